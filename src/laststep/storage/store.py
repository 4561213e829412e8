"""The protocol that every store implements.

A custom store subclasses `Store` and implements the abstract methods; the defaults of the others
are right for a store without a disk. Stores know nothing about checkpoints. Names are relative,
`/`-separated and checked by `check_name`. A call that fails raises `NotFoundError`,
`AlreadyExistsError` or `StorageError`, never a bare `OSError`, and `UsageError` rather than change
the target of a symbolic link. All methods are safe to call from several threads; so are those of
`FileWriting` and `FileReading` if their ranges do not overlap.
"""

from __future__ import annotations

import mmap
from abc import abstractmethod
from typing import Protocol, runtime_checkable

import msgspec

from laststep.constants import ALIGN_BYTES, align_up
from laststep.errors import CorruptError, UsageError

__all__ = [
    "FileReading",
    "FileWriting",
    "InPlace",
    "Lock",
    "PrefersCached",
    "Store",
    "StoreEntry",
    "check_name",
]


class StoreEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One name in a folder."""

    name: str
    is_folder: bool
    size_bytes: int
    modified_s: float
    is_link: bool = False
    """True for a symbolic link; the other fields then describe its target."""


class FileWriting(Protocol):
    """A new file being written at given offsets; not durable before `finish`."""

    alignment_bytes: int
    """Offsets, lengths and addresses of `write_at` MUST be multiples of this (else
    `UsageError`)."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`; several threads may call this concurrently."""

    def finish(self, size_bytes: int) -> None:
        """Truncate the file to its exact size, make it durable and close it."""

    def close(self) -> None:
        """Close without making the file durable; does nothing after `finish`."""


def write_aligned(writer: FileWriting, offset: int, data: bytes) -> None:
    """Write bytes from ordinary memory through a page-aligned copy, which a direct write needs."""
    with mmap.mmap(-1, align_up(max(len(data), 1), ALIGN_BYTES)) as buffer:
        buffer[: len(data)] = data
        size = align_up(len(data), writer.alignment_bytes)
        with memoryview(buffer) as view, view[:size] as used:
            writer.write_at(offset, used)


class FileReading(Protocol):
    """An existing file, read at given offsets."""

    alignment_bytes: int
    """Reads whose offset, length and address are multiples of this avoid a copy."""

    size_bytes: int

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset` and return the number of bytes, which is smaller only at the
        end of the file."""

    def close(self) -> None: ...


@runtime_checkable
class InPlace(Protocol):
    """A `FileReading` that holds the bytes in its own memory: a caller that only looks at them
    saves a copy."""

    at_hand: bool
    """True if the bytes are in memory before they are requested, so that a call never waits for
    them."""

    def in_place(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return a view of these bytes, which the file MUST have; None if they are not contiguous.
        The caller must not write to it."""


@runtime_checkable
class PrefersCached(Protocol):
    """A `FileReading` that bypasses a cache of the system, and can be switched to use it."""

    def prefer_cached(self) -> None:
        """Serve cached bytes from the cache from now on. A second read of the same bytes MUST come
        from the storage itself: the caller doubts them."""


class Store(Protocol):
    """A folder-like place for files."""

    has_marks: bool = True
    """True if other processes see the marks on a lock; if False, no marks are set."""
    same_everywhere: bool = False
    """True if all machines see the same files, which no mount can guarantee: then one rank looks on
    behalf of all."""

    def locks_tell(self) -> bool:
        """Return whether a free lock proves that no process, on any machine, holds it."""
        return False

    @property
    @abstractmethod
    def url(self) -> str:
        """The name of this store for people, which also opens it again (`registry.open_store`).

        Followed by `/` and the name of a folder, it opens that folder.
        """

    @abstractmethod
    def list(self, folder: str) -> list[StoreEntry]:
        """Return the entries of one folder, sorted by name; empty if it does not exist. "" is the
        root."""

    def file_names(self, folder: str) -> tuple[str, ...]:
        """Return the names of the files in one folder, in any order; may be much cheaper than
        `list`."""
        return tuple(entry.name for entry in self.list(folder) if not entry.is_folder)

    def folder_names(self, folder: str) -> tuple[str, ...]:
        """Return the names of the folders in one folder, in any order; may be much cheaper than
        `list`."""
        return tuple(entry.name for entry in self.list(folder) if entry.is_folder)

    @abstractmethod
    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return a whole small file; raise `CorruptError` if it is larger than `limit_bytes`."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Create a small file, atomically and durably; raise `AlreadyExistsError` if the name is
        taken.

        Its folder MUST exist (else `NotFoundError`). Of several concurrent calls exactly one
        succeeds. After `StorageError` the file either exists completely or not at all; `read` shows
        which.
        """

    @abstractmethod
    def make_folder(self, name: str, *, parents: bool = True) -> None:
        """Make one folder, durably, and its parents; raise `AlreadyExistsError` if it exists.

        Without `parents`, raise `NotFoundError` if its parent does not exist.
        """

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable, if they are not already. "" is the root."""
        if name:
            check_name(name)

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete one file, durably; a missing one is ignored."""

    @abstractmethod
    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        """Delete a folder and everything below it, `first` (a name within it) durably before the
        rest.

        The folder's name disappears before the remaining contents: no process ever sees a part of
        it or can create a file in it meanwhile. Symbolic links are removed, never followed; a
        `name` that is or passes through one raises `UsageError`. A missing folder is ignored.
        """

    @abstractmethod
    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        """Create a file; raise `AlreadyExistsError` if the name is taken and `NotFoundError` if its
        folder does not exist.

        Space is allocated in advance if possible (`StorageError` if there is not enough).
        """

    def link(self, name: str, new: str) -> bool:
        """Give a file a second name in another folder, without a copy; durable after `sync_folder`.
        Raise `AlreadyExistsError` if that name is taken and `NotFoundError` if the file or the
        folder does not exist. Return False if the store cannot link, or not this file."""
        check_name(name)
        check_name(new)
        return False

    @abstractmethod
    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        """Open a file for reading. With `cached=False`, bypass the page cache if possible, so that
        the bytes come from the storage itself."""

    @abstractmethod
    def lock(self, name: str) -> Lock:
        """Take the lock `name` until `close` or the end of this process; raise `AlreadyExistsError`
        if it is held, also by this process.

        A forked child does not inherit the lock. It is listed as a file.
        """

    @abstractmethod
    def is_locked(self, name: str) -> bool:
        """Return whether a live process holds that lock; False if the file does not exist."""

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the places of that lock that its holders have marked, as (first, last) ranges in
        order."""
        check_name(name)
        return ()

    def free_bytes(self) -> int | None:
        """Return the free space; None, and never 0, if the store does not know it."""
        return None


class Lock(Protocol):
    """A held lock; it is released when all its holders are dead.

    Its holders may also mark places of it, numbered from 1, for other processes to see: a restore
    waits for saves that have such a pending marker. `StorageError` is raised if that fails. Without
    marks a restore waits only for saves that have begun.
    """

    def mark(self, place: int) -> None:
        return

    def clear(self, place: int) -> None:
        return

    def fileno(self) -> int | None:
        """Return the descriptor of an open-file lock (`F_OFD_SETLK`): a process that receives a
        copy of it holds the lock too (`locks.FileLock`). Return None for any other kind of lock."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the lock."""


def check_name(name: str) -> str:
    """Return `name` if it is a relative path of plain parts; else raise `UsageError`."""
    parts = name.split("/")
    if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise UsageError(
            "name could escape its store",
            expected="a relative path without empty, '.' or '..' parts",
            found=repr(name),
        )
    return name


def too_large(where: str, limit_bytes: int, size_bytes: int) -> CorruptError:
    """Return the error for a small file that is larger than its reader accepts."""
    return CorruptError(
        "file too large",
        where=where,
        expected=f"at most {limit_bytes} bytes",
        found=f"{size_bytes} bytes",
        remedy="restore it from a copy, or take another checkpoint",
    )
