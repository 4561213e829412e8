"""Carry state from live objects through a checkpoint on disk into other live objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL_POOL_BYTES = 64 << 20

Items = dict[str, object]


@pytest.fixture
def carry(tmp_path: Path) -> Callable[..., laststep.Restored]:
    """`carry(source, target)`: save the items of `source`, restore them into those of `target`."""
    count = 0

    def go(
        source: Items, target: Items, *, saves: int = 1, allow_pickle: bool = False, **how: object
    ) -> laststep.Restored:
        nonlocal count
        count += 1
        run = tmp_path / f"run{count}"
        settings = {
            "flush": "thread",
            "host_memory_bytes": SMALL_POOL_BYTES,
            "allow_pickle": allow_pickle,
            "progress": False,
        }
        with laststep.Checkpointer(run, items=source, **as_keywords(settings)) as checkpointer:
            for step in range(saves):  # the second save takes the way of what is already known
                checkpointer.save(step).wait()
        with laststep.Checkpointer(run, items=target, **as_keywords(settings)) as checkpointer:
            return checkpointer.restore(**how)

    return go
