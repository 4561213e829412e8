"""Ranks that are slow, stopped, out of room or out of step: all hear it, and the next save works.

Each test leaves all ranks of a standing job alive. `patient` has a deadline that no test waits for:
there everybody hears at once. `hasty` has one of a few seconds.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING

import pytest
from rank_jobs import LONG_S, check, folders, wait_until

import laststep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_jobs import Job, Standing

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def others_than(number: int) -> list[int]:
    return [one for one in (0, 1, 2) if one != number]


# Heard at once


def test_a_rank_that_is_slow_but_in_time_holds_nothing_up(patient: Standing) -> None:
    step = patient.stand_at("receipt", 1)
    assert laststep.open(patient.run).steps() == patient.committed
    patient.ranks[1].do("go receipt")
    patient.is_committed(step)
    patient.works()


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_with_a_full_disk_is_named_with_the_systems_error(
    number: int, patient: Standing
) -> None:
    patient.works()
    flusher = patient.ranks[number].flusher()
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    step = patient.step()
    errors = patient.job.fails(step)
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, UNLIMITED)
    assert all("File too large" in error for error in errors)
    assert all(f"rank {number}: " in errors[other] for other in others_than(number))
    assert "StorageFailed" in errors[number]
    patient.save(step)  # the same step again
    patient.works()


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_flusher_that_is_killed_fails_the_save_of_all_ranks(
    number: int, patient: Standing
) -> None:
    patient.works()
    before = len(folders(patient.run))
    flusher = patient.ranks[number].flusher()
    os.kill(flusher, signal.SIGSTOP)
    patient.job.tell(f"try {patient.step()}")
    if number == 1:
        wait_until(lambda: len(folders(patient.run)) > before)
    os.kill(flusher, signal.SIGKILL)
    errors = [rank.failed() for rank in patient.ranks]
    assert all("signal 9" in error for error in errors)
    assert all(f"rank {number}: " in errors[other] for other in others_than(number))
    patient.works()
    assert patient.ranks[number].flusher() != flusher


def test_a_rank_whose_flusher_is_killed_after_its_receipt_reports_what_the_others_decide(
    patient: Standing,
) -> None:
    patient.ranks[1].flusher()
    step = patient.stand_at("decide")
    patient.ranks[1].kill_flusher()
    patient.ranks[0].do("go decide")
    patient.is_committed(step)
    patient.works()


def test_a_rank_whose_flusher_is_killed_after_its_receipt_finds_the_commit_in_the_run(
    hasty: Standing,
) -> None:
    """Though nobody tells it any more."""
    first, second, _ = hasty.ranks
    second.flusher()
    step = hasty.stand_at("tell")
    second.kill_flusher()
    hasty.is_committed(step, 1, 2)
    first.do("go tell")
    hasty.works()


def test_a_first_ranks_flusher_that_is_killed_between_the_phases_commits_nothing(
    patient: Standing,
) -> None:
    patient.works()
    patient.ranks[0].flusher()
    patient.stand_at("decide")
    patient.ranks[0].kill_flusher()
    patient.ranks[0].do("go decide")
    errors = [rank.failed() for rank in patient.ranks]
    assert all("signal 9" in error for error in errors)
    assert all("rank 0: " in error for error in errors[1:])
    patient.works()


def test_a_rank_at_a_later_step_is_named_at_once(patient: Standing) -> None:
    lower, higher = patient.step(), patient.step()
    patient.job.tell(f"try {lower}", [0, 2])
    patient.job.tell(f"try {higher}", [1])
    for number in (0, 2):
        error = patient.ranks[number].failed()
        assert f"rank 1 saves step {higher} and not {lower}" in error
    told = f"step {lower}: the save of rank 0 fails: rank 1 saves step {higher}"
    assert told in patient.ranks[1].log.read_text()
    patient.job.tell(f"try {higher}", [0, 2])  # they have caught up
    patient.is_committed(higher)
    patient.works()


def test_a_rank_at_an_earlier_step_hears_it_at_once(patient: Standing) -> None:
    lower, higher = patient.step(), patient.step()
    patient.job.tell(f"try {higher}", [0, 2])
    patient.job.tell(f"try {lower}", [1])
    assert f"rank 0 saves step {higher} and not {lower}" in patient.ranks[1].failed()
    patient.job.tell(f"try {higher}", [1])
    patient.is_committed(higher)
    patient.works()


@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_step_on_one_rank_fails_on_all_and_the_next_save_works(
    number: int, patient: Standing
) -> None:
    step, wrong = patient.step(), 10_000_000
    patient.job.tell(f"try {step}", others_than(number))
    patient.job.tell(f"try {wrong}", [number])
    for rank in patient.ranks:
        error = rank.failed()
        assert f"saves step {wrong} and not {step}" in error or (
            f"saves step {step} and not {wrong}" in error
        )
    patient.works()


@pytest.mark.parametrize("number", [0, 1])
def test_the_step_that_was_wrong_can_be_saved_by_all_right_after(
    number: int, patient: Standing
) -> None:
    """The save of it that failed is not the one that ranks then take part in."""
    step, wrong = patient.step(), patient.step()
    patient.job.tell(f"try {step}", others_than(number))
    patient.job.tell(f"try {wrong}", [number])
    for rank in patient.ranks:
        rank.failed()
    patient.save(wrong)
    patient.works()


@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_step_holds_up_no_save_that_follows(number: int, patient: Standing) -> None:
    """Nobody waits for it to fail."""
    step, following = patient.step(), patient.step()
    patient.job.tell(f"save {step}", others_than(number))
    patient.job.tell("save 20000000", [number])
    for rank in patient.ranks:
        rank.hear("done", "save")
    patient.job.tell(f"save {following}")
    for rank in patient.ranks:  # which may have heard of the failure by then
        assert rank.next_words()[0] in ("done", "failed")
    patient.job.tell("over")
    for rank in patient.ranks:
        rank.hear("done", "over")
    patient.job.tell("wait")
    for rank in patient.ranks:
        assert rank.next_words()[0] in ("done", "failed")
    patient.committed.append(following)
    patient.works()


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_cannot_describe_its_state_is_named_with_the_cause(
    number: int, patient: Standing
) -> None:
    patient.works()
    step = patient.step()
    patient.ranks[number].do("fail")
    errors = patient.job.fails(step)
    assert "ZeroDivisionError as asked" in errors[number]
    assert all(f"rank {number}: as asked" in errors[other] for other in others_than(number))
    patient.save(step)  # the same step again
    patient.works()


def fail_untold(patient: Standing) -> None:
    """A save has failed on all ranks, and none of them has asked for it."""
    flusher = patient.ranks[1].flusher()
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    patient.job.tell(f"save {patient.step()}")
    for rank in patient.ranks:
        rank.hear("done", "save")
    patient.job.tell("over")
    for rank in patient.ranks:
        rank.hear("done", "over")
    resource.prlimit(flusher, resource.RLIMIT_FSIZE, UNLIMITED)


def test_what_failed_is_raised_at_the_next_save_which_is_made_all_the_same(
    patient: Standing,
) -> None:
    patient.works()
    fail_untold(patient)
    step = patient.step()
    patient.job.tell(f"save {step}")
    assert all("File too large" in rank.failed() for rank in patient.ranks)
    patient.job.tell("wait")
    for rank in patient.ranks:
        rank.hear("done", "wait")
    patient.committed.append(step)
    patient.works()


def test_what_failed_is_raised_later_when_the_next_save_raises_something_else(
    patient: Standing,
) -> None:
    patient.works()
    fail_untold(patient)
    for rank in patient.ranks:
        rank.do("fail")
    patient.job.tell(f"save {patient.step()}")
    assert all("ZeroDivisionError as asked" in rank.failed() for rank in patient.ranks)
    patient.job.tell("wait")
    assert all("File too large" in rank.failed() for rank in patient.ranks)
    patient.works()


def test_a_state_that_changes_on_all_ranks_or_on_one_is_agreed_on_anew(patient: Standing) -> None:
    patient.works()
    for rank in patient.ranks:
        rank.do("grow")
    patient.works()
    patient.ranks[1].do("grow")
    for error in patient.job.fails(patient.step()):
        assert "rank 1 describes the state otherwise than rank 0 knew" in error
    patient.works()


def test_a_tensor_of_another_shape_is_blamed_on_the_rank_that_has_it(patient: Standing) -> None:
    patient.works()
    size = 1 << 18
    patient.ranks[1].do("reshape 7")
    for error in patient.job.fails(patient.step()):
        assert f"state/t: float32[7] on rank 1, float32[{size}] on ranks 0, 2" in error
        assert "rank 0: " not in error
    patient.ranks[1].do(f"reshape {size}")
    patient.works()


def test_a_rank_that_alone_calls_restore_says_whom_it_waits_for(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    """The first rank says so for all; the others only that they wait for the first."""
    job = start_job(3)
    job.open(run_folder, deadline_s=LONG_S)
    for expected, late, tells in (("None", 1, [0]), ("1", 0, [1, 2])):
        job.tell("restore", [rank for rank in range(3) if rank != late])
        told = f"restore() waits for rank {late}, for 150 s at most: every rank has to call it"
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


def test_a_rank_that_alone_calls_its_first_save_says_whom_it_waits_for(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(3)
    job.open(run_folder, deadline_s=LONG_S)
    for step, (late, tells) in enumerate([(1, [0]), (0, [1, 2])]):
        job.tell(f"try {step}", [rank for rank in range(3) if rank != late])
        told = f"save() waits for rank {late}, for 30 s at most: every rank has to call it"
        for number in tells:
            log = job.ranks[number].log
            wait_until(lambda log=log, told=told: told in log.read_text())
            log.write_text("")
        assert "waits for" not in "".join(job.ranks[n].log.read_text() for n in range(3))
        job.tell(f"try {step}", [late])
        for rank in job.ranks:
            rank.hear("committed", str(step))
            rank.do("grow")
    job.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_takes_no_part_in_the_first_save_is_heard_at_once(
    number: int, start_job: Callable[..., Job], run_folder: Path
) -> None:
    """Though the others wait to hear what it holds, and may try the same step again."""
    job = start_job(3)
    job.open(run_folder, deadline_s=LONG_S)
    for _ in range(2):
        job.ranks[number].do("fail")
        errors = job.fails(1)
        assert "ZeroDivisionError as asked" in errors[number]
        assert all(f"rank {number}: as asked" in errors[other] for other in others_than(number))
    job.save(1)
    job.close()
    check(run_folder, [1], ranks=3)


def test_a_rank_that_takes_no_part_in_one_save_is_not_heard_in_the_next(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    """It has told of step 1, while the first rank, which was late, goes on with step 2."""
    job = start_job(2)
    job.open(run_folder, deadline_s=LONG_S)
    job.ranks[1].do("fail")
    job.ranks[1].tell("try 1")
    assert "as asked" in job.ranks[1].failed()
    job.save(2)
    job.close()
    check(run_folder, [2])


def test_a_rank_that_skips_a_save_makes_all_give_it_up(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2)
    job.open(run_folder, deadline_s=LONG_S, only={1: {"on_busy": "skip"}})
    job.ranks[0].do("shut decide")
    for step in range(9):
        job.tell(f"save {step}")
        if job.ranks[1].next_words()[0] == "skipped":
            break
    job.ranks[0].tell("go decide")
    heard = sorted(" ".join(job.ranks[0].next_words()) for _ in range(step + 3))
    assert heard == ["at decide", "done go", *["done save"] * (step + 1)]
    job.ranks[0].tell("wait")
    assert "rank 1: skipped the save: " in job.ranks[0].failed()
    job.ranks[1].do("over")
    job.save(step + 1)
    job.close()
    check(run_folder, [*range(step), step + 1])


# Heard when the deadline has passed


def test_a_rank_that_is_too_slow_is_named_and_hears_it_itself(hasty: Standing) -> None:
    hasty.works()
    step = hasty.stand_at("receipt", 1)
    cause = f"rank 1 (last seen at step {step}) did not save step {step} within 1.5 s"
    for number in (0, 2):
        assert cause in hasty.ranks[number].failed()
    hasty.ranks[1].do("go receipt")
    assert cause in hasty.ranks[1].failed()
    hasty.works()


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_was_stopped_past_the_deadline_is_named_and_comes_back(
    number: int, hasty: Standing
) -> None:
    hasty.works()
    step = hasty.step()
    stopped = hasty.ranks[number]
    stopped.send(signal.SIGSTOP)
    for error in hasty.job.fails(step, *others_than(number)):
        assert f"rank {number} (last seen at step" in error
        assert "within 1.5 s" in error
    stopped.tell(f"try {step}")
    stopped.send(signal.SIGCONT)
    assert "Aborted" in stopped.failed()
    hasty.works()


def test_a_rank_that_does_not_save_at_all_is_named(hasty: Standing) -> None:
    step = hasty.step()
    last = hasty.committed[-1]
    for error in hasty.job.fails(step, 0, 2):
        assert f"rank 1 (last seen at step {last}) did not save step {step} within 1.5 s" in error
    hasty.works()


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_misses_the_first_save_is_named_and_the_next_works(
    number: int, start_job: Callable[..., Job], run_folder: Path
) -> None:
    """Then the ranks do not even know what the others hold."""
    job = start_job(2)
    job.open(run_folder)
    (error,) = job.fails(1, 1 - number)
    assert f"nothing from rank {number} (not seen before) within 1.5 s" in error
    job.ranks[number].do("fail")
    errors = job.fails(2)
    assert "as asked" in errors[number]
    assert f"rank {number}" in errors[1 - number]
    job.save(3)
    job.save(4)
    job.close()
    check(run_folder, [3, 4])


def test_a_first_rank_stopped_between_the_phases_comes_back_late_and_cannot_commit(
    hasty: Standing,
) -> None:
    first, *others = hasty.ranks
    hasty.works()
    step = hasty.stand_at("decide")
    first.send(signal.SIGSTOP)
    said = f"gave it up: rank 0 did not commit step {step} within 1.5 s"
    for rank in others:
        assert said in rank.failed()
    first.send(signal.SIGCONT)
    first.do("go decide")
    # Others' reason, or, where its flusher has removed the folder with that by then, its own.
    assert f"rank 0 did not commit step {step} within 1.5 s" in first.failed()
    hasty.works()


def test_a_first_rank_stopped_before_it_tells_of_a_commit_changes_nothing(hasty: Standing) -> None:
    first = hasty.ranks[0]
    step = hasty.stand_at("tell")
    first.send(signal.SIGSTOP)
    hasty.is_committed(step, 1, 2)
    first.send(signal.SIGCONT)
    first.do("go tell")
    hasty.works()


def test_a_first_ranks_flusher_that_stands_still_between_the_phases_commits_nothing(
    hasty: Standing,
) -> None:
    hasty.works()
    flusher = hasty.ranks[0].flusher()
    step = hasty.stand_at("decide")
    os.kill(flusher, signal.SIGSTOP)
    hasty.ranks[0].do("go decide")
    for rank in hasty.ranks:
        assert f"rank 0 did not commit step {step} within 1.5 s" in rank.failed()
    assert laststep.open(hasty.run).steps() == hasty.committed
    os.kill(flusher, signal.SIGCONT)
    hasty.works()


def test_a_store_host_that_stands_still_is_an_error_in_time_and_the_next_save_works(
    hasty: Standing,
) -> None:
    hasty.works()
    hasty.job.store.send(signal.SIGSTOP)
    for error in hasty.job.fails(hasty.step()):
        assert "the store that the ranks of this job meet in does not answer" in error
        assert "no answer within 1.5 s" in error
    hasty.job.store.send(signal.SIGCONT)
    hasty.works()
