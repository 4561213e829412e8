"""Replicas that are not the same: what comes back is what one rank held, and the rest is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep
from expect import names

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


def test_statistics_that_differ_under_ddp_come_back_as_the_first_ranks(
    crew: Crew, run_folder: Path
) -> None:
    for warnings in crew("replica_tasks:save_statistics", 3, run=str(run_folder)):
        assert not [text for text in warnings if "differ" in text]  # they always do
    for ranks in (3, 2):
        for found in crew("replica_tasks:load_statistics", ranks, run=str(run_folder)):
            assert found == {2.0}


def test_a_state_that_has_diverged_comes_back_as_one_ranks_and_is_told_once(
    crew: Crew, run_folder: Path
) -> None:
    first, *others = crew("replica_tasks:save_diverged", 3, run=str(run_folder), where=[2])
    (warning,) = first["warnings"]
    assert "state/big, state/small" in warning
    assert "rank 2" in warning
    assert "rank 0" in warning
    assert first["events"] == [(1, ("state/big", "state/small"), (0, 2))]
    assert all(one == {"warnings": [], "events": []} for one in others)
    for found in crew("replica_tasks:load_diverged", 2, run=str(run_folder)):
        assert found == ({0.0}, {0.0})


@pytest.mark.parametrize(("how", "steps"), [("always", [1, 2]), ("never", [])])
def test_how_often_replicas_are_compared_is_a_setting(
    crew: Crew, run_folder: Path, how: str, steps: list[int]
) -> None:
    first, *_ = crew(
        "replica_tasks:save_diverged", 2, run=str(run_folder), where=[1], compare_replicas=how
    )
    assert [step for step, *_ in first["events"]] == steps


def test_replicas_are_compared_across_ranks_that_hold_other_things_as_well(
    crew: Crew, run_folder: Path
) -> None:
    first, *others = crew("replica_tasks:save_some", 3, run=str(run_folder))
    (warning,) = first
    assert "state/w" in warning
    assert "rank 2" in warning
    assert others == [[], []]


def test_buffers_that_lie_on_a_mesh_are_one_replicas(crew: Crew, run_folder: Path) -> None:
    crew("replica_tasks:save_laid_buffers", 4, run=str(run_folder))
    found = laststep.load(run_folder)["model"]
    assert found["both"].tolist() == [0.0] * 4
    assert found["cut"].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("diverged", [False, True])
def test_ranks_whose_state_is_on_other_devices_are_not_said_to_differ(
    crew: Crew, run_folder: Path, *, diverged: bool
) -> None:
    first, *others = crew("replica_tasks:save_elsewhere", 3, run=str(run_folder), diverged=diverged)
    assert [names(text, "state/w", "rank 0", "rank 1") for text in first] == [True] * (2 * diverged)
    assert others == [[], []]
