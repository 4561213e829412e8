"""What goes wrong when a run is the storage of torch.distributed.checkpoint, and who may write."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_rounds import ALONE, failing, load, save, steps
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import laststep
from expect import raises
from laststep.catalog.attempt import Attempt
from laststep.catalog.run import Run
from laststep.catalog.terms import this_writer
from laststep.dcp import Reader, Writer
from laststep.errors import AbortedError, CorruptError, NotFoundError, StorageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import FileReader, FileWriter

ROOT = Path(__file__).resolve().parents[2]

pytestmark = ALONE


# --- failures


class Failing(DefaultSavePlanner):
    """Fails at the second tensor."""

    count = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.count += 1
        if self.count == 2:
            raise OSError("the planner failed")
        return super().resolve_data(write_item)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException, match="the planner failed"):
        save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, 2, planner=Failing())
    assert sorted(tmp_path.iterdir()) == before
    assert not Run.open(DirectoryStore(tmp_path)).live_writer()
    save({"a": torch.ones(2)}, tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_store_that_fails_its_write_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FileWriter, offset: int, data: memoryview) -> None:
        raise StorageError("no space left", where="here")

    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "write_at", fail)
        with failing(StorageError, "no space left"):
            save({"a": torch.ones(2)}, tmp_path)
    assert list(tmp_path.glob("step-*")) == []
    save({"a": torch.ones(2)}, tmp_path)


def test_a_failed_commit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Attempt, commit: object) -> None:
        raise StorageError("no space left", where="here")

    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "commit", fail)
        with failing(StorageError, "no space left"):
            save({"a": torch.ones(2)}, tmp_path)
    assert list(tmp_path.glob("step-*")) == []


@pytest.mark.parametrize("what", ["run/step-*", "run"])
@pytest.mark.parametrize("when", ["write_data", "finish"])
def test_a_save_whose_folder_is_deleted_says_so_and_nothing_else(
    what: str,
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    act = getattr(Writer, when)

    def overtaken(self: Writer, *arguments: Any, **more: Any) -> Any:
        for folder in tmp_path.glob(what):
            shutil.rmtree(folder)
        return act(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, when, overtaken)
        with failing(NotFoundError, "step-"):
            save({"w": torch.ones(3)}, run, 1)
    assert [
        record
        for record in caplog.records
        if record.name.startswith("laststep") and record.levelno > logging.INFO
    ] == []
    save({"w": torch.ones(3)}, run, 1)
    assert steps(run) == [1]


def test_a_save_that_is_dropped_in_the_middle_is_given_up(tmp_path: Path) -> None:
    def begin(writer: Writer) -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        [plan], _ = planner.create_global_plan([plan])
        [plan] = writer.prepare_global_plan([plan])
        writer.write_data(planner.finish_plan(plan), planner)

    writer = Writer(tmp_path, step=1)
    begin(writer)
    run = Run.open(DirectoryStore(tmp_path))
    assert [one.folder for one in run.attempts()] == ["step-00000001.1-1"]
    assert run.live_writer() is not None
    begin(writer)  # the same Writer again: the first attempt goes
    assert [one.folder for one in run.attempts()] == ["step-00000001.1-2"]
    del writer
    assert run.attempts() == ()
    assert list(tmp_path.glob("step-*")) == []
    assert run.live_writer() is None


def test_a_writer_that_is_used_for_two_saves_at_once_commits_neither_for_the_other(
    tmp_path: Path,
) -> None:
    def plan(state: dict[str, Any]) -> tuple[Any, Any, Any]:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        writer.set_up_storage_writer(True)
        [plan], metadata = planner.create_global_plan([planner.create_local_plan()])
        [plan] = writer.prepare_global_plan([plan])
        return plan, metadata, planner

    writer = Writer(tmp_path, step=1)
    first, metadata, planner = plan({"w": torch.zeros(3)})
    written = writer.write_data(first, planner).value()
    plan({"w": torch.ones(3)})
    with raises(AbortedError, remedy="Writer"):
        writer.finish(metadata, [written])
    assert steps(tmp_path) == []


def test_a_killed_save_is_invisible_and_goes_with_the_next(tmp_path: Path) -> None:
    script = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import torch, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from laststep.dcp import Writer

        class Dying(DefaultSavePlanner):
            def resolve_data(self, item):
                if item.index.fqn == "b":
                    os.kill(os.getpid(), 9)
                return super().resolve_data(item)

        state = {"a": torch.ones(8_000_000), "b": torch.ones(3)}
        dcp.save(state, storage_writer=Writer(sys.argv[1], step=2), planner=Dying())
    """
    save({"a": torch.ones(2)}, tmp_path, 1)
    done = subprocess.run(
        [os.environ["WARM_PYTHON"], "-c", textwrap.dedent(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("step-*"))) == 2
    assert steps(tmp_path) == [1]
    into = {"a": torch.zeros(2)}
    load(into, tmp_path)
    assert into["a"].tolist() == [1, 1]
    code = script.replace('== "b"', '== ""')
    done = subprocess.run(
        [os.environ["WARM_PYTHON"], "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0
    assert steps(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("step-*"))) == 2


@pytest.mark.parametrize("what", ["tensor", "value", "index", "coordinator's index"])
def test_a_changed_byte_is_noticed(tmp_path: Path, what: str) -> None:
    save(
        {"model": {"w": torch.ones(1 << 20)}, "values": {"array": (np.arange(500_000),)}}, tmp_path
    )
    [folder] = tmp_path.glob("step-*")
    names = {
        "tensor": "model-r00000.safetensors",
        "value": "values-r00000.safetensors",
        "index": "index-r00000",
        "coordinator's index": "index-r00001",
    }
    path = folder / names[what]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    into: dict[str, Any] = {"model": {"w": torch.zeros(1 << 20)}, "values": {"array": None}}
    if what in ("tensor", "value"):
        with failing(CorruptError, "xxh3-128:"):
            load(into, tmp_path)
    else:
        with pytest.raises(CorruptError):
            Reader(tmp_path).read_metadata()
        with pytest.raises(CheckpointException, match="xxh3-128:"):
            load(into, tmp_path)


def test_what_the_page_cache_has_is_used_and_read_from_the_disk_if_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.arange(3 << 20)}, tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.read_bytes()
    preadv, lies = os.preadv, []

    def lying(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        count = preadv(fd, views, offset, flags)
        if flags:
            lies.append(offset)
            views[0][5] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lying)
    into = {"w": torch.zeros(3 << 20, dtype=torch.int64)}
    load(into, tmp_path)
    assert torch.equal(into["w"], torch.arange(3 << 20))
    assert len(lies) == 6


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"model": {f"w{i}": torch.randn(1 << 20) for i in range(8)}}, tmp_path)
    sizes: list[int] = []
    read_into = FileReader.read_into

    def count(self: FileReader, offset: int, into: memoryview) -> int:
        sizes.append(len(into))
        return read_into(self, offset, into)

    monkeypatch.setattr(FileReader, "read_into", count)
    load({"model": {"w3": torch.zeros(1 << 20)}}, tmp_path)
    assert sum(sizes) < 6 << 20


# --- writers


def test_saves_of_one_process_share_an_epoch(tmp_path: Path) -> None:
    for step in range(3):
        save({"w": torch.ones(1)}, tmp_path, step)
    assert len(list(tmp_path.glob("terms/*.json"))) == 1
    names = [checkpoint.folder for checkpoint in laststep.open(tmp_path)]
    assert names == ["step-00000000.1-1", "step-00000001.1-2", "step-00000002.1-3"]


def test_a_run_that_another_job_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    save({"w": torch.ones(1)}, tmp_path, 1)
    run = Run.open(DirectoryStore(tmp_path))
    stranger = msgspec.structs.replace(this_writer(), pid=1)
    run.claim_term((1, 1), writer=stranger)
    with failing(AbortedError, "process 1 on "):
        save({"w": torch.ones(1)}, tmp_path, 2)
    assert steps(tmp_path) == [1]


def test_a_later_epoch_of_the_same_trainer_is_continued(tmp_path: Path) -> None:
    save({"w": torch.ones(1)}, tmp_path, 1)
    options = laststep.Options(flush="thread", progress=False)
    with laststep.Checkpointer(tmp_path, model={"w": torch.ones(1)}, options=options) as ckpt:
        ckpt.continue_newest()
        ckpt.save(2).wait()
    with laststep.Checkpointer(tmp_path, other={"w": torch.ones(1)}, options=options) as ckpt:
        ckpt.continue_newest()
        with raises(laststep.UsageError, expected="model"):
            ckpt.save(3)
    save({"w": torch.ones(1)}, tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_run_that_was_deleted_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(2):
        save({"w": torch.ones(1)}, run, 1)
        DirectoryStore(tmp_path).delete_folder("run")
    save({"w": torch.ones(1)}, run, 1)
    assert steps(run) == [1]


def test_writers_and_readers_travel_to_other_processes(tmp_path: Path) -> None:
    def travel(thing: Any) -> Any:
        return pickle.loads(pickle.dumps(thing))  # noqa: S301 (its own)

    writer = travel(Writer(tmp_path, step=3))
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    reader = Reader(tmp_path)
    metadata = reader.read_metadata()
    travelled = travel(reader)
    travelled.set_up_storage_reader(travel(metadata), True)
    planner = DefaultLoadPlanner()
    into = {"w": torch.zeros(2)}
    planner.set_up_planner(into, metadata, True)
    plan = travelled.prepare_local_plan(planner.create_local_plan())
    travelled.read_data(plan, planner).wait()
    assert into["w"].tolist() == [1, 1]


@pytest.mark.parametrize("same_writer", [True, False])
def test_async_saves_commit_in_the_background(tmp_path: Path, same_writer: bool) -> None:
    writer = Writer(tmp_path)
    state = {"model": {"w": torch.zeros(1000)}}
    waiting = []
    for step in range(3):
        state["model"]["w"].fill_(step)
        one = writer if same_writer else Writer(tmp_path)
        done = dcp.async_save(state, storage_writer=one, checkpoint_id=str(step))
        if same_writer:
            done.result()
        waiting.append(done)
    for done in waiting:
        done.result()
    assert sorted(steps(tmp_path)) == [0, 1, 2]
    for step in range(3):
        into = {"model": {"w": torch.full((1000,), 9.0)}}
        load(into, tmp_path, step)
        assert set(into["model"]["w"].tolist()) == {step}


def test_a_failed_async_save_tells(tmp_path: Path) -> None:
    save({"w": torch.ones(1)}, tmp_path, 1)
    done = dcp.async_save({"w": torch.ones(1)}, storage_writer=Writer(tmp_path, step=1))
    with pytest.raises(CheckpointException, match="step 1"):
        done.result()
