"""Stages of a save: reached in order, failed together, never reached after an error."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.capture.mover import CaptureTiming
from laststep.errors import AbortedError, StorageError, UsageError
from laststep.events import Captured, Committed
from saves_of import commit, lone_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from laststep.flush.saves import SaveHandle


def test_a_failure_reaches_every_stage_that_was_not_reached() -> None:
    save = lone_save(1)
    handle = save.handle
    save.captured(CaptureTiming())
    save.fail(AbortedError("gone"))
    assert handle.captured.done()
    assert not handle.durable.done()
    assert handle.durable.over()
    commit(save)
    assert not handle.durable.done()
    assert not handle.committed.done()
    assert not save.seen
    with pytest.raises(AbortedError, match="gone"):
        handle.wait()
    assert save.seen
    assert "failed" in repr(handle)


def test_waiting_is_bounded_by_its_timeout() -> None:
    save = lone_save(1)
    assert save.handle.wait(0.01) is False
    threading.Timer(0.05, commit, [save]).start()
    assert save.handle.wait(20) is True


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_stages_are_reached_in_their_order(flush: str, tmp_path: Path) -> None:
    order: list[tuple[str, int]] = []
    wrong: list[str] = []

    def see(event: object) -> None:
        name = type(event).__name__
        if name in ("Captured", "Durable", "Committed"):
            order.append((name, event.step))
            handle = handles.get(event.step)
            if handle is not None:
                done = [handle.captured.done(), handle.durable.done(), handle.committed.done()]
                if done != sorted(done, reverse=True):
                    wrong.append(f"{name}: {done}")

    handles: dict[int, SaveHandle] = {}
    with laststep.Checkpointer(
        tmp_path / "run",
        s={"t": torch.zeros(100)},
        options=laststep.Options(flush=flush, subscribers=[see]),
        host_memory_bytes=64 << 20,
    ) as checkpointer:
        for step in range(8):
            handles[step] = checkpointer.save(step)
    assert wrong == []
    for step in range(8):
        mine = [name for name, at in order if at == step]
        assert mine == ["Captured", "Durable", "Committed"]
    assert [at for name, at in order if name == "Committed"] == list(range(8))


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", [lambda handle: handle, lambda handle: handle.committed])
def test_neither_a_handle_nor_a_stage_of_it_can_be_copied(
    act: Callable[[object], object], part: Callable[[SaveHandle], object]
) -> None:
    save = lone_save(1)
    with raises(UsageError, type(part(save.handle)).__name__):
        act(part(save.handle))


def test_the_result_of_a_save_is_its_report(tmp_path: Path) -> None:
    with laststep.Checkpointer(tmp_path / "run", s={"t": torch.zeros(100)}) as checkpointer:
        handle = checkpointer.save(3)
        report = handle.result(timeout=100)
        assert report is handle.report
        assert report.folder == "step-00000003.1-1"
        assert handle.exception() is None
        assert handle.done()
        assert not handle.running()


def test_a_result_that_takes_too_long_is_a_timeout_that_names_the_step() -> None:
    save = lone_save(7)
    handle = save.handle
    for ask in (handle.result, handle.exception):
        with pytest.raises(TimeoutError, match="step 7"):
            ask(timeout=0.01)
    assert handle.running()
    assert not handle.done()
    assert not handle.cancel()
    assert not handle.cancelled()


def test_a_failure_that_was_asked_for_counts_as_told() -> None:
    save = lone_save(1)
    handle = save.handle
    save.fail(AbortedError("gone"))
    error = handle.exception()
    assert isinstance(error, AbortedError)
    assert save.seen
    with pytest.raises(AbortedError, match="gone"):
        handle.result()
    assert handle.done()


def test_the_result_of_a_skipped_save_says_why() -> None:
    save = lone_save(1)
    handle = save.handle
    save.skip("an earlier save is still being captured")
    assert handle.done()
    assert handle.result().skipped == "an earlier save is still being captured"
    assert handle.wait() is False


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_callbacks_run_once_on_the_thread_that_ends_the_save(flush: str, tmp_path: Path) -> None:
    called: list[tuple[str, str, SaveHandle]] = []

    def note(handle: SaveHandle) -> None:
        called.append((threading.current_thread().name, str(handle.result(0).folder), handle))

    added = threading.Event()

    def hold_up(event: object) -> None:
        if isinstance(event, Committed):
            added.wait(100)

    with laststep.Checkpointer(
        tmp_path / "run",
        s={"t": torch.zeros(100)},
        options=laststep.Options(flush=flush, subscribers=[hold_up]),
    ) as checkpointer:
        handle = checkpointer.save(2)
        handle.add_done_callback(note)
        added.set()
        concurrent.futures.wait([handle])
        handle.add_done_callback(note)
    here = threading.current_thread().name
    folder = "step-00000002.1-1"
    assert len(called) == 2
    assert set(called) == {("laststep-receive", folder, handle), (here, folder, handle)}


@pytest.mark.parametrize(
    "error", [ValueError("own"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_a_callback_that_raises_is_logged_and_hurts_nobody(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []
    added = threading.Event()

    def fall(handle: SaveHandle) -> None:
        called.append(handle.step)
        raise error

    def hold_up(event: object) -> None:
        if isinstance(event, Committed):
            added.wait(100)

    with laststep.Checkpointer(
        tmp_path / "run", s={"t": torch.zeros(100)}, options=laststep.Options(subscribers=[hold_up])
    ) as checkpointer:
        for step in range(3):
            added.clear()
            handle = checkpointer.save(step)
            handle.add_done_callback(fall)
            handle.add_done_callback(fall)
            added.set()
            assert handle.wait(100)
    assert called == [0, 0, 1, 1, 2, 2]
    assert caplog.text.count(f"\n{traceback.format_exception_only(error)[0].strip()}") == 6


def test_what_ends_a_program_does_so_where_a_callback_is_called_at_once() -> None:
    save = lone_save(1)
    handle = save.handle
    save.skip("an earlier save is still being captured")
    with pytest.raises(SystemExit):
        handle.add_done_callback(lambda _: sys.exit(3))


def test_callbacks_of_a_failed_save_are_called(tmp_path: Path) -> None:
    heard: list[object] = []
    with laststep.Checkpointer(tmp_path / "run", s={"t": torch.zeros(100)}) as checkpointer:
        checkpointer.save(1)
    with laststep.Checkpointer(tmp_path / "run", s={"t": torch.zeros(100)}) as checkpointer:
        checkpointer.continue_newest()
        handle = checkpointer.save(1)  # which the flusher finds
        handle.add_done_callback(lambda one: heard.append(one.exception()))
        assert isinstance(handle.exception(), laststep.AlreadyExistsError)
        concurrent.futures.wait([handle])
    assert heard == [handle.exception()]


def test_the_tools_of_futures_take_handles(tmp_path: Path) -> None:
    async def wait_for(handle: SaveHandle) -> object:
        return await asyncio.wrap_future(handle)

    with laststep.Checkpointer(tmp_path / "run", s={"t": torch.zeros(100)}) as checkpointer:
        handles = [checkpointer.save(step) for step in range(3)]
        over = list(concurrent.futures.as_completed(handles, timeout=100))
        assert {handle.step for handle in over} == {0, 1, 2}
        last = checkpointer.save(3)
        assert asyncio.run(wait_for(last)) is last.report


def test_each_of_several_saves_that_fail_of_one_error_names_its_own_step() -> None:
    error = StorageError("the flusher ended", remedy="look at the disk")
    error.transient = True
    error.__cause__ = cause = OSError("no room")
    first, second = lone_save(3), lone_save(4)
    for save in (first, second):
        save.fail(error)
    told = [save.handle.exception() for save in (first, second)]
    assert [one.step for one in told] == [3, 4]
    assert all(f"step {one.step}" in str(one) for one in told)
    assert all(one.transient and one.__cause__ is cause for one in told)
    assert all(one.what == "the flusher ended" for one in told)
    assert error.step is None


def test_an_error_that_names_the_step_already_does_so_once() -> None:
    save = lone_save(3)
    save.fail(AbortedError("step 3 is in the run already"))
    assert str(save.error).count("step 3") == 1


def test_a_forked_process_can_ask_only_for_what_was_over_at_the_fork(tmp_path: Path) -> None:
    forked = threading.Event()

    def hold_up(event: object) -> None:
        if isinstance(event, Captured) and event.step == 2:
            forked.wait(100)

    def ask_in_vain() -> None:
        asked: list[Callable[[], object]] = [
            under_way.wait,
            under_way.result,
            under_way.exception,
            under_way.durable.wait,
            checkpointer.wait,
            lambda: under_way.add_done_callback(print),
        ]
        for ask in asked:
            with raises(UsageError, found=f"process {os.getpid()}"):
                ask()

    with laststep.Checkpointer(
        tmp_path / "run", s={"t": torch.zeros(100)}, options=laststep.Options(subscribers=[hold_up])
    ) as checkpointer:
        over = checkpointer.save(1)
        assert over.wait(100)
        under_way = checkpointer.save(2)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # ends one that waits for ever
            try:
                ask_in_vain()
                os._exit(42 if over.wait() and over.result().folder else 1)
            finally:
                os._exit(2)
        forked.set()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        assert under_way.wait(100)
