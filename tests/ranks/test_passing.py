"""What ranks pass on to each other arrives, and never much of it at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

SIZE = 1 << 20
HEAD = 1


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("to", ["each", "first", "some"])
def test_parcels_arrive_and_two_at_most_are_coming(crew: Crew, ranks: int, to: str) -> None:
    found = crew("passing_tasks:pass_on", ranks, size=SIZE, to=to)
    for mine, (senders, most_bytes) in enumerate(found):
        assert (
            senders
            == {
                "each": [rank for rank in range(ranks) if rank != mine],
                "first": list(range(1, ranks)) if mine == 0 else [],
                "some": [mine - 1] if mine % 2 else [],
            }[to]
        )
        assert most_bytes <= 2 * (SIZE + HEAD)


def test_what_is_for_all_is_told_to_all(crew: Crew) -> None:
    assert crew("passing_tasks:tell_all", 4, size=SIZE) == [[2], [0, 2], [0], [0, 2]]


def test_a_short_note_is_told_in_one_round_and_any_other_in_two(crew: Crew) -> None:
    sizes = [0, 1, 504, 505, 5000]
    assert crew("passing_tasks:tell_notes", 2, sizes=sizes) == [[1, 1, 1, 2, 2]] * 2


def test_a_rank_that_ends_meanwhile_is_an_error_on_the_others(crew: Crew, run_folder: Path) -> None:
    crew("reading_tasks:save_big", 3, run=str(run_folder), cut=0)
    with pytest.raises(AssertionError) as told:
        crew("passing_tasks:load_and_lose_a_rank", 3, run=str(run_folder))
    heard = "heard in time: True: "
    assert str(told.value).count(heard) == 2
