"""Experts, sequence and context parallelism, among each other and into one process: bit-equal
weights and AdamW state, and the next step is that of a job that never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

Case = tuple[str, int]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("experts", 4), ("experts_fsdp", 4)),
        (("experts_ddp", 4), ("plain", 1)),
        (("sequence", 2), ("context", 4)),
        (("context", 4), ("experts_fsdp", 2)),
        pytest.param(("experts_fsdp", 4), ("experts", 3), marks=pytest.mark.long),
        pytest.param(("plain", 2), ("experts_ddp", 4), marks=pytest.mark.long),
        pytest.param(("experts", 2), ("sequence", 4), marks=pytest.mark.long),
    ],
    ids=lambda case: f"{case[0]}{case[1]}",
)
def test_one_way_goes_on_in_another(
    crew: Crew, run_folder: Path, saved: Case, loaded: Case
) -> None:
    crew("expert_tasks:save", saved[1], run=str(run_folder), way=saved[0])
    assert all(crew("expert_tasks:load", loaded[1], run=str(run_folder), way=loaded[0]))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (4, 2),
        (1, 4),
        pytest.param(2, 3, marks=pytest.mark.long),
        pytest.param(3, 1, marks=pytest.mark.long),
    ],
)
def test_experts_that_are_modules_of_single_ranks_move(
    crew: Crew, run_folder: Path, saved: int, loaded: int
) -> None:
    crew("expert_tasks:save_modules", saved, run=str(run_folder))
    assert all(crew("expert_tasks:load_modules", loaded, run=str(run_folder)))
