"""The registry of the faults of `system`: each module of faults enters its functions here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from scene import Scene

FAULTS: dict[str, Callable[[Scene], None]] = {}


def fault(name: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Enter a function into the registry."""

    def enter(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        FAULTS[name] = function
        return function

    return enter
