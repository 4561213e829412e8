"""Real trainers in processes of their own, which are ended, by their ids, whatever a test does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rank_jobs import Job, Jobs, Standing

# Lets the tests of several ranks import what they share by its name.
sys.path.insert(0, str(Path(__file__).parent))

TRAINER = Path(__file__).with_name("trainer.py")
SOURCE = TRAINER.parent.parent.parent / "src"
PATIENCE_S = 60.0


class Trainer:
    """A process that runs trainer.py."""

    def __init__(
        self, run: Path, *options: str, when_it_waits: Callable[[], None] | None = None
    ) -> None:
        """`when_it_waits` is called when its restore waits for somebody else, which it must."""
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), str(run), *options]
            + ["--tell-waiting"] * (when_it_waits is not None),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        self.children: list[int] = []
        self._heard = b""
        if when_it_waits is not None:
            self.hear("waiting")
            when_it_waits()
        _, helper, step = self.hear("ready")
        self.helper = None if helper == "None" else int(helper)
        self.restored = None if step == "None" else int(step)

    def next_words(self) -> list[str]:
        """The next line that it prints."""
        out = self.process.stdout
        while b"\n" not in self._heard:
            if not select.select([out], [], [], PATIENCE_S)[0]:
                raise TimeoutError("nothing was heard")
            data = os.read(out.fileno(), 4096)
            if not data:
                break
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().split()

    def hear(self, word: str) -> list[str]:
        """The next line, which must begin with that word."""
        words = self.next_words()
        if not words or words[0] != word:
            self.kill()
            raise AssertionError(f"{words} {self.process.stderr.read().decode()}")
        return words

    def tell(self, command: str) -> None:
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()

    def do(self, command: str) -> None:
        self.tell(command)
        self.hear("done")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def stop_helper(self) -> None:
        os.kill(self.helper, signal.SIGSTOP)

    def resume_helper(self) -> None:
        os.kill(self.helper, signal.SIGCONT)

    def kill_helper(self) -> None:
        os.kill(self.helper, signal.SIGKILL)

    def wait_for_helper(self) -> None:
        """Until the flusher has ended; `TimeoutError` if it never does."""
        assert self.helper is not None
        wait_for_end(self.helper)

    def clean_up(self) -> None:
        for pid in (self.process.pid, self.helper, *self.children):
            if pid is not None and (pid == self.process.pid or is_ours(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                stream.close()


def is_ours(pid: int) -> bool:
    """Whether that id still is a process of this test and no other that got its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"laststep.flusher" in command or str(TRAINER).encode() in command


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not end")
        time.sleep(0.01)


@pytest.fixture
def start(run_folder: Path) -> Iterator[Callable[..., Trainer]]:
    """`start(*options, when_it_waits=…)`: a trainer on the test's run."""
    started: list[Trainer] = []

    def go(*options: str, **how: Callable[[], None]) -> Trainer:
        started.append(Trainer(run_folder, *options, **how))
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


def _standing(jobs: Jobs, kept: dict[float, Standing], deadline_s: float) -> Iterator[Standing]:
    """The job of that deadline; one that a failed test has left in disorder is replaced."""
    from rank_jobs import check

    if deadline_s not in kept:
        kept[deadline_s] = jobs.standing(deadline_s)
    one = kept.pop(deadline_s)
    try:
        yield one
        check(one.run, one.committed, ranks=3, tidy=False)
        in_order = all(rank.is_idle() for rank in one.ranks)
    except BaseException:
        one.job.clean_up()
        raise
    if in_order:
        kept[deadline_s] = one
    else:
        one.job.clean_up()


@pytest.fixture(scope="session")
def kept(jobs: Jobs) -> Iterator[dict[float, Standing]]:
    """The standing jobs, by their deadlines."""
    found: dict[float, Standing] = {}
    yield found
    for one in found.values():
        one.job.clean_up()


@pytest.fixture
def patient(jobs: Jobs, kept: dict[float, Standing]) -> Iterator[Standing]:
    """A standing job whose deadline is long: whatever is heard is heard at once."""
    from rank_jobs import LONG_S

    yield from _standing(jobs, kept, LONG_S)


@pytest.fixture
def hasty(jobs: Jobs, kept: dict[float, Standing]) -> Iterator[Standing]:
    """A standing job whose deadline is short."""
    from rank_jobs import DEADLINE_S

    yield from _standing(jobs, kept, DEADLINE_S)


@pytest.fixture
def start_job(jobs: Jobs) -> Iterator[Callable[..., Job]]:
    """`start_job(ranks, **how)`: a job of the test's own."""
    started: list[Job] = []

    def go(ranks: int, **how: object) -> Job:
        started.append(jobs.start(ranks, **how))
        return started[-1]

    yield go
    for job in started:
        job.clean_up()


@pytest.fixture
def hasty_job(start_job: Callable[..., Job], run_folder: Path) -> Callable[..., Job]:
    """`hasty_job(ranks, **how)`: a job of the test's own on its run, with a short deadline; it has
    saved something."""

    def go(ranks: int, **how: object) -> Job:
        job = start_job(ranks, **how)
        job.open(run_folder)
        job.warm_up()
        return job

    return go


@pytest.fixture
def patient_job(start_job: Callable[..., Job], run_folder: Path) -> Callable[..., Job]:
    """`patient_job(ranks, **how)`: the same with a long deadline; nothing is saved yet."""
    from rank_jobs import LONG_S

    def go(ranks: int, **how: object) -> Job:
        job = start_job(ranks, **how)
        job.open(run_folder, deadline_s=LONG_S)
        return job

    return go
