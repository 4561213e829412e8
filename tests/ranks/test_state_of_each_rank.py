"""What each rank has for itself comes back to it, and what happens when there are other ranks."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from crew import Crew


def test_random_numbers_go_on_on_each_rank(crew: Crew, run_folder: Path) -> None:
    run = str(run_folder)
    drawn = crew("tasks:save_random", 3, run=run)
    assert len({tuple(one) for one in drawn}) == 3
    again = crew("tasks:load_random", 3, run=run)
    assert [numbers for numbers, _ in again] == drawn
    assert not any(lines for _, lines in again)
    fewer = crew("tasks:load_random", 2, run=run)
    assert [numbers for numbers, _ in fewer] == drawn[:2]
    one = crew("tasks:load_random", 1, run=run)
    assert [numbers for numbers, _ in one] == drawn[:1]
    more = crew("tasks:load_random", 4, run=run)
    assert [numbers for numbers, _ in more][:3] == drawn
    assert more[3][0] not in drawn
    ((line,), *others) = [lines for _, lines in more]
    assert names(line, "rank 0: rng: ", "3 ranks", "4", "rank 3")
    assert not any(others)
    made_late = crew("tasks:load_random", 4, run=run, late=True)
    assert [numbers for numbers, _ in made_late] == [numbers for numbers, _ in more]


def seen(number: int) -> tuple[int, list[int]]:
    return number, [number] * (3 * number)


@pytest.fixture(scope="module")
def places(crew: Crew) -> Iterator[str]:
    """A run of three ranks."""
    with tempfile.TemporaryDirectory(prefix="laststep-ranks-") as folder:
        crew("tasks:save_places", 3, run=f"{folder}/run")
        yield f"{folder}/run"


def test_what_is_each_ranks_own_comes_back_to_it(crew: Crew, places: str) -> None:
    found = crew("tasks:load_places", 3, run=places, policy="refuse")
    assert found == [("", seen(10 + rank), []) for rank in range(3)]


def test_what_is_made_late_says_then_what_becomes_of_it_with_other_ranks(
    crew: Crew, places: str
) -> None:
    ((error, place, _),) = crew("tasks:load_places", 1, run=places, policy="refuse", late=True)
    assert "3" in error
    assert place == seen(50)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("policy", ["refuse", "drop", "keep"])
def test_the_provider_says_what_becomes_of_it_with_other_ranks(
    crew: Crew, places: str, ranks: int, policy: str
) -> None:
    found = crew("tasks:load_places", ranks, run=places, policy=policy)
    for rank, (error, place, warnings) in enumerate(found):
        if policy == "refuse":
            assert "place" in error
            assert "3" in error
            assert "when_ranks_change=" in error
            assert place == seen(50)
        else:
            assert error == ""
            kept = policy == "keep" and rank < 3
            assert place == seen(10 + rank if kept else 50)
            assert len(warnings) == (rank == 0 and (policy == "drop" or ranks > 3))
            own = [f"rank {n}" for n in range(ranks) if policy == "drop" or n > 2]
            assert all(names(warning, "place", "3 ranks", *own) for warning in warnings)


def test_parts_of_groups_and_marks_inside_of_marks_say_what_becomes_of_them(
    crew: Crew, run_folder: Path
) -> None:
    run = str(run_folder)
    drawn = crew("tasks:save_own_groups", 2, run=run)
    found = crew("tasks:load_own_groups", 3, run=run)
    for rank, (numbers, draws) in enumerate(found):
        kept = [rank, 10 + rank, 20 + rank] if rank < 2 else [1000, 1010, 1020]
        made = [60 + 1 + 100 * rank, 80 + 1 + 100 * rank]
        assert numbers == [*kept, *made, 1050]
        assert (draws == drawn[rank]) if rank < 2 else (draws not in drawn)
    for error in crew("tasks:load_odd_group", 3, run=run):
        assert "when_ranks_change=" in error


def test_what_ranks_share_is_not_taken_for_each_ones_own(crew: Crew, run_folder: Path) -> None:
    for error in crew("tasks:save_parts_as_own", 2, run=str(run_folder)):
        assert names(error, "item 'mine'", "w", "laststep.PerRank")


def test_a_group_that_comes_to_mix_what_is_shared_with_what_is_not_is_refused(
    crew: Crew, run_folder: Path
) -> None:
    for errors in crew("tasks:save_what_becomes_mixed", 2, run=str(run_folder)):
        assert len(errors) == 2


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_what_reads_data_is_each_ranks_own_and_every_line_of_the_log_says_whose(
    crew: Crew, run_folder: Path, level: str
) -> None:
    logged = crew("tasks:save_readers", 2, run=str(run_folder), level=level)
    for rank, lines in enumerate(logged):
        assert [line for line in lines if not line.startswith(f"rank {rank}: ")] == []
        if rank and level == "INFO":
            assert lines == []
            continue
        told = [line for line in lines if "laststep.PerRank" in line]
        assert len(told) == 2  # Checkpointers
        assert any("step-00000001" in line for line in lines)


def test_one_rank_tells_what_saves_of_all_ranks_need(crew: Crew, run_folder: Path) -> None:
    ((need,), *others) = crew("tasks:preflights", 3, run=str(run_folder))
    assert not any(others)
    assert (need.ranks, need.state_bytes, need.needed_disk_bytes) == (3, 3 * 24, 4 * 3 * 24)
    assert need.free_disk_bytes > 0


def test_a_save_that_would_leave_checkpoints_behind_fails_on_all_ranks(
    crew: Crew, run_folder: Path
) -> None:
    found = crew("tasks:save_without_restore", 2, run=str(run_folder))
    for first, second, steps in found:
        assert "step 1" in first
        assert "step 2" in second
        assert steps == [1, 2]
    assert "rank 1" in found[0][1]
