"""A state that was met before is taken as it is now, whatever has changed in between."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import laststep
from laststep.saving.describe import TakenState, naming, take_state
from laststep.settings import as_keywords
from laststep.state.collecting import CollectCache, collect
from laststep.state.items import providers_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from laststep.state.tree import Collected


class Marked(torch.Tensor):
    """A subclass that laststep is taught."""


laststep.register_tensor_type(
    Marked,
    name="tests.Marked",
    to_parts=lambda tensor: {"inner": tensor.as_subclass(torch.Tensor)},
    from_parts=lambda parts: parts["inner"].as_subclass(Marked),
)


class Pair(NamedTuple):
    one: object
    two: object


class Counting(laststep.StateProvider):
    """A provider of a user's own; what it does when it is asked is up to them."""

    def __init__(self) -> None:
        self.data = {"t": torch.arange(3.0), "n": 0}
        self.when_asked: Callable[[], None] = lambda: None

    def describe(self) -> laststep.State:
        self.when_asked()
        return laststep.State(value=self.data)

    def restore(self, value: object) -> None: ...


EQUAL_KEYS: list[tuple[object, object]] = [
    ((1, "a"), (True, "a")),
    (0.0, -0.0),
    ((2,), (2.0,)),
    (frozenset({1}), frozenset({True})),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (((0, 3), "deep"), ((False, 3), "deep")),
    (Pair(1, 2), Pair(1, 2.0)),
]
"""Pairs of keys that a dict takes for one."""


class World:
    """A training run with a bit of everything, small enough to be changed a thousand times."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train()
        ordered = OrderedDict(a=torch.zeros(2), b=torch.ones(2))
        self.plain: dict[object, object] = {
            "square": torch.randn(3, 3),
            "complex": torch.randn(3, dtype=torch.complex64),
            "empty": torch.empty(0),
            "n": 1,
            "deep": [1, (torch.ones(2), {"x": [torch.zeros(1)]})],
            "ordered": ordered,
            1: torch.zeros(5),
            "log": [0.5],
            "strided": torch.randn(4, 4)[::2],
            "tied": None,
        }
        self.plain |= {keys[0]: torch.zeros(2) for keys in EQUAL_KEYS}
        self.own = Counting()

    def items(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "plain": self.plain,
            "own": self.own,
        }

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()

    def first(self) -> nn.Linear:
        return next(node for node in self.model.modules() if isinstance(node, nn.Linear))

    # What may change between two saves, each as a method.

    def parameter_replaced(self) -> None:
        self.first().weight = nn.Parameter(torch.randn(4, 4))

    def parameter_replaced_in_the_optimizer_too(self) -> None:
        self.parameter_replaced()
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())
        self.optimizer.state.clear()
        self.train()

    def data_replaced(self) -> None:
        self.first().weight.data = torch.randn_like(self.first().weight)

    def data_transposed(self) -> None:
        self.first().weight.data = self.first().weight.data.t()

    def data_reshaped(self) -> None:
        self.plain["square"].data = self.plain["square"].data.reshape(-1, 1)

    def data_of_another_dtype(self) -> None:
        self.plain[1].data = self.plain[1].data.view(torch.int32)

    def halved(self) -> None:
        self.plain["square"].data = self.plain["square"].data.half()

    def resized(self) -> None:
        self.plain["square"].resize_(2, 3)

    def set_to_another(self) -> None:
        self.plain["square"].set_(torch.randn(2, 2))

    def turned_in_place(self) -> None:
        self.plain["square"].t_()

    def conjugated(self) -> None:
        self.plain["complex"].data = self.plain["complex"].data.conj()

    def negated(self) -> None:
        self.first().weight.data = torch._neg_view(self.first().weight.data)

    def parameter_added(self) -> None:
        self.model.register_parameter(
            f"p{len(self.model._parameters)}", nn.Parameter(torch.ones(2))
        )

    def parameter_removed(self) -> None:
        self.first().bias = None

    def parameter_renamed(self) -> None:
        held = self.first()._parameters
        held["renamed"] = held.pop("weight", None)

    def parameters_in_another_order(self) -> None:
        held = self.first()._parameters
        key = next(iter(held))
        held[key] = held.pop(key)

    def parameter_made_a_buffer(self) -> None:
        weight = self.first()._parameters.pop("weight", None)
        if weight is not None:
            self.first().register_buffer("weight", weight)

    def buffer_hidden(self) -> None:
        self.model[1]._non_persistent_buffers_set.add("running_mean")

    def buffer_shown(self) -> None:
        self.model[1]._non_persistent_buffers_set.discard("running_mean")

    def module_swapped(self) -> None:
        self.model[0] = nn.Linear(4, 4)

    def module_taken_out(self) -> None:
        self.model._modules["2"] = None

    def module_wrapped(self) -> None:
        self.model[2] = nn.Sequential(nn.Linear(4, 4))

    def module_with_extra_state(self) -> None:
        class Extra(nn.Linear):
            def get_extra_state(self) -> dict[str, int]:
                return {"n": 3}

            def set_extra_state(self, state: object) -> None: ...

        self.model[0] = Extra(4, 4)

    def hook_on_state_dict(self) -> None:
        def hook(module: nn.Module, state: dict[str, object], *_: object) -> None:
            state["hooked"] = torch.ones(1)

        self.model.register_state_dict_post_hook(hook)

    def tied(self) -> None:
        self.plain["tied"] = self.plain["square"]

    def untied(self) -> None:
        self.plain["tied"] = self.plain["square"].clone()

    def overlapping(self) -> None:
        self.plain["tied"] = self.plain[1][1:3]

    def moments_made_anew(self) -> None:
        for state in self.optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items()})

    def moments_dropped(self) -> None:
        self.optimizer.state.clear()

    def moment_of_one_made_a_number(self) -> None:
        for state in list(self.optimizer.state.values())[:1]:
            state["step"] = 3.0

    def moment_added(self) -> None:
        for state in list(self.optimizer.state.values())[:1]:
            state["more"] = torch.ones(1)

    def options_changed(self) -> None:
        group = self.optimizer.param_groups[0]
        group["lr"] *= 0.5
        group["new"] = [1, {"two": 2}]

    def option_made_a_tensor(self) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.5)

    def group_added(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 3.0})

    def values_changed(self) -> None:
        self.plain["n"] += 1
        self.plain["log"].append(2.5)
        self.own.data["n"] += 1

    def value_made_a_tensor(self) -> None:
        self.plain["n"] = torch.tensor(2)

    def tensor_made_a_value(self) -> None:
        self.plain["n"] = 7

    def nested_value_changed(self) -> None:
        self.plain["deep"][0] += 1
        self.plain["deep"][1][1]["x"][0] = torch.full((1,), 9.0)

    def list_made_a_tuple(self) -> None:
        self.plain["deep"] = list(self.plain["deep"])
        self.plain["deep"][1] = list(self.plain["deep"][1])

    def key_of_another_type(self) -> None:
        key = next(key for key in self.plain if key in (1, True))
        self.plain[True if type(key) is int else 1] = self.plain.pop(key)

    def key_that_is_equal_and_another(self) -> None:
        of = {
            name: other
            for one, two in EQUAL_KEYS
            for name, other in ((repr(one), two), (repr(two), one))
        }
        entries = [(of.get(repr(key), key), value) for key, value in self.plain.items()]
        self.plain.clear()
        self.plain.update(entries)

    def order_made_plain(self) -> None:
        self.plain["ordered"] = dict(self.plain["ordered"])

    def order_changed(self) -> None:
        self.plain["ordered"] = OrderedDict(self.plain["ordered"])
        self.plain["ordered"].move_to_end("a")

    def keys_moved(self) -> None:
        self.plain["square"], self.plain[2] = torch.ones(2, 2), self.plain["square"]

    def strides_changed(self) -> None:
        strided = self.plain["strided"]
        strided.data = torch.as_strided(strided.data, strided.shape, (1, 4))

    def subclass_put_in_place(self) -> None:
        self.plain["square"] = self.plain["square"].as_subclass(Marked)

    def array_put_in_place(self) -> None:
        self.plain["n"] = torch.ones(3).numpy()

    def something_else_put_in_place(self) -> None:
        self.plain["n"] = {1, 2}

    def of_a_provider_replaced(self) -> None:
        self.own.data = {"t": torch.randn(2), "n": -1}


CHANGES = sorted(
    name
    for name, method in vars(World).items()
    if callable(method) and not name.startswith("__") and name not in ("items", "first")
)


SAVED = [
    "parameter_replaced_in_the_optimizer_too",
    "data_replaced",
    "data_transposed",
    "halved",
    "resized",
    "set_to_another",
    "parameter_added",
    "parameter_removed",
    "parameter_renamed",
    "module_swapped",
    "hook_on_state_dict",
    "untied",
    "moments_made_anew",
    "options_changed",
    "nested_value_changed",
    "subclass_put_in_place",
    "of_a_provider_replaced",
]
"""Those that are tried with files too."""


def taken(
    providers: dict[str, laststep.StateProvider], caches: dict[str, CollectCache]
) -> TakenState | str:
    try:
        return take_state(providers, caches, {}, None, allow_pickle=False)
    except laststep.UsageError as error:
        return str(error)


def leaf_by_leaf(items: dict[str, object]) -> dict[str, Collected] | str:
    """What is found without the help of caches."""
    found: dict[str, Collected] = {}
    try:
        for name, provider in providers_for(items).items():
            with naming(name):
                state = provider.describe()
                found[name] = collect(state.value, volatile=state.volatile)
    except laststep.UsageError as error:
        return str(error)
    return found


def apply(world: World, change: str) -> None:
    """Apply a change, if what it changes is still there."""
    try:
        with torch.no_grad() if change != "train" else torch.enable_grad():
            getattr(world, change)()
    except (
        AttributeError,
        IndexError,
        KeyError,
        RuntimeError,
        StopIteration,
        TypeError,
        ValueError,
    ):
        pass


def check_same(quick: TakenState | str, fresh: dict[str, Collected] | str) -> None:
    """Every byte and every word that would be stored is the same."""
    if isinstance(quick, str) or isinstance(fresh, str):
        assert quick == fresh
        return
    assert [spec.pieces for spec, _ in quick.described] == [one.pieces for one in fresh.values()]
    sources = [source for one in fresh.values() for source in one.sources]
    for mine, theirs in zip(quick.sources, sources, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.device == theirs.device
        assert not mine.is_conj()
        assert not mine.is_neg()
        assert torch.equal(mine, theirs)
    for name, mine in quick.collected.items():
        theirs = fresh[name]
        assert repr(mine.tree) == repr(theirs.tree)
        assert (mine.ties, mine.views, mine.layouts) == (theirs.ties, theirs.views, theirs.layouts)


# torch warns once in a process of a gradient that a transposed parameter lays out otherwise.
@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
@given(changes=st.lists(st.sampled_from(CHANGES), max_size=8), only_torchs=st.booleans())
def test_a_state_taken_again_is_what_a_first_look_finds_after_any_changes(
    changes: list[str], *, only_torchs: bool
) -> None:
    world, caches = World(), {}
    items = world.items()
    if only_torchs:
        del items["own"]  # then modules are looked at once for all items
    providers = providers_for(items)
    for change in ["values_changed", "values_changed", *changes, "values_changed"]:
        apply(world, change)
        fresh = leaf_by_leaf(items)
        check_same(taken(providers, caches), fresh)
        check_same(taken(providers_for(items), {}), fresh)


@pytest.mark.parametrize("keys", EQUAL_KEYS, ids=repr)
@pytest.mark.parametrize("nested", [False, True])
def test_a_key_that_is_equal_and_another_is_stored_as_it_is_now(
    keys: tuple[object, object], tmp_path: Path, *, nested: bool
) -> None:
    tensor = torch.arange(3.0)
    state: dict[str, object] = {"value": None}
    with laststep.Checkpointer(
        tmp_path / "run", state=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        for step, key in enumerate((*keys, *keys)):
            state["value"] = {key: {"x": tensor}} if nested else {key: tensor}
            ckpt.save(step).wait()
    for step, key in enumerate((*keys, *keys)):
        stored = laststep.load(tmp_path / "run", step=step)["state"]["value"]  # type: ignore[index]
        assert list(map(repr, stored)) == [repr(key)]


@pytest.mark.parametrize("change", SAVED)
def test_the_second_save_stores_what_changed_since_the_first(change: str, tmp_path: Path) -> None:
    settings = {"flush": "thread", "host_memory_bytes": 64 << 20, "progress": False}
    world = World()
    world.tied()
    with laststep.Checkpointer(
        tmp_path / "twice", items=world.items(), **as_keywords(settings)
    ) as ckpt:
        ckpt.save(0).wait()
        getattr(world, change)()
        ckpt.save(1).wait()
    with laststep.Checkpointer(
        tmp_path / "once", items=world.items(), **as_keywords(settings)
    ) as ckpt:
        ckpt.save(1).wait()
    twice, once = laststep.load(tmp_path / "twice"), laststep.load(tmp_path / "once")
    assert repr(twice) == repr(once)


@pytest.mark.parametrize("change", ["values_changed", "options_changed", "train"])
def test_what_only_changes_its_numbers_is_not_taken_apart_anew(change: str) -> None:
    world, caches = World(), {}
    providers = providers_for(world.items())
    before = taken(providers, caches)
    getattr(world, change)()
    after = taken(providers, caches)
    pairs = zip(after.described, before.described, strict=True)
    assert all(a.pieces is b.pieces for (a, _), (b, _) in pairs)


def test_nothing_holds_the_tensors_of_a_state_between_saves() -> None:
    world, caches = World(), {}
    providers = providers_for(world.items())
    taken(providers, caches)
    taken(providers, caches)
    refs = [weakref.ref(tensor) for tensor in world.model.parameters()]
    del world, providers
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def test_tensors_made_anew_in_the_same_memory_are_the_same_state() -> None:
    memory = torch.arange(6.0)
    cache = CollectCache()
    first = collect({"a": memory[:3], "n": 1}, cache=cache)
    again = collect({"a": memory[:3], "n": 2}, cache=cache)
    assert again.pieces is first.pieces
    assert again.tree["n"] == 2
    assert collect({"a": memory[1:4], "n": 2}, cache=cache).sources[0].tolist() == [1, 2, 3]


def test_a_provider_that_changes_the_model_when_asked_does_not_confuse_its_optimizer() -> None:
    world = World()
    items = {"model": world.model, "own": world.own, "optimizer": world.optimizer}
    providers, caches = providers_for(items), {}

    def take() -> list[str]:
        found = take_state(providers, caches, {}, None, allow_pickle=False)
        return [piece.name for piece in found.described[2][0].pieces]

    assert "state/0.weight/exp_avg" in take()
    world.own.when_asked = world.parameter_renamed
    assert "state/0.renamed/exp_avg" in take()


def test_a_hook_that_changes_the_model_does_not_confuse_its_optimizer() -> None:
    world = World()
    providers = providers_for({"model": world.model, "optimizer": world.optimizer})
    caches: dict[str, CollectCache] = {}

    def take() -> list[str]:
        found = take_state(providers, caches, {}, None, allow_pickle=False)
        return [piece.name for piece in found.described[1][0].pieces]

    take()
    assert "state/0.weight/exp_avg" in take()

    def hook(module: nn.Module, *_: object) -> None:
        if "renamed" not in world.first()._parameters:
            world.parameter_renamed()

    world.model.register_state_dict_pre_hook(hook)
    assert "state/0.renamed/exp_avg" in take()


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_dtensor_is_known_by_its_local_memory_and_its_layout(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))
    local = torch.arange(6.0)
    state: dict[str, object] = {"d": DTensor.from_local(local, mesh, [Shard(0)]), "n": 1}
    cache = CollectCache()

    def take() -> bool:
        """Whether it was known; what is taken is right in any case."""
        before = cache.last
        found, fresh = collect(state, cache=cache), collect(state)
        assert (found.pieces, found.layouts) == (fresh.pieces, fresh.layouts)
        assert torch.equal(found.sources[0], fresh.sources[0])
        assert repr(found.tree) == repr(fresh.tree)
        return cache.last is before

    assert not take()
    state["n"] = 2
    assert take()
    state["d"]._local_tensor.mul_(2)
    assert take()
    state["d"] = DTensor.from_local(local, mesh, [Replicate()])
    assert not take()
    state["d"]._local_tensor = torch.ones(6)
    assert not take()
    state["d"] = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    assert not take()
    state["d"] = torch.ones(2, 3)
    assert not take()
    assert take()
