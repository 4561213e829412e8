"""Listings that are checked against a file whose name is known.

A proxy, or a server in trouble, may answer a request for a listing with a page of HTML and status
200, which clients read as an empty listing. A job that believed it would begin its run anew, or
restore an older checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import NotFound, StorageFailed

if TYPE_CHECKING:
    from laststep.storage.store import Store, StoreEntry


def list_checked(store: Store, folder: str, expected: str) -> list[StoreEntry]:
    """List a folder; `StorageFailed` if the listing lacks the file `expected`, which exists."""
    entries = store.list(folder)
    path = f"{folder}/{expected}" if folder else expected
    if _has(entries, expected) or not exists(store, path):
        return entries
    entries = store.list(folder)  # the file may have been created after the first listing
    if _has(entries, expected) or not exists(store, path):
        return entries
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


def _has(entries: list[StoreEntry], name: str) -> bool:
    return any(entry.name == name for entry in entries)
