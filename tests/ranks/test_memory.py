"""A checkpoint of real ranks that lies in shared memory: all restore it from there, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.fixture
def left(crew: Crew, tmp_path: Path, run_folder: Path) -> dict[str, str]:
    """What two ranks have left in memory; of what they have stored the bytes are gone."""
    base = tmp_path / "shm"
    base.mkdir()
    where = {"base": str(base), "run": str(run_folder)}
    crew("memory_tasks:leave_in_memory", 2, **where)
    for path in run_folder.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    return where


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_state_comes_out_of_memory_bit_for_bit(
    crew: Crew, left: dict[str, str], ranks: int
) -> None:
    assert crew("memory_tasks:restore", ranks, **left) == ["exact"] * ranks


def test_where_one_rank_does_not_see_it_no_rank_restores_from_memory(
    crew: Crew, left: dict[str, str]
) -> None:
    for error in crew("memory_tasks:restore", 2, blind=1, **left):
        assert names(error, "CorruptError", "step ")


def test_ranks_of_which_only_some_have_the_tier_are_told_so(
    crew: Crew, left: dict[str, str]
) -> None:
    for error in crew("memory_tasks:restore", 2, without=1, **left):
        assert names(error, "rank 0", "restore()", "rank 1")
