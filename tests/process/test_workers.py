"""Threads that do what they are given, for which no program waits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from laststep.process.threads import Workers
from waiting import wait_until


def test_all_is_done_by_so_many_threads_and_they_end() -> None:
    meet = threading.Barrier(3)
    with Workers(3, "laststep-test") as workers:
        done = [workers.submit(lambda n=n: (meet.wait(), n)[1]) for n in range(6)]
        assert [one.result() for one in done] == list(range(6))
        names = {thread.name for thread in threading.enumerate()}
        assert {name for name in names if name.startswith("laststep-test")} == {
            f"laststep-test_{n}" for n in range(3)
        }
    assert not any(t.name.startswith("laststep-test") for t in threading.enumerate())


def test_what_fails_is_told_to_whoever_asked() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with Workers(1, "laststep-test") as workers:
        failed, fine = workers.submit(fail), workers.submit(int, "7")
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert fine.result() == 7


def test_threads_of_workers_that_nobody_has_any_more_end() -> None:
    workers = Workers(2, "laststep-test")
    workers.submit(int).result()
    del workers
    gc.collect()
    wait_until(lambda: not any(t.name.startswith("laststep-test") for t in threading.enumerate()))


def test_the_end_of_a_program_waits_for_none() -> None:
    script = (
        "import threading; from laststep.process.threads import Workers; "
        "workers = Workers(1, 'laststep-test'); begun = threading.Event(); "
        "workers.submit(lambda: (begun.set(), threading.Event().wait())); begun.wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 0
