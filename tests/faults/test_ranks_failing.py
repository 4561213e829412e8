"""Real ranks that are stopped, out of room or out of step: all hear it, and the next save works.

Each test leaves all ranks of a standing job alive. Its deadline passes when a test says so
(`Process.late`). What is marked long is tried in `tests/commit` in every order of messages, without
processes.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING

import pytest
from rank_jobs import check

import laststep
from expect import names
from stored import folders
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_jobs import Job, ReplicaStatus

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def others_than(number: int) -> list[int]:
    return [one for one in (0, 1, 2) if one != number]


# Heard at once


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_with_a_full_disk_is_named_with_the_systems_error(
    number: int, standing: ReplicaStatus
) -> None:
    standing.works()
    flusher = standing.ranks[number].flusher()
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    step = standing.step()
    errors = standing.job.fails(step)
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, UNLIMITED)
    assert all("File too large" in error for error in errors)
    assert all(f"rank {number}: " in errors[other] for other in others_than(number))
    assert "StorageError" in errors[number]
    standing.save(step)  # the same step again
    standing.works()


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_flusher_that_is_killed_fails_the_save_of_all_ranks(
    number: int, standing: ReplicaStatus
) -> None:
    standing.works()
    before = len(folders(standing.run))
    flusher = standing.ranks[number].flusher()
    os.kill(flusher, signal.SIGSTOP)
    standing.job.tell(f"save {standing.step()}")
    for rank in standing.ranks:
        rank.hear("done", "save")  # or a rank that is late would start a new flusher for it
    if number == 1:
        wait_until(lambda: len(folders(standing.run)) > before)
    os.kill(flusher, signal.SIGKILL)
    standing.job.tell("wait")
    errors = [rank.failed() for rank in standing.ranks]
    assert all("signal 9" in error for error in errors)
    assert all(f"rank {number}: " in errors[other] for other in others_than(number))
    standing.works()
    assert standing.ranks[number].flusher() != flusher


@pytest.mark.long
def test_a_rank_whose_flusher_is_killed_after_its_receipt_finds_the_commit_in_the_run(
    standing: ReplicaStatus,
) -> None:
    """Though nobody tells it any more."""
    first, second, _ = standing.ranks
    second.flusher()
    step = standing.stand_at("tell")
    second.kill_flusher()
    for rank in standing.ranks[1:]:
        assert rank.late() == ["committed", str(step)]
    standing.committed.append(step)
    first.do("go tell")
    standing.works()


@pytest.mark.long
def test_a_first_ranks_flusher_that_is_killed_between_the_phases_commits_nothing(
    standing: ReplicaStatus,
) -> None:
    standing.works()
    standing.ranks[0].flusher()
    standing.stand_at("decide")
    standing.ranks[0].kill_flusher()
    standing.ranks[0].do("go decide")
    errors = [rank.failed() for rank in standing.ranks]
    assert all("signal 9" in error for error in errors)
    assert all("rank 0: " in error for error in errors[1:])
    standing.works()


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_wrong_step_holds_up_no_save_that_follows(number: int, standing: ReplicaStatus) -> None:
    """Nobody waits for it to fail."""
    step, following = standing.step(), standing.step()
    standing.job.tell(f"save {step}", others_than(number))
    standing.job.tell("save 20000000", [number])
    for rank in standing.ranks:
        rank.hear("done", "save")
    standing.job.tell(f"save {following}")
    for rank in standing.ranks:  # which may have heard of the failure by then
        assert rank.next_words()[0] in ("done", "failed")
    standing.job.tell("over")
    for rank in standing.ranks:
        rank.hear("done", "over")
    standing.job.tell("wait")
    for rank in standing.ranks:
        assert rank.next_words()[0] in ("done", "failed")
    standing.committed.append(following)
    standing.works()


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_cannot_describe_its_state_is_named_with_the_cause(
    number: int, standing: ReplicaStatus
) -> None:
    standing.works()
    step = standing.step()
    standing.ranks[number].do("fail")
    errors = standing.job.fails(step)
    assert "ZeroDivisionError as asked" in errors[number]
    assert all(f"rank {number}: as asked" in errors[other] for other in others_than(number))
    standing.save(step)  # the same step again
    standing.works()


def fail_untold(standing: ReplicaStatus) -> None:
    """A save has failed on all ranks, and none of them has asked for it."""
    flusher = standing.ranks[1].flusher()
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    standing.job.tell(f"save {standing.step()}")
    for rank in standing.ranks:
        rank.hear("done", "save")
    standing.job.tell("over")
    for rank in standing.ranks:
        rank.hear("done", "over")
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, UNLIMITED)


def test_what_failed_is_raised_at_the_next_save_which_is_made_all_the_same(
    standing: ReplicaStatus,
) -> None:
    standing.works()
    fail_untold(standing)
    step = standing.step()
    standing.job.tell(f"save {step}")
    assert all("File too large" in rank.failed() for rank in standing.ranks)
    standing.job.tell("wait")
    for rank in standing.ranks:
        rank.hear("done", "wait")
    standing.committed.append(step)
    standing.works()


def test_what_failed_is_raised_later_when_the_next_save_raises_something_else(
    standing: ReplicaStatus,
) -> None:
    standing.works()
    fail_untold(standing)
    for rank in standing.ranks:
        rank.do("fail")
    standing.job.tell(f"save {standing.step()}")
    assert all("ZeroDivisionError as asked" in rank.failed() for rank in standing.ranks)
    standing.job.tell("wait")
    assert all("File too large" in rank.failed() for rank in standing.ranks)
    standing.works()


def test_a_tensor_of_another_shape_is_blamed_on_the_rank_that_has_it(
    standing: ReplicaStatus,
) -> None:
    standing.works()
    size = 1 << 18
    standing.ranks[1].do("reshape 7")
    for error in standing.job.fails(standing.step()):
        assert names(error, "state/t", f"float32[{size}]", "rank 0", "float32[7]", "rank 1")
        assert "rank 0: " not in error
    standing.ranks[1].do(f"reshape {size}")
    standing.works()


@pytest.mark.long  # ten seconds; tests/ranks/test_missing_ranks.py has the same without processes
def test_a_rank_that_alone_calls_restore_says_whom_it_waits_for(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    """The first rank says so for all; the others only that they wait for the first."""
    job = start_job(3)
    job.open(run_folder)
    for expected, late, tells in (("None", 1, [0]), ("1", 0, [1, 2])):
        job.tell("restore", [rank for rank in range(3) if rank != late])
        told = f"rank {late}, "
        for number in tells:
            log = job.ranks[number].log
            wait_until(lambda log=log, told=told: log.read_text().count(told) > 0)
            log.write_text("")
        assert "waits for" not in "".join(job.ranks[n].log.read_text() for n in range(3))
        job.tell("restore", [late])
        for rank in job.ranks:
            rank.hear("restored", expected)
        if expected == "None":
            job.save(1)
    job.close()


def test_a_rank_that_skips_a_save_makes_all_give_it_up(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder, only={1: {"on_busy": "skip"}})
    job.ranks[0].do("shut decide")
    for step in range(9):
        job.tell(f"save {step}")
        if job.ranks[1].next_words()[0] == "skipped":
            break
    job.ranks[0].tell("go decide")
    heard = sorted(" ".join(job.ranks[0].next_words()) for _ in range(step + 3))
    assert heard == ["at decide", "done go", *["done save"] * (step + 1)]
    job.ranks[0].tell("wait")
    assert "rank 1: " in job.ranks[0].failed()
    job.ranks[1].do("over")
    job.save(step + 1)
    job.close()
    check(run_folder, [*range(step), step + 1])


# Heard when the deadline has passed


@pytest.mark.long
def test_a_first_rank_that_was_stopped_past_the_deadline_is_named_and_comes_back(
    standing: ReplicaStatus,
) -> None:
    standing.works()
    step, last = standing.step(), standing.committed[-1]
    first, *others = standing.ranks
    first.send(signal.SIGSTOP)
    standing.job.tell(f"try {step}", [1, 2])
    for rank in others:
        said = f"rank 0 (last seen at step {last}) did not save step {step} within 30 s"
        assert said in rank.gives_up()
    first.tell(f"try {step}")
    first.send(signal.SIGCONT)
    assert "AbortedError" in first.gives_up()
    standing.works()


@pytest.mark.long
def test_a_first_rank_stopped_between_the_phases_comes_back_late_and_cannot_commit(
    standing: ReplicaStatus,
) -> None:
    first, *others = standing.ranks
    standing.works()
    step = standing.stand_at("decide")
    first.send(signal.SIGSTOP)
    said = f"gave it up: rank 0 did not commit step {step} within 30 s"
    for rank in others:
        assert said in rank.gives_up()
    first.send(signal.SIGCONT)
    first.do("go decide")
    # Others' reason, or, where its flusher has removed the folder with that by then, its own.
    assert names(first.failed(), "rank 0", f"step {step}", "30 s")
    standing.works()


@pytest.mark.long
def test_a_first_ranks_flusher_that_stands_still_between_the_phases_commits_nothing(
    standing: ReplicaStatus,
) -> None:
    standing.works()
    flusher = standing.ranks[0].flusher()
    step = standing.stand_at("decide")
    os.kill(flusher, signal.SIGSTOP)
    standing.ranks[0].do("go decide")
    for rank in standing.ranks:
        assert names(rank.gives_up(), "rank 0", f"step {step}", "30 s")
    assert laststep.open(standing.run).steps() == standing.committed
    os.kill(flusher, signal.SIGCONT)
    standing.works()


def save_in_the_end(job: Job, step: int) -> int:
    """Save until it has worked, from that step on: a store that was stopped may take longer than it
    may to answer. Returns the step that was committed."""
    told = []
    for tried in range(step, step + 5):
        job.tell(f"try {tried}")
        told.append([" ".join(rank.next_words()) for rank in job.ranks])
        if all(said == f"committed {tried}" for said in told[-1]):
            return tried
    raise AssertionError(told)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_store_host_that_stands_still_is_an_error_in_time_and_the_next_save_works(
    number: int, start_job: Callable[..., Job], run_folder: Path
) -> None:
    """In the first save, while the ranks agree, and later."""
    job = start_job(2)
    job.open(run_folder, answer_s=2.0)
    job.stand_at("agree", 1, number)
    job.store.send(signal.SIGSTOP)  # while the other one waits to hear what this one holds
    job.ranks[number].do("go agree")
    for rank in job.ranks:
        assert "2 s" in rank.failed()
    job.store.send(signal.SIGCONT)
    first = save_in_the_end(job, 2)
    job.store.send(signal.SIGSTOP)
    for error in job.fails(first + 1):
        assert "2 s" in error
    job.store.send(signal.SIGCONT)
    second = save_in_the_end(job, first + 2)
    job.close()
    assert {first, second} <= set(laststep.open(run_folder).steps())
