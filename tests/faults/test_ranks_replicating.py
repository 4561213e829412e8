"""Ranks bring their own files to a replica; the next start finishes what a death ended."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from rank_jobs import wait_for_end

import laststep
from stored import contents
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_jobs import Job, Process


class Replicated:
    """The starts of one job, one after the other, whose checkpoints are replicated."""

    def __init__(self, start_job: Callable[..., Job], folder: Path) -> None:
        self._start_job = start_job
        self._store: Process | None = None
        self._count = 0
        self.primary, self.far = folder / "primary", folder / "far"
        folder.mkdir()

    def __call__(self, ranks: int, *slow: int, **options: Any) -> Job:
        """Files of the `slow` ranks are not finished at the replica before `go_on`."""
        self._count += 1
        job = self._start_job(ranks, store=self._store, start=f"start{self._count}")
        self._store = job.store
        only = {
            rank: {"replica": f"gated://{self.far}" if rank in slow else str(self.far), **options}
            for rank in range(ranks)
        }
        job.open(self.primary, only=only)
        return job

    def stands(self) -> None:
        """Wait until a slow rank is in the middle of replicating."""
        wait_until(self.far.with_suffix(".waits").exists)

    def go_on(self) -> None:
        self.far.with_suffix(".open").touch()

    def is_replicated(self, steps: list[int]) -> bool:
        """Return whether these are committed there, and the temporary files and locks of their
        copies are gone: they go after the commit is visible."""
        left = [*self.far.rglob("*.tmp-*"), *self.far.rglob("copying*.lock")]
        return laststep.open(self.far).steps() == steps and not left

    def check(self, steps: list[int]) -> None:
        """The replica has these, each whole, and bit for bit what the primary has."""
        catalog = laststep.open(self.far)
        assert catalog.steps() == steps
        for checkpoint in catalog:
            assert checkpoint.verify().damage == ()
            assert contents(self.far / checkpoint.folder) == contents(
                self.primary / checkpoint.folder
            )


@pytest.fixture
def replicated(start_job: Callable[..., Job], run_folder: Path) -> Replicated:
    return Replicated(start_job, run_folder)


def kill(*ranks: Process) -> None:
    """With their flushers."""
    for rank in ranks:
        for pid in (rank.pid, *rank.flushers):
            os.kill(pid, signal.SIGKILL)
        rank.end()
        for pid in rank.flushers:
            wait_for_end(pid)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_bring_their_own_files_at_once(replicated: Replicated, ranks: int) -> None:
    job = replicated(ranks)
    assert job.restore() == ["None"] * ranks
    for step in (1, 2):
        job.save(step)
    job.close()
    assert laststep.open(replicated.far).steps()[-1] == 2
    replicated.check(laststep.open(replicated.far).steps())


@pytest.mark.parametrize(
    ("ranks", "slow", "then"),
    [
        (4, 2, 2),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((2, 1, 4), (4, 0, 4), (2, 1, 1))),
    ],
)
def test_what_a_rank_died_in_the_middle_of_another_number_of_ranks_finishes(
    replicated: Replicated, ranks: int, slow: int, then: int
) -> None:
    job = replicated(ranks, slow)
    job.restore()
    job.save(1)
    replicated.stands()
    kill(job.ranks[slow])
    kill(*(rank for rank in job.ranks if rank is not job.ranks[slow]))
    assert laststep.open(replicated.far).steps() == []
    again = replicated(then)
    assert again.restore() == ["1"] * then
    wait_until(lambda: replicated.is_replicated([1]))
    replicated.check([1])
    again.save(2)
    again.close()
    replicated.check([1, 2])


def test_a_flusher_that_still_brings_its_files_is_not_overtaken_by_the_next_start(
    replicated: Replicated,
) -> None:
    """Its trainer is gone; what all ranks are to have is told to be gone on with, later."""
    job = replicated(2, 1)
    job.restore()
    job.save(1)
    replicated.stands()
    kill(job.ranks[0])
    job.ranks[1].kill()
    again = replicated(2)
    assert again.restore() == ["1"] * 2
    log = again.ranks[0].log
    wait_until(lambda: "copying-r00001.lock is locked" in log.read_text())
    replicated.go_on()
    wait_until(lambda: replicated.is_replicated([1]))
    again.close()
    replicated.check([1])


def test_the_end_of_a_job_waits_for_a_rank_that_brings_its_files(replicated: Replicated) -> None:
    job = replicated(2, 1)
    job.restore()
    job.save(1)
    replicated.stands()
    job.tell("close")
    replicated.go_on()
    for rank in job.ranks:
        rank.hear("done", "close")
    replicated.check([1])
