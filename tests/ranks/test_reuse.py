"""Ranks write only what changed of their parts, and other ranks read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

MIB = 1 << 20


def test_ranks_borrow_of_their_own_files_and_others_read_them(crew: Crew, run_folder: Path) -> None:
    run = str(run_folder)
    first = crew("reusing_tasks:save_often", 2, run=run, cut=0, steps=[0, 1, 2])
    assert all(rank[0] > 30 * MIB for rank in first)
    assert all(later < 3 * MIB for rank in first for later in rank[1:])
    again = crew("reusing_tasks:save_often", 2, run=run, cut=0, steps=[3])  # a new start
    assert all(rank[0] < 3 * MIB for rank in again)
    for ranks, cut in ((2, 0), (4, 1), (1, 0)):
        for step in (1, 3):
            found = crew("reusing_tasks:load_and_compare", ranks, run=run, cut=cut, step=step)
            assert all(found), (ranks, cut, step)


def test_ranks_encode_their_own_files_and_others_read_them(crew: Crew, run_folder: Path) -> None:
    how = {"run": str(run_folder), "cut": 0}
    first = crew("reusing_tasks:save_often", 2, steps=[0, 1], compression="max", **how)
    assert all(rank[0] < 20 * MIB for rank in first)
    assert all(rank[1] < MIB / 8 for rank in first)  # a row, told by its difference
    more = {"flush": "process", "compression": "max"}
    again = crew("reusing_tasks:save_often", 2, steps=[2], **more, **how)
    assert all(rank[0] < MIB for rank in again)
    for ranks, cut, step in ((4, 1, 2), (1, 0, 1)):
        load = {"run": str(run_folder), "cut": cut, "step": step}
        assert all(crew("reusing_tasks:load_and_compare", ranks, **load)), (ranks, step)
