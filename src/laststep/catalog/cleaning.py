"""What crashes leave behind in a run, and its removal.

Only what no live writer can still want: attempts that were given up or whose writer is dead, what
somebody has deleted by half, and temporary names and free witnesses older than an hour. Committed
checkpoints are never touched, and nothing that lies behind a link is. A free lock proves death only
under the same kernel; the attempt of another machine must also have been quiet for an hour.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.catalog.epochs import Epochs, is_here
from laststep.catalog.names import EPOCHS_FOLDER, parse_folder, parse_witness
from laststep.errors import Corrupt
from laststep.format.manifest import Abort

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.catalog.listing import ScannedAttempt
    from laststep.storage.store import Store, StoreEntry

_log = logging.getLogger(__name__)

QUIET_S = 3600.0
"""How long nothing has to have changed where nothing better tells that a writer is dead."""

_TEMPORARY = ".tmp-"


class RemovalReason(enum.Enum):
    """Why something may go."""

    ABORTED = "given up"
    DEAD_WRITER = "no manifest, and its writer is dead"
    DEBRIS = "a temporary name that was left behind"
    DEAD_WITNESS = "of a start that is over"


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """One file or folder that nobody needs, by its name within the run."""

    name: str
    why: RemovalReason
    is_folder: bool
    size_bytes: int


def orphans(
    store: Store, epochs: Epochs, found: tuple[ScannedAttempt, ...], *, now_s: float
) -> tuple[Orphan, ...]:
    """All that may be removed now; removes nothing. What was `found` MUST have been looked through,
    but for checkpoints: data files never have temporary names."""
    result = attempts_of_the_dead(epochs, found, now_s=now_s)
    for item in found:
        if item.is_committed and not item.is_link:
            result += _debris(item.entries, item.name.folder, now_s)
    result += _debris(store.list(""), "", now_s)
    result += _debris(store.list(EPOCHS_FOLDER), EPOCHS_FOLDER, now_s)
    result += _witnesses(store, now_s)
    return tuple(result)


def attempts_of_the_dead(
    epochs: Epochs, found: tuple[ScannedAttempt, ...], *, now_s: float
) -> list[Orphan]:
    """Those of the attempts `found` that were given up or never decided, and whose writer is known
    to be dead, or silent for long."""
    dead: dict[int, _Liveness] = {}
    result = []
    for item in found:
        if item.is_link or item.is_committed:
            continue
        epoch = item.name.epoch
        if epoch not in dead:
            dead[epoch] = _liveness(epochs, epoch)
        quiet = now_s - item.changed_s > QUIET_S
        if dead[epoch] is _Liveness.DEAD or (dead[epoch] is _Liveness.SILENT and quiet):
            why = (
                RemovalReason.ABORTED
                if isinstance(item.decided, Abort)
                else RemovalReason.DEAD_WRITER
            )
            result.append(
                Orphan(name=item.name.folder, why=why, is_folder=True, size_bytes=item.size_bytes)
            )
    return result


def remove(store: Store, orphan: Orphan) -> bool:
    """Remove one; False where it turned out to be committed.

    An undecided attempt is given up first, so a writer that was wrongly taken for dead loses. The
    abort must not go before the rest: without it the attempt would be undecided again, and that
    writer could commit what is half gone. `delete_folder` takes the folder's name away first, the
    abort with it, and in a folder without a name nobody can commit.
    """
    if orphan.why is RemovalReason.DEAD_WRITER and not isinstance(
        decision.abort(store, orphan.name, f"{orphan.why.value}; cleaned up"), Abort
    ):
        return False
    if orphan.is_folder:
        store.delete_folder(orphan.name)
    else:
        store.delete(orphan.name)
    level = logging.WARNING if orphan.why is RemovalReason.DEAD_WRITER else logging.INFO
    _log.log(level, "removed %s (%s, %d bytes)", orphan.name, orphan.why.value, orphan.size_bytes)
    return True


class _Liveness(enum.Enum):
    ALIVE = enum.auto()
    SILENT = enum.auto()
    DEAD = enum.auto()


def _liveness(epochs: Epochs, epoch: int) -> _Liveness:
    if epochs.is_alive(epoch):
        return _Liveness.ALIVE
    try:
        record = epochs.read(epoch)
    except Corrupt:
        record = None
    return _Liveness.DEAD if record is not None and is_here(record) else _Liveness.SILENT


def _witnesses(store: Store, now_s: float) -> list[Orphan]:
    """A lock that is free may belong to a live start on another machine; there it is no use."""
    entries = [entry for entry in store.list(EPOCHS_FOLDER) if parse_witness(entry.name)]
    return [
        Orphan(
            name=name, why=RemovalReason.DEAD_WITNESS, is_folder=False, size_bytes=entry.size_bytes
        )
        for entry in entries
        if now_s - entry.modified_s > QUIET_S
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
        if _TEMPORARY in entry.name.rpartition("/")[2]
        and (now_s - entry.modified_s > QUIET_S or _is_half_deleted(entry, folder))
    ]


def _is_half_deleted(entry: StoreEntry, folder: str) -> bool:
    """A checkpoint or an attempt that has lost its name: nobody wants it back, and whoever may
    still be deleting it does not mind help."""
    named = parse_folder(entry.name.partition(_TEMPORARY)[0])
    return not folder and entry.is_folder and not entry.is_link and named is not None
