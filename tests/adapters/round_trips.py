"""Save on ranks that train in one way, load on ranks that train in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Way = tuple[str, int]
"""A name in `wraps.WAYS`, and the number of ranks."""


def save_and_load(
    crew: Callable[..., list[Any]], module: str, run: Path, source: Way, target: Way
) -> None:
    """Load into new state and into state that was trained otherwise, and train on; by the tasks of
    a module that knows both ways."""
    crew(f"{module}:save_as", source[1], way=source[0], run=str(run))
    for trained in (False, True):
        crew(
            f"{module}:load_as",
            target[1],
            way=target[0],
            run=str(run),
            trained=trained,
            exactly=source == target,
        )
