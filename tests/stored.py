"""What lies in the folder of a run, for tests that look at it or damage it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Change these bits of the byte at that place, in the file itself: its other names see it."""
    with path.open("r+b") as file:
        file.seek(at)
        [old] = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ bits]))


def folders(run: Path) -> list[str]:
    """The names of the folders of checkpoints, finished or not."""
    return sorted(path.name for path in run.glob("step-*"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder but locks, which belong to their place."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }
