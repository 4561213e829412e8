"""A restore waits for saves to the same run that somebody else has under way."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

import laststep
from expect import warned
from laststep.catalog import terms
from laststep.catalog.run import Run
from laststep.flush import server as serving
from laststep.restoring import choose
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Held:
    """Flushes of this process that stand still before they are durable, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.reached = threading.Event()
        finish = serving.SaveWriter.finish

        def held(flush: object, *arguments: object) -> object:
            self.reached.set()
            self.go_on.wait(PATIENCE_S)
            return finish(flush, *arguments)

        monkeypatch.setattr(serving.SaveWriter, "finish", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go_on.set()


@pytest.fixture
def waited_for(held: Held) -> Iterator[list[str]]:
    """Lets flushes go on when a restore waits for another Checkpointer; what it says then."""
    said: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        held.go_on.set()
        return True

    before = choose.log.level
    choose.log.setLevel(logging.INFO)
    choose.log.addFilter(hear)
    yield said
    choose.log.removeFilter(hear)
    choose.log.setLevel(before)


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_save_of_another_checkpointer_of_this_process_is_waited_for(
    flush: str, waited_for: list[str], opened: object, training: object, fresh: object
) -> None:
    first = opened(training)
    training.become(5)
    first.save(5)
    with opened(fresh, flush=flush) as second:
        assert second.restore().step == 5
    assert fresh.is_wholly(5)
    [said] = waited_for
    assert "step 5" in said
    first.close()


def test_how_anothers_save_ended_is_not_told_here(
    opened: object, training: object, fresh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(training)
    training.become(1)
    first.save(1).wait()

    def fail(*_: object) -> object:
        raise laststep.StorageError("the disk is full")

    monkeypatch.setattr(serving.SaveWriter, "finish", fail)
    first.save(2)
    with opened(fresh) as second:
        assert second.restore().step == 1
    with pytest.raises(laststep.StorageError, match="disk is full"):
        first.close()


def test_saves_to_another_run_are_not_waited_for(
    held: Held, opened: object, training: object, tmp_path: Path
) -> None:
    first = opened(training)
    first.save(0)
    with laststep.Checkpointer(
        tmp_path / "other", s={"a": 1}, options=laststep.Options(flush="thread")
    ) as second:
        assert second.restore().step is None
    held.go_on.set()
    first.close()


def test_the_run_is_known_by_any_of_its_paths(
    held: Held,
    waited_for: list[str],
    opened: object,
    training: object,
    run_folder: Path,
    tmp_path: Path,
) -> None:
    first = opened(training)
    training.become(4)
    first.save(4)
    assert held.reached.wait(PATIENCE_S)
    (tmp_path / "link").symlink_to(run_folder)
    with laststep.Checkpointer(
        tmp_path / "link", items=training.items(), options=laststep.Options(flush="thread")
    ) as second:
        assert second.restore().step == 4
    assert len(waited_for) == 1
    first.close()


def test_a_forked_child_waits_for_nothing_of_its_parent(
    held: Held, opened: object, training: object, run_folder: Path
) -> None:
    first = opened(training)
    first.save(0)
    assert held.reached.wait(PATIENCE_S)
    pid = os.fork()
    if pid == 0:
        choose.wait_for_others(object(), str(run_folder))
        os._exit(42)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    held.go_on.set()
    first.close()


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_writer_is_known_by_its_trainer(
    flush: str, opened: object, training: object, run_folder: Path
) -> None:
    with opened(training, flush=flush) as checkpointer:
        checkpointer.save(0).wait()
        writer = Run.open(DirectoryStore(run_folder)).live_writer()
    assert writer is not None
    assert writer.record.pid == os.getpid()


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_what_ones_own_flusher_could_not_decide_is_not_waited_for(
    flush: str, opened: object, training: object, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(training, flush=flush) as checkpointer:
        checkpointer.save(0).wait()
        run = Run.open(DirectoryStore(run_folder))
        run.begin(step=1, term=1, attempt=2)
        assert choose._other_writers(run) == []
        monkeypatch.setattr(choose, "os", SimpleNamespace(getpid=lambda: os.getpid() + 1))
        (writer,) = choose._other_writers(run)
        assert writer.attempts == ("step-00000001.1-2",)


def test_a_process_of_the_same_number_in_another_container_is_waited_for(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open_or_create(DirectoryStore(run_folder))
    there = msgspec.structs.replace(terms.this_writer(), host="another-container")
    with contextlib.closing(run.lock_term(run.claim_term(None, writer=there))):
        run.begin(step=1, term=1, attempt=1)
        (writer,) = choose._other_writers(run)
    assert (writer.record.pid, writer.record.host) == (os.getpid(), "another-container")


@pytest.mark.parametrize("dead", [False, True])
def test_a_restore_beside_a_live_job_says_who_saves_to_the_run(
    opened: object,
    training: object,
    run_folder: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    dead: bool,
) -> None:
    """And nothing of a flusher that outlives its trainer by a moment."""
    run = Run.open_or_create(DirectoryStore(run_folder))
    change = {"pid": 2**22 + 1} if dead else {"host": "another-host"}
    writer = msgspec.structs.replace(terms.this_writer(), **change)
    with contextlib.closing(run.lock_term(run.claim_term(None, writer=writer))):  # noqa: SIM117
        with opened(training) as checkpointer:
            checkpointer.restore()
    told = warned(caplog, f"process {os.getpid()} on another-host")
    assert bool(told) is not dead


def test_a_live_writer_that_does_not_commit_is_told(
    held: Held,
    opened: object,
    training: object,
    fresh: object,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "WAIT_FOR_OTHERS_S", 0.2)
    held.go_on.set()
    first = opened(training)
    training.become(1)
    first.save(1).wait()
    held.go_on.clear()
    held.reached.clear()
    first.save(2)
    assert held.reached.wait(PATIENCE_S)
    # As if it were another process, of which this one knows nothing.
    monkeypatch.setattr("laststep.running.wait_for_others", lambda *_: None)
    monkeypatch.setattr("laststep.restoring.choose.shares_pids", lambda _: False)
    with opened(fresh) as second:
        assert second.restore().step == 1
    assert warned(caplog, f"process {os.getpid()} on ")
    held.go_on.set()
    first.close()


def test_the_program_waits_for_what_a_dropped_checkpointer_was_saving(tmp_path: Path) -> None:
    code = f"""
import laststep, torch
laststep.Checkpointer({str(tmp_path / "run")!r}, s={{"a": torch.ones(1 << 22)}}).save(5)
"""
    subprocess.run([os.environ["WARM_PYTHON"], "-c", code], check=True, timeout=PATIENCE_S)
    assert [one.step for one in laststep.open(tmp_path / "run")] == [5]
