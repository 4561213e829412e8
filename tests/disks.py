"""Disks that fail or record, for use in a `DirectoryStore`.

`FailingDisk` fails the n-th changing system call; `RecordingDisk` performs and records each one.
Neither knows the purpose of the calls. Both count across threads under one mutex.
"""

from __future__ import annotations

import enum
import os
import threading
from dataclasses import dataclass

from laststep.storage.files import Disk


class Kind(enum.Enum):
    """A changing system call."""

    CREATE_FILE = "create_file"
    WRITE = "write"
    TRUNCATE = "truncate"
    ALLOCATE = "allocate"
    SYNC = "sync"
    SYNC_FOLDER = "sync_folder"
    LINK = "link"
    RENAME = "rename"
    UNLINK = "unlink"
    MAKE_FOLDER = "make_folder"
    REMOVE_FOLDER = "remove_folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One call. `file` is the serial number of the `CREATE_FILE` that opened the file."""

    kind: Kind
    path: str
    file: int | None = None
    to: str | None = None
    offset: int = 0
    data: bytes = b""
    size_bytes: int = 0


class _ObservedDisk(Disk):
    """Reports every changing call to `before` and `after`, and tracks the file of each
    descriptor."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: dict[int, tuple[int, str]] = {}
        self._files = 0

    def before(self, kind: Kind) -> None:
        """Called before each call; may raise."""

    def after(self, change: Change) -> None:
        """Called after each call that succeeded."""

    def create_file(self, path: str, *, direct: bool) -> int:
        self.before(Kind.CREATE_FILE)
        fd = super().create_file(path, direct=direct)
        with self._mutex:
            self._files += 1
            serial = self._files
            self._open[fd] = (serial, path)
        self.after(Change(kind=Kind.CREATE_FILE, path=path, file=serial))
        return fd

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.before(Kind.WRITE)
        count = super().write(fd, data, offset)
        self._after_file(Kind.WRITE, fd, offset=offset, data=bytes(data[:count]))
        return count

    def truncate(self, fd: int, size_bytes: int) -> None:
        self.before(Kind.TRUNCATE)
        super().truncate(fd, size_bytes)
        self._after_file(Kind.TRUNCATE, fd, size_bytes=size_bytes)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self.before(Kind.ALLOCATE)
        super().allocate(fd, size_bytes)
        self._after_file(Kind.ALLOCATE, fd, size_bytes=size_bytes)

    def sync(self, fd: int) -> None:
        self.before(Kind.SYNC)
        super().sync(fd)
        self._after_file(Kind.SYNC, fd)

    def sync_folder(self, path: str) -> None:
        self.before(Kind.SYNC_FOLDER)
        super().sync_folder(path)
        self.after(Change(kind=Kind.SYNC_FOLDER, path=path))

    def link(self, path: str, new: str) -> None:
        self.before(Kind.LINK)
        super().link(path, new)
        self.after(Change(kind=Kind.LINK, path=path, to=new))

    def rename(self, path: str, new: str) -> None:
        self.before(Kind.RENAME)
        super().rename(path, new)
        self.after(Change(kind=Kind.RENAME, path=path, to=new))

    def rename_new(self, path: str, new: str) -> None:
        self.before(Kind.RENAME)
        super().rename_new(path, new)
        self.after(Change(kind=Kind.RENAME, path=path, to=new))

    def unlink(self, path: str) -> None:
        self.before(Kind.UNLINK)
        super().unlink(path)
        self.after(Change(kind=Kind.UNLINK, path=path))

    def make_folder(self, path: str) -> None:
        self.before(Kind.MAKE_FOLDER)
        super().make_folder(path)
        self.after(Change(kind=Kind.MAKE_FOLDER, path=path))

    def remove_folder(self, path: str) -> None:
        self.before(Kind.REMOVE_FOLDER)
        super().remove_folder(path)
        self.after(Change(kind=Kind.REMOVE_FOLDER, path=path))

    def close(self, fd: int) -> None:
        with self._mutex:
            self._open.pop(fd, None)
        super().close(fd)

    def _after_file(
        self, kind: Kind, fd: int, *, offset: int = 0, data: bytes = b"", size_bytes: int = 0
    ) -> None:
        with self._mutex:
            serial, path = self._open[fd]
        self.after(
            Change(
                kind=kind, path=path, file=serial, offset=offset, data=data, size_bytes=size_bytes
            )
        )


class FailingDisk(_ObservedDisk):
    """Fails the n-th changing call (counted from 1) with error `number`; with `lasting`, all later
    ones too.

    With `kinds`, only calls of these kinds count and fail. If every call fails from then on, the
    process sees a lost disk, and the disk is left as if the process had died.
    """

    def __init__(
        self,
        n: int,
        number: int,
        *,
        lasting: bool = False,
        kinds: frozenset[Kind] = frozenset(Kind),
    ) -> None:
        super().__init__()
        self.calls = 0
        self._n = n
        self._number = number
        self._lasting = lasting
        self._kinds = kinds

    def before(self, kind: Kind) -> None:
        """Count the call and raise `OSError` if it is one that must fail."""
        if kind not in self._kinds:
            return
        with self._mutex:
            self.calls += 1
            calls = self.calls
        if calls == self._n or (self._lasting and calls > self._n):
            raise OSError(self._number, os.strerror(self._number))


class RecordingDisk(_ObservedDisk):
    """Performs every call and records it, with the bytes of every write, in `changes`."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []

    def after(self, change: Change) -> None:
        """Append the call to `changes`."""
        with self._mutex:
            self.changes.append(change)
