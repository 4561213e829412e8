"""Commit or abort: the one create-only name for which both compete.

Whoever creates `manifest.json` first has decided, for good; the other learns what was decided.
Nobody is told of a commit before its name is durable, whoever made it: each who finds one syncs the
folder first. A commit that cannot be made durable is taken back by who made it. Somebody else may
have found it meanwhile and made it durable: these two compete for another create-only name, the
commit's fate, and everybody goes by that. Knows nothing of lineage, retention or what is in the
data files. Any process may call any of this.

Listings are checked against a file whose name is known: a proxy may answer with a page of HTML and
status 200, which clients read as an empty listing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from laststep.catalog.lineage import FATE_NAME, RUN_NAME, AttemptName, parse_folder
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format import manifest
from laststep.format.manifest import Abort, Commit
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.storage.store import Store, StoreEntry


_PAUSES_S = (0.0, 0.1, 0.3, 1.0)
"""Between listings: the file may be new, and some servers list it later than they serve it."""


def list_checked(store: Store, folder: str, expected: str) -> list[StoreEntry]:
    """List a folder. In an object store, raise `StorageError` if the listing lacks the file
    `expected` although it exists, also when it is repeated."""
    entries = store.list(folder)
    if not store.same_everywhere:
        return entries
    path = f"{folder}/{expected}" if folder else expected
    for pause_s in _PAUSES_S:
        if _has(entries, expected) or not exists(store, path) or _is_being_deleted(store, folder):
            return entries
        time.sleep(pause_s)  # nothing tells when a server has caught up
        entries = store.list(folder)
    error = StorageError(
        "a listing lacks a file that exists",
        where=f"{store.url}/{folder}".rstrip("/"),
        expected=f"{expected} among the names",
        found=f"{len(entries)} names without it",
        remedy="look at the server, and at proxies in front of it, and try again",
    )
    error.transient = True
    raise error


def exists(store: Store, path: str) -> bool:
    """Return whether a file can be opened by its name."""
    try:
        store.open_reader(path, cached=True).close()
    except NotFoundError:
        return False
    return True


def _is_being_deleted(store: Store, folder: str) -> bool:
    """Return whether a folder of the run is gone: its name goes before its contents, and what is
    left of those does not count."""
    return bool(folder) and not _has(list_checked(store, "", RUN_NAME), folder)


def _has(entries: list[StoreEntry], name: str) -> bool:
    return any(entry.name == name for entry in entries)


_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", bound="_HasFolder")
_Result = TypeVar("_Result")


class _HasFolder(Protocol):
    """A checkpoint, in whichever form it was listed."""

    @property
    def folder(self) -> str: ...


MANIFEST_LIMIT_BYTES = 256 << 20
"""The largest manifest that a reader takes, and so that a writer makes."""
_STANDS = b"stands"
_TAKEN_BACK = b"taken back"
_FATE_LIMIT_BYTES = 4096
MOST_TRIES = 20
"""How often a reader tries again with a newer checkpoint. Beside a writer that deletes each one
before it is read, it would never end; `laststep pin` keeps one for it."""


def read(store: Store, folder: str) -> Commit | Abort | None:
    """What was decided, or None where nothing is yet; `CorruptError` where it cannot be read."""
    decided = read_manifest(store, folder)
    return as_fated(store, folder, decided) if isinstance(decided, Commit) else decided


def as_fated(store: Store, folder: str, decided: Commit) -> Commit | Abort:
    """What has become of a commit: an `Abort` where its maker has taken it back."""
    try:
        fate = _read_fate(store, folder)
    except NotFoundError:
        return decided
    if fate != _TAKEN_BACK:  # whatever else is there, nothing is lost by keeping a checkpoint
        return decided
    return Abort(reason="it could not be made durable, and was taken back", by="who made it")


def read_manifest(store: Store, folder: str) -> Commit | Abort | None:
    """What the manifest alone says; for callers who look for the fate of a commit themselves."""
    name = f"{folder}/{MANIFEST_NAME}"
    try:
        data = store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES)
    except NotFoundError:
        return None
    decided = manifest.decode(data, where=f"{store.url}/{name}")
    if isinstance(decided, Commit):
        _check_place(decided, folder, where=f"{store.url}/{name}")
    return decided


def is_checkpoint(store: Store) -> bool:
    """Whether the store itself is the folder of one checkpoint; False where it cannot be read."""
    try:
        store.open_reader(MANIFEST_NAME, cached=True).close()
    except LaststepError:
        return False
    return True


def deleted(store: Store, folder: str) -> NotFoundError | None:
    """The error for a checkpoint that was there and is no longer; None where it still is.

    Whoever finds a part of a checkpoint missing asks this first: retention or a prune may have
    taken it away meanwhile, and its manifest goes before anything else.
    """
    # By its name, too: a listing may wrongly be empty.
    listed = any(entry.name == MANIFEST_NAME for entry in store.list(folder))
    if listed or exists(store, f"{folder}/{MANIFEST_NAME}"):
        return None
    return NotFoundError(
        "the checkpoint was deleted meanwhile",
        where=f"{store.url}/{folder}",
        remedy="`laststep ls` lists those that are there now",
    ).lacking(f"{folder}/{MANIFEST_NAME}")


def read_newest(
    store: Store, find: Callable[[], _Found], read: Callable[[_Found], _Result]
) -> _Result:
    """Read the checkpoint that `find` returns, and find another if it is deleted meanwhile.

    Retention deletes a checkpoint only after a newer commit, so the next `find` returns that one.
    Not for a step that the user named: no other checkpoint may stand in for it.
    """
    tries = 0
    while True:
        found, tries = find(), tries + 1
        try:
            return read(found)
        except (CorruptError, NotFoundError):
            if deleted(store, found.folder) is None or tries == MOST_TRIES:
                raise
            _log.warning("%s was deleted while it was read: listing the run again", found.folder)


def commit(store: Store, folder: str, decided: Commit) -> None:
    """Make a checkpoint visible and durable; `AbortedError` where somebody has given it up.

    All data files MUST have been finished. After `StorageError` it is not there, unless that says
    that this is not known. A repeated call with the same commit is fine.
    """
    try:
        _check_place(decided, folder, where=f"{store.url}/{folder}")
    except CorruptError as error:
        raise UsageError(
            error.what, where=error.where, expected=error.expected, found=error.found
        ) from None
    data = manifest.encode(decided)
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise UsageError(
            "a manifest would be too large to be read",
            where=f"{store.url}/{folder}",
            expected=f"at most {MANIFEST_LIMIT_BYTES} bytes",
            found=f"{len(data)} bytes",
            remedy="metrics and metadata are in it: save what is large as an item",
        )
    publish(store, folder, data)


def publish(store: Store, folder: str, data: bytes) -> None:
    """The same for a commit whose bytes there are already: those of a copy are its original's."""
    try:
        # The names of the data files have to be durable before anything refers to them.
        store.sync_folder(folder)
        store.create(f"{folder}/{MANIFEST_NAME}", data)
    except NotFoundError as error:
        raise AbortedError(
            "the save was given up by another writer",
            where=f"{store.url}/{folder}",
            found="its folder has been cleaned up",
            remedy="only one job at a time may save to a run",
        ) from error
    except (AlreadyExistsError, StorageError) as error:
        _settle(store, folder, data, error)


def abort(store: Store, folder: str, reason: str) -> Commit | Abort:
    """Give an attempt up, unless it is decided already; returns the decision that stands, a commit
    only once it is durable."""
    mine = Abort(reason=reason, by=f"process {os.getpid()} on {socket.gethostname()}")
    try:
        store.create(f"{folder}/{MANIFEST_NAME}", manifest.encode(mine))
    except NotFoundError:
        return mine  # The folder is gone: nobody can commit it any more.
    except AlreadyExistsError:
        decided = read_manifest(store, folder)
        if isinstance(decided, Abort) or (decided is not None and _stands(store, folder)):
            return decided
    return mine


def standing(store: Store, folder: str) -> Commit | None:
    """The commit of an attempt, once it is durable; None where there is none."""
    decided = read(store, folder)
    if not isinstance(decided, Commit):
        return None
    store.sync_folder(folder)
    return decided


def _stands(store: Store, folder: str) -> bool:
    """Make a commit of somebody else stand, durably; returns False where it was taken back."""
    try:
        store.sync_folder(folder)
        return _fate(store, folder, _STANDS) != _TAKEN_BACK
    except NotFoundError:
        return False  # it has been taken back, folder and all


def _fate(store: Store, folder: str, wanted: bytes) -> bytes:
    """Settle what becomes of a commit, and return it: whoever creates its fate first decides."""
    try:
        store.create(f"{folder}/{FATE_NAME}", wanted)
    except AlreadyExistsError:
        return _read_fate(store, folder)
    except StorageError as error:  # its name may be there: then it is what others go by
        try:
            return _read_fate(store, folder)
        except NotFoundError:
            raise error from None
    return wanted


def _read_fate(store: Store, folder: str) -> bytes:
    try:
        return store.read(f"{folder}/{FATE_NAME}", limit_bytes=_FATE_LIMIT_BYTES)
    except CorruptError:
        return b""  # too large for anything that we wrote


def _settle(
    store: Store, folder: str, data: bytes, error: AlreadyExistsError | StorageError
) -> None:
    """Find out what stands after a commit that was not plainly made, and make it durable."""
    decided = read(store, folder)
    where = f"{store.url}/{folder}"
    if isinstance(decided, Abort):
        raise AbortedError(
            "the save was given up", where=where, found=f"{decided.reason} (by {decided.by})"
        )
    if decided is None:
        raise error
    # Bytes, not values: NaN is not equal to itself.
    if store.read(f"{folder}/{MANIFEST_NAME}", limit_bytes=MANIFEST_LIMIT_BYTES) != data:
        raise AlreadyExistsError("another commit is in this attempt's place", where=where)
    try:
        # A second sync does not lie about names, as it may about the bytes of a file: they are in
        # the filesystem's journal, and a journal that failed stays so.
        store.sync_folder(folder)
    except StorageError as second:
        _take_back(store, folder, second)


def _take_back(store: Store, folder: str, error: StorageError) -> None:
    """Take back a commit that a power cut might undo, unless somebody else has made it durable
    meanwhile and has said so. Its folder goes with its manifest, in one step, so it never looks
    undecided."""
    where = f"{store.url}/{folder}"
    try:
        with contextlib.suppress(NotFoundError):  # who cleans up has come first
            if _fate(store, folder, _TAKEN_BACK) != _TAKEN_BACK:
                return
            store.delete_folder(folder)
    except StorageError as second:
        raise StorageError(
            "it is not known whether a checkpoint is committed",
            where=where,
            found=f"{error}; then {second}",
            remedy="`laststep ls` shows it if it is",
        ) from second
    raise StorageError(
        "cannot make a commit durable: the checkpoint was taken back",
        where=where,
        found=error.found,
        remedy=error.remedy,
    ) from error


def _check_place(decided: Commit, folder: str, *, where: str) -> None:
    found = AttemptName(step=decided.step, epoch=decided.epoch, attempt=decided.attempt)
    if parse_folder(folder) != found:
        raise CorruptError(
            "a manifest is not that of its folder",
            where=where,
            expected=folder,
            found=found.folder,
            remedy=f"give the folder its own name back; {manifest.DAMAGE_REMEDY}",
        )
