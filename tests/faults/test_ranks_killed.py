"""Ranks, stores and whole jobs that die in mid-save: all of a checkpoint is there or nothing, those
who live hear why, and no process stays."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from rank_jobs import LONG_S, check, folders, wait_for_end

import laststep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_jobs import Job


def end_all(job: Job, *numbers: int) -> None:
    """These ranks can close, and end as they should; no flusher is left of any."""
    for number in numbers:
        job.ranks[number].do("close")
        job.ranks[number].hang_up()
    for number in numbers:
        job.ranks[number].hear("ends")
        assert job.ranks[number].end() == 0
    for rank in job.ranks:
        for pid in rank.flushers:
            wait_for_end(pid)


def stand_at(job: Job, gate: str, step: int, number: int = 0) -> None:
    """All save that step, and that rank stands at the gate."""
    job.ranks[number].do(f"shut {gate}")
    job.tell(f"try {step}")
    while job.ranks[number].next_words() != ["at", gate]:
        pass


def test_a_member_that_is_killed_is_named_and_the_others_live_on(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(3)
    job.open(run_folder)
    job.warm_up()
    stand_at(job, "receipt", 101, number=2)
    job.ranks[2].kill()
    for number in (0, 1):
        assert "no receipt within 1.5 s from rank 2" in job.ranks[number].failed()
    end_all(job, 0, 1)
    check(run_folder, job.committed, ranks=3)


def test_a_first_rank_that_is_killed_between_the_phases_leaves_nothing_of_the_save(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder)
    job.warm_up()
    stand_at(job, "decide", 101)
    job.ranks[0].kill()
    assert "rank 0 decided nothing within 1.5 s" in job.ranks[1].failed()
    end_all(job, 1)
    check(run_folder, job.committed)  # its flusher gave the save up and removed it


def test_a_first_rank_that_is_killed_with_its_flusher_between_the_phases_commits_nothing(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder)
    job.warm_up()
    stand_at(job, "decide", 101)
    job.ranks[0].kill_flusher()
    job.ranks[0].kill()
    assert "rank 0 decided nothing within 1.5 s" in job.ranks[1].failed()
    end_all(job, 1)
    check(run_folder, job.committed, tidy=False)
    assert len(folders(run_folder)) == len(job.committed) + 1
    # What is left goes with the next start of the job, which meets in the same store.
    again = start_job(2, store=job.store, start="start2")
    again.open(run_folder, deadline_s=LONG_S)
    newest = str(job.committed[-1])
    assert again.restore() == [newest, newest]
    again.save(101)
    again.close()
    check(run_folder, [*job.committed, 101])


def test_a_first_rank_that_is_killed_before_it_tells_of_a_commit_leaves_it_whole(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder)
    job.warm_up()
    stand_at(job, "tell", 101)
    job.ranks[0].kill()
    job.ranks[1].hear("committed", "101")
    end_all(job, 1)
    check(run_folder, [*job.committed, 101])


def test_a_first_rank_that_hosts_the_store_is_killed_with_it(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2, first_hosts=True)
    job.open(run_folder, deadline_s=LONG_S)
    job.save(1)
    stand_at(job, "decide", 2)
    job.ranks[0].kill()
    error = job.ranks[1].failed()
    assert "the store that the ranks of this job meet in does not answer" in error
    (error,) = job.fails(3, 1)
    assert "does not answer" in error
    end_all(job, 1)
    check(run_folder, [1])


def test_a_store_that_is_gone_is_an_error_on_all_ranks_and_nobody_hangs(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder, deadline_s=LONG_S)
    job.save(1)
    stand_at(job, "receipt", 2, number=1)
    job.store.kill()
    job.ranks[1].do("go receipt")
    for rank in job.ranks:
        assert "the store that the ranks of this job meet in does not answer" in rank.failed()
    end_all(job, 0, 1)
    check(run_folder, [1])


def test_a_store_that_is_gone_after_the_commit_leaves_it_whole(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder, deadline_s=LONG_S)
    stand_at(job, "tell", 1)
    job.store.kill()
    job.ranks[1].hear("committed", "1")
    job.ranks[0].tell("go tell")
    while job.ranks[0].next_words() != ["done", "go"]:
        pass  # it says before or after that it has committed
    end_all(job, 0, 1)
    check(run_folder, [1])


def test_close_ends_while_a_round_waits_and_so_does_a_program_without_close(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(3)
    job.open(run_folder)
    job.warm_up()
    job.ranks[2].send(signal.SIGSTOP)
    for number in (0, 1):
        job.ranks[number].do("save 101")
    job.ranks[0].tell("close")
    job.ranks[1].tell("forget")
    assert "rank 2" in job.ranks[0].failed()
    job.ranks[1].hear("ends")
    assert job.ranks[1].end() == 0
    assert "a save failed and nobody was there to see it: " in job.ranks[1].log.read_text()
    job.ranks[2].kill()
    end_all(job, 0)
    check(run_folder, job.committed, ranks=3)


@pytest.mark.parametrize("gate", ["decide", "tell"])
def test_a_job_that_is_killed_whole_goes_on_from_the_newest_that_was_committed(
    gate: str, start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder, deadline_s=LONG_S)
    job.save(1)
    stand_at(job, gate, 2)
    for rank in job.ranks:
        rank.kill_flusher()
        rank.kill()
    steps = [1, 2] if gate == "tell" else [1]
    check(run_folder, steps, tidy=False)
    again = start_job(2, store=job.store, start="start2")
    again.open(run_folder, deadline_s=LONG_S)
    assert again.restore() == [str(steps[-1])] * 2
    again.save(3)
    again.close()
    check(run_folder, [*steps, 3])
    assert folders(run_folder)[-1] == "step-00000003.2-1"


def test_a_zombie_of_an_earlier_start_cannot_commit_and_is_not_cleaned_up_while_it_lives(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    zombie = start_job(2)
    zombie.open(run_folder, deadline_s=LONG_S)
    zombie.save(1)
    stand_at(zombie, "decide", 2)
    zombie.ranks[0].send(signal.SIGSTOP)
    zombie.ranks[1].kill()  # so that nobody gives the save up
    again = start_job(2, store=zombie.store, start="start2")
    again.open(run_folder, deadline_s=LONG_S)
    again.save(5)
    assert "step-00000002.1-2" in folders(run_folder)
    zombie.ranks[0].send(signal.SIGCONT)
    zombie.ranks[0].do("go decide")
    error = zombie.ranks[0].failed()
    assert "taken over by another writer" in error
    assert f"process {again.ranks[0].pid}" in error
    again.save(6)
    again.close()
    end_all(zombie, 0)
    assert laststep.open(run_folder).steps() == [5, 6]
    assert folders(run_folder) == ["step-00000001.1-1", "step-00000005.2-1", "step-00000006.2-2"]
    assert (run_folder / "step-00000001.1-1" / "manifest.json").exists()
