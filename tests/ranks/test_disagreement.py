"""Ranks that describe the same thing differently: everybody hears who and what, and nothing is
committed; the next save, of what all agree on, works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", ("state/w", "float32[5]", "rank 2", "float32[4]", "rank 0")),
        ("dtype", ("state/w", "float64[4]", "rank 2", "float32[4]", "rank 0")),
        ("layout", ("state/w", "rank 2")),
        ("lacking", ("state/w", "rank 2")),
    ],
)
def test_a_tensor_that_ranks_describe_differently_is_named(
    crew: Crew, run_folder: Path, how: str, said: tuple[str, ...]
) -> None:
    for kind, message, steps in crew("tasks:save_differing", 3, run=str(run_folder), how=how):
        assert kind == "MismatchError"
        assert all(text in message for text in said), message
        assert steps == [1, 2]


def test_plain_values_that_differ_are_named_and_not_committed(crew: Crew, run_folder: Path) -> None:
    for kind, message, steps in crew("tasks:save_differing", 3, run=str(run_folder), how="values"):
        assert kind == "AbortedError"
        assert names(message, "state/number", "rank 0", "rank 2")
        assert "laststep.PerRank" in message
        assert steps == [1, 2]


@pytest.mark.parametrize(
    ("size", "stages"), [(4, [0, 1, 0, 1]), (2, [0, 1, 0, 1]), (2, [0, 0, 1, 1])]
)
def test_plain_values_are_named_that_differ_on_ranks_other_than_the_first(
    crew: Crew, run_folder: Path, size: int, stages: list[int]
) -> None:
    """Whether these two ranks are in the first group of ranks, in two, or in another."""
    first = stages.index(1)
    for message, steps in crew(
        "tasks:save_stages", 4, run=str(run_folder), size=size, stages=stages
    ):
        assert names(message, "schedule/at/lr", f"rank {first}", "rank 3")
        assert steps == [2]


def test_parts_that_lie_over_each_other_in_memory_are_refused(crew: Crew, run_folder: Path) -> None:
    for kind, message in crew("tasks:overlapping", 2, run=str(run_folder)):
        assert kind == "UsageError"
        assert "state/a" in message
