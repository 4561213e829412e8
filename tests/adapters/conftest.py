"""Real ranks for the adapters of frameworks, and modules that the tests import by their names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crew import Crew

HERE = Path(__file__).parent
# Lets the tests here import what they share, with each other and with tests/ranks, as ranks do.
sys.path += [str(HERE), str(HERE.parent / "ranks")]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """The crew of tests/ranks, whose processes can import the modules here as well."""
    from crew import Crew

    with_all = Crew(size=2, also=(HERE,))
    yield with_all
    with_all.close()


@pytest.fixture
def fresh() -> Callable[..., list[Any]]:
    """The same, in new processes for each task: what DeepSpeed and Megatron set up lasts for as
    long as a process."""
    from crew import Crew

    def run(task: str, ranks: int, **arguments: Any) -> list[Any]:
        with_all = Crew(size=0, also=(HERE,))
        try:
            return with_all(task, ranks, timeout_s=240, **arguments)
        finally:
            with_all.close()

    return run
