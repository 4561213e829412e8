"""All ranks of a job save at the same steps, which the first one chooses by its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.mark.parametrize(("every", "slow"), [("auto", 2), ("0.05 s", 1), (60, 0)])
def test_ranks_save_the_same_steps_whatever_their_clocks_and_speeds(
    crew: Crew, run_folder: Path, every: object, slow: int
) -> None:
    found = crew("stepping_tasks:step_alike", 3, run=str(run_folder), every=every, slow=slow)
    assert found[1:] == found[:1] * 2
    before, after = found[0]
    assert len(before) > 1
    assert before[-1] == 150
    assert after[-1] == 120
    assert laststep.open(run_folder).steps() == [before[0], *after]


def test_a_first_rank_that_is_late_is_named_and_ranks_get_into_step_again(
    crew: Crew, run_folder: Path
) -> None:
    found = crew("stepping_tasks:step_without_the_first", 2, run=str(run_folder))
    (nothing, *there), (said, *here) = found
    assert nothing == ""
    assert "0.5 s" in said
    assert there == here
