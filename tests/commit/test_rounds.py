"""Rounds of many ranks, in whatever order their messages come: a save is committed whole or absent,
whoever lives hears how it ended and who was to blame, and the next one works.

All of it is simulated (`simulated`): `tests/faults/test_ranks_*` does some of the same with real
processes, flushers and signals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from simulated import written_by

from expect import names
from laststep.format.manifest import WrittenIndexes

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulated import SimulatedJob

    Simulate = Callable[..., SimulatedJob]

AT_ONCE_S = 5.0
"""By the job's own clock, on which nothing takes time but waiting; everybody waits 30 s."""


def works(job: SimulatedJob, step: int) -> None:
    """That save is committed, the newest of all."""
    assert set(job.save(step)) == {""}
    assert job.committed()[-1] == step


@pytest.mark.parametrize(("ranks", "group"), [(2, None), (3, None), (9, 3), (8, 3), (100, 40)])
def test_all_ranks_commit_one_save_after_the_other(
    ranks: int, group: int | None, simulate: Simulate
) -> None:
    job = simulate(ranks, group=group)
    for step in (1, 2, 3):
        works(job, step)
    assert job.committed() == [1, 2, 3]
    assert job.clock.now_s < AT_ONCE_S


@pytest.mark.parametrize("group", [None, 1, 3, 4])
def test_a_commit_has_the_index_of_every_rank_in_order(
    group: int | None, simulate: Simulate
) -> None:
    """Whichever way the ranks are cut into groups."""
    job = simulate(10, group=group)
    works(job, 1)
    (commit,) = job.commits()
    assert (commit.ranks, commit.index_count) == (10, 10)
    expected = WrittenIndexes()
    for rank in range(10):
        expected = expected.plus(written_by(rank))
    assert commit.written == expected


# Heard at once


def test_a_rank_that_is_slow_but_in_time_holds_nothing_up(simulate: Simulate) -> None:
    job = simulate(3)
    works(job, 1)
    waits = job.clock.now_s + 20
    job.ranks[1].at["r/1"] = lambda: job.clock.until(lambda: None, waits)
    works(job, 2)
    assert job.clock.now_s >= waits


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_rank_with_a_full_disk_is_named_on_all_with_the_cause(
    number: int, simulate: Simulate
) -> None:
    job = simulate(5, group=2)
    works(job, 1)
    job.ranks[number].flusher.full = True
    told = job.save(2)
    assert all("No space left on device" in said for said in told)
    assert all(f"rank {number}: " in said for rank, said in enumerate(told) if rank != number)
    assert job.clock.now_s < AT_ONCE_S
    job.ranks[number].flusher.full = False
    works(job, 2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_flusher_that_dies_after_its_receipt_leaves_the_decision_to_the_others(
    number: int, simulate: Simulate
) -> None:
    job = simulate(3)
    job.ranks[0].at["decide"] = job.ranks[number].flusher.die
    works(job, 1)
    works(job, 2)


def test_a_first_ranks_flusher_that_dies_between_the_phases_commits_nothing(
    simulate: Simulate,
) -> None:
    job = simulate(3)
    job.ranks[0].at["decide"] = job.ranks[0].flusher.die
    told = job.save(1)
    assert all("signal 9" in said for said in told)
    assert all("rank 0: " in said for said in told[1:])
    assert job.committed() == []
    works(job, 2)


def test_a_flusher_that_dies_after_its_rank_has_gathered_the_group_stops_nothing(
    simulate: Simulate,
) -> None:
    """Its files are durable, and a summary is only a note."""
    job = simulate(4, group=2)
    job.ranks[2].at["g/2"] = job.ranks[2].flusher.die
    works(job, 1)
    works(job, 2)


def test_a_first_ranks_flusher_that_stands_still_is_an_error_in_time_though_all_others_are_dead(
    simulate: Simulate,
) -> None:
    job = simulate(2)
    works(job, 1)
    flusher = job.ranks[0].flusher

    def stand() -> None:
        flusher.stands = True

    job.ranks[0].at["decide"] = stand
    job.ranks[1].at["r/1"] = lambda: job.ranks[1].at.update({"": job.ranks[1].die})
    assert names(job.save(2)[0], "rank 0", "step 2", "30 s")
    flusher.resume()
    assert job.committed() == [1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_takes_no_part_is_heard_at_once(number: int, simulate: Simulate) -> None:
    """In the first save, when nobody knows what others hold, and later."""
    job = simulate(3)
    for step in (1, 1, 2):
        with job.clock.standing():
            for rank in job.ranks:
                rank.begin(step, problem="as asked" if rank.number == number else "")
        told = [rank.outcome() for rank in job.ranks]
        assert all("as asked" in said for said in told)
        assert all(f"rank {number}: " in said for rank, said in enumerate(told) if rank != number)
        works(job, step + 10)
    assert job.clock.now_s < AT_ONCE_S


def test_a_rank_that_takes_no_part_in_one_save_is_not_heard_in_the_next(simulate: Simulate) -> None:
    """It has told of step 1, while the first rank, which was late, goes on with step 2."""
    job = simulate(2)
    job.ranks[1].begin(1, problem="as asked")
    assert "as asked" in job.ranks[1].outcome()
    works(job, 2)


def test_a_rank_at_a_later_step_is_named_at_once(simulate: Simulate) -> None:
    job = simulate(3)
    works(job, 1)
    with job.clock.standing():
        job.begin(2, 0, 2)
        job.begin(3, 1)
        for number in (0, 2):
            assert names(job.ranks[number].outcome(), "rank 1", "step 3", "2")
        job.begin(3, 0, 2)  # they have caught up
    assert [rank.outcome() for rank in job.ranks] == ["", "", ""]
    works(job, 4)
    assert job.committed() == [1, 3, 4]


def test_a_rank_at_an_earlier_step_hears_it_at_once(simulate: Simulate) -> None:
    job = simulate(3)
    works(job, 1)
    with job.clock.standing():
        job.begin(3, 0, 2)
        job.begin(2, 1)
        assert names(job.ranks[1].outcome(), "rank 0", "step 3", "2")
        job.begin(3, 1)
    assert [rank.outcome() for rank in job.ranks] == ["", "", ""]
    works(job, 4)
    assert job.committed() == [1, 3, 4]


def test_a_rank_that_is_never_at_the_step_of_the_others_tells_them_at_once(
    simulate: Simulate,
) -> None:
    job = simulate(3)
    works(job, 1)
    with job.clock.standing():
        job.begin(9, 0, 2)
        job.begin(2, 1)
        assert names(job.ranks[1].outcome(), "rank 0", "step 9", "2")
        job.begin(3, 1)
        for number in (0, 2):
            assert names(job.ranks[number].outcome(), "rank 1", "step 3", "9")
        job.begin(3, 0, 2)
    assert [rank.outcome() for rank in job.ranks] == ["", "", ""]


def test_a_rank_that_comes_to_a_save_when_the_others_have_gone_on_hears_at_once_how_it_ended(
    simulate: Simulate,
) -> None:
    job = simulate(3)
    works(job, 1)
    said = ("rank 2", "step 1", "step 2", "30 s")
    assert all(names(told, *said) for told in job.save(2, 0, 1))
    with job.clock.standing():
        job.begin(3, 0, 1)
        job.begin(2, 2)
        assert names(job.ranks[2].outcome(), *said)
        job.begin(3, 2)
    assert [rank.outcome() for rank in job.ranks] == ["", "", ""]


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_that_was_wrong_on_one_rank_fails_on_all_and_can_be_saved_after_it(
    number: int, simulate: Simulate
) -> None:
    job = simulate(3)
    works(job, 1)
    with job.clock.standing():
        job.begin(2, *(rank for rank in range(3) if rank != number))
        job.begin(9, number)
    for rank in job.ranks:
        said = rank.outcome()
        assert names(said, "step 9", "2") or names(said, "step 2", "9")
    works(job, 9)
    works(job, 10)


def test_a_state_that_changes_on_all_ranks_or_on_one_is_agreed_on_anew(simulate: Simulate) -> None:
    job = simulate(3)
    works(job, 1)
    for rank in job.ranks:
        rank.tensors.append("more")
    works(job, 2)
    job.ranks[1].tensors.append("and more")
    for said in job.save(3):
        assert names(said, "rank 1", "rank 0")
    works(job, 4)


@pytest.mark.parametrize("early", [(0,), (1, 2)])
def test_ranks_that_did_not_describe_one_state_can_save_when_they_do(
    early: tuple[int, ...], simulate: Simulate
) -> None:
    """Whoever comes first finds only what they described before."""
    job = simulate(3)
    job.ranks[2].size = 5
    assert all(names(said, "float32[4] on rank 0", "float32[5] on rank 2") for said in job.save(1))
    job.ranks[2].size = 4
    job.begin(1, *early)
    job.clock.pass_s(1)
    job.begin(1, *(number for number in range(3) if number not in early))
    assert [rank.outcome() for rank in job.ranks] == ["", "", ""]


@pytest.mark.parametrize("group", [None, 2])
def test_ranks_whose_plain_values_differ_commit_nothing_and_say_in_what(
    group: int | None, simulate: Simulate
) -> None:
    job = simulate(5, group=group)
    works(job, 1)
    job.ranks[3].value = b"2"
    for said in job.save(2):
        assert "rank 3" in said
    assert job.committed() == [1]
    job.ranks[3].value = b"1"
    works(job, 3)


# Heard when the deadline has passed


def late(said: str, number: int, step: int) -> bool:
    return names(said, f"rank {number}", f"step {step}", f"step {step}", "30 s")


@pytest.mark.parametrize(("group", "number"), [(None, 1), (None, 4), (2, 1), (2, 3), (2, 4)])
def test_a_rank_that_is_too_slow_is_named_and_hears_it_itself(
    group: int | None, number: int, simulate: Simulate
) -> None:
    job = simulate(5, group=group)
    works(job, 1)
    rank = job.ranks[number]
    rank.at[f"r/{number}"] = rank.sleep
    for said in job.save(2):
        assert late(said, number, 2)
    works(job, 3)
    assert job.committed() == [1, 3]


@pytest.mark.parametrize("number", [1, 3])
def test_a_rank_that_is_killed_before_its_receipt_is_named(number: int, simulate: Simulate) -> None:
    """By whoever speaks for it."""
    job = simulate(4, group=2)
    job.ranks[number].at[f"r/{number}"] = job.ranks[number].die
    told = job.save(1)
    assert all(late(said, number, 1) for rank, said in enumerate(told) if rank != number)
    assert job.committed() == []


@pytest.mark.parametrize("how", ["die", "sleep"])
def test_a_rank_that_does_not_come_to_speak_for_its_group_is_named(
    how: str, simulate: Simulate
) -> None:
    job = simulate(4, group=2)
    job.ranks[2].at["g/2"] = getattr(job.ranks[2], how)
    told = job.save(1)
    for number in (0, 1, 3):
        assert names(told[number], "rank 2", "step 1", "ranks 2 to 3")
    assert job.committed() == []
    works(job, 2)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_rank_that_does_not_save_is_named_and_takes_part_in_the_next(
    number: int, simulate: Simulate
) -> None:
    job = simulate(4, group=2)
    works(job, 1)
    for said in job.save(2, *(rank for rank in range(4) if rank != number)):
        assert names(said, f"rank {number}", "step 1", "step 2", "30 s")
    (said,) = job.save(2, number)  # it comes when all others have gone
    assert said
    works(job, 3)
    assert job.committed() == [1, 3]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_misses_the_first_save_is_named_and_the_next_works(
    number: int, simulate: Simulate
) -> None:
    """Then the ranks do not even know what the others hold."""
    job = simulate(2)
    (said,) = job.save(1, 1 - number)
    assert names(said, f"rank {number}", "30 s")
    works(job, 2)
    works(job, 3)


@pytest.mark.parametrize("late_one", [0, 1])
def test_whoever_waits_for_the_first_save_of_others_says_for_whom(
    late_one: int, simulate: Simulate, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rank says so for all; the others only that they wait for the first."""
    job = simulate(3)
    job.begin(1, *(rank for rank in range(3) if rank != late_one))
    for rank in range(3):
        if rank != late_one:
            job.ranks[rank].outcome()
    told = [text for text in caplog.messages if names(text, "save()", f"rank {late_one}", "30 s")]
    assert len(told) == (1 if late_one else 2)


@pytest.mark.parametrize("group", [None, 2])
def test_a_first_rank_that_is_killed_between_the_phases_leaves_nothing(
    group: int | None, simulate: Simulate
) -> None:
    job = simulate(4, group=group)
    works(job, 1)
    job.ranks[0].at["decide"] = job.ranks[0].die
    for said in job.save(2)[1:]:
        assert names(said, "rank 0", "step 2", "30 s")
    assert job.committed() == [1]


def test_a_first_rank_stopped_between_the_phases_comes_back_late_and_cannot_commit(
    simulate: Simulate,
) -> None:
    job = simulate(3)
    works(job, 1)
    job.ranks[0].at["decide"] = job.ranks[0].sleep
    for said in job.save(2):
        assert names(said, "rank 0", "step 2", "30 s")
    assert job.committed() == [1]
    works(job, 3)


@pytest.mark.parametrize("how", ["die", "sleep"])
def test_a_commit_that_the_first_rank_does_not_tell_of_is_found_in_the_run(
    how: str, simulate: Simulate
) -> None:
    job = simulate(3)
    works(job, 1)
    job.ranks[0].at["decision"] = getattr(job.ranks[0], how)
    assert job.save(2)[1:] == ["", ""]
    assert job.committed() == [1, 2]


def test_a_flusher_that_dies_after_its_receipt_finds_a_commit_that_nobody_tells_of(
    simulate: Simulate,
) -> None:
    job = simulate(3)

    def both() -> None:
        job.ranks[1].flusher.die()
        job.ranks[0].sleep()

    job.ranks[0].at["decision"] = both
    assert job.save(1) == ["", "", ""]
    works(job, 2)


def test_a_first_ranks_flusher_that_stands_still_between_the_phases_commits_nothing(
    simulate: Simulate,
) -> None:
    job = simulate(3)
    works(job, 1)
    flusher = job.ranks[0].flusher

    def stand() -> None:
        flusher.stands = True

    job.ranks[0].at["decide"] = stand
    for said in job.save(2):
        assert names(said, "rank 0", "step 2", "30 s")
    assert job.committed() == [1]
    flusher.resume()
    assert job.committed() == [1]
    works(job, 3)
