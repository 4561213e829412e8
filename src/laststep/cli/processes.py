"""Which processes a process has started, read from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """The processes whose parent is `parent`, zombies included."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The second field is the command in brackets, which may hold anything.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(stat.parent.name))
    return children
