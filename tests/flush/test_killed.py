"""A flusher that is killed around its commit: what the trainer then says of the save is true."""

from __future__ import annotations

import errno
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.constants import CHUNK_BYTES
from laststep.flush import client as starting
from laststep.flush.protocol import Flushed
from laststep.flush.saves import Save
from laststep.memory.pool import Pool, ReadBuffers
from laststep.storage.files import Disk
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """`die("before" | "after", step)`: flushers kill themselves then, seen from the commit of that
    step."""

    def prepare(when: str, step: int) -> None:
        code = f"""
import os, signal
from laststep.catalog.run import RunWriter
commit = RunWriter.commit
def deadly(writer, attempt, record):
    if {when!r} == "after" or attempt.name.step != {step}:
        commit(writer, attempt, record)
    if attempt.name.step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
RunWriter.commit = deadly
"""
        # What the helper runs.
        found, main = starting._CODE.split("; from ")
        both = f"{found}; exec({code!r}); from {main}"
        monkeypatch.setattr(starting, "_CODE", both)

    return prepare


def test_a_commit_of_which_the_flusher_died_before_it_told_is_reported_as_one(
    run_folder: Path, die: Callable[[str, int], None]
) -> None:
    state = {"t": torch.ones(5)}
    die("after", 2)
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        handle = checkpointer.save(2)
        handle.wait(PATIENCE_S)
        assert handle.committed.done()
        assert handle.report.folder == "step-00000002.1-2"
        # The next flusher goes on from there.
        checkpointer.save(3).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [1, 2, 3]
    assert not list((run_folder / "terms").glob("start-*.lock"))


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_commit_of_which_the_trainer_could_not_hear_is_reported_as_one(
    flush: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = Save.hear

    def fall(save: Save, message: object) -> None:
        if isinstance(message, Flushed):
            wait_until((run_folder / "step-00000002.1-2" / "manifest.json").exists)
            raise ZeroDivisionError("as asked")
        hear(save, message)

    state = {"t": torch.ones(5)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush=flush)
    ) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(Save, "hear", fall)
            handle = checkpointer.save(2)
            assert handle.wait(PATIENCE_S)
        assert handle.report.folder == "step-00000002.1-2"
        checkpointer.save(3).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [1, 2, 3]


def test_a_save_whose_flusher_died_before_the_commit_has_failed_and_its_step_is_free(
    run_folder: Path, die: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.ones(5)}
    usual = starting._CODE
    die("before", 2)
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        with raises(laststep.StorageError, step=2, found="signal 9"):
            checkpointer.save(2).wait(PATIENCE_S)
        monkeypatch.setattr(starting, "_CODE", usual)
        checkpointer.save(2).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [1, 2]


def test_a_commit_that_was_to_be_replaced_is_not_taken_for_the_one_that_failed(
    run_folder: Path, die: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.ones(5)}
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
    die("before", 1)
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        checkpointer.restore()
        with raises(laststep.StorageError, found="signal 9"):
            checkpointer.save(1, overwrite=True).wait(PATIENCE_S)


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
def test_where_the_run_cannot_be_read_after_the_death_nobody_claims_to_know(
    error: Exception,
    run_folder: Path,
    die: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(_disk: Disk, _path: str) -> None:
        raise error

    state = {"t": torch.ones(5)}
    die("after", 2)
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        with monkeypatch.context() as broken:
            broken.setattr(Disk, "sync_folder", failing)
            with raises(laststep.StorageError, step=2, where="step-00000002.1-2"):
                checkpointer.save(2).wait(PATIENCE_S)


def test_an_idle_flusher_that_dies_during_a_restore_is_just_replaced(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{n}": torch.full((CHUNK_BYTES,), n, dtype=torch.uint8) for n in range(8)}
    # Fewer slots than chunks: readers wait for them.
    with laststep.Checkpointer(
        run_folder, state=state, host_memory_bytes=4 * CHUNK_BYTES
    ) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        client, lease = checkpointer._client, ReadBuffers.lease
        pid, died, killing = client.helper_pid, threading.Event(), threading.Lock()

        def kill_and_lease(buffers: ReadBuffers, timeout_s: float | None = None) -> int | None:
            with killing:  # several threads read
                if not died.is_set():
                    os.kill(pid, signal.SIGKILL)
                    client._receiver.join()
                    died.set()
            return lease(buffers, timeout_s)

        for tensor in state.values():
            tensor.zero_()
        with monkeypatch.context() as patch:
            patch.setattr(ReadBuffers, "lease", kill_and_lease)
            assert checkpointer.restore().step == 1
        assert died.is_set()
        assert [int(tensor[0]) for tensor in state.values()] == list(range(8))
        checkpointer.save(2).wait(PATIENCE_S)
        assert client.helper_pid != pid
    assert laststep.open(run_folder).steps() == [1, 2]


def test_a_pool_without_memory_stays_an_error_after_the_flusher_died_until_there_is_some(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pages = Pool._make_pages

    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Pool, "_make_pages", full)
    with laststep.Checkpointer(run_folder, state={"t": torch.ones(5)}) as checkpointer:
        with raises(laststep.StorageError, step=1, found="Errno 12"):
            checkpointer.save(1).wait(PATIENCE_S)
        client = checkpointer._client
        assert client.helper_pid is not None
        os.kill(client.helper_pid, signal.SIGKILL)
        client._receiver.join(PATIENCE_S)
        lost = checkpointer.save(2)
        with raises(laststep.StorageError, step=2, found="Errno 12"):
            assert lost.wait(PATIENCE_S)
        monkeypatch.setattr(Pool, "_make_pages", make_pages)
        checkpointer.save(3).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [3]
