"""Commit or abort: the one create-only name for which both compete.

Whoever creates `manifest.json` first has decided, for good; the other learns what was decided.
Knows nothing of lineage, retention or what is in the data files. Any process may call any of this.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from laststep.catalog.names import parse_folder
from laststep.errors import Aborted, Corrupt, Exists, NotFound, Usage
from laststep.format import manifest
from laststep.format.manifest import Abort, Commit
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from laststep.storage.store import Store

MANIFEST_LIMIT_BYTES = 256 << 20


def read(store: Store, folder: str) -> Commit | Abort | None:
    """What was decided, or None where nothing is yet; `Corrupt` where it cannot be read."""
    name = f"{folder}/{MANIFEST_NAME}"
    try:
        data = store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES)
    except NotFound:
        return None
    decided = manifest.decode(data, where=f"{store.url}/{name}")
    if isinstance(decided, Commit):
        _check_place(decided, folder, where=f"{store.url}/{name}")
    return decided


def deleted(store: Store, folder: str) -> NotFound | None:
    """The error for a checkpoint that was there and is no longer; None where it still is.

    Whoever finds a part of a checkpoint missing asks this first: retention or a prune may have
    taken it away meanwhile, and its manifest goes before anything else.
    """
    if any(entry.name == MANIFEST_NAME for entry in store.list(folder)):
        return None
    return NotFound(
        "the checkpoint was deleted meanwhile",
        where=f"{store.url}/{folder}",
        remedy="`laststep ls` lists those that are there now",
    )


def commit(store: Store, folder: str, decided: Commit) -> None:
    """Make a checkpoint visible; `Aborted` where somebody has given it up.

    All data files MUST have been finished. A repeated call with the same commit is fine, which is
    how a caller finds out after a `StorageFailed`, whose outcome is open.
    """
    try:
        _check_place(decided, folder, where=f"{store.url}/{folder}")
    except Corrupt as error:
        raise Usage(
            error.what, where=error.where, expected=error.expected, found=error.found
        ) from None
    data = manifest.encode(decided)
    try:
        # The names of the data files have to be durable before anything refers to them.
        store.sync_folder(folder)
        store.create(f"{folder}/{MANIFEST_NAME}", data)
    except NotFound as error:
        raise Aborted(
            "the save was given up by another writer",
            where=f"{store.url}/{folder}",
            found="its folder has been cleaned up",
            remedy="only one job at a time may save to a run",
        ) from error
    except Exists:
        _accept(store, folder, decided)


def abort(store: Store, folder: str, reason: str) -> Commit | Abort:
    """Give an attempt up, unless it is decided already; returns the decision that stands."""
    mine = Abort(reason=reason, by=f"process {os.getpid()} on {socket.gethostname()}")
    try:
        store.create(f"{folder}/{MANIFEST_NAME}", manifest.encode(mine))
    except NotFound:
        return mine  # The folder is gone: nobody can commit it any more.
    except Exists:
        return read(store, folder) or mine
    return mine


def _accept(store: Store, folder: str, decided: Commit) -> None:
    found = read(store, folder)
    where = f"{store.url}/{folder}"
    if isinstance(found, Abort):
        raise Aborted("the save was given up", where=where, found=f"{found.reason} (by {found.by})")
    if found != decided:
        raise Exists("another commit is in this attempt's place", where=where)
    store.sync_folder(folder)


def _check_place(decided: Commit, folder: str, *, where: str) -> None:
    name = parse_folder(folder)
    found = (decided.step, decided.epoch, decided.attempt)
    if name is None or (name.step, name.epoch, name.attempt) != found:
        raise Corrupt(
            "a manifest is not that of its folder",
            where=where,
            expected=folder,
            found=f"step {found[0]}, epoch {found[1]}, attempt {found[2]}",
            remedy=f"give the folder its own name back; {manifest.DAMAGE_REMEDY}",
        )
