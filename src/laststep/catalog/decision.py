"""Read the decision about an attempt: a commit, an abort, or none yet.

`attempt` writes decisions. A process that reads a run beside its writer may see it in the middle of
a change; `looks` limits how often the read is repeated.

Listings are checked against a file whose name is known: a proxy may answer with an HTML page and
status 200, which clients parse as an empty listing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from laststep.catalog.lineage import RUN_NAME, AttemptName, parse_folder
from laststep.constants import MANIFEST_NAME
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import manifest
from laststep.format.manifest import Abort, Commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.storage.store import Store, StoreEntry

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", bound="_HasFolder")
_Result = TypeVar("_Result")

MANIFEST_LIMIT_BYTES = 256 << 20
"""The largest manifest that is read or written."""
_PAUSES_S = (0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8)


class _HasFolder(Protocol):
    """Any listed form of a checkpoint."""

    @property
    def folder(self) -> str: ...


def looks() -> Iterator[bool]:
    """Yield before each try to read a run that others change, after growing pauses. Yield True
    before the last try.

    Retries are needed because some servers and filesystems list files before or after they can be
    read, and because a writer may delete each checkpoint before it has been read (`laststep pin`
    keeps one).
    """
    for number, pause_s in enumerate(_PAUSES_S, 1):
        time.sleep(pause_s)
        yield number == len(_PAUSES_S)


def list_checked(store: Store, folder: str, expected: str) -> list[StoreEntry]:
    """List a folder. In an object store, raise `StorageError` if repeated listings omit the file
    `expected` although it exists."""
    entries: list[StoreEntry] = []
    path = f"{folder}/{expected}" if folder else expected
    for _ in looks():
        entries = store.list(folder)
        if (
            not store.same_everywhere
            or _has(entries, expected)
            or not exists(store, path)
            or _is_being_deleted(store, folder)
        ):
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


def exists(store: Store, path: str) -> bool:
    """Return True if the file can be opened, without relying on a listing."""
    try:
        store.open_reader(path, cached=True).close()
    except NotFoundError:
        return False
    return True


def _is_being_deleted(store: Store, folder: str) -> bool:
    """Return True if the folder is no longer listed in the run. A deletion removes the folder's
    name before its contents, so the remaining contents do not count."""
    return bool(folder) and not _has(list_checked(store, "", RUN_NAME), folder)


def _has(entries: list[StoreEntry], name: str) -> bool:
    return any(entry.name == name for entry in entries)


def read(store: Store, folder: str) -> Commit | Abort | None:
    """Return the decision, or None if there is none yet. Raise `CorruptError` if it is damaged."""
    try:
        data = read_bytes(store, folder)
    except NotFoundError:
        return None
    where = f"{store.url}/{folder}/{MANIFEST_NAME}"
    decided = manifest.decode(data, where=where)
    if isinstance(decided, Commit):
        check_place(decided, folder, where=where)
    return decided


def read_bytes(store: Store, folder: str) -> bytes:
    """Return the bytes of a manifest. Raise `NotFoundError` if there is none."""
    return store.read(f"{folder}/{MANIFEST_NAME}", limit_bytes=MANIFEST_LIMIT_BYTES)


def standing(store: Store, folder: str) -> Commit | None:
    """Make the commit of an attempt durable and return it; None if it is not committed."""
    decided = read(store, folder)
    if not isinstance(decided, Commit):
        return None
    store.sync_folder(folder)
    return decided


def is_checkpoint(store: Store) -> bool:
    """Return True if the store's root is the folder of a checkpoint; False if it cannot be read."""
    try:
        store.open_reader(MANIFEST_NAME, cached=True).close()
    except LaststepError:
        return False
    return True


def deleted(store: Store, folder: str) -> NotFoundError | None:
    """Return an error if the checkpoint has been deleted, or None if it still exists.

    Callers that find a part of a checkpoint missing ask this first: retention or a prune may have
    deleted the checkpoint in the meantime, and deletes its manifest before anything else.
    """
    # Also open it by name, because a listing may be wrongly empty.
    listed = any(entry.name == MANIFEST_NAME for entry in store.list(folder))
    if listed or exists(store, f"{folder}/{MANIFEST_NAME}"):
        return None
    return NotFoundError(
        "the checkpoint was deleted in the meantime",
        where=f"{store.url}/{folder}",
        remedy="`laststep ls` lists those that are there now",
    ).lacking(f"{folder}/{MANIFEST_NAME}")


def read_newest(
    store: Store, find: Callable[[], _Found], read: Callable[[_Found], _Result]
) -> _Result:
    """Read the checkpoint that `find` returns; if it is deleted meanwhile, call `find` again.

    Retention deletes a checkpoint only after a newer commit, so the next `find` returns that one.
    Not for a step that the user named: another checkpoint must not replace it.
    """
    for is_last in looks():
        found = find()
        try:
            return read(found)
        except (CorruptError, NotFoundError):
            if is_last or deleted(store, found.folder) is None:
                raise
            _log.warning("%s was deleted while it was read: listing the run again", found.folder)
    raise AssertionError  # the last iteration returns or raises


def check_place(decided: Commit, folder: str, *, where: str) -> None:
    """Raise `CorruptError` if the commit belongs to another folder."""
    found = AttemptName(step=decided.step, term=decided.term, attempt=decided.attempt)
    if parse_folder(folder) != found:
        raise CorruptError(
            "a manifest is not that of its folder",
            where=where,
            expected=folder,
            found=found.folder,
            remedy=f"give the folder its own name back; {manifest.DAMAGE_REMEDY}",
        )
