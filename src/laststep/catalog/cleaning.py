"""Find and remove the files that crashes leave behind in a run.

Only files that no live writer can still need are removed: attempts that were aborted or whose
writer is dead; copies in which no process is active and which are either older than a later
checkpoint or unchanged for a week; half-deleted folders; temporary names and unlocked liveness
locks older than an hour. Committed checkpoints and everything behind a symbolic link are never
touched. A free lock proves that a writer is dead only under the same kernel, or if the store
guarantees it; otherwise an attempt must also have been unchanged for an hour.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.catalog.attempt import abort
from laststep.catalog.lineage import TERMS_FOLDER, parse_folder, parse_liveness_lock
from laststep.catalog.terms import Terms, is_here
from laststep.errors import CorruptError, StorageError
from laststep.format.manifest import Abort

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.catalog.listing import ScannedAttempt
    from laststep.storage.store import Store, StoreEntry

_log = logging.getLogger(__name__)

QUIET_S = 3600.0
"""A writer counts as dead after this time without any change, unless there is better evidence."""

COPY_QUIET_S = 7 * 86400.0
"""An interrupted copy may be removed after this time without any change; until then the next copy
resumes it. `QUIET_S` applies instead once there is a later checkpoint, because then the copy is
unlikely to be resumed."""

_TEMPORARY = re.compile(r"(.+)\.tmp-[0-9a-f]{12}")
"""Temporary names that a store gives to files it creates and folders it deletes."""


class RemovalReason(enum.Enum):
    ABORTED = "given up"
    DEAD_WRITER = "no manifest, and its writer is dead"
    STALE_COPY = "an abandoned copy"
    DEBRIS = "a leftover temporary name"
    DEAD_WITNESS = "of a start that is over"


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that is no longer needed. `name` is relative to the run."""

    name: str
    why: RemovalReason
    is_folder: bool
    size_bytes: int


def orphans(
    store: Store, terms: Terms, scanned: tuple[ScannedAttempt, ...], *, now_s: float
) -> tuple[Orphan, ...]:
    """Return everything that may be removed now. The scan MUST include the subfolders of attempts.
    It need not include those of checkpoints, because data files never have temporary names."""
    result = attempts_of_the_dead(terms, scanned, now_s=now_s, locks_tell=store.locks_tell())
    for item in scanned:
        if item.is_committed and not item.is_link:
            result += _debris(item.entries, item.name.folder, now_s)
    result += _debris(store.list(""), "", now_s)
    entries = store.list(TERMS_FOLDER)
    result += _debris(entries, TERMS_FOLDER, now_s) + _liveness_locks(store, entries, now_s)
    return tuple(result)


def attempts_of_the_dead(
    terms: Terms, scanned: tuple[ScannedAttempt, ...], *, now_s: float, locks_tell: bool = False
) -> list[Orphan]:
    """Return the scanned attempts that were aborted or never decided and whose writer is dead or
    has been silent for long. Copies that are older than a later checkpoint are found only if
    checkpoints were scanned too."""
    liveness = functools.cache(lambda term: _liveness(terms, term))
    newest = max((item.name.point for item in scanned if item.is_committed), default=(0, 0))
    result = []
    for item in scanned:
        if item.is_link or item.is_committed:
            continue
        quiet_s = now_s - item.changed_s
        why = RemovalReason.DEAD_WRITER
        if item.is_copy:  # its term belongs to the writer of the original, so proves nothing
            why = RemovalReason.STALE_COPY
            is_overtaken = item.name.point < newest
            is_dead = not item.is_copied_now and (
                (is_overtaken and locks_tell)
                or quiet_s > (QUIET_S if is_overtaken else COPY_QUIET_S)
            )
        else:
            writer = liveness(item.name.term)
            is_dead = writer is _WriterState.DEAD or (
                writer is _WriterState.SILENT and quiet_s > QUIET_S
            )
        if is_dead:
            why = RemovalReason.ABORTED if isinstance(item.decided, Abort) else why
            result.append(
                Orphan(name=item.name.folder, why=why, is_folder=True, size_bytes=item.size_bytes)
            )
    return result


def remove(store: Store, orphan: Orphan) -> bool:
    """Remove one orphan. Return False if it turned out to be committed.

    An undecided attempt is aborted first, so a writer that was wrongly considered dead cannot
    commit it. The abort must not be deleted before the other files: the attempt would be undecided
    again, and that writer could commit a half-deleted checkpoint. `delete_folder` therefore renames
    the folder first, together with the abort; nothing can be committed in a folder without its
    name.
    """
    undecided = orphan.why in (RemovalReason.DEAD_WRITER, RemovalReason.STALE_COPY)
    if undecided and not _gave_up(store, orphan):
        return False
    if orphan.is_folder:
        store.delete_folder(orphan.name)
    else:
        store.delete(orphan.name)
    level = logging.WARNING if undecided else logging.INFO
    _log.log(level, "removed %s (%s, %d bytes)", orphan.name, orphan.why.value, orphan.size_bytes)
    return True


def _gave_up(store: Store, orphan: Orphan) -> bool:
    """Abort an undecided attempt. Return False if it turned out to be committed."""
    try:
        decided = abort(store, orphan.name, f"{orphan.why.value}; cleaned up")
    except StorageError:
        # A full disk has no room for an abort either. Deleting the folder also prevents a commit.
        decided = decision.read(store, orphan.name) or Abort(reason=orphan.why.value, by="")
    return isinstance(decided, Abort)


class _WriterState(enum.Enum):
    ALIVE = enum.auto()
    SILENT = enum.auto()
    DEAD = enum.auto()


def _liveness(terms: Terms, term: int) -> _WriterState:
    if terms.is_alive(term):
        return _WriterState.ALIVE
    try:
        record = terms.read(term)
    except CorruptError:
        record = None
    return _WriterState.DEAD if record is not None and is_here(record) else _WriterState.SILENT


def _liveness_locks(store: Store, entries: Iterable[StoreEntry], now_s: float) -> list[Orphan]:
    """Return the old liveness locks that no process holds. An unlocked one may belong to a live job
    instance on another machine, but is of no use to it."""
    return [
        Orphan(
            name=name, why=RemovalReason.DEAD_WITNESS, is_folder=False, size_bytes=entry.size_bytes
        )
        for entry in entries
        if parse_liveness_lock(entry.name)
        and now_s - entry.modified_s > QUIET_S
        and not store.is_locked(name := f"{TERMS_FOLDER}/{entry.name}")
    ]


def _debris(entries: Iterable[StoreEntry], folder: str, now_s: float) -> list[Orphan]:
    return [
        Orphan(
            name=f"{folder}/{entry.name}" if folder else entry.name,
            why=RemovalReason.DEBRIS,
            is_folder=entry.is_folder and not entry.is_link,
            size_bytes=entry.size_bytes,
        )
        for entry in entries
        if _TEMPORARY.fullmatch(entry.name)
        and (now_s - entry.modified_s > QUIET_S or _is_half_deleted(entry, folder))
    ]


def _is_half_deleted(entry: StoreEntry, folder: str) -> bool:
    """Return True for a checkpoint or an attempt whose deletion has begun. It is no longer needed,
    and two processes may delete it at the same time."""
    name = _TEMPORARY.fullmatch(entry.name)
    named = None if name is None else parse_folder(name[1])
    return not folder and entry.is_folder and not entry.is_link and named is not None
