"""Which processes a process has started, read from /proc."""

from __future__ import annotations

from pathlib import Path


def children_of(parent: int) -> list[int]:
    """The processes whose parent is `parent`, zombies included."""
    return [pid for pid, its_parent in _parents() if its_parent == parent]


def _parents() -> list[tuple[int, int]]:
    parents: list[tuple[int, int]] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        # The second field is the command in brackets, which may hold anything.
        parents.append((int(folder.name), int(text.rpartition(")")[2].split()[1])))
    return parents
