"""Ranks, stores and whole jobs that die in mid-save: all of a checkpoint is there or nothing, those
who live hear why, and no process stays."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from rank_jobs import check

import laststep
from expect import names
from stored import folders

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_jobs import Job


@pytest.mark.long
def test_a_first_rank_that_is_killed_between_the_phases_leaves_nothing_of_the_save(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(2)
    job.save(1)
    job.stand_at("decide", 2)
    job.ranks[0].kill()
    assert names(job.ranks[1].gives_up(), "rank 0", "step 2", "30 s")
    job.end_all(1)
    check(run_folder, [1])  # its flusher gave the save up and removed it


def test_a_first_rank_that_is_killed_with_its_flusher_between_the_phases_commits_nothing(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(2)
    job.save(1)
    job.stand_at("decide", 2)
    job.ranks[0].kill_flusher()
    job.ranks[0].kill()
    assert names(job.ranks[1].gives_up(), "rank 0", "step 2", "30 s")
    job.end_all(1)
    check(run_folder, [1], tidy=False)
    assert len(folders(run_folder)) == 2
    # What is left goes with the next start of the job, which meets in the same store.
    again = open_job(2, store=job.store, start="start2")
    assert again.restore() == ["1", "1"]
    again.save(2)
    again.close()
    check(run_folder, [1, 2])


@pytest.mark.long
def test_a_first_ranks_flusher_that_stands_still_is_an_error_in_time_though_all_others_are_dead(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    """Nobody else gives the save up; and what wakes up later cannot commit it any more."""
    job = open_job(2)
    job.save(1)
    flusher = job.ranks[0].flusher()
    job.stand_at("decide", 2)
    os.kill(flusher, signal.SIGSTOP)
    job.ranks[1].kill_flusher()
    job.ranks[1].kill()
    job.ranks[0].do("go decide")
    error = job.ranks[0].gives_up()
    assert names(error, "rank 0", "step 2", "30 s")
    os.kill(flusher, signal.SIGCONT)
    job.end_all(0)
    check(run_folder, [1])


def test_a_first_rank_that_hosts_the_store_is_killed_with_it(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(2, first_hosts=True)
    job.save(1)
    job.stand_at("decide", 2)
    job.ranks[0].kill()
    job.ranks[1].failed()
    assert len(job.fails(3, 1)) == 1
    job.end_all(1)
    check(run_folder, [1])


@pytest.mark.long
def test_a_store_that_is_gone_is_an_error_on_all_ranks_and_nobody_hangs(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(2)
    job.save(1)
    job.stand_at("receipt", 2, number=1)
    job.store.kill()
    job.ranks[1].do("go receipt")
    for rank in job.ranks:
        rank.failed()
    job.end_all(0, 1)
    check(run_folder, [1])


@pytest.mark.long
def test_a_store_that_is_gone_after_the_commit_leaves_it_whole(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(2)
    job.stand_at("tell", 1)
    job.store.kill()
    job.ranks[1].hear("committed", "1")
    job.ranks[0].do("go tell")
    job.end_all(0, 1)
    check(run_folder, [1])


def test_close_ends_while_a_round_waits_and_so_does_a_program_without_close(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(3)
    job.save(1)
    job.ranks[2].send(signal.SIGSTOP)
    first = job.ranks[0]
    first.do("shut post")
    job.tell("save 2", [0, 1])
    heard = {" ".join(first.next_words()) for _ in range(2)}
    assert heard == {"at post", "done save"}  # from now on it waits for the others
    job.ranks[1].hear("done", "save")
    first.do("go post")
    first.tell("close")
    job.ranks[1].tell("forget")
    assert "rank 2" in first.gives_up()
    job.ranks[1].hear("ends")
    assert job.ranks[1].end() == 0
    assert "step 2" in job.ranks[1].log.read_text()
    job.ranks[2].kill()
    job.end_all(0)
    check(run_folder, [1], ranks=3)


@pytest.mark.parametrize("gate", [pytest.param("decide", marks=pytest.mark.long), "tell"])
def test_a_job_that_is_killed_whole_goes_on_from_the_newest_that_was_committed(
    gate: str, open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(2)
    job.save(1)
    job.stand_at(gate, 2)
    for rank in job.ranks:
        rank.kill_flusher()
        rank.kill()
    steps = [1, 2] if gate == "tell" else [1]
    check(run_folder, steps, tidy=False)
    again = open_job(2, store=job.store, start="start2")
    assert again.restore() == [str(steps[-1])] * 2
    again.save(3)
    again.close()
    check(run_folder, [*steps, 3])
    assert folders(run_folder)[-1] == "step-00000003.2-1"


@pytest.mark.parametrize(
    "gate",
    [
        "receipt",
        pytest.param("decide", marks=pytest.mark.long),
        pytest.param("tell", marks=pytest.mark.long),
    ],
)
def test_a_start_that_finds_the_notes_of_an_earlier_one_does_not_take_them_for_its_own(
    gate: str, open_job: Callable[..., Job], run_folder: Path
) -> None:
    """A launcher that starts ranks again may leave them the store that the dead ones met in."""
    job = open_job(2, notes="kept")
    job.save(1)
    job.stand_at(gate, 2, number=gate == "receipt")
    for rank in job.ranks:
        rank.kill_flusher()
        rank.kill()
    steps = [1, 2] if gate == "tell" else [1]
    again = open_job(2, store=job.store, start="start2", notes="kept")
    assert again.restore() == [str(steps[-1])] * 2
    again.ranks[0].do("shut agree")  # so that the other one finds the old notes first
    again.tell("try 3" if gate == "tell" else "try 2")
    again.ranks[0].hear("at", "agree")
    again.ranks[0].do("go agree")
    steps.append(steps[-1] + 1)
    for rank in again.ranks:
        rank.hear("committed", str(steps[-1]))
    for _ in range(2):
        steps.append(steps[-1] + 1)
        again.save(steps[-1])
    again.close()
    check(run_folder, steps)


@pytest.mark.parametrize(
    "gate",
    [
        "receipt",
        pytest.param("decide", marks=pytest.mark.long),
        pytest.param("tell", marks=pytest.mark.long),
    ],
)
def test_a_start_that_restores_nothing_commits_nothing_of_an_earlier_one(
    gate: str, start_job: Callable[..., Job], run_folder: Path
) -> None:
    """As above, but the ranks have not met in a restore: a save may fail, and the next works."""
    job = start_job(2, notes="kept")
    job.open(run_folder)
    job.save(1)
    job.stand_at(gate, 2, number=gate == "receipt")
    for rank in job.ranks:
        rank.kill_flusher()
        rank.kill()
    again = start_job(2, store=job.store, start="start2", notes="kept")
    again.open(run_folder, deadline_s=16.0)  # a fourth of it passes
    again.ranks[0].do("shut agree")
    again.tell("try 3")
    again.ranks[0].hear("at", "agree")
    again.ranks[0].do("go agree")
    outcomes = {rank.next_words()[0] for rank in again.ranks}
    again.save(4)
    again.save(5)
    again.close()
    check(run_folder, [*([3] if outcomes == {"committed"} else []), 4, 5], tidy=False)


def test_a_zombie_of_an_earlier_start_cannot_commit_and_is_not_cleaned_up_while_it_lives(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    zombie = open_job(2)
    zombie.save(1)
    zombie.stand_at("decide", 2)
    zombie.ranks[0].send(signal.SIGSTOP)
    zombie.ranks[1].kill()  # so that nobody gives the save up
    again = open_job(2, store=zombie.store, start="start2")
    again.save(5)
    assert "step-00000002.1-2" in folders(run_folder)
    zombie.ranks[0].send(signal.SIGCONT)
    zombie.ranks[0].do("go decide")
    error = zombie.ranks[0].failed()
    assert "AbortedError" in error
    assert f"process {again.ranks[0].pid}" in error
    again.save(6)
    again.close()
    zombie.end_all(0)
    assert laststep.open(run_folder).steps() == [5, 6]
    assert folders(run_folder) == ["step-00000001.1-1", "step-00000005.2-1", "step-00000006.2-2"]
    assert (run_folder / "step-00000001.1-1" / "manifest.json").exists()
