"""What planners of torch.distributed.checkpoint may do when a run is the storage, and pickles."""

from __future__ import annotations

import dataclasses
import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_rounds import ALONE, failing, load, same, save, steps, trained
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import laststep
from laststep.dcp import Reader, Writer
from laststep.errors import UsageError

pytestmark = ALONE


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


def shards_of(local: torch.Tensor, *rows: tuple[int, int, int]) -> torch.Tensor:
    """Declare rows of a local tensor as rows of a global one of 8 by 3, by torch's public protocol:
    each is (row of the global tensor, row of the local one, number of rows)."""
    local.global_shape = (8, 3)
    local.global_offsets = tuple((at, 0) for at, _, _ in rows)
    local.local_offsets = tuple((at, 0) for _, at, _ in rows)
    local.local_sizes = tuple((count, 3) for _, _, count in rows)
    return local


@pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="needs CheckpointableTensor (torch 2.15)"
)
def test_a_tensor_that_names_its_own_shards_is_saved_and_loaded(tmp_path: Path) -> None:
    whole = torch.randn(8, 3)
    local = torch.full((10, 3), torch.nan)  # with rows that belong to no shard
    local[1:6], local[7:10] = whole[3:8], whole[:3]
    state = {"model": {"w": shards_of(local, (3, 1, 5), (0, 7, 3))}}
    assert isinstance(state["model"]["w"], dcp.CheckpointableTensor)
    save(state, tmp_path)
    assert same(laststep.load(tmp_path), {"model": {"w": whole}})
    into = {"model": {"w": torch.zeros(8, 3)}}
    load(into, tmp_path)
    assert same(into["model"]["w"], whole)
    other = torch.zeros(6, 3)
    load({"model": {"w": shards_of(other, (2, 0, 2), (6, 3, 2))}}, tmp_path)
    expected = torch.zeros(6, 3)
    expected[:2], expected[3:5] = whole[2:4], whole[6:]
    assert same(other, expected)


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
    with failing(UsageError):
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


def test_data_of_a_planner_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    planner = Telling()
    planner.data = Fraction(1, 3)
    with failing(UsageError, "Fraction"):
        save({"w": torch.ones(3)}, tmp_path, planner=planner, allow_pickle=True)


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
    with failing(UsageError, "own", "allow_pickle=True"):
        save(state, tmp_path)
    assert steps(tmp_path) == []
    save(state, tmp_path, allow_pickle=True)
    into: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "own": None}
    with failing(UsageError, "own", "allow_pickle=True"):
        load(into, tmp_path)
    load(into, tmp_path, allow_pickle=True)
    assert same(into, state)


def test_bytes_in_memory_are_no_pickle(tmp_path: Path) -> None:
    stream = io.BytesIO(b"some bytes")
    stream.seek(3)
    save({"model": {"own": stream}, "within": ([1, stream],)}, tmp_path)
    assert stream.tell() == 3
    into: dict[str, Any] = {"model": {"own": None}, "within": None}
    load(into, tmp_path)
    for found in (into["model"]["own"], into["within"][0][1]):
        assert (found.getvalue(), found.tell()) == (b"some bytes", 3)
    assert isinstance(laststep.load(tmp_path)["model"]["own"], bytes)


@pytest.mark.parametrize("admitted", [False, True])
def test_what_the_user_lets_torch_load_stays_as_it_was(tmp_path: Path, admitted: bool) -> None:
    with torch.serialization.safe_globals([io.BytesIO] if admitted else []):
        before = set(torch.serialization.get_safe_globals())
        if not admitted and io.BytesIO in before:
            pytest.skip("a framework that this process has imported admits it")
        save({"own": io.BytesIO(b"1")}, tmp_path)
        load({"own": None}, tmp_path)
        assert set(torch.serialization.get_safe_globals()) == before


class OwnStream(io.BytesIO):
    """May do anything when it is unpickled."""


def test_other_streams_are_pickles(tmp_path: Path) -> None:
    with failing(UsageError, "allow_pickle=True"):
        save({"own": OwnStream(b"1")}, tmp_path)


def test_loading_runs_nothing_that_was_stored(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harmed",)

    save({"own": Harm()}, tmp_path / "run", allow_pickle=True)
    with failing(UsageError, "allow_pickle=True"):
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
    with failing(UsageError, "allow_pickle=True"):
        save({"own": 1}, tmp_path, planner=Scribbling())
    save({"own": 1}, tmp_path, planner=Scribbling(), allow_pickle=True)
    into: dict[str, Any] = {"own": None}
    load(into, tmp_path, planner=Deciphering(), allow_pickle=True)
    assert into == {"own": b"scribble"}
