"""A run as storage of torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_rounds import ALONE, failing, load, same, save, steps, trained, untrained
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import laststep
from expect import raises
from laststep import cli
from laststep.constants import DTYPES
from laststep.dcp import Reader, Writer, attempts
from laststep.errors import AlreadyExistsError, NotFoundError, UsageError

pytestmark = [*ALONE, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]


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
    shapes["one of many"] = torch.arange(10.0)[::10]  # which is contiguous
    shapes["conjugate"] = torch.view_as_complex(torch.randn(3, 2)).conj()
    shapes["parameter"] = torch.nn.Parameter(torch.randn(3))
    save(state, tmp_path)
    into = {
        part: {
            key: torch.zeros_like(t, memory_format=torch.contiguous_format).detach()
            for key, t in state[part].items()
        }
        for part in state
    }
    load(into, tmp_path)
    state["shapes"]["conjugate"] = state["shapes"]["conjugate"].resolve_conj()
    state["shapes"]["parameter"] = state["shapes"]["parameter"].detach()
    assert same(into, state)
    assert same(laststep.load(tmp_path), state)


def test_large_tensors_pass_through_small_buffers(tmp_path: Path) -> None:
    state = {
        "w": {
            "plain": torch.randn(5_000_000),
            "columns": torch.randn(3_000, 2_000).t(),
            "rows": torch.randn(2, 5_000_000).t(),
            "one row": torch.randn(5_000_000, 2).t()[:1],
            "rows across the ends of chunks": torch.randn(20, 500_003),
            "small": torch.randn(3),
        }
    }
    save(state, tmp_path)
    into = {"w": {key: torch.zeros(t.shape) for key, t in state["w"].items()}}
    load(into, tmp_path)
    assert same(into, state)
    assert laststep.open(tmp_path).latest().verify().damage == ()


@pytest.mark.gpu
def test_tensors_on_a_gpu_come_back_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "w": {
            "plain": torch.randn(6_000_000, device="cuda"),
            "strided": torch.randn(3_000, 2_000, device="cuda").t(),
            "scalar": torch.tensor(2.5, device="cuda"),
            "half": torch.randn(5, 3, device="cuda").bfloat16(),
        }
    }
    save(state, tmp_path)
    into = {
        "w": {
            key: torch.zeros(t.shape, dtype=t.dtype, device="cuda") for key, t in state["w"].items()
        }
    }
    load(into, tmp_path)
    assert same(into, state)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(1 << 80),
        1.5,
        float("inf"),
        "text",
        "",
        b"bytes",
        bytes(10_000),
        2 + 3j,
        (1, (2, "x")),
        ({1: "int key", "a": [1]},),
        (OrderedDict(b=1, a=2),),
        {1, 2},
        range(3),
        frozenset({3}),
        slice(1, 2),
        bytearray(b"x"),
        deque([1], 3),
        (Counter("aab"),),
        np.arange(6.0).reshape(2, 3),
        np.float64(2.5),
        torch.float16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        (torch.arange(3), "with a tensor"),
        [],
        [1, 2],
        ({},),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(tmp_path: Path, value: object) -> None:
    save({"state": {"value": value}, "top": value}, tmp_path)
    into: dict[str, Any] = {"state": {"value": 0}, "top": 0}
    load(into, tmp_path)
    assert same(into["state"]["value"], value)
    assert same(into["top"], value)


def test_a_sparse_tensor_is_a_value_or_refused(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    with failing(UsageError):
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
    state = {
        "model": model.state_dict(),
        "data": {"files": ["a", "b"]},
        "step": 7,
        "ema": torch.ones(3),
    }
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
    with laststep.Checkpointer(
        tmp_path, model=other, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
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
        tmp_path,
        model=model,
        optimizer=optimizer,
        extra=extra,
        options=laststep.Options(flush="thread", progress=False),
    ) as ckpt:
        ckpt.save(5).wait()
    fresh = untrained()
    weights, moments = get_state_dict(*fresh)
    into: dict[str, Any] = {
        "model": weights,
        "optimizer": moments,
        "extra": {
            "one": torch.zeros(6),
            "two": torch.zeros(6),
            "part": torch.zeros(3),
            "values": 0,
        },
    }
    load(into, tmp_path)
    set_state_dict(*fresh, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert same(fresh[0].state_dict(), model.state_dict())
    assert same(fresh[1].state_dict(), optimizer.state_dict())
    assert same(into["extra"], extra)


def test_names_that_dcp_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    with laststep.Checkpointer(
        tmp_path, state=state, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.save(0).wait()
    with raises(UsageError, found="state.a.b"):
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
    with raises(NotFoundError, where=tmp_path / "nothing"):
        Reader(tmp_path / "nothing").read_metadata()
    save({"w": torch.ones(1)}, tmp_path, 5)
    with raises(NotFoundError, "step 6", where=tmp_path):
        Reader(tmp_path, 6).read_metadata()
    with pytest.raises(CheckpointException, match="step 6"):
        load({"w": torch.ones(1)}, tmp_path, 6)


def test_the_id_of_a_checkpoint_is_its_step(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for step in ("3", "4"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=step)
        assert writer.checkpoint_id == step
    assert steps(tmp_path) == [3, 4]
    assert Writer.validate_checkpoint_id("100")
    assert Reader.validate_checkpoint_id("100")
    assert Writer.validate_checkpoint_id("runs/gpt")
    assert Reader.validate_checkpoint_id(Path("100"))
    assert not Writer.validate_checkpoint_id("")
    for wrong in (1.5, True):
        with raises(UsageError, found=repr(wrong)):
            dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=wrong)  # type: ignore[arg-type]


def test_a_load_tells_which_step_and_which_save_it_reads(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    told = dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id="3")
    writer = Writer(tmp_path, step=4)
    told_later = dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    assert told_later.storage_meta.save_id == writer.save_id
    for step, reader in (("3", Reader(tmp_path, 3)), ("4", Reader(tmp_path))):
        assert reader.checkpoint_id in (str(tmp_path), step)
        found = reader.read_metadata().storage_meta
        assert found is not None
        assert found.checkpoint_id == reader.checkpoint_id == step
        assert (found.save_id == told.storage_meta.save_id) == (step == "3")
        assert found.load_id == reader.load_id != Reader(tmp_path).load_id


def test_what_no_dcp_saved_has_a_step_and_no_id_of_a_save(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    with laststep.Checkpointer(
        tmp_path, state=state, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.save(5).wait()
    found = Reader(tmp_path).read_metadata().storage_meta
    assert found is not None
    assert (found.checkpoint_id, found.save_id) == ("5", None)


def test_a_reader_reads_the_checkpoint_that_the_metadata_are_of(tmp_path: Path) -> None:
    save({"w": torch.tensor([1])}, tmp_path, 1)
    metadata = Reader(tmp_path).read_metadata()
    save({"w": torch.tensor([2])}, tmp_path, 2)
    other = Reader(tmp_path)
    other.set_up_storage_reader(metadata, is_coordinator=True)
    planner, into = DefaultLoadPlanner(), {"w": torch.tensor([0])}
    planner.set_up_planner(into, metadata, is_coordinator=True)
    other.read_data(other.prepare_local_plan(planner.create_local_plan()), planner).wait()
    assert into["w"].item() == 1


def test_a_step_is_a_number(tmp_path: Path) -> None:
    for step in (-1, 1.5, True, "3"):
        with raises(UsageError, found=repr(step)):
            Writer(tmp_path, step=step)  # type: ignore[arg-type]


def test_a_step_that_is_there_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(1)}, tmp_path, 1)
    with failing(AlreadyExistsError, "Checkpoint already exists: ", "step 1"):  # as DCP says
        save({"w": torch.ones(1)}, tmp_path, 1)
    with failing(AlreadyExistsError, "overwrite=True"):
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


def test_a_process_that_saves_to_many_runs_lets_go_of_those_that_it_is_done_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_writers", {})
    monkeypatch.setattr(attempts, "_MOST_WRITERS", 2)
    runs = [tmp_path / name for name in "abcd"]
    for step in (1, 2):
        for run in runs:
            save({"w": torch.full((2,), step)}, run, step=step)
    assert [steps(run) for run in runs] == [[1, 2]] * 4
    assert len(attempts._writers) == 2
