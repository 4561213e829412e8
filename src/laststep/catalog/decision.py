"""Commit or abort: the one create-only name for which both compete.

Whoever creates `manifest.json` first has decided, for good; the other learns what was decided.
Nobody is told of a commit before its name is durable, whoever made it: each who finds one syncs the
folder first. A commit that cannot be made durable is taken back by who made it, folder and all, so
that it is one thing to everybody: not there. Somebody else may have found it meanwhile and made it
durable: these two compete for another create-only name, the commit's fate. Knows nothing of
lineage, retention or what is in the data files. Any process may call any of this.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from laststep.catalog.names import FATE_NAME, parse_folder
from laststep.errors import Aborted, Corrupt, Exists, NotFound, StorageFailed, Usage
from laststep.format import manifest
from laststep.format.manifest import Abort, Commit
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from laststep.storage.store import Store

MANIFEST_LIMIT_BYTES = 256 << 20
_STANDS = b"stands"
_TAKEN_BACK = b"taken back"


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
    ).lacking(f"{folder}/{MANIFEST_NAME}")


def commit(store: Store, folder: str, decided: Commit) -> None:
    """Make a checkpoint visible and durable; `Aborted` where somebody has given it up.

    All data files MUST have been finished. After `StorageFailed` it is not there, unless that says
    that this is not known. A repeated call with the same commit is fine.
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
    except (Exists, StorageFailed) as error:
        _settle(store, folder, decided, error)


def abort(store: Store, folder: str, reason: str) -> Commit | Abort:
    """Give an attempt up, unless it is decided already; returns the decision that stands, a commit
    only once it is durable."""
    mine = Abort(reason=reason, by=f"process {os.getpid()} on {socket.gethostname()}")
    try:
        store.create(f"{folder}/{MANIFEST_NAME}", manifest.encode(mine))
    except NotFound:
        return mine  # The folder is gone: nobody can commit it any more.
    except Exists:
        found = read(store, folder) or mine
        if isinstance(found, Abort) or _found_to_stand(store, folder):
            return found
    return mine


def standing(store: Store, folder: str) -> Commit | None:
    """The commit of an attempt, once it is durable; None where there is none."""
    found = read(store, folder)
    if not isinstance(found, Commit):
        return None
    store.sync_folder(folder)
    return found


def _found_to_stand(store: Store, folder: str) -> bool:
    """Whether a commit of somebody else's stands from now on, durably. If it is being taken back,
    it is gone after this."""
    try:
        store.sync_folder(folder)
        stands = _fate(store, folder, _STANDS) == _STANDS
    except NotFound:
        return False
    if not stands:
        store.delete_folder(folder)
    return stands


def _fate(store: Store, folder: str, wanted: bytes) -> bytes:
    """What becomes of a commit about which two may disagree, as the first of them has said."""
    name = f"{folder}/{FATE_NAME}"
    try:
        store.create(name, wanted)
    except Exists:
        return store.read(name, limit_bytes=len(_TAKEN_BACK))
    except StorageFailed as error:  # its name may be there: then it is what others go by
        try:
            return store.read(name, limit_bytes=len(_TAKEN_BACK))
        except NotFound:
            raise error from None
    return wanted


def _settle(store: Store, folder: str, decided: Commit, error: Exists | StorageFailed) -> None:
    """Find out what stands after a commit that was not plainly made, and make it durable."""
    found = read(store, folder)
    where = f"{store.url}/{folder}"
    if isinstance(found, Abort):
        raise Aborted("the save was given up", where=where, found=f"{found.reason} (by {found.by})")
    if found is None:
        raise error
    if found != decided:
        raise Exists("another commit is in this attempt's place", where=where)
    try:
        # A second sync does not lie about names, as it may about the bytes of a file: they are in
        # the filesystem's journal, and a journal that failed stays so.
        store.sync_folder(folder)
    except StorageFailed as second:
        _take_back(store, folder, second)


def _take_back(store: Store, folder: str, error: StorageFailed) -> None:
    """What a power cut might undo is not committed: nobody may find it there. Its folder goes with
    its manifest, in one step, so it never looks undecided. Unless somebody else has made it durable
    meanwhile, and told so."""
    where = f"{store.url}/{folder}"
    try:
        with contextlib.suppress(NotFound):  # whoever found it being taken back has finished that
            if _fate(store, folder, _TAKEN_BACK) == _STANDS:
                return
            store.delete_folder(folder)
    except StorageFailed as second:
        raise StorageFailed(
            "it is not known whether a checkpoint is committed", where=where,
            found=f"{error}; then {second}", remedy="`laststep ls` shows it if it is",
        ) from second  # fmt: skip
    raise StorageFailed(
        "cannot make a commit durable: the checkpoint was taken back", where=where,
        found=error.found, remedy=error.remedy,
    ) from error  # fmt: skip


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
