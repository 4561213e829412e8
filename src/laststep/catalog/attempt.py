"""One attempt to write a checkpoint: its name, the calls begin, put, commit and abort, its decision
and its indexes.

The flusher, the DCP adapter, copies, replication and recovery all write through `Attempt`. Commit
and abort compete to create one name, `manifest.json`: the first to create it makes the final
decision, and the other reads that decision. A commit is reported only once its name is durable, so
every process that finds a commit syncs the folder first. Several processes may hold the same
attempt, and all functions are thread-safe. Knows nothing of terms, lineage or retention.

A damaged index is read a second time, bypassing every cache, before `CorruptError` is raised;
`NotFoundError` is raised if the whole checkpoint has been deleted since its manifest was read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import re
import socket
import time
from contextlib import closing
from posixpath import dirname
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from laststep.codecs.digests import DIGEST_NAME
from laststep.constants import MANIFEST_NAME
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.process.threads import ready
from laststep.storage.store import write_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from laststep.storage.store import FileWriting, Store, StoreEntry

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", bound="_HasFolder")
_Result = TypeVar("_Result")

RUN_NAME = "run.json"
PIN_NAME = "pinned"
MANIFEST_LIMIT_BYTES = 256 << 20
INDEX_LIMIT_BYTES = 4 << 30

_FOLDER = re.compile(r"step-([0-9]{8,20})\.([0-9]{1,20})-([0-9]{1,20})")
COPYING_NAME = re.compile(r"copying(-r[0-9]{5,8})?\.lock")
_PAUSES_S = (0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8)


class AttemptName(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The name of an attempt or a checkpoint: its step, the term of its writer, and its number in
    that term. Every name has exactly one folder, and every folder at most one name."""

    step: int
    term: int
    attempt: int

    @property
    def point(self) -> tuple[int, int]:
        return self.term, self.attempt

    @property
    def folder(self) -> str:
        return f"step-{self.step:08d}.{self.term}-{self.attempt}"


by_point = operator.attrgetter("term", "attempt")


@functools.lru_cache(maxsize=1 << 14)
def parse_folder(folder: str) -> AttemptName | None:
    """Return a folder name's attempt, if any; cached, because scans parse each name repeatedly."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    step, term, attempt = map(int, match.groups())
    name = AttemptName(step=step, term=term, attempt=attempt)
    return name if term >= 1 and attempt >= 1 and name.folder == folder else None


_name_in = functools.partial(msgspec.convert, type=ready(AttemptName), from_attributes=True)
"""The name that a manifest states."""


def copying_name(first_rank: int | None = None) -> str:
    """Return the lock's name in an uncommitted copy, by the first rank copied; None: all are."""
    return f"copying{'' if first_rank is None else f'-r{first_rank:05d}'}.lock"


class Attempt:
    """The folder of one attempt. `check` raises `AbortedError` if this writer may no longer commit;
    it is called after the folder is created and again before the commit."""

    def __init__(
        self, store: Store, name: AttemptName, check: Callable[[], None] = lambda: None
    ) -> None:
        self.store = store
        self.name = name
        self.folder = name.folder
        self._check = check

    def begin(self) -> None:
        """Create the folder, then check that this writer may still commit: a newer writer is either
        seen by the check, or finds the folder and aborts the attempt. Raise `AlreadyExistsError` if
        the folder exists."""
        self.store.make_folder(self.folder)
        try:
            self._check()
        except AbortedError as error:
            abort(self.store, self.folder, f"the run was taken over by {error.found}")
            raise

    # Put

    def make_folders(self, names: Iterable[str]) -> None:
        """Create the subfolders of the attempt's folder that these files need."""
        for inner in inner_folders(names):
            with contextlib.suppress(AlreadyExistsError):  # another rank may be first
                self.store.make_folder(f"{self.folder}/{inner}", parents=False)

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        """Open a new file. It is durable once the writer is finished and its folder is synced."""
        return self.store.open_writer(f"{self.folder}/{name}", expected_bytes=expected_bytes)

    def put(self, name: str, data: bytes) -> None:
        """Write a whole file. It is durable once its folder is synced."""
        with closing(self.open_writer(name, expected_bytes=len(data))) as writer:
            write_aligned(writer, 0, data)
            writer.finish(len(data))

    def sync(self, names: Iterable[str]) -> None:
        """Make the names of these finished files durable, and all names in the folder itself."""
        for inner in (*inner_folders(names), ""):
            self.store.sync_folder(f"{self.folder}/{inner}".rstrip("/"))

    # Decide

    def commit(self, commit: manifest.Commit) -> None:
        """Make the checkpoint visible and durable. Raise `AbortedError` if another process has
        aborted it.

        All files MUST be finished. The call may be repeated with the same commit. After
        `StorageError` the checkpoint does not exist, unless the error states that this is unknown.
        """
        data = manifest.encode(commit)
        if len(data) > MANIFEST_LIMIT_BYTES:
            raise UsageError(
                "a manifest would be too large to be read",
                where=f"{self.store.url}/{self.folder}",
                expected=f"at most {MANIFEST_LIMIT_BYTES} bytes",
                found=f"{len(data)} bytes",
                remedy="it holds metrics and metadata: save large values as an item",
            )
        self.publish(data)

    def publish(self, data: bytes) -> None:
        """Commit with these manifest bytes; a copy reuses the bytes of its original."""
        self._check()
        try:
            # The names of the data files have to be durable before anything refers to them.
            self.store.sync_folder(self.folder)
            self.store.create(f"{self.folder}/{MANIFEST_NAME}", data)
        except NotFoundError as error:
            raise AbortedError(
                "another writer aborted the save",
                where=f"{self.store.url}/{self.folder}",
                found="its folder was removed",
                remedy="only one job at a time may save to a run",
            ) from error
        except (AlreadyExistsError, StorageError) as error:
            self._settle(data, error)

    def _settle(self, data: bytes, error: AlreadyExistsError | StorageError) -> None:
        """After an unclear commit, read the decision; raise unless it is this one and durable."""
        where = f"{self.store.url}/{self.folder}"
        try:
            decided = read_decision(self.store, self.folder)
            # Bytes, not values: NaN is not equal to itself.
            if (
                isinstance(decided, manifest.Commit)
                and read_manifest(self.store, self.folder) == data
            ):
                # Repeating a failed sync is safe for names, though not for the bytes of a file:
                # names are in the filesystem's journal, and a journal that failed keeps failing.
                self.store.sync_folder(self.folder)
                return
        except StorageError as second:
            # Do not withdraw the commit: another process may have found and reported it.
            unknown = StorageError(
                "it is not known whether a checkpoint is committed",
                where=where,
                found=second.found,
                remedy="`laststep ls` shows it if it is",
            )
            unknown.transient = second.transient
            raise unknown from second
        if isinstance(decided, manifest.Abort):
            raise AbortedError(
                "the save was aborted", where=where, found=f"{decided.reason} (by {decided.by})"
            )
        if decided is None:
            raise error
        raise AlreadyExistsError("a different commit took the place of this attempt", where=where)

    def abort(self, reason: str) -> bool:
        """Abort the attempt and delete its files, which no other process may still be writing.
        Return True if it was committed instead; that commit is then durable.

        The abort must not be deleted before the other files: the attempt would be undecided again,
        and a writer that was wrongly considered dead could commit a half-deleted checkpoint.
        `delete_folder` therefore takes the folder's name away first, together with the abort.
        """
        try:
            if isinstance(abort(self.store, self.folder, reason), manifest.Commit):
                return True
            if read_decision(self.store, self.folder) is None:
                return False  # somebody has removed it already; a new copy may have its name
        except StorageError:
            # A full disk has no room for an abort either. Deleting the folder also prevents a
            # commit.
            if isinstance(read_decision(self.store, self.folder), manifest.Commit):
                raise
        self.store.delete_folder(self.folder)
        return False


def inner_folders(names: Iterable[str]) -> list[str]:
    """Return the subfolders of a checkpoint's folder that contain these files."""
    return sorted({*map(dirname, names)} - {""})


def abort(store: Store, folder: str, reason: str) -> manifest.Commit | manifest.Abort:
    """Abort an undecided attempt, keep its files, and return the decision; a commit is durable."""
    own = manifest.Abort(reason=reason, by=f"process {os.getpid()} on {socket.gethostname()}")
    try:
        store.create(f"{folder}/{MANIFEST_NAME}", manifest.encode(own))
    except NotFoundError:
        pass  # Without its folder the attempt cannot be committed.
    except AlreadyExistsError:
        decided = read_decision(store, folder)
        if isinstance(decided, manifest.Commit):
            store.sync_folder(folder)
        return decided or own
    return own


# Reading decisions


def read_decision(store: Store, folder: str) -> manifest.Commit | manifest.Abort | None:
    """Return the decision, or None if there is none yet. Raise `CorruptError` if it is damaged."""
    try:
        data = read_manifest(store, folder)
    except NotFoundError:
        return None
    where = f"{store.url}/{folder}/{MANIFEST_NAME}"
    decided = manifest.decode(data, where=where)
    if isinstance(decided, manifest.Commit) and _name_in(decided) != parse_folder(folder):
        raise CorruptError(
            "a manifest is not that of its folder",
            where=where,
            expected=folder,
            found=_name_in(decided).folder,
            remedy=f"give the folder its own name back; {CorruptError.usual_remedy}",
        )
    return decided


def read_manifest(store: Store, folder: str) -> bytes:
    """Return the bytes of a manifest. Raise `NotFoundError` if there is none."""
    return store.read(f"{folder}/{MANIFEST_NAME}", limit_bytes=MANIFEST_LIMIT_BYTES)


def unknown_decision(at: AttemptName, found: str) -> StorageError:
    """Return the error for a save of which nobody can read whether it is committed."""
    return StorageError(
        f"unknown whether step {at.step} is committed",
        where=at.folder,
        found=found,
        remedy="`laststep ls` shows it if it is",
    )


def is_checkpoint(store: Store) -> bool:
    """Return True if the store's root is the folder of a checkpoint."""
    try:
        return exists(store, MANIFEST_NAME)
    except LaststepError:
        return False


def exists(store: Store, path: str) -> bool:
    """Return True if the file can be opened, without relying on a listing."""
    try:
        store.open_reader(path, cached=True).close()
    except NotFoundError:
        return False
    return True


def deleted(store: Store, folder: str) -> NotFoundError | None:
    """Return an error if the checkpoint has been deleted, or None if it still exists. Retention
    deletes a manifest before anything else, so who misses another part of it asks this first."""
    # Also open it by name, because a listing may be wrongly empty.
    path = f"{folder}/{MANIFEST_NAME}"
    if MANIFEST_NAME in store.file_names(folder) or exists(store, path):
        return None
    return NotFoundError(
        "the checkpoint was deleted in the meantime",
        where=f"{store.url}/{folder}",
        remedy="`laststep ls` lists those that are there now",
    ).lacking(path)


class _HasFolder(Protocol):
    @property
    def folder(self) -> str: ...


def read_newest(
    store: Store, find: Callable[[], _Found], read: Callable[[_Found], _Result]
) -> _Result:
    """Read the checkpoint that `find` returns; if it is deleted meanwhile, call `find` again: there
    is a newer commit. Not for a step that the user named, which no other may replace."""
    for is_last in looks():
        found = find()
        try:
            return read(found)
        except (CorruptError, NotFoundError):
            if is_last or deleted(store, found.folder) is None:
                raise
            _log.warning("%s was deleted while it was read: listing the run again", found.folder)
    raise AssertionError  # the last iteration returns or raises


def looks() -> Iterator[bool]:
    """Yield before each try to read a run that others change, after growing pauses; True before the
    last. Some servers list files before or after they can be read, and a writer may delete each
    checkpoint before it has been read (`laststep pin` keeps one)."""
    for number, pause_s in enumerate(_PAUSES_S, 1):
        time.sleep(pause_s)
        yield number == len(_PAUSES_S)


def list_checked(store: Store, folder: str, expected: str) -> list[StoreEntry]:
    """List a folder. In an object store, raise `StorageError` if repeated listings omit the file
    `expected` although it exists: clients parse a proxy's HTML page as an empty listing."""
    if not store.same_everywhere:
        return store.list(folder)
    entries: list[StoreEntry] = []
    path = f"{folder}/{expected}" if folder else expected
    for _ in looks():
        entries = store.list(folder)
        if any(entry.name == expected for entry in entries) or not exists(store, path):
            return entries
        # A deletion removes the folder's name from the run before its contents, so the contents
        # that are left do not count.
        if folder and all(entry.name != folder for entry in list_checked(store, "", RUN_NAME)):
            return entries
    error = StorageError(
        "a listing omits an existing file",
        where=f"{store.url}/{folder}".rstrip("/"),
        expected=f"{expected} among the names",
        found=f"{len(entries)} names without it",
        remedy="check the server and any proxies, and try again",
    )
    error.transient = True
    raise error


def read_index(store: Store, folder: str, commit: manifest.Commit, rank: int) -> index_format.Index:
    """Read the index of a rank and verify it against the manifest."""
    data, where = read_index_bytes(store, folder, commit, rank)
    index = index_format.decode(data, where=where)
    if index.rank != rank:
        raise CorruptError(
            "an index is that of another rank",
            where=where,
            expected=f"rank {rank}",
            found=f"rank {index.rank}",
        )
    return index


def read_indexes(store: Store, folder: str, commit: manifest.Commit) -> list[index_format.Index]:
    return [read_index(store, folder, commit, rank) for rank in range(commit.index_count)]


def read_index_bytes(
    store: Store, folder: str, commit: manifest.Commit, rank: int
) -> tuple[bytes, str]:
    """Return the verified bytes of an index and their URL."""
    name = index_format.index_name(rank, commit.ranks)
    where, expected = f"{store.url}/{folder}/{name}", commit.index_digest(rank)
    try:
        data = _read_index_once(store, f"{folder}/{name}", where)
        try:
            index_format.check(data, where=where, expected=expected)
        except CorruptError:
            data = _read_index_once(store, f"{folder}/{name}", where)
            index_format.check(data, where=where, expected=expected)
    except (CorruptError, NotFoundError) as error:
        gone = deleted(store, folder)
        if gone is not None:
            raise gone from error
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            "an index is missing",
            where=where,
            expected=f"{DIGEST_NAME}:{expected.hex()}",
            found="no such file",
        ).lacking(f"{folder}/{name}") from error
    return data, where


def _read_index_once(store: Store, name: str, where: str) -> bytes:
    with closing(store.open_reader(name)) as reader:
        if reader.size_bytes > INDEX_LIMIT_BYTES:
            raise CorruptError(
                "an index is too large to be one",
                where=where,
                expected=f"at most {INDEX_LIMIT_BYTES} bytes",
                found=f"{reader.size_bytes} bytes",
            )
        data = bytearray(reader.size_bytes)
        try:
            got = reader.read_into(0, memoryview(data))
        except StorageError as error:
            if not error.device_failed:
                raise
            raise CorruptError("an index cannot be read", where=where, found=error.found) from error
        return bytes(data[:got])
