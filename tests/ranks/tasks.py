"""What the ranks of a job do in these tests: functions that run on every rank."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor
from wraps import WAYS, Trainer

import laststep
from laststep import events
from laststep.commit import thread as teaming
from laststep.flush.saves import Save
from laststep.plan.receipts import Groups
from laststep.settings import as_keywords
from laststep.state.items import providers_for
from laststep.state.layouts import Mesh, Shard, Sharded
from laststep.state.tensors import LocalShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PATIENCE_S = 120.0


def checkpointer(run: str, trainer: Trainer, **more: object) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run,
        items=trainer.items(),
        **as_keywords({"progress": False, "deadline_s": PATIENCE_S, "flush": "thread", **more}),
    )


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def save_as(way: str, run: str) -> None:
    """Two steps, a save, and one step more, of which the outcome is kept beside the run."""
    trainer = WAYS[way]()
    for number in range(2):
        trainer.step(number)
    with checkpointer(run, trainer) as c:
        c.save(2).wait()
        then = trainer.full()
        loss = trainer.step(2)
    if dist.get_rank() == 0:
        torch.save({"then": then, "loss": loss, "later": trainer.full()}, f"{run}.pt")
    else:
        trainer.full()


def load_as(way: str, run: str, *, trained: bool, exactly: bool) -> None:
    """Load, into a state that was `trained` meanwhile or never was, and go on for a step: as the
    run that never stopped did, and `exactly` so where it is laid out the same."""
    trainer = WAYS[way]()
    if trained:
        for number in (7, 8, 9):
            trainer.step(number)
    with checkpointer(run, trainer) as c:
        assert c.restore().step == 2
    expected = torch.load(f"{run}.pt")
    equal(trainer.full(), expected["then"])
    loss, later = trainer.step(2), trainer.full()
    if exactly:
        assert loss == expected["loss"]
        equal(later, expected["later"])
    torch.testing.assert_close(loss, expected["loss"])
    for name, tensor in expected["later"].items():
        torch.testing.assert_close(later[name], tensor, msg=name)


def load_by_itself(run: str) -> None:
    """One process, without a live state: everything is whole."""
    found = laststep.load(run)
    expected = torch.load(f"{run}.pt")["then"]
    parameters = {name.partition(":")[0] for name in expected if ":" in name}
    equal(found["model"], {name: t for name, t in expected.items() if ":" not in name})
    state = found["optimizer"]["state"]
    assert set(state) == parameters
    for name, entries in state.items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, expected[f"{name}:{key}"]), (name, key)


# -- what each rank has for itself ----------------------------------------------------------------


class Heard(logging.Handler):
    """What the library logs as a warning meanwhile, or at another level."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("laststep").addHandler(self)
        logging.getLogger("laststep").setLevel(self.level)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("laststep").setLevel(logging.NOTSET)
        logging.getLogger("laststep").removeHandler(self)


def opened(
    run: str, *, flush: str = "thread", compression: str = "none", **items: object
) -> laststep.Checkpointer:
    """Flushers are threads, unless a test says otherwise: processes take longer to start."""
    return laststep.Checkpointer(
        run,
        items=items,
        options=laststep.Options(progress=False, deadline_s=PATIENCE_S, flush=flush),
        compression=compression,
    )


def drawn() -> list[float]:
    return [*torch.rand(3).tolist(), *np.random.rand(3).tolist(), random.random()]  # noqa: NPY002


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)


def save_random(run: str) -> list[float]:
    """Returns what this rank draws after the save."""
    seed(dist.get_rank())
    drawn()
    with opened(run, rng=laststep.RNG(), flush="process") as c:
        c.save(1)
        return drawn()


def load_random(run: str, *, late: bool = False) -> tuple[list[float], list[str]]:
    """Returns what this rank draws after the restore, and what is logged of derived states."""
    seed(100 + dist.get_rank())
    own = laststep.RNG()
    rng = laststep.Deferred(lambda: own) if late else own
    with Heard(logging.INFO) as lines, opened(run, rng=rng) as c:
        assert c.restore().step == 1
    return drawn(), [line for line in lines if "rng" in line]


class Place(laststep.StateProvider):
    """A rank's place in its data: numbers and tensors of its own, even of forms of its own."""

    kind = "place"
    per_rank = True

    def __init__(self, number: int, policy: str) -> None:
        self.when_ranks_change = policy
        self.value = {"at": number, "queue": torch.full((number, 3), number)}

    def describe(self) -> laststep.State:
        return laststep.State(value=self.value, fresh=((),))

    def restore(self, value: dict[str, object]) -> None:
        self.value = value

    def seen(self) -> tuple[int, list[int]]:
        return self.value["at"], self.value["queue"].flatten().tolist()


def save_places(run: str) -> None:
    place = Place(10 + dist.get_rank(), "refuse")
    with opened(run, place=place, common={"w": torch.arange(6.0)}) as c:
        c.save(1)


def save_parts_as_own(run: str) -> str:
    """Something that ranks share, said to be each one's own; what was raised."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = distribute_tensor(torch.arange(6.0), mesh, [TorchShard(0)])
    with opened(run, mine=laststep.PerRank({"w": part})) as c:
        try:
            c.save(1)
        except laststep.UsageError as error:
            return str(error)
    return ""


def _total(
    states: list[dict[str, dict[str, int]]], rank: int, ranks: int
) -> dict[str, dict[str, int]]:
    return {key: {"n": sum(state[key]["n"] for state in states) + 100 * rank} for key in states[0]}


def own_groups(number: int) -> tuple[dict[str, object], list[dict[str, int]]]:
    """Items that say in several ways what becomes of each rank's own, and the numbers in them."""
    own, rng = [{"n": number + 10 * i} for i in range(6)], laststep.RNG()

    def said(i: int, policy: object) -> laststep.PerRank:
        return laststep.PerRank(own[i], when_ranks_change=policy)

    items = {
        "kept": {"a": said(0, "keep"), "inner": {"b": said(1, "keep")}},
        "nested": laststep.PerRank(said(2, "keep")),
        "made": laststep.PerRank({"a": own[3], "b": own[4]}, when_ranks_change=_total),
        "random": {"rng": laststep.Deferred(lambda: rng)},
        "rest": laststep.PerRank({"p": own[5]}, when_ranks_change="drop"),
    }
    return items, own


def save_own_groups(run: str) -> list[float]:
    """Returns what this rank draws after the save."""
    seed(dist.get_rank())
    items, _ = own_groups(dist.get_rank())
    odd = {"a": laststep.PerRank({}, when_ranks_change="keep"), "rng": laststep.RNG()}
    with opened(run, **items, odd=odd) as c:
        c.save(1)
        return drawn()


def load_own_groups(run: str) -> tuple[list[int], list[float]]:
    """Returns the numbers and what this rank draws after the restore."""
    seed(100 + dist.get_rank())
    items, own = own_groups(1000)
    with opened(run, **items) as c:
        c.restore(only=list(items))
    return [one["n"] for one in own], drawn()


def load_odd_group(run: str) -> str:
    """What is raised where parts of a group say different things."""
    odd = {"a": laststep.PerRank({}, when_ranks_change="keep"), "rng": laststep.RNG()}
    with opened(run, odd=laststep.PerRank(odd)) as c:
        try:
            c.restore(only="odd")
        except laststep.MismatchError as error:
            return str(error)
    return ""


def save_what_becomes_mixed(run: str) -> list[str]:
    """Groups that come to hold what is each rank's own beside what is not; what was raised."""
    shared = Place(1, "refuse")
    shared.per_rank = False
    own = laststep.PerRank({"n": dist.get_rank()})
    errors = []
    for number, (group, more) in enumerate((({"own": own}, 3), ({"shared": shared}, own))):
        with opened(f"{run}{number}", group={"inner": group}) as c:
            c.save(1).wait()
            group["more"] = more
            try:
                c.save(2)
            except laststep.UsageError as error:
                errors.append(str(error))
    return errors


def load_places(
    run: str, policy: str, *, late: bool = False
) -> tuple[str, tuple[int, list[int]], list[str]]:
    """What was raised, where the rank stands then, and the warnings."""
    place, common = Place(50, policy), {"w": torch.zeros(6)}
    error = ""
    item = laststep.Deferred(lambda: place) if late else place
    with Heard() as warnings, opened(run, place=item, common=common) as c:
        try:
            c.restore()
        except laststep.MismatchError as raised:
            error = str(raised)
    assert torch.equal(common["w"], torch.zeros(6) if error else torch.arange(6.0))
    return error, place.seen(), warnings


class Reader:
    """A loader with a state, as data loaders have it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.at))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def save_readers(run: str, level: str) -> list[str]:
    """Each rank is elsewhere in its data. Returns what is logged of it."""
    reader = Reader(dist.get_rank())
    with Heard(logging.getLevelName(level)) as lines:
        with opened(run, flush="process", reader=reader, common={"w": torch.zeros(6)}) as c:
            c.restore()
            c.save(1).result()
        reader.at = 50
        with opened(run, reader=reader, common={"w": torch.zeros(6)}) as c:
            c.restore()
    assert reader.at == dist.get_rank()
    return lines


def preflights(run: str) -> list[events.Preflight]:
    """Returns those of two saves, of 24 bytes on each rank."""
    told: list[events.Event] = []
    options = laststep.Options(progress=False, flush="thread", subscribers=[told.append])
    state = {"own": torch.zeros(6)}
    with laststep.Checkpointer(
        run, state=laststep.PerRank(state), keep=laststep.Keep(last=2), options=options
    ) as c:
        for step in (1, 2):
            c.save(step).wait()
    return [event for event in told if isinstance(event, events.Preflight)]


def save_without_restore(run: str) -> tuple[str, str, list[int]]:
    """What a save says that would leave step 1 behind, on all ranks, and on one of them; then the
    steps once that was restored."""
    with opened(run, common={"w": torch.zeros(6)}) as c:
        c.save(1).result()
    with opened(run, common={"w": torch.zeros(6)}) as c:
        first = kinds(lambda: c.save(2))[1]
        c.restore()
        c.save(2).result()
    first_rank = dist.get_rank() == 0
    with laststep.Checkpointer(
        run,
        common={"w": torch.zeros(6)},
        options=laststep.Options(progress=False, deadline_s=PATIENCE_S, flush="thread"),
        new_lineage=first_rank,
    ) as c:
        second = kinds(lambda: c.save(3).result())[1]
    return first, second, laststep.open(run).steps()


# -- ranks that disagree --------------------------------------------------------------------------


def kinds(work: Callable[[], object]) -> tuple[str, str]:
    """The class of the error that something raises, and its message."""
    try:
        work()
    except laststep.LaststepError as error:
        return type(error).__name__, str(error)
    return "", ""


def halves(shape: tuple[int, ...]) -> Sharded:
    ranks = dist.get_world_size()
    return Sharded(shape, Mesh.of(("half",), (ranks,), range(ranks)), (Shard(0),))


def differing(how: str) -> dict[str, object]:
    """A state that the last rank describes otherwise than the others."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if how == "shape":
        return {"w": torch.zeros(5 if last else 4)}
    if how == "dtype":
        return {"w": torch.zeros(4, dtype=torch.float64 if last else torch.float32)}
    if how == "layout":
        part = torch.zeros(dist.get_world_size() * 4)
        return {"w": part if last else LocalShard(torch.zeros(4), halves(tuple(part.shape)))}
    if how == "lacking":
        return (
            {} if last else {"w": LocalShard(torch.zeros(4), halves((dist.get_world_size() * 4,)))}
        )
    return {"w": torch.zeros(4), "number": 7 if last else 6}


def save_differing(run: str, how: str) -> tuple[str, str, list[int]]:
    """What a save of that raises here; and which steps there are once all agree again."""
    state = differing(how)
    with opened(run, state=state) as c:
        error = kinds(lambda: c.save(1).wait())
        dist.barrier()
        assert not steps_of(run)
        state.clear()
        state.update(w=torch.ones(4), number=8)
        for step in (1, 2):
            c.save(step).wait()
    return *error, steps_of(run)


def save_stages(run: str, size: int, stages: list[int]) -> tuple[str, list[int]]:
    """Stages of a pipeline, one for each rank, in groups of `size` ranks; the last rank has another
    learning rate for once."""
    rank, cut = dist.get_rank(), teaming.cut
    schedule = {"at": {"lr": 0.3 if rank == 3 else 0.1}, "n": 1}
    teaming.cut = lambda ranks: Groups(ranks, size)
    try:
        with opened(run, model={f"stage{stages[rank]}": torch.ones(3)}, schedule=schedule) as c:
            _, message = kinds(lambda: c.save(1).wait())
            dist.barrier()
            schedule["at"]["lr"] = 0.1
            c.save(2).wait()
    finally:
        teaming.cut = cut
    return message, steps_of(run)


def steps_of(run: str) -> list[int]:
    return laststep.open(run).steps() if Path(run).exists() else []


def overlapping(run: str) -> tuple[str, str]:
    """Two parts of tensors that lie over each other in memory: what is stored as one would be
    other bytes on every rank."""
    memory, ranks = torch.arange(6.0), dist.get_world_size()
    state = {
        "a": LocalShard(memory[:4], halves((4 * ranks,))),
        "b": LocalShard(memory[2:], halves((4 * ranks,))),
    }
    with opened(run, state=state) as c:
        return kinds(lambda: c.save(1).wait())


# -- damage ---------------------------------------------------------------------------------------


def sharded_model() -> nn.Linear:
    torch.manual_seed(1)
    model = nn.Linear(33, 17)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def fill(model: nn.Module, number: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)


def filled_with(model: nn.Module) -> set[float]:
    return {x for p in model.parameters() for x in p.full_tensor().flatten().tolist()}


def save_sharded(run: str, steps: int, **more: object) -> None:
    model = sharded_model()
    with opened(run, model=model, flush="process", **more) as c:
        for step in range(1, steps + 1):
            fill(model, step)
            c.save(step).wait()


def load_damaged(run: str, *, touched: bool) -> dict[str, object]:
    """The newest by name, which is damaged, and the newest that is not."""
    model = sharded_model()
    with opened(run, model=model) as c:
        fill(model, -1)
        named = kinds(lambda: c.restore(2))
        if touched:
            assert kinds(lambda: c.save(5))[0] == "UsageError"  # the state is mixed
        else:
            assert filled_with(model) == {-1.0}
        with Heard() as warnings:
            restored = c.restore()
        found = filled_with(model)
        c.save(3).wait()
    skipped = [(one.step, one.reason) for one in restored.skipped]
    return {
        "named": named,
        "step": restored.step,
        "skipped": skipped,
        "found": found,
        "warnings": warnings,
    }


def load_newest(run: str) -> tuple[int | None, set[float]]:
    model = sharded_model()
    with opened(run, model=model) as c:
        restored = c.restore()
        return restored.step, filled_with(model)


def peek_at_damaged(run: str) -> dict[str, object]:
    """The newest opens; reading finds that a rank's part of it is damaged."""
    model, plain = sharded_model(), {"n": -1}
    late = laststep.Deferred(lambda: model)
    with opened(run, model=late, plain=plain) as c:
        steps = [c.peek().step]
        error = kinds(lambda: c.restore(only="model"))
        mixed = kinds(lambda: c.save(5))
        steps.append(c.peek().step)
        c.restore(only="plain")
        restored = c.restore(only="model")
        steps.append(restored.step)
        found = filled_with(model)
        c.save(3).wait()
    return {"steps": steps, "error": error, "mixed": mixed[0], "found": found}


def peek_or_restore(run: str) -> tuple[str, str]:
    """One rank peeks where the others restore."""
    with opened(run, model=sharded_model()) as c:
        return kinds(c.peek if dist.get_rank() == 1 else c.restore)


def restore_a_part(run: str, where: int | None) -> list[str]:
    """Returns the warnings about a new run beside other files, and of a restore that lacks a
    tensor, on one rank or on all."""
    place = Path(run)
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        (place / "notes.txt").touch()
    dist.barrier()
    state = {"own": laststep.PerRank({"w": torch.ones(3)}), "common": {"w": torch.ones(3)}}
    with Heard() as warnings:
        with opened(run, **state) as c:
            c.save(1).wait()
        if where in (None, dist.get_rank()):
            state["own"] = laststep.PerRank({"w": torch.ones(3), "more": torch.ones(3)})
        with opened(run, **state) as c:
            c.restore(strict=False)
    return warnings


def load_nothing_good(run: str) -> tuple[str, str]:
    with opened(run, model=sharded_model()) as c:
        return kinds(c.restore)


def load_with_more(run: str, where: int) -> tuple[tuple[str, str], set[float]]:
    """One rank's model has a parameter that was never saved."""
    model = sharded_model()
    fill(model, -1)
    if dist.get_rank() == where:
        model.extra = nn.Parameter(torch.zeros(3))
        model.other = nn.Parameter(torch.zeros(3))
    with opened(run, model=model) as c:
        error = kinds(c.restore)
    if dist.get_rank() == where:
        del model.extra, model.other
    return error, filled_with(model)


# -- states of other kinds ------------------------------------------------------------------------


def bag(number: int) -> dict[str, object]:
    """What a state may hold beside tensors in parts."""
    torch.manual_seed(number)
    memory = torch.randn(12)
    return {
        "array": np.arange(6.0) * number,
        "long": bytes([number]) * 5000,
        "text": f"at {number}",
        "sparse": torch.eye(3).mul(number).to_sparse(),
        "over": memory[:8],
        "lap": memory[4:],
        "empty": torch.zeros(0, 3),
        "strided": torch.randn(4, 6).t(),
        "list": [1, (2, number)],
        "half": torch.randn(5).bfloat16(),
        "flag": torch.tensor([True, False]),
    }


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one.to_dense(), other.to_dense()) and one.dtype == other.dtype
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


def save_bag(run: str) -> None:
    """On the first rank also an item that nobody else has."""
    extra = {"extra": {"w": torch.arange(4.0)}} if dist.get_rank() == 0 else {}
    with opened(run, state=bag(3), **extra) as c:
        c.save(1)


def save_some_items(run: str) -> None:
    """Stages with tensors of their own, an item on two ranks, and later one more on the last."""
    rank = dist.get_rank()
    stage, later = {f"w{rank}": torch.ones(3)}, {"w": torch.ones(3)}
    items = {"model": stage} | ({"ema": {"w": torch.ones(3)}} if rank else {})
    with opened(run, **items) as c:
        for step in (1, 2, 3, 4):
            c.save(step).wait()
            stage[f"more{step}"] = torch.ones(step)
            dist.barrier()
            if step == 2 and rank == 2:
                c._context.providers.update(providers_for({"later": later}))


def load_bag(run: str, who: int) -> None:
    state, extra = bag(4), {"w": torch.zeros(4)}
    more = {"extra": extra} if dist.get_rank() == who else {}
    with opened(run, state=state, **more) as c:
        c.restore()
    assert same(state, bag(3)), state
    assert extra["w"].tolist() == ([0.0, 1.0, 2.0, 3.0] if more else [0.0] * 4)


def turned(number: float) -> dict[str, torch.Tensor]:
    """Tensors of which the parts do not lie one after the other in memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole_one = torch.arange(30.0).view(5, 6) + number
    cut_by_hand = torch.arange(40.0).view(10, 4) + number
    ranks = dist.get_world_size()
    layout = Sharded((10, 4), Mesh.of(("r",), (ranks,), range(ranks)), (Shard(0),))
    (box,) = layout.held(dist.get_rank())
    wide = torch.zeros(10, 8)
    wide[:, ::2] = cut_by_hand
    return {
        "turned": distribute_tensor(whole_one.t().contiguous(), mesh, [TorchShard(1)]).t(),
        "by hand": LocalShard(wide[box.start[0] : box.stop[0], ::2], layout),
    }


def through_strides(run: str) -> None:
    with opened(run, state=turned(1)) as c:
        c.save(1).wait()
    state, expected = turned(2), turned(1)
    with opened(run, state=state) as c:
        c.restore()
    assert torch.equal(state["turned"].full_tensor(), expected["turned"].full_tensor())
    assert torch.equal(state["by hand"].local, expected["by hand"].local)


def through_a_group(run: str) -> None:
    """An optimizer of sharded parameters in a group with others."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded_model()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 33)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    with opened(run, training={"model": model, "optimizer": optimizer, "term": 3}) as c:
        c.save(1).wait()
    step(model, optimizer)
    model_again, optimizer_again = made()
    with opened(run, training={"model": model_again, "optimizer": optimizer_again, "term": 0}) as c:
        c.restore()
    step(model_again, optimizer_again)
    for one, other in zip(model.parameters(), model_again.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def some_of_it(run: str) -> None:
    """Only a part of what is stored, on all ranks."""
    model = sharded_model()
    fill(model, 5)
    with opened(run, model=model, term={"at": 1}) as c:
        c.save(1).wait()
    fill(model, -1)
    term = {"at": 2}
    with opened(run, model=model, term=term) as c:
        c.restore(only=["model/bias"])
        assert set(model.bias.full_tensor().tolist()) == {5.0}
        assert set(model.weight.full_tensor().flatten().tolist()) == {-1.0}
        c.restore(only=["model"])
        assert filled_with(model) == {5.0}
        assert term == {"at": 2}


# -- the order of things --------------------------------------------------------------------------


def slow_to_begin(run: str, slow: int) -> None:
    """A rank that has begun nothing when the other waits for it: a member when it hears where to
    write, the first rank when the others ask what it leads."""
    begin = Save.begin
    heard = threading.Event()

    def late(save: Save) -> None:
        if threading.current_thread().name == "laststep-commit":
            heard.set()
        heard.wait(0.5 if slow == 0 else 30)
        begin(save)

    if dist.get_rank() == slow:
        Save.begin = late
    try:
        with laststep.Checkpointer(
            run,
            w={"w": torch.ones(3)},
            options=laststep.Options(deadline_s=PATIENCE_S, progress=False),
        ) as c:
            c.save(1).wait()
            c.save(2).wait()
    finally:
        Save.begin = begin


class Stumbling(laststep.StateProvider):
    """Raises once."""

    def __init__(self, times: int) -> None:
        self.times = times

    def describe(self) -> laststep.State:
        if self.times:
            self.times -= 1
            raise laststep.UsageError("stumbled")
        return laststep.State(value={"w": torch.ones(3)})

    def restore(self, value: object) -> None:
        pass


def stumble(run: str, who: int) -> tuple[tuple[str, str], list[int]]:
    """A rank whose state cannot be described once; all save again after that."""
    item = Stumbling(1 if dist.get_rank() == who else 0)
    with laststep.Checkpointer(
        run, items={"w": item}, options=laststep.Options(deadline_s=PATIENCE_S, progress=False)
    ) as c:
        first = kinds(lambda: c.save(1).wait())
        dist.barrier()
        for step in (1, 2):
            c.save(step).wait()
    return first, steps_of(run)
