"""States that are not a model and its optimizer, on several ranks; and ranks that come late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def test_values_of_all_kinds_and_an_item_of_one_rank(crew: Crew, run_folder: Path) -> None:
    crew("tasks:save_bag", 3, run=str(run_folder))
    for ranks, who in ((2, 0), (3, 1), (1, 0)):
        crew("tasks:load_bag", ranks, run=str(run_folder), who=who)


def test_stages_and_items_of_some_ranks_may_change_from_save_to_save(
    crew: Crew, run_folder: Path
) -> None:
    crew("tasks:save_some_items", 3, run=str(run_folder))
    found = laststep.open(run_folder)
    assert found.steps() == [1, 2, 3, 4]
    assert {"ema", "later"} <= set(found[4].items())


def test_parts_need_not_be_contiguous_in_memory(crew: Crew, run_folder: Path) -> None:
    crew("tasks:through_strides", 2, run=str(run_folder))


def test_an_optimizer_in_a_group_keeps_its_layout(crew: Crew, run_folder: Path) -> None:
    crew("tasks:through_a_group", 2, run=str(run_folder))


def test_a_part_of_what_is_stored_is_restored_on_all_ranks(crew: Crew, run_folder: Path) -> None:
    crew("tasks:some_of_it", 3, run=str(run_folder))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_begins_after_the_others_takes_part(
    crew: Crew, run_folder: Path, slow: int
) -> None:
    crew("tasks:slow_to_begin", 2, run=str(run_folder), slow=slow)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.long)])
def test_after_a_rank_could_not_describe_its_state_the_next_save_works(
    crew: Crew, run_folder: Path, who: int
) -> None:
    found = crew("tasks:stumble", 3, run=str(run_folder), who=who)
    for rank, ((kind, _), steps) in enumerate(found):
        assert kind == ("UsageError" if rank == who else "AbortedError")
        assert steps == [1, 2]
