"""Find the child processes of a process in /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`, including zombies."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            # The second field is the command in parentheses, which may contain anything.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(stat.parent.name))
    return children
