"""Real trainers in processes of their own, which are ended, by their ids, whatever a test does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from preemptions import Ranks, Told
    from rank_jobs import Job, Jobs, ReplicaStatus

# Lets the tests of several ranks import what they share by its name.
sys.path.insert(0, str(Path(__file__).parent))


class Trainer:
    """A process that runs trainer.py, forked from one that has imported torch."""

    def __init__(
        self, jobs: Jobs, run: Path, *options: str, when_it_waits: Callable[[], None] | None = None
    ) -> None:
        """`when_it_waits` is called when its restore waits for somebody else, which it must."""
        waiting = ["--tell-waiting"] if when_it_waits is not None else []
        self._process = jobs.fork({"what": "trainer", "arguments": [str(run), *options, *waiting]})
        self.pid = self._process.pid
        self.children: list[int] = []
        if when_it_waits is not None:
            self.hear("waiting")
            when_it_waits()
        helper, step = self.hear("ready")
        self.helper = None if helper == "None" else int(helper)
        self.restored = None if step == "None" else int(step)

    def next_words(self) -> list[str]:
        """The next line that it prints."""
        return self._process.next_words()

    def hear(self, word: str) -> list[str]:
        """The next line, which must begin with that word; returns the others."""
        return self._process.hear(word).split()

    def tell(self, command: str) -> None:
        self._process.tell(command)

    def do(self, command: str) -> None:
        self._process.do(command)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        return self._process.end()

    def stop_helper(self) -> None:
        os.kill(self.helper, signal.SIGSTOP)

    def resume_helper(self) -> None:
        os.kill(self.helper, signal.SIGCONT)

    def kill_helper(self) -> None:
        os.kill(self.helper, signal.SIGKILL)

    def wait_for_helper(self) -> None:
        """Until the flusher has ended; `TimeoutError` if it never does."""
        assert self.helper is not None
        wait_until(lambda: has_ended(self.helper))

    def clean_up(self) -> None:
        self._process.clean_up()
        for pid in (self.helper, *self.children):
            if pid is not None and is_ours(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: has_ended(pid))


def is_ours(pid: int) -> bool:
    """Whether that id still is a process of this test and no other that got its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"laststep.flush" in command or b"warm/server.py" in command


def has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def start(jobs: Jobs, run_folder: Path) -> Iterator[Callable[..., Trainer]]:
    """`start(*options, when_it_waits=…)`: a trainer on the test's run."""
    started: list[Trainer] = []

    def go(*options: str, **how: Callable[[], None]) -> Trainer:
        started.append(Trainer(jobs, run_folder, *options, **how))
        return started[-1]

    yield go
    for trainer in started:
        trainer.clean_up()


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """Starts jobs of several ranks."""
    from rank_jobs import Jobs

    all_jobs = Jobs()
    yield all_jobs
    all_jobs.close()


@pytest.fixture(scope="session")
def kept(jobs: Jobs) -> Iterator[list[ReplicaStatus]]:
    """The standing job, while no test has it."""
    from rank_jobs import check

    found: list[ReplicaStatus] = []
    yield found
    for one in found:
        one.job.clean_up()
        check(one.run, one.committed, ranks=3, tidy=False)  # all of it, once more


@pytest.fixture
def standing(jobs: Jobs, kept: list[ReplicaStatus]) -> Iterator[ReplicaStatus]:
    """A job of three ranks that many tests save with; one that a failed test has left in disorder
    is replaced."""
    from rank_jobs import check

    one = kept.pop() if kept else jobs.standing()
    try:
        yield one
        check(one.run, one.committed, ranks=3, tidy=False, read=one.read)
        in_order = all(rank.is_idle() for rank in one.ranks)
    except BaseException:
        one.job.clean_up()
        raise
    if in_order:
        kept.append(one)
    else:
        one.job.clean_up()


@pytest.fixture
def start_job(jobs: Jobs, run_folder: Path) -> Iterator[Callable[..., Job]]:
    """`start_job(ranks, **how)`: a job of the test's own, which ends before its run goes."""
    started: list[Job] = []

    def go(ranks: int, **how: object) -> Job:
        started.append(jobs.start(ranks, **how))
        return started[-1]

    yield go
    for job in started:
        job.clean_up()


@pytest.fixture
def open_job(start_job: Callable[..., Job], run_folder: Path) -> Callable[..., Job]:
    """`open_job(ranks, **how)`: a job of the test's own on its run; nothing is saved yet."""

    def go(ranks: int, **how: object) -> Job:
        job = start_job(ranks, **how)
        job.open(run_folder)
        return job

    return go


@pytest.fixture
def told(jobs: Jobs, run_folder: Path) -> Iterator[Callable[..., Told]]:
    """`told(**request)`: a training on the test's run."""
    from preemptions import Told

    started: list[Told] = []

    def go(**request: Any) -> Told:
        started.append(Told(jobs, run_folder, **request))
        return started[-1]

    yield go
    for one in started:
        one.process.clean_up()


@pytest.fixture
def told_job(jobs: Jobs, run_folder: Path) -> Iterator[Callable[..., Ranks]]:
    """`told_job(ranks, **request)`: a job of such trainings on the test's run."""
    from preemptions import Ranks

    started: list[Ranks] = []

    def go(ranks: int, **request: Any) -> Ranks:
        started.append(Ranks(jobs, run_folder, ranks, **request))
        return started[-1]

    yield go
    for job in started:
        for one in job.ranks:
            one.process.clean_up()
        job.store.clean_up()
