"""A run as storage of torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter, OrderedDict, deque
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import laststep
from laststep import cli
from laststep.adapters.dcp import Reader, Writer
from laststep.errors import Exists, LaststepError, NotFound, Usage
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    # Of torch.distributed.checkpoint itself, in a process that is no rank.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def save(state: dict[str, Any], run: Path, step: int = 0, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.save(state, storage_writer=Writer(run, step=step, **options), planner=planner)


def load(state: dict[str, Any], run: Path, step: int | None = None, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.load(state, storage_reader=Reader(run, step, **options), planner=planner)


@contextlib.contextmanager
def failing(kind: type[LaststepError], match: str) -> Iterator[None]:
    """What DCP raises names the errors of all ranks."""
    with pytest.raises(CheckpointException) as caught:
        yield
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, kind), repr(error)
    assert match in str(error)


def steps(run: Path) -> list[int]:
    return laststep.open(run).steps()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 40)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def untrained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*flat)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


# --- round trips


def test_tensors_of_all_dtypes_and_shapes_come_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {"dtypes": {}, "shapes": {}}
    for name in DTYPES:
        raw = torch.randint(0, 2, (7 * DTYPES[name].size_bytes,), dtype=torch.uint8)
        state["dtypes"][name] = raw.view(getattr(torch, name))
    shapes = state["shapes"]
    shapes["scalar"] = torch.tensor(3.5)
    shapes["empty"] = torch.empty(0)
    shapes["empty rows"] = torch.empty(3, 0, 2)
    shapes["transposed"] = torch.arange(6.0).view(2, 3).t()
    shapes["expanded"] = torch.arange(3.0).expand(4, 3)
    shapes["strided"] = torch.arange(40.0).view(4, 10)[:, ::3]
    shapes["conjugate"] = torch.view_as_complex(torch.randn(3, 2)).conj()
    shapes["parameter"] = torch.nn.Parameter(torch.randn(3))
    save(state, tmp_path)
    into = {
        part: {key: torch.zeros_like(t, memory_format=torch.contiguous_format).detach()
               for key, t in state[part].items()}
        for part in state
    }  # fmt: skip
    load(into, tmp_path)
    state["shapes"]["conjugate"] = state["shapes"]["conjugate"].resolve_conj()
    state["shapes"]["parameter"] = state["shapes"]["parameter"].detach()
    assert same(into, state)
    assert same(laststep.load(tmp_path), state)


def test_large_tensors_pass_through_small_buffers(tmp_path: Path) -> None:
    state = {"w": {
        "plain": torch.randn(5_000_000),
        "columns": torch.randn(3_000, 2_000).t(),
        "rows": torch.randn(2, 5_000_000).t(),
        "one row": torch.randn(5_000_000, 2).t()[:1],
        "small": torch.randn(3),
    }}  # fmt: skip
    save(state, tmp_path)
    into = {"w": {key: torch.zeros(t.shape) for key, t in state["w"].items()}}
    load(into, tmp_path)
    assert same(into, state)
    assert laststep.open(tmp_path).latest().verify().damage == ()


@pytest.mark.gpu
def test_tensors_on_a_gpu_come_back_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"w": {
        "plain": torch.randn(6_000_000, device="cuda"),
        "strided": torch.randn(3_000, 2_000, device="cuda").t(),
        "scalar": torch.tensor(2.5, device="cuda"),
        "half": torch.randn(5, 3, device="cuda").bfloat16(),
    }}  # fmt: skip
    save(state, tmp_path)
    into = {"w": {key: torch.zeros(t.shape, dtype=t.dtype, device="cuda")
                  for key, t in state["w"].items()}}  # fmt: skip
    load(into, tmp_path)
    assert same(into, state)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(1 << 80), 1.5, float("inf"), "text", "", b"bytes", bytes(10_000), 2 + 3j,
        (1, (2, "x")), ({1: "int key", "a": [1]},), (OrderedDict(b=1, a=2),), {1, 2}, range(3),
        frozenset({3}), slice(1, 2), bytearray(b"x"), deque([1], 3), (Counter("aab"),),
        np.arange(6.0).reshape(2, 3), np.float64(2.5), torch.float16,
        torch.device("cuda:1"), torch.Size([2, 3]), (torch.arange(3), "with a tensor"),
        [], [1, 2], ({},),
    ],
    ids=repr,
)  # fmt: skip
def test_values_come_back_as_they_were(tmp_path: Path, value: object) -> None:
    save({"state": {"value": value}, "top": value}, tmp_path)
    into: dict[str, Any] = {"state": {"value": 0}, "top": 0}
    load(into, tmp_path)
    assert same(into["state"]["value"], value)
    assert same(into["top"], value)


def test_a_sparse_tensor_is_a_value_or_refused(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    with failing(Usage, "a dense tensor"):
        save({"w": sparse}, tmp_path)
    save({"w": (sparse,)}, tmp_path)
    into: dict[str, Any] = {"w": None}
    load(into, tmp_path)
    assert same(into["w"][0].to_dense(), torch.eye(3))


def test_an_optimizer_comes_back_by_the_names_of_its_parameters(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optim": moments, "step": 2}, tmp_path, 2)
    fresh = untrained()
    weights, moments = get_state_dict(*fresh)
    into: dict[str, Any] = {"model": weights, "optim": moments, "step": 0}
    load(into, tmp_path)
    set_state_dict(*fresh, model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert into["step"] == 2
    assert same(fresh[0].state_dict(), model.state_dict())
    assert same(fresh[1].state_dict(), optimizer.state_dict())


def test_stateful_objects_are_saved_and_loaded_through_their_methods(tmp_path: Path) -> None:
    model, _ = trained()
    save({"model": model}, tmp_path)
    other, _ = untrained()
    load({"model": other}, tmp_path)
    assert same(other.state_dict(), model.state_dict())


# --- what is stored is a checkpoint like any other


def test_a_nested_state_has_an_item_for_each_key(tmp_path: Path) -> None:
    model, _ = trained()
    state = {"model": model.state_dict(), "data": {"files": ["a", "b"]}, "step": 7,
             "ema": torch.ones(3)}  # fmt: skip
    save(state, tmp_path, 7)
    checkpoint = laststep.open(tmp_path).latest()
    assert sorted(checkpoint.items()) == ["data", "ema", "model", "step"]
    assert same(checkpoint.tensor("model/0.weight")[3:5], state["model"]["0.weight"][3:5])
    assert checkpoint.verify().damage == ()
    assert same(laststep.load(tmp_path), state | {"model": dict(state["model"])})


def test_a_flat_state_is_the_item_model(tmp_path: Path) -> None:
    model, _ = trained()
    save(model.state_dict(), tmp_path)
    assert same(laststep.load(tmp_path), {"model": dict(model.state_dict())})


@pytest.mark.parametrize("key", ["with/slash", "with space", "shared", "x" * 65, ""])
def test_keys_that_cannot_be_items_stay_within_one(tmp_path: Path, key: str) -> None:
    state = {key: {"a": torch.ones(2)}, "other": {"b": 1}}
    save(state, tmp_path)
    assert same(laststep.load(tmp_path), {"model": state})
    into = {key: {"a": torch.zeros(2)}, "other": {"b": 0}}
    load(into, tmp_path)
    assert same(into, state)


def test_a_checkpointer_restores_it(tmp_path: Path) -> None:
    model, _ = trained()
    save({"model": model.state_dict()}, tmp_path, 3)
    other, _ = untrained()
    with laststep.Checkpointer(tmp_path, model=other, flush="thread", progress=False) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4).wait()
    assert same(other.state_dict(), model.state_dict())
    assert steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("words", [["ls"], ["show"], ["verify"]])
def test_the_commands_know_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"model": {"w": torch.ones(3)}}, tmp_path)
    monkeypatch.setattr(sys, "argv", ["laststep", *words, str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code


def test_it_is_exported_as_a_folder_of_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"w": torch.randn(4, 3)}, "step": 3}
    save(state, tmp_path / "run")
    words = ["laststep", "export", tmp_path / "run", tmp_path / "dcp", "--format", "dcp"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit):
        cli.main()
    into: dict[str, Any] = {"model": {"w": torch.zeros(4, 3)}, "step": 0}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    assert same(into, state)


# --- what a Checkpointer wrote


def test_what_a_checkpointer_wrote_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    tied = torch.arange(6.0)
    extra = {"one": tied, "two": tied, "part": tied[1:4], "values": (1, "x", np.arange(3))}
    with laststep.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, extra=extra, flush="thread", progress=False
    ) as ckpt:
        ckpt.save(5).wait()
    fresh = untrained()
    weights, moments = get_state_dict(*fresh)
    into: dict[str, Any] = {
        "model": weights, "optimizer": moments,
        "extra": {"one": torch.zeros(6), "two": torch.zeros(6), "part": torch.zeros(3),
                  "values": 0},
    }  # fmt: skip
    load(into, tmp_path)
    set_state_dict(*fresh, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert same(fresh[0].state_dict(), model.state_dict())
    assert same(fresh[1].state_dict(), optimizer.state_dict())
    assert same(into["extra"], extra)


def test_names_that_dcp_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    with laststep.Checkpointer(tmp_path, state=state, flush="thread", progress=False) as ckpt:
        ckpt.save(0).wait()
    with pytest.raises(Usage, match="same name"):
        Reader(tmp_path).read_metadata()


# --- which checkpoint


def test_the_newest_is_loaded_unless_a_step_is_named(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save({"model": {"w": torch.tensor([step])}}, tmp_path, step)
    into = {"model": {"w": torch.tensor([0])}}
    load(into, tmp_path)
    assert into["model"]["w"].item() == 3
    load(into, tmp_path, 2)
    assert into["model"]["w"].item() == 2
    dcp.load(into, storage_reader=Reader(tmp_path), checkpoint_id="1")
    assert into["model"]["w"].item() == 1


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no run"):
        Reader(tmp_path / "nothing").read_metadata()
    save({"w": torch.ones(1)}, tmp_path, 5)
    with pytest.raises(NotFound, match="no checkpoint of step 6"):
        Reader(tmp_path, 6).read_metadata()
    with pytest.raises(CheckpointException, match="no checkpoint of step 6"):
        load({"w": torch.ones(1)}, tmp_path, 6)


def test_the_id_of_a_checkpoint_is_its_step(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for step in ("3", "4"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=step)
        assert writer.checkpoint_id == step
    assert steps(tmp_path) == [3, 4]
    assert Writer.validate_checkpoint_id("100")
    assert Reader.validate_checkpoint_id("100")
    assert not Writer.validate_checkpoint_id("runs/gpt")
    assert not Reader.validate_checkpoint_id(Path("100"))
    with pytest.raises(Usage, match="is a step"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id="runs/gpt")


def test_a_save_needs_a_step(tmp_path: Path) -> None:
    with failing(Usage, "without a step"):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(tmp_path))
    for step in (-1, 1.5, True, "3"):
        with pytest.raises(Usage, match="a step is"):
            Writer(tmp_path, step=step)  # type: ignore[arg-type]


def test_a_step_that_is_there_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(1)}, tmp_path, 1)
    with failing(Exists, "step 1 has been saved already"):
        save({"w": torch.ones(1)}, tmp_path, 1)
    into = {"w": torch.full((1,), 5.0)}
    load(into, tmp_path)
    assert into["w"].item() == 0


def test_a_step_is_overwritten_if_that_is_asked_for(tmp_path: Path) -> None:
    save({"w": torch.zeros(1)}, tmp_path, 1)
    save({"w": torch.ones(1)}, tmp_path, 1, overwrite=True)
    into = {"w": torch.full((1,), 5.0)}
    load(into, tmp_path, 1)
    assert into["w"].item() == 1
    assert len(list(tmp_path.glob("step-*"))) == 1


# --- metadata and planners


def test_the_metadata_are_those_of_torchs_own_storage(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "list": [torch.ones(2), {"a": 1}], "n": 3}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    told = dcp.save(state, storage_writer=Writer(tmp_path / "ours", step=0))
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    ours = Reader(tmp_path / "ours").read_metadata()
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for fqn, content in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[fqn]
        assert type(mine) is type(content)
        if not isinstance(content, BytesStorageMetadata):
            assert (mine.size, mine.chunks) == (content.size, content.chunks)
            assert mine.properties.dtype == content.properties.dtype
    assert ours.storage_data.keys() == theirs.storage_data.keys() == told.storage_data.keys()
    assert ours.version == theirs.version == told.version
    assert told.storage_meta is not None
    assert told.storage_meta.save_id


def test_a_part_of_the_state_is_loaded(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(3)}, "n": 3}, tmp_path)
    into: dict[str, Any] = {"model": {"b": torch.zeros(3)}}
    load(into, tmp_path)
    assert into["model"]["b"].tolist() == [1, 1, 1]
    into = {"model": {"b": torch.zeros(3), "new": torch.zeros(1)}}
    with pytest.raises(CheckpointException, match=r"Missing key .*model\.new"):
        load(into, tmp_path)
    load(into, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(into, {"model": {"b": torch.ones(3), "new": torch.zeros(1)}})


@pytest.mark.parametrize(
    ("keys", "parts"),
    [(None, ["model", "list", "n"]), ({"model.a"}, ["model"]), ({"n", "list"}, ["list", "n"])],
)
def test_a_state_is_made_of_the_metadata(
    tmp_path: Path, keys: set[str] | None, parts: list[str]
) -> None:
    state = {"model": {"a": torch.randn(2, 3)}, "list": [torch.ones(1), 4], "n": 3}
    save(state, tmp_path)
    made: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    # Not dcp.load, which hands back only what it was given keys for.
    _load_state_dict(made, storage_reader=Reader(tmp_path), planner=planner, no_dist=True)
    assert same(made, {part: state[part] for part in parts})


def test_a_planner_that_flattens_nothing_is_served(tmp_path: Path) -> None:
    state = {"t": torch.randn(3), "nested": {"w": torch.ones(2), "n": [1, "x"]}}
    save(state, tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    into: dict[str, Any] = {"t": torch.zeros(3), "nested": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(into, tmp_path, planner=planner)
    assert same(into, state)
    assert same(laststep.load(tmp_path), {"model": state})
    assert Reader(tmp_path).read_metadata().planner_data is None


class Halving(DefaultSavePlanner):
    """Saves at half precision, as torch's documentation shows."""

    tells = True

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and self.tells:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        given = super().resolve_data(write_item)
        return given.to(torch.float16) if isinstance(given, torch.Tensor) else given


class Renaming(DefaultLoadPlanner):
    """Loads what has another name now."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"old_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)


def test_a_planner_may_change_dtypes_and_names(tmp_path: Path) -> None:
    save({"old_model": {"w": torch.full((3,), 1.5)}}, tmp_path, planner=Halving())
    assert laststep.open(tmp_path).latest().tensor("old_model/w").dtype == "float16"
    into = {"model": {"w": torch.zeros(3)}}
    load(into, tmp_path, planner=Renaming())
    assert same(into["model"]["w"], torch.full((3,), 1.5))


def test_a_planner_that_gives_something_else_than_it_planned_is_refused(tmp_path: Path) -> None:
    planner = Halving()
    planner.tells = False
    with failing(Usage, "something else than it had planned"):
        save({"w": torch.ones(3)}, tmp_path, planner=planner)
    assert steps(tmp_path) == []


class Telling(DefaultSavePlanner):
    """Has data of its own in the metadata."""

    data: object = None

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self.data)


def test_the_data_of_a_planner_come_back(tmp_path: Path) -> None:
    planner = Telling()
    planner.data = {"any": (1, "thing")}
    save({"model": {"w": torch.ones(3)}}, tmp_path, planner=planner)
    assert Reader(tmp_path).read_metadata().planner_data == {"any": (1, "thing")}


def test_the_data_of_a_planner_are_pickled_only_if_that_is_allowed(tmp_path: Path) -> None:
    planner = Telling()
    planner.data = Fraction(1, 3)
    with failing(Usage, "data of the planner"):
        save({"w": torch.ones(3)}, tmp_path, planner=planner)
    save({"w": torch.ones(3)}, tmp_path, planner=planner, allow_pickle=True)
    with pytest.raises(Usage, match="allow_pickle=True"):
        Reader(tmp_path).read_metadata()
    assert Reader(tmp_path, allow_pickle=True).read_metadata().planner_data == Fraction(1, 3)


def test_a_planner_may_keep_its_plans(tmp_path: Path) -> None:
    for step in range(4):
        width = 3 if step < 3 else 4  # the last plan is another
        state = {"model": {"w": torch.full((width,), float(step))}, "n": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = str(tmp_path)
        save(state, tmp_path, step, planner=planner)
    for step in range(4):
        into: dict[str, Any] = {"model": {"w": torch.zeros(3 if step < 3 else 4)}, "n": None}
        load(into, tmp_path, step)
        assert set(into["model"]["w"].tolist()) == {step}
        assert into["n"] == step


# --- pickles


def test_an_object_is_pickled_only_if_that_is_allowed(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "own": Fraction(1, 3)}
    with failing(Usage, "cannot save own: it is a pickled object"):
        save(state, tmp_path)
    assert steps(tmp_path) == []
    save(state, tmp_path, allow_pickle=True)
    into: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "own": None}
    with failing(Usage, "cannot load own: it is a pickled object"):
        load(into, tmp_path)
    load(into, tmp_path, allow_pickle=True)
    assert same(into, state)


def test_loading_runs_nothing_that_was_stored(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harmed",)

    save({"own": Harm()}, tmp_path / "run", allow_pickle=True)
    with failing(Usage, "pickled object"):
        load({"own": None}, tmp_path / "run")
    assert not (tmp_path / "harmed").exists()


def test_what_a_tree_cannot_express_keeps_torchs_bytes(tmp_path: Path) -> None:
    own = (torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True))
    save({"own": own}, tmp_path)
    into: dict[str, Any] = {"own": None}
    load(into, tmp_path)
    assert isinstance(into["own"][0], torch.nn.Parameter)
    assert into["own"][1].requires_grad
    assert same(into["own"][0].data, torch.ones(2))
    got: Any = laststep.load(tmp_path)
    assert isinstance(got["model"]["own"], bytes)


class Wrapping(DefaultSavePlanner):
    """Saves tensors as values."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [
            WriteItem(index=MetadataIndex(item.index.fqn), type=WriteItemType.BYTE_IO)
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)


def test_a_tensor_may_be_a_value(tmp_path: Path) -> None:
    save({"model": {"w": torch.arange(3)}}, tmp_path, planner=Wrapping())
    into: dict[str, Any] = {"model": {"w": None}}
    load(into, tmp_path)
    assert same(into, {"model": {"w": torch.arange(3)}})
    assert same(laststep.load(tmp_path), into)


class Scribbling(DefaultSavePlanner):
    """Gives bytes that torch.save did not write."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        given = super().transform_object(write_item, object)
        if not isinstance(given, torch.Tensor):
            given.seek(0)
            given.truncate()
            given.write(b"scribble")
        return given


class Deciphering(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_bytes_of_a_planners_own_are_kept_as_they_are(tmp_path: Path) -> None:
    with failing(Usage, "pickled object"):
        save({"own": 1}, tmp_path, planner=Scribbling())
    save({"own": 1}, tmp_path, planner=Scribbling(), allow_pickle=True)
    into: dict[str, Any] = {"own": None}
    load(into, tmp_path, planner=Deciphering(), allow_pickle=True)
    assert into == {"own": b"scribble"}
