"""Threads that cannot be started are an error of ours, with a remedy; nothing of a user's ends one
that runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep import events
from laststep.capture.mover import Job, Mover
from laststep.flush.saves import Save
from laststep.process import threads
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on the system has no thread of that name."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_a_thread_that_cannot_be_started_is_told_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch, "laststep-some")
    with pytest.raises(laststep.StorageError) as caught:
        threads.Worker("some", print).start()
    assert caught.value.where == "laststep-some"
    assert caught.value.remedy is not None


def test_copying_threads_all_run_or_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    refuse(monkeypatch, "laststep-copy_1")
    with pytest.raises(laststep.StorageError):
        threads.WorkerPool("copy", 4).start()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["laststep-copy", "laststep-receive", "laststep-write"])
def test_a_save_without_a_thread_fails_and_the_next_one_works(
    name: str, run_folder: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So large that it is copied by several threads, where these are to be refused.
    state = {"t": torch.zeros(9 << 20 if name == "laststep-copy" else 9, dtype=torch.int64)}
    with laststep.Checkpointer(
        str(run_folder), state=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        with monkeypatch.context() as patch:
            refuse(patch, name)
            with pytest.raises(laststep.StorageError, match="can't start new thread"):
                ckpt.save(1).wait()
        with_threads = ckpt.save(2)
        with_threads.wait()
    assert laststep.open(str(run_folder)).steps() == [2]


def test_a_flusher_that_cannot_be_started_again_is_started_by_a_later_save(
    run_folder: object, monkeypatch: pytest.MonkeyPatch, flusher: Callable[[], int]
) -> None:
    with laststep.Checkpointer(str(run_folder), state={"n": 1}) as ckpt:
        ckpt.save(1).wait()
        os.kill(flusher(), signal.SIGKILL)
        for thread in threading.enumerate():
            if thread.name == "laststep-receive":
                thread.join()  # which tells everybody
        with monkeypatch.context() as patch:
            refuse(patch, "laststep-receive")
            for step in (2, 3):
                with pytest.raises(laststep.StorageError, match="can't start new thread"):
                    ckpt.save(step)
        ckpt.save(4).wait()
    assert laststep.open(str(run_folder)).steps() == [1, 4]


ENDINGS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("own")]


@pytest.mark.parametrize("error", ENDINGS, ids=repr)
@pytest.mark.parametrize("kind", [events.Captured, events.Durable, events.Committed])
def test_whatever_a_subscriber_raises_ends_no_thread_of_ours(
    kind: type, error: BaseException, run_folder: object
) -> None:
    told: list[int] = []

    def fall(event: events.Event) -> None:
        if isinstance(event, kind):
            told.append(event.step)
            raise error

    with laststep.Checkpointer(
        str(run_folder),
        state={"n": 1},
        options=laststep.Options(flush="thread", subscribers=[fall]),
    ) as ckpt:
        for step in (1, 2):
            assert ckpt.save(step).wait(PATIENCE_S)
    assert told == [1, 2]


def test_what_ends_a_program_goes_on_on_the_users_own_thread(run_folder: object) -> None:
    def fall(event: events.Event) -> None:
        if isinstance(event, events.SaveStarted):
            raise ENDINGS[event.step]

    with laststep.Checkpointer(
        str(run_folder),
        state={"n": 1},
        options=laststep.Options(flush="thread", subscribers=[fall]),
    ) as ckpt:
        for step in range(3):
            with pytest.raises(type(ENDINGS[step])):
                ckpt.save(step)
        assert ckpt.save(3).wait(PATIENCE_S)


def test_neither_does_a_handler_of_the_log() -> None:
    class Falling(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            raise SystemExit(3)

    log, went_on = logging.getLogger("some"), threading.Event()
    log.addHandler(Falling())

    def work() -> None:
        with threads.outlasting(log, "it fell"):
            raise ValueError("own")
        went_on.set()

    ours = threading.Thread(target=work, name="laststep-some")
    ours.start()
    ours.join()
    log.handlers.clear()
    assert went_on.is_set()


@pytest.mark.parametrize("where", [(Save, "hear"), (Mover, "move"), (Job, "let_go")])
def test_a_thread_that_fails_tells_whoever_waits_and_the_next_save_works(
    where: tuple[type, str], run_folder: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall(*_: object) -> None:
        raise asyncio.CancelledError

    with laststep.Checkpointer(str(run_folder), state={"t": torch.ones(9)}) as ckpt:
        ckpt.save(1).wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(*where, fall)
            with raises(laststep.StorageError, step=2):
                ckpt.save(2).wait(PATIENCE_S)
            assert ckpt._capturer._last.over.wait(PATIENCE_S)
        ckpt.save(3).wait(PATIENCE_S)
    assert laststep.open(str(run_folder)).steps() == [1, 3]
