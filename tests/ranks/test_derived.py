"""Ranks leave out the parts of weights that follow from masters of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

WEIGHT_BYTES = 2 * sum(1024 * (1024 + n) for n in range(3))


def test_parts_that_are_cut_alike_are_left_out_and_read_by_other_ranks(
    crew: Crew, run_folder: Path
) -> None:
    run = str(run_folder)
    skipped = crew("derived_tasks:save", 2, run=run, cut=0)
    assert WEIGHT_BYTES - 1000 < sum(skipped) < WEIGHT_BYTES
    for ranks, cut, only in ((2, 0, None), (2, 1, ["model"]), (1, 0, ["model"])):
        found = crew("derived_tasks:load_and_compare", ranks, run=run, cut=cut, only=only)
        assert all(found), (ranks, cut, only)


@pytest.mark.parametrize("again", [False, True])
def test_what_every_rank_holds_comes_back_whoever_wrote_it(
    crew: Crew, run_folder: Path, again: bool
) -> None:
    run = str(run_folder)
    crew("derived_tasks:save", 2, run=run, cut=None)
    if again:
        crew("derived_tasks:save", 2, run=run, cut=None, seed=1)
    found = crew("derived_tasks:load_and_compare", 2, run=run, cut=0, only=None, seed=int(again))
    assert all(found)
