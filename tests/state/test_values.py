"""Schedulers, scalers, loaders, random numbers, nested values, groups, providers of one's own."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import laststep
from expect import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Point(NamedTuple):
    x: object
    y: object


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "linear": lr_scheduler.LinearLR,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


def training(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, SCHEDULERS[kind](optimizer)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_goes_on_where_it_was(kind: str, carry: Callable[..., object]) -> None:
    model, optimizer, scheduler = training(kind)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    other, fresh, restored = training(kind)
    carry(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler},
        {"model": other, "optimizer": fresh, "scheduler": restored},
    )
    rates = []
    for opt, sched in ((optimizer, scheduler), (fresh, restored)):
        seen = []
        for _ in range(5):
            seen.append(float(opt.param_groups[0]["lr"]))
            opt.step()
            sched.step()
        rates.append(seen)
    assert rates[0] == rates[1]


def test_a_schedule_by_plateau_remembers_its_best(carry: Callable[..., object]) -> None:
    def make() -> tuple[torch.optim.Optimizer, lr_scheduler.ReduceLROnPlateau]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    optimizer, scheduler = make()
    fresh, restored = make()
    carry({"o": optimizer, "s": scheduler}, {"o": fresh, "s": restored})  # best is inf
    for loss in (3.0, 2.0, 2.5):
        scheduler.step(loss)
    carry({"o": optimizer, "s": scheduler}, {"o": fresh, "s": restored})
    restored.step(2.5)
    assert fresh.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_gradient_scaler_comes_back_used_unused_and_disabled(
    carry: Callable[..., object],
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.amp.GradScaler("cpu")
    carry({"scaler": scaler}, {"scaler": other})
    assert other.get_scale() == 4.0
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0
    used = torch.amp.GradScaler("cpu")
    used.scale(torch.ones(1))
    for target in (torch.amp.GradScaler("cpu"), used):
        carry({"scaler": scaler}, {"scaler": target})
        assert target.state_dict() == scaler.state_dict()
    off = torch.amp.GradScaler("cpu", enabled=False)
    carry({"scaler": off}, {"scaler": torch.amp.GradScaler("cpu", enabled=False)})


class Counting:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def test_anything_with_a_state_dict_is_handed_what_it_gave(carry: Callable[..., object]) -> None:
    target = Counting(None)
    carry({"thing": Counting({"n": [1, (2, "x")], "t": torch.arange(3)})}, {"thing": target})
    assert target.value["n"] == [1, (2, "x")]
    assert target.value["t"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(
    workers: int, carry: Callable[..., object]
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> object:
        return stateful.StatefulDataLoader(
            list(range(40)),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(5),
        )

    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    other = make()
    carry({"loader": loader}, {"loader": other})
    rest = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in other] == rest
    assert len(rest) == 10


def test_random_numbers_go_on_where_they_were(carry: Callable[..., object]) -> None:
    def draw() -> tuple[object, ...]:
        return (
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),  # noqa: NPY002 (the global generator is what is saved)
            float(np.random.standard_normal()),  # noqa: NPY002
            torch.rand(1).item(),
            torch.randn(3).tolist(),
        )

    draw()
    rng = laststep.RNG()

    class Later(laststep.RNG):
        """Restores when the numbers were drawn."""

        def restore(self, value: object) -> None:
            self.expected = draw()
            super().restore(value)

    later = Later()
    carry({"rng": rng}, {"rng": later})
    assert draw() == later.expected


def test_a_nested_state_is_restored_in_place_with_all_its_kinds(
    carry: Callable[..., object],
) -> None:
    def make(n: int) -> dict[object, object]:
        return {
            "tensor": torch.full((2,), n),
            "array": np.full((3,), n),
            "list": [n, [torch.full((1,), n)], {"deep": n}],
            "tuple": (n, torch.full((1,), n)),
            "named": Point(n, torch.full((1,), n)),
            "deque": deque([n, n], maxlen=5),
            "ordered": OrderedDict(b=n, a=n),
            "counter": Counter({"a": n}),
            "plain": [None, True, n, n / 3, complex(n, 1), "é" * n, bytes([n]), bytearray([n])],
            "big": bytes([n]) * 10_000,
            "odd": [float("inf"), float("-inf"), -0.0, 1 << 100, range(n), slice(1, n), {n}],
            "frozen": frozenset({n, "x"}),
            "scalar": np.float32(n / 7),
            "date": np.datetime64("2020-01-01") + np.timedelta64(n, "D"),
            "dtype": torch.bfloat16 if n == 3 else torch.float32,
            "device": torch.device("cpu"),
            "size": torch.Size([n, 2]),
            "empty": {},
            "parameter": nn.Parameter(torch.full((2,), float(n))),
            n * 0 + 7: "an int as key",
            (1, "a"): torch.full((1,), n),
            "": torch.full((1,), n),
            "a/b~#": torch.full((1,), n),
            "#1": torch.full((1,), n),
            "__metadata__": torch.full((1,), n),
            True: "a bool as key",
            "ключ": torch.full((1,), n),
        }

    source, target = make(3), make(4)
    tensor, array, parameter = target["tensor"], target["array"], target["parameter"]
    inner_list, inner_deque = target["list"], target["deque"]
    carry({"state": source}, {"state": target}, saves=2)
    assert target["tensor"] is tensor
    assert target["array"] is array
    assert target["parameter"] is parameter
    assert parameter.requires_grad
    assert target["list"] is inner_list
    assert target["deque"] is inner_deque
    assert inner_deque.maxlen == 5
    assert_same(source, target)


def assert_same(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple | deque):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_lists_and_dicts_take_the_length_that_was_stored(carry: Callable[..., object]) -> None:
    source = {
        "grown": [1, 2, 3],
        "shrunk": [1],
        "queue": deque([1, 2]),
        "new": {"k": 1},
        "blob": b"x" * 10_000,
        "long": b"x" * 20_000,
        "short": b"x",
    }
    target = {
        "grown": [9],
        "shrunk": [9, 9, 9],
        "queue": deque([9, 9, 9]),
        "blob": b"y" * 9_000,
        "long": b"y",
        "short": b"y" * 9_000,
    }
    carry({"state": source}, {"state": target})
    assert target == source


def test_dicts_take_the_keys_that_were_stored_to_the_last_bit_and_in_their_order(
    carry: Callable[..., object],
) -> None:
    source = {"b": 1, (1, "a"): 2, True: 3, 0.0: 4, "a": {frozenset({1}): 5}}
    target = {"a": {frozenset({True}): 0}, 1: 0, -0.0: 0, (True, "a"): 0, "b": 0}
    assert target.keys() == source.keys()
    carry({"state": source}, {"state": target})
    assert repr(target) == repr(source)


def test_a_lone_tensor_or_array_is_an_item_too(carry: Callable[..., object]) -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    parameter = nn.Parameter(torch.zeros(2))
    carry(
        {"t": torch.arange(3.0), "a": np.arange(3.0), "p": torch.ones(2)},
        {"t": tensor, "a": array, "p": parameter},
    )
    assert tensor.tolist() == [0, 1, 2]
    assert array.tolist() == [0, 1, 2]
    assert parameter.tolist() == [1, 1]
    assert parameter.requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4)[:, ::2],
        np.arange(5)[::-1],
        np.arange(4, dtype=">i4"),
        np.broadcast_to(np.arange(3), (2, 3)),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.arange(3, dtype=np.uint64),
        np.array([1 + 2j], dtype=np.complex64),
        np.array([(1, 2.5)], dtype=[("a", "i1"), ("b", "f8")])["b"],
        np.float16([1.5]),
    ],
)
def test_arrays_of_any_memory_order_come_back(
    array: np.ndarray, carry: Callable[..., object]
) -> None:
    target = {"a": np.zeros(array.shape, array.dtype)}
    carry({"s": {"a": array}}, {"s": target})
    assert np.array_equal(target["a"], array)
    readonly = np.zeros(array.shape, array.dtype)
    readonly.flags.writeable = False
    target = {"a": readonly}
    carry({"s": {"a": array}}, {"s": target})
    assert np.array_equal(target["a"], array)
    assert target["a"].dtype == array.dtype


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["text"]),
        np.ma.masked_array([1, 2], [0, 1]),
        np.array([(1,)], dtype=[("a", "i4")]),
        np.zeros(1, dtype=np.longdouble),
        object(),
        lambda: None,
        {1: {2: object}},
    ],
    ids=[
        "objects",
        "texts",
        "masked",
        "records",
        "long doubles",
        "an object",
        "a function",
        "deep",
    ],
)
def test_what_cannot_be_stored_faithfully_is_refused_by_its_path(
    value: object, tmp_path: Path
) -> None:
    with pytest.raises(laststep.UsageError, match="inner"):
        laststep.save({"outer": {"inner": value}}, tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    state["self"] = state
    with raises(laststep.UsageError, where="self['self']", expected="200"):
        laststep.save(state, tmp_path / "one")


def test_a_group_of_module_optimizer_and_plain_values_is_one_item(
    carry: Callable[..., object],
) -> None:
    def make(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=seed + 1.0, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler = lr_scheduler.StepLR(optimizer, 3)
        return {
            "model": model,
            "optimizer": optimizer,
            "more": {"scheduler": scheduler, "epoch": seed},
            "epoch": seed,
            "history": [seed],
            "best": torch.tensor(float(seed)),
        }

    source, target = make(0), make(1)
    # What is said of it counts when it is saved, not when the Checkpointer was made.
    provider_sees = {"bundle": source}
    source["epoch"] = 41
    carry(provider_sees, {"bundle": target})
    assert torch.equal(target["model"].weight, source["model"].weight)
    a, b = source["optimizer"], target["optimizer"]
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]
    assert (target["epoch"], target["history"], target["more"]["epoch"]) == (41, [0], 0)
    assert target["best"] == 0


def test_a_plain_entry_of_a_group_is_looked_up_at_each_save(tmp_path: Path) -> None:
    bundle = {"model": nn.Linear(1, 1), "epoch": 0}
    with laststep.Checkpointer(
        tmp_path / "run",
        bundle=bundle,
        options=laststep.Options(flush="thread"),
        host_memory_bytes=64 << 20,
    ) as checkpointer:
        bundle["epoch"] = 7
        checkpointer.save(0).wait()
        bundle["epoch"] = 8
        checkpointer.restore()
    assert bundle["epoch"] == 7


def test_a_part_of_a_group_leaves_its_schedule_alone(carry: Callable[..., object]) -> None:
    def make(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = lr_scheduler.StepLR(optimizer, 3)
        for _ in range(seed):
            optimizer.step()
            schedule.step()
        return {"model": model, "schedule": schedule, "epoch": seed}

    source, target = make(1), make(2)
    carry({"bundle": source}, {"bundle": target}, only=["bundle/model/*"])
    assert torch.equal(target["model"].weight, source["model"].weight)
    assert target["schedule"].last_epoch == 2
    assert target["epoch"] == 2


class Table(laststep.StateProvider):
    """A provider as a user would write one."""

    kind = "table"

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.data = torch.full((rows,), float(rows))
        self.restored: object = None

    def describe(self) -> laststep.State:
        return laststep.State(value={"data": self.data, "rows": self.rows}, fresh=(("data",),))

    def restore(self, value: object) -> None:
        self.restored = value
        self.data, self.rows = value["data"], value["rows"]

    def check(self, stored: object) -> list[str]:
        return [] if stored["rows"] else ["has no rows"]


def test_a_provider_of_ones_own_describes_checks_and_restores(carry: Callable[..., object]) -> None:
    target = Table(2)
    carry({"table": Table(5)}, {"table": target})
    assert target.rows == 5
    assert target.data.tolist() == [5.0] * 5
    with pytest.raises(laststep.MismatchError, match="table has no rows"):
        carry({"table": Table(0)}, {"table": target})


@pytest.mark.parametrize("item", [3, "text", (1, 2), None, frozenset()])
def test_an_item_that_cannot_change_is_refused_at_construction(
    item: object, tmp_path: Path
) -> None:
    with raises(laststep.UsageError, "thing"):
        laststep.Checkpointer(tmp_path / "run", thing=item)


@pytest.mark.parametrize("name", ["shared", "a/b", "", ".hidden", "x" * 65, "a b"])
def test_a_name_that_is_no_file_name_is_refused(name: str, tmp_path: Path) -> None:
    with raises(laststep.UsageError, expected="64", found=True):
        laststep.Checkpointer(tmp_path / "run", items={name: {"a": 1}})


def test_no_items_are_refused(tmp_path: Path) -> None:
    with raises(laststep.UsageError, remedy="model=model"):
        laststep.Checkpointer(tmp_path / "run")


def test_pickles_are_made_and_opened_only_when_both_sides_allow_it(
    carry: Callable[..., object],
) -> None:
    import fractions

    source, target = {"f": fractions.Fraction(1, 3)}, {"f": None}
    with raises(laststep.UsageError, "fractions.Fraction", where="f of item 's'"):
        carry({"s": source}, {"s": target})
    carry({"s": source}, {"s": target}, allow_pickle=True)
    assert target["f"] == fractions.Fraction(1, 3)


class Bomb:
    """Says that it was opened."""

    opened = False

    def __reduce__(self) -> tuple[object, ...]:
        return (setattr, (Bomb, "opened", True))


def test_a_pickle_in_a_checkpoint_is_never_executed_unless_allowed(tmp_path: Path) -> None:
    laststep.save({"a": Bomb()}, tmp_path / "one", allow_pickle=True)
    with raises(laststep.UsageError, remedy="allow_pickle=True"):
        laststep.load(tmp_path / "one")
    with raises(laststep.UsageError, remedy="allow_pickle=True"):
        laststep.load(tmp_path / "one", into={"a": 1})
    with laststep.Checkpointer(tmp_path / "other", s={"a": 1}) as checkpointer:
        checkpointer.restore()
    assert not Bomb.opened
    laststep.load(tmp_path / "one", allow_pickle=True)
    assert Bomb.opened


def test_what_cannot_be_pickled_is_refused_by_its_path(tmp_path: Path) -> None:
    with raises(laststep.UsageError, where="inner of item 'state'"):
        laststep.save({"inner": lambda: None}, tmp_path / "one", allow_pickle=True)
