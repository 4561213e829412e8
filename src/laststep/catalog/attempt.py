"""One attempt to write a checkpoint: begin, put, then commit or abort.

The flusher, the DCP adapter, copies, replication and recovery all write through `Attempt`. Commit
and abort compete to create one name, `manifest.json`: the first to create it makes the final
decision, and the other reads that decision. A commit is reported only once its name is durable, so
every process that finds a commit syncs the folder first. This module knows nothing of terms,
lineage, retention or file contents. Several processes may hold the same attempt, and all functions
are thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.constants import MANIFEST_NAME
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format import manifest
from laststep.format.manifest import Abort, Commit
from laststep.storage.store import write_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from laststep.catalog.lineage import AttemptName
    from laststep.storage.store import FileWriting, Store


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
        """Create the folder, then check that this writer may still commit.

        The order matters: a newer writer is either seen by the check, or finds the folder and
        aborts the attempt. Raise `AlreadyExistsError` if the folder exists.
        """
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

    def sync(self, names: Iterable[str] = ()) -> None:
        """Make the names of finished files durable: the given ones and all files directly in the
        folder."""
        for inner in (*inner_folders(names), ""):
            self.store.sync_folder(f"{self.folder}/{inner}".rstrip("/"))

    # Decide

    def commit(self, commit: Commit) -> None:
        """Make the checkpoint visible and durable. Raise `AbortedError` if another process has
        aborted it.

        All files MUST be finished. The call may be repeated with the same commit. After
        `StorageError` the checkpoint does not exist, unless the error states that this is unknown.
        """
        try:
            decision.check_place(commit, self.folder, where=f"{self.store.url}/{self.folder}")
        except CorruptError as error:
            raise UsageError(
                error.what, where=error.where, expected=error.expected, found=error.found
            ) from None
        data = manifest.encode(commit)
        if len(data) > decision.MANIFEST_LIMIT_BYTES:
            raise UsageError(
                "a manifest would be too large to be read",
                where=f"{self.store.url}/{self.folder}",
                expected=f"at most {decision.MANIFEST_LIMIT_BYTES} bytes",
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
        """Read the decision after a commit that did not clearly succeed. Return if it is this
        commit and is now durable, else raise."""
        where = f"{self.store.url}/{self.folder}"
        try:
            decided = decision.read(self.store, self.folder)
        except StorageError as second:
            raise _unknown(where, second) from error
        if isinstance(decided, Abort):
            raise AbortedError(
                "the save was aborted", where=where, found=f"{decided.reason} (by {decided.by})"
            )
        if decided is None:
            raise error
        # Bytes, not values: NaN is not equal to itself.
        if decision.read_bytes(self.store, self.folder) != data:
            raise AlreadyExistsError(
                "a different commit took the place of this attempt", where=where
            )
        try:
            # Repeating a failed sync is safe for names, though not for the bytes of a file: names
            # are in the filesystem's journal, and a journal that failed keeps failing.
            self.store.sync_folder(self.folder)
        except StorageError as second:
            # Do not withdraw the commit: another process may have found and reported it.
            raise _unknown(where, second) from second

    def abort(self, reason: str) -> bool:
        """Abort the attempt and delete its files, which no other process may still be writing.
        Return True if it was committed instead; that commit is then durable."""
        try:
            if isinstance(abort(self.store, self.folder, reason), Commit):
                return True
            if decision.read(self.store, self.folder) is None:
                return False  # a later writer has removed it already
        except StorageError:
            # A full disk has no room for an abort either. Deleting the folder also prevents a
            # commit.
            if decision.read(self.store, self.folder) is not None:
                raise
        self.store.delete_folder(self.folder)
        return False


def abort(store: Store, folder: str, reason: str) -> Commit | Abort:
    """Abort an undecided attempt without deleting its files. Return the final decision; a commit is
    returned only once it is durable."""
    own = Abort(reason=reason, by=f"process {os.getpid()} on {socket.gethostname()}")
    try:
        store.create(f"{folder}/{MANIFEST_NAME}", manifest.encode(own))
    except NotFoundError:
        return own  # Without its folder the attempt cannot be committed.
    except AlreadyExistsError:
        decided = decision.read(store, folder)
        if isinstance(decided, Commit):
            store.sync_folder(folder)
        return decided or own
    return own


def _unknown(where: str, error: StorageError) -> StorageError:
    unknown = StorageError(
        "it is not known whether a checkpoint is committed: its manifest cannot be read or made "
        "durable",
        where=where,
        found=error.found,
        remedy="`laststep ls` shows it if it is",
    )
    unknown.transient = error.transient
    return unknown


def inner_folders(names: Iterable[str]) -> list[str]:
    """Return the subfolders of a checkpoint's folder that contain these files."""
    return sorted({name.rpartition("/")[0] for name in names} - {""})
