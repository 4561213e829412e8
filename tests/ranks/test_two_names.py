"""A tied weight that others hold under two names: where these differ, where they share ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.mark.parametrize(("way", "ranks"), [("fsdp2", 3), ("zero3", 2), ("pipeline", 4)])
def test_a_difference_in_the_part_of_one_rank_is_told_on_all(
    crew: Crew, run_folder: Path, way: str, ranks: int
) -> None:
    crew("two_names_tasks:save_differing", 2, run=str(run_folder))
    found = crew("two_names_tasks:load_differing", ranks, run=str(run_folder), way=way)
    for (kind, message), mixed, lines, at_last in found:
        assert kind == "MismatchError"
        assert names(message, "model/head.weight", "embed.weight")
        assert mixed == "UsageError"
        assert at_last == ""
        model, optimizer = lines
        assert names(model, "mismatched: model/head.weight", "embed.weight")
        assert names(optimizer, "mismatched: optimizer/state/head.weight/exp_avg")


def test_stages_of_two_names_keep_what_differs(crew: Crew, run_folder: Path) -> None:
    crew("two_names_tasks:save_differing", 2, run=str(run_folder))
    crew("two_names_tasks:load_apart", 4, run=str(run_folder))


def test_two_sharded_parameters_get_the_state_of_one_in_memory_of_their_own(
    crew: Crew, run_folder: Path
) -> None:
    crew("tasks:save_as", 2, way="fsdp2", run=str(run_folder))
    for trained in (False, True):
        crew("two_names_tasks:load_untied", 3, run=str(run_folder), trained=trained)
    for kind, message in crew("two_names_tasks:load_half_untied", 2, run=str(run_folder)):
        assert kind == "MismatchError"
        assert "state/head.weight/exp_avg" in message


@pytest.mark.parametrize(("way", "ranks"), [("pipeline_two_names", 2), ("fsdp2", 4)])
def test_state_that_came_after_the_checkpoint_goes_where_a_rank_lacks_some_of_it(
    crew: Crew, run_folder: Path, way: str, ranks: int
) -> None:
    crew("two_names_tasks:save_unstepped", 2, run=str(run_folder))
    crew("two_names_tasks:load_unstepped", ranks, run=str(run_folder), way=way)
