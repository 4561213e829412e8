"""What a place for files must be able to do, as a protocol that every store implements.

A store of one's own subclasses `Store` and writes what is abstract; the rest has an answer that is
right where there is no disk. Knows nothing of checkpoints. Names are relative, `/`-separated and
checked by `check_name`. A call that fails raises `NotFoundError`, `AlreadyExistsError` or
`StorageError`, never a bare `OSError`. It raises `UsageError` before it would change what lies
behind a symbolic link. All methods are safe to call from several threads; a `FileWriting` or
`FileReading` is too, as long as ranges do not overlap."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

import msgspec

from laststep.errors import UsageError

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
    """Whether it points elsewhere; the rest then tells of what it points to."""


class FileWriting(Protocol):
    """A new file being written at given offsets; not durable before `finish`."""

    alignment_bytes: int
    """Offsets, lengths and addresses of `write_at` MUST be multiples of this (else
    `UsageError`)."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`; several threads may call this at once."""

    def finish(self, size_bytes: int) -> None:
        """Cut the file to its exact size, make it durable and close it."""

    def close(self) -> None:
        """Close without promising anything; does nothing after `finish`."""


class FileReading(Protocol):
    """An existing file, read at given offsets."""

    alignment_bytes: int
    """Reads whose offset, length and address are multiples of this are not copied; others are."""

    size_bytes: int

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; fewer bytes only at the end of the file. Returns how many."""

    def close(self) -> None: ...


@runtime_checkable
class InPlace(Protocol):
    """A `FileReading` that has what it reads in memory of its own: who only looks saves a copy."""

    at_hand: bool
    """Whether it lies there before anybody asks, so that nobody waits for it."""

    def in_place(self, offset: int, size_bytes: int) -> memoryview | None:
        """These bytes, which the file MUST have; None where they do not lie together. Nobody writes
        into them."""


@runtime_checkable
class PrefersCached(Protocol):
    """A `FileReading` that reads past a cache of the system, and can be told not to."""

    def prefer_cached(self) -> None:
        """From now on, take what that cache has from there. What is asked for a second time MUST
        come from where it is stored: somebody doubts it."""


class Store(Protocol):
    """A folder-like place for files."""

    has_marks: bool = True
    """Whether what is marked on a lock is seen by others; if not, nobody is asked to mark."""
    same_everywhere: bool = False
    """Whether all machines see the same, as no mount can promise: then one rank looks for all."""

    def locks_tell(self) -> bool:
        """Whether a lock that is free proves that nobody holds it, on whatever machine."""
        return False

    @property
    @abstractmethod
    def url(self) -> str:
        """How a person names this place, and what opens it again (`registry.open_store`).

        With `/` and the name of a folder behind it, it opens that folder.
        """

    @abstractmethod
    def list(self, folder: str) -> list[StoreEntry]:
        """The entries of one folder, by name; an absent folder is empty. "" is the root."""

    def file_names(self, folder: str) -> tuple[str, ...]:
        """The names of the files in one folder, in any order; may cost much less than `list`."""
        return tuple(entry.name for entry in self.list(folder) if not entry.is_folder)

    def folder_names(self, folder: str) -> tuple[str, ...]:
        """The names of the folders in one folder, in any order; may cost much less than `list`."""
        return tuple(entry.name for entry in self.list(folder) if entry.is_folder)

    @abstractmethod
    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """A whole small file. `CorruptError` where it is larger than `limit_bytes`."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Make a small file, all or nothing and durable; `AlreadyExistsError` where the name is
        taken.

        Its folder MUST be there (else `NotFoundError`). Of several at once exactly one succeeds.
        After
        `StorageError` the file is there whole or not at all; `read` tells.
        """

    @abstractmethod
    def make_folder(self, name: str, *, parents: bool = True) -> None:
        """Make one folder, durably, and its parents; `AlreadyExistsError` where it is there
        already.

        Without `parents`, `NotFoundError` where the folder that it is to be in is absent.
        """

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable, where they are not from the start. "" is the root."""
        if name:
            check_name(name)

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove one file, durably; an absent one is fine."""

    @abstractmethod
    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        """Remove a folder and all below it, `first` (a name within it) durably before the rest.

        The name of the folder goes before what is left in it: nobody ever sees a part of it, and
        nobody can create a file in it meanwhile. Symbolic links are removed, never followed; a
        `name` that is or passes through one is refused with `UsageError`. An absent folder is fine.
        """

    @abstractmethod
    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        """A new file; `AlreadyExistsError` where the name is taken, `NotFoundError` where its
        folder is absent.

        Room for it is asked for where possible (`StorageError` where there is not enough).
        """

    def link(self, name: str, new: str) -> bool:
        """Give a file a second name in another folder, without a copy; durable with `sync_folder`.
        `AlreadyExistsError` where that name is taken, `NotFoundError` where the file or the folder
        is absent. False where the place cannot do that, or not with this file."""
        check_name(name)
        check_name(new)
        return False

    @abstractmethod
    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        """`cached=False` reads past the page cache where it can: what is read is what is stored."""

    @abstractmethod
    def lock(self, name: str) -> Lock:
        """Take the lock `name` for this process's life or until `close`; `AlreadyExistsError` if
        held.

        Also refused where this process holds it already. A forked child does not inherit it. It is
        listed as a file.
        """

    @abstractmethod
    def is_locked(self, name: str) -> bool:
        """Whether a live process holds that lock (False where the file is absent)."""

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        """The places of that lock that its holders have marked, as (first, last), in order."""
        check_name(name)
        return ()

    def free_bytes(self) -> int | None:
        """The room left. None, and never 0, where the place does not know how much there is."""
        return None


class Lock(Protocol):
    """A held lock; it is let go of when all who hold it are dead.

    Beside the lock itself its holders may mark places of it, numbered from 1, for others to see: a
    restore waits for saves that are marked as coming. `StorageError` where that fails. Without
    marks a restore waits only for saves that have begun.
    """

    def mark(self, place: int) -> None: ...

    def clear(self, place: int) -> None: ...

    def fileno(self) -> int | None:
        """The descriptor of a lock of an open file (`F_OFD_SETLK`): a process that gets a copy of
        it holds the lock too (`locks.adopt`). None where the lock is not of that kind."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


def check_name(name: str) -> str:
    """`name`, if it is a relative path of plain parts; else `UsageError`."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UsageError(
            "refused a name that could leave its store",
            expected="a relative path without empty, '.' or '..' parts",
            found=repr(name),
        )
    return name
