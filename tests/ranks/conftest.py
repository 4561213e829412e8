"""Real processes with gloo over loopback; they stay for the session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crew import Crew

# Lets the tests here import the tasks by their names, as the processes do.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """`crew("module:function", ranks, **arguments)`: the results, by rank."""
    from crew import Crew

    with_all = Crew()
    yield with_all
    with_all.close()
