"""Find and remove what crashes leave behind in a run.

That is only what no live writer can still want: attempts that were given up or whose writer is
dead, copies that nobody works on and that a later checkpoint has overtaken, or nobody has gone on
with for a week, folders that somebody has deleted by half, and temporary names and free witnesses
older than an hour. Committed checkpoints are never touched, and nothing that lies behind a link is.
A free lock proves death only under the same kernel, or where the store says so; else an attempt
must also have been quiet for an hour.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.catalog.epochs import Epochs, is_here
from laststep.catalog.lineage import EPOCHS_FOLDER, parse_folder, parse_witness
from laststep.errors import CorruptError, StorageError
from laststep.format.manifest import Abort

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.catalog.listing import ScannedAttempt
    from laststep.storage.store import Store, StoreEntry

_log = logging.getLogger(__name__)

QUIET_S = 3600.0
"""How long nothing must have changed, where nothing better shows that a writer is dead."""

COPY_QUIET_S = 7 * 86400.0
"""The same for a copy that was interrupted: until then, whoever copies again goes on with it. Once
a later checkpoint is there, nobody is expected to."""

_TEMPORARY = re.compile(r"(.+)\.tmp-[0-9a-f]{12}")
"""What a store names files that it makes, and folders that it deletes; a user's names are his."""


class RemovalReason(enum.Enum):
    """Why a file or folder may be removed."""

    ABORTED = "given up"
    DEAD_WRITER = "no manifest, and its writer is dead"
    STALE_COPY = "a copy that nobody goes on with"
    DEBRIS = "a temporary name that was left behind"
    DEAD_WITNESS = "of a start that is over"


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """One file or folder that nobody needs, by its name within the run."""

    name: str
    why: RemovalReason
    is_folder: bool
    size_bytes: int


def orphans(
    store: Store, epochs: Epochs, scanned: tuple[ScannedAttempt, ...], *, now_s: float
) -> tuple[Orphan, ...]:
    """All that may be removed now; removes nothing. The scan MUST have looked through attempts. It
    need not look through checkpoints: data files never have temporary names."""
    result = attempts_of_the_dead(epochs, scanned, now_s=now_s, locks_tell=store.locks_tell())
    for item in scanned:
        if item.is_committed and not item.is_link:
            result += _debris(item.entries, item.name.folder, now_s)
    result += _debris(store.list(""), "", now_s)
    entries = store.list(EPOCHS_FOLDER)
    result += _debris(entries, EPOCHS_FOLDER, now_s) + _witnesses(store, entries, now_s)
    return tuple(result)


def attempts_of_the_dead(
    epochs: Epochs, scanned: tuple[ScannedAttempt, ...], *, now_s: float, locks_tell: bool = False
) -> list[Orphan]:
    """The scanned attempts that were given up or never decided, and whose writer is known to be
    dead, or silent for long. Copies that others have overtaken are told only where checkpoints were
    scanned too."""
    liveness = functools.cache(lambda epoch: _liveness(epochs, epoch))
    newest = max((item.name.point for item in scanned if item.is_committed), default=(0, 0))
    result = []
    for item in scanned:
        if item.is_link or item.is_committed:
            continue
        quiet_s = now_s - item.changed_s
        why = RemovalReason.DEAD_WRITER
        if item.is_copy:  # the writer of its epoch is that of another place, and proves nothing
            why = RemovalReason.STALE_COPY
            is_overtaken = item.name.point < newest
            is_dead = not item.is_copied_now and (
                (is_overtaken and locks_tell)
                or quiet_s > (QUIET_S if is_overtaken else COPY_QUIET_S)
            )
        else:
            writer = liveness(item.name.epoch)
            is_dead = writer is _Liveness.DEAD or (writer is _Liveness.SILENT and quiet_s > QUIET_S)
        if is_dead:
            why = RemovalReason.ABORTED if isinstance(item.decided, Abort) else why
            result.append(
                Orphan(name=item.name.folder, why=why, is_folder=True, size_bytes=item.size_bytes)
            )
    return result


def remove(store: Store, orphan: Orphan) -> bool:
    """Remove one orphan; returns False where it turned out to be committed.

    An undecided attempt is given up first, so a writer that was wrongly taken for dead loses. The
    abort must not go before the rest: without it the attempt would be undecided again, and that
    writer could commit what is half gone. `delete_folder` takes the folder's name away first, the
    abort with it, and in a folder without a name nobody can commit.
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
    """Give an undecided attempt up; returns False where it turned out to be committed."""
    try:
        decided = decision.abort(store, orphan.name, f"{orphan.why.value}; cleaned up")
    except StorageError:
        # A full disk has no room for a decision either; without its folder nobody can commit.
        decided = decision.read(store, orphan.name) or Abort(reason=orphan.why.value, by="")
    return isinstance(decided, Abort)


class _Liveness(enum.Enum):
    ALIVE = enum.auto()
    SILENT = enum.auto()
    DEAD = enum.auto()


def _liveness(epochs: Epochs, epoch: int) -> _Liveness:
    if epochs.is_alive(epoch):
        return _Liveness.ALIVE
    try:
        record = epochs.read(epoch)
    except CorruptError:
        record = None
    return _Liveness.DEAD if record is not None and is_here(record) else _Liveness.SILENT


def _witnesses(store: Store, entries: Iterable[StoreEntry], now_s: float) -> list[Orphan]:
    """The old witnesses that nobody holds. A free one may belong to a live start on another
    machine, to which it is of no use."""
    return [
        Orphan(
            name=name, why=RemovalReason.DEAD_WITNESS, is_folder=False, size_bytes=entry.size_bytes
        )
        for entry in entries
        if parse_witness(entry.name)
        and now_s - entry.modified_s > QUIET_S
        and not store.is_locked(name := f"{EPOCHS_FOLDER}/{entry.name}")
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
    """Whether it is a checkpoint or an attempt whose deletion has begun. Nobody wants it back, and
    whoever may still be deleting it does not mind help."""
    name = _TEMPORARY.fullmatch(entry.name)
    named = None if name is None else parse_folder(name[1])
    return not folder and entry.is_folder and not entry.is_link and named is not None
