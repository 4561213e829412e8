"""From any layout on any number of ranks to any other: bit-equal state, and training goes on alike.

`make test` has every layout on both sides, `make test-long` several times. `LASTSTEP_ALL_LAYOUTS=1`
tries every pair, which takes about a quarter of an hour.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _pytest.mark import ParameterSet
    from crew import Crew

RANKS = {
    "plain": (1, 2),
    "ddp": (1, 2, 3, 4),
    "fsdp2": (1, 2, 3, 4),
    "hsdp": (2, 4),
    "tp": (2, 3, 4),
    "fsdp2tp": (4,),
    "pipeline": (2, 4),
    "pipeline_two_names": (2, 4),
    "zero1": (1, 2, 3, 4),
    "zero3": (1, 2, 3, 4),
    "fsdp1": (2, 3, 4),
}
"""The ways in wraps.py, and on how many ranks each works."""
Case = tuple[str, int]
EVERY: list[Case] = [(way, ranks) for way, several in RANKS.items() for ranks in several]
SOME: list[Case] = [
    ("plain", 1),
    ("fsdp2", 3),
    ("pipeline", 4),
    ("zero1", 2),
    ("tp", 4),
    ("ddp", 2),
    ("fsdp1", 4),
    ("pipeline_two_names", 4),
    ("hsdp", 4),
    ("zero3", 3),
    ("fsdp2tp", 4),
    ("fsdp2", 4),
    ("pipeline", 2),
    ("tp", 3),
]
"""Each way once, and then some on other numbers of ranks."""
STEPS = (3, 0, 8)
"""Each way into another one; in the long run also into the same one and a third."""


def pairs() -> list[ParameterSet]:
    if os.environ.get("LASTSTEP_ALL_LAYOUTS"):
        return [pytest.param(*both) for both in itertools.product(EVERY, EVERY)]
    count = len(SOME)
    return [
        pytest.param(
            SOME[at],
            SOME[(at + step) % count],
            marks=() if (step == 3 and at < 12) or (step, at) == (0, 1) else pytest.mark.long,
        )
        for at in range(count)
        for step in STEPS
    ]


@pytest.fixture(scope="module")
def saved(crew: Crew) -> Iterator[Callable[[Case], Path]]:
    """The run of a case; saved when it is first asked for."""
    folder = Path(tempfile.mkdtemp(prefix="laststep-ranks-"))
    done: set[Case] = set()

    def run_of(case: Case) -> Path:
        run = folder / f"{case[0]}-{case[1]}"
        if case not in done:
            shutil.rmtree(run, ignore_errors=True)
            crew("tasks:save_as", case[1], way=case[0], run=str(run))
            done.add(case)
        return run

    yield run_of
    shutil.rmtree(folder)


def named(case: Case) -> str:
    return f"{case[0]}{case[1]}"


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), pairs(), ids=named)
def test_any_layout_loads_into_any_other_and_goes_on(
    crew: Crew, saved: Callable[[Case], Path], source: Case, target: Case
) -> None:
    run = saved(source)
    trained = (EVERY.index(source) + EVERY.index(target)) % 2 == 0
    crew(
        "tasks:load_as",
        target[1],
        way=target[0],
        run=str(run),
        trained=trained,
        exactly=source == target,
    )


@pytest.mark.parametrize("source", [("pipeline", 4), ("fsdp2tp", 4), ("zero3", 3)], ids=named)
def test_one_process_loads_all_of_it_without_a_live_state(
    crew: Crew, saved: Callable[[Case], Path], source: Case
) -> None:
    crew("tasks:load_by_itself", 1, run=str(saved(source)))
