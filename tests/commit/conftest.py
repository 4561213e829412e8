"""Jobs in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulated import SimulatedJob

# Lets the tests import what they share by its name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def simulate() -> Iterator[Callable[..., SimulatedJob]]:
    """`simulate(ranks, group=…)`: a job."""
    from simulated import SimulatedJob

    started: list[SimulatedJob] = []

    def go(ranks: int, *, group: int | None = None) -> SimulatedJob:
        started.append(SimulatedJob(ranks, group=group))
        return started[-1]

    yield go
    for job in started:
        job.close()
