"""Listings that are checked against a file whose name is known.

A proxy, or a server in trouble, may answer a request for a listing with a page of HTML and status
200, which clients read as an empty listing. A job that believed it would begin its run anew, or
restore an older checkpoint. Directories are not checked: they do not lie, and a network filesystem
may list a new file later than it opens it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from laststep.catalog.names import RUN_NAME
from laststep.errors import NotFound, StorageFailed

if TYPE_CHECKING:
    from laststep.storage.store import Store, StoreEntry


_PAUSES_S = (0.0, 0.1, 0.3, 1.0)
"""Between listings: the file may be new, and some servers list it later than they serve it."""


def list_checked(store: Store, folder: str, expected: str) -> list[StoreEntry]:
    """List a folder. In an object store, raise `StorageFailed` if the listing lacks the file
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
    error = StorageFailed(
        "a listing lacks a file that exists", where=f"{store.url}/{folder}".rstrip("/"),
        expected=f"{expected} among the names", found=f"{len(entries)} names without it",
        remedy="look at the server, and at proxies in front of it, and try again",
    )  # fmt: skip
    error.transient = True
    raise error


def exists(store: Store, path: str) -> bool:
    """Return whether a file can be opened by its name."""
    try:
        store.open_reader(path, cached=True).close()
    except NotFound:
        return False
    return True


def _is_being_deleted(store: Store, folder: str) -> bool:
    """Return whether a folder of the run is gone: its name goes before its contents, and what is
    left of those does not count."""
    return bool(folder) and not _has(list_checked(store, "", RUN_NAME), folder)


def _has(entries: list[StoreEntry], name: str) -> bool:
    return any(entry.name == name for entry in entries)
