"""Threads and pools of threads, for which no program waits."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading

import pytest

import laststep
from laststep.process.threads import Worker, WorkerPool
from waiting import PATIENCE_S, wait_until


def names() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("laststep-test")}


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_can_be_joined_before_it_begins_and_after_it_failed() -> None:
    worker = Worker("test", fail)
    assert worker.join()  # which has not begun
    assert worker.start().join(PATIENCE_S)
    assert not worker.is_alive()


def test_a_pool_runs_all_tasks_on_so_many_threads_and_ends_them() -> None:
    meet = threading.Barrier(3)
    with WorkerPool("test", 3) as pool:
        done = [pool.submit(lambda n=n: (meet.wait(), n)[1]) for n in range(6)]
        assert [future.result() for future in done] == list(range(6))
        assert names() == {f"laststep-test_{n}" for n in range(3)}
    assert not names()


def test_a_future_gets_the_error_of_its_task_and_the_pool_goes_on() -> None:
    with WorkerPool("test", 1) as pool:
        failed, fine = pool.submit(fail), pool.submit(int, "7")
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert fine.result() == 7


def test_the_first_error_of_a_task_without_a_future_is_raised_later() -> None:
    pool = WorkerPool("test", 1)
    pool.put(fail)
    pool.wait()
    with pytest.raises(ZeroDivisionError):
        pool.put(print)
    with pytest.raises(ZeroDivisionError):
        pool.close()
    assert not names()


def test_a_handler_of_the_log_that_raises_does_not_end_the_threads_of_a_pool() -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.msg)

    handler, log = Raising(), logging.getLogger("laststep")
    log.addHandler(handler)
    try:
        pool = WorkerPool("test", 1)
        pool.put(fail)
        waiting = Worker("test-waits", pool.wait).start()
        assert waiting.join(PATIENCE_S)
        with pytest.raises(ZeroDivisionError):
            pool.close()
    finally:
        log.removeHandler(handler)


def test_a_full_queue_blocks_whoever_adds_more() -> None:
    go, third = threading.Event(), threading.Event()
    with WorkerPool("test", 1, limit=1) as pool:
        pool.put(go.wait)
        pool.put(print)
        adding = Worker("test-adding", lambda: (pool.put(print), third.set())).start()
        assert not third.wait(0.1)
        go.set()
        assert third.wait(PATIENCE_S)
        adding.join()


def test_a_pool_waits_for_tasks_that_tasks_add() -> None:
    done: list[int] = []
    with WorkerPool("test", 2) as pool:

        def count(n: int) -> None:
            done.append(n)
            if n:
                pool.put(count, n - 1)

        pool.put(count, 9)
        pool.wait()
        assert done == list(range(9, -1, -1))


@pytest.mark.parametrize("refused", ["laststep-test_0", "laststep-test_1"])
def test_a_pool_starts_all_threads_or_none(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(laststep.StorageError):
        WorkerPool("test", 2).start()
    assert not names()


def test_threads_of_a_pool_that_nobody_has_any_more_end() -> None:
    pool = WorkerPool("test", 2)
    pool.submit(int).result()
    del pool
    gc.collect()
    wait_until(lambda: not names())


def test_the_end_of_a_program_waits_for_none() -> None:
    script = (
        "import threading; from laststep.process.threads import WorkerPool; "
        "pool = WorkerPool('test', 1); begun = threading.Event(); "
        "pool.put(lambda: (begun.set(), threading.Event().wait())); begun.wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 0
