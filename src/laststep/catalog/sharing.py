"""Which checkpoints have files in common, and what deleting some of them gives back.

Pure, from what indexes say. A file is known by the checkpoint that it was written for, the name
that it has there, and its size: a file that was written twice with the same content is two. A copy of a run whose links became files of their own takes more room than this
says.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.format.index import StoredFile


class Holding(NamedTuple):
    """What lies in the folder of a checkpoint."""

    folder: str
    stored_bytes: int
    """Of all files there, the manifest too."""
    files: tuple[StoredFile, ...]
    """Its data files."""


class FileId(NamedTuple):
    """What files have in common that are one."""

    written_for: str
    name: str
    size_bytes: int


class Sharing:
    """The files of all checkpoints of a run."""

    def __init__(self, held: Iterable[Holding]) -> None:
        self._stored_bytes: dict[str, int] = {}
        self._files: dict[str, list[FileId]] = {}
        self._folders: dict[FileId, list[str]] = {}
        self._order: dict[str, int] = {}
        for folder, stored_bytes, files in held:
            self._order[folder] = len(self._order)
            self._stored_bytes[folder] = stored_bytes
            self._files[folder] = [file_id(file, folder) for file in files]
            for file in self._files[folder]:
                self._folders.setdefault(file, []).append(folder)

    def freed_bytes(self, folders: Iterable[str]) -> int:
        """What deleting all of these folders gives back: a file goes with the last that has it."""
        chosen = set(folders)
        names = Counter(file for folder in chosen for file in self._files[folder])
        kept = sum(
            file.size_bytes * (count - (count == len(self._folders[file])))
            for file, count in names.items()
        )
        # A file that is missing was not stored: there may be less than the manifests say.
        return max(sum(self._stored_bytes[folder] for folder in chosen) - kept, 0)

    def stored_bytes(self) -> int:
        """What all of them take together."""
        return self.freed_bytes(self._stored_bytes)

    def shared_bytes(self, folder: str) -> int:
        """Of the files in this folder, those that lie in others too."""
        files = self._files[folder]
        return sum(file.size_bytes for file in files if len(self._folders[file]) > 1)

    def sharers(self, folder: str) -> tuple[str, ...]:
        """The other folders that have a file of this one, in the order of checkpoints."""
        others = {other for file in self._files[folder] for other in self._folders[file]}
        return tuple(sorted(others - {folder}, key=self._order.__getitem__))


def file_id(file: StoredFile, folder: str) -> FileId:
    """Which file that is, which lies in `folder`."""
    stem, _, suffix = file.name.rpartition(".")
    name = f"{stem.partition('~')[0]}.{suffix}"
    return FileId(file.origin or folder, name, file.size_bytes)
