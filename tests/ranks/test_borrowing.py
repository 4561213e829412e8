"""Ranks write only what changed of their parts, and other ranks read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

MIB = 1 << 20


def test_ranks_borrow_of_their_own_files_and_others_read_them(crew: Crew, run_folder: Path) -> None:
    run = str(run_folder)
    first = crew("borrowing_tasks:save_often", 2, run=run, cut=0, steps=[0, 1, 2])
    assert all(rank[0] > 30 * MIB for rank in first)
    assert all(later < 3 * MIB for rank in first for later in rank[1:])
    again = crew("borrowing_tasks:save_often", 2, run=run, cut=0, steps=[3])  # a new start
    assert all(rank[0] < 3 * MIB for rank in again)
    for ranks, cut in ((2, 0), (4, 1), (1, 0)):
        for step in (1, 3):
            found = crew("borrowing_tasks:load_and_compare", ranks, run=run, cut=cut, step=step)
            assert all(found), (ranks, cut, step)
