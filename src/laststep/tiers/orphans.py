"""Recover orphaned snapshots: store what dead processes left in shared memory, and free it.

Segments of live processes are never touched. Snapshots of dead processes that exist nowhere else
are stored in their run. A segment is removed once the run has all its snapshots or has continued
without them; it is kept if something in it could not be stored. This module knows nothing of torch.
"""

from __future__ import annotations

import enum
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.run import Run
from laststep.errors import LaststepError
from laststep.format.manifest import Commit
from laststep.memory import segments
from laststep.storage.files import absolute
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.tiers import recovery
from laststep.tiers.snapshots import records_in

if TYPE_CHECKING:
    import os

    from laststep.memory.segments import Segment
    from laststep.tiers.snapshots import SnapshotRecord

__all__ = ["OrphanedSegment", "OrphanedSnapshot", "RecoverReport", "SnapshotState", "recover"]


class SnapshotState(enum.StrEnum):
    """The state of a snapshot in shared memory."""

    STORED = "stored"
    """The run has it."""
    RECOVERED = "recovered"
    """It was stored in the run by this call."""
    ALONE = "alone"
    """It exists only in memory."""
    LEFT_BEHIND = "left behind"
    """It exists only in memory, and another job instance has continued without it."""
    NOT_STORED = "not stored"
    """It exists only in memory and could not be stored."""
    GIVEN_UP = "given up"
    """It could not be stored and was deleted at the user's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedSnapshot:
    """A complete snapshot in a segment."""

    step: int
    folder: str
    """The folder of this checkpoint in its run."""
    created_s: float
    size_bytes: int
    fate: SnapshotState
    error: str | None = None
    """The reason why it could not be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedSegment:
    """A segment: the shared memory of one rank of one job instance."""

    folder: str
    run: str
    rank: int
    ranks: int
    pid: int
    host: str
    created_s: float
    size_bytes: int
    """The memory that it occupies."""
    is_alive: bool
    """True if its trainer or its flusher is alive."""
    saves: tuple[OrphanedSnapshot, ...]
    unreadable: int
    """The number of its records that this version cannot read."""
    is_removed: bool = False

    @property
    def is_needed(self) -> bool:
        """Return True if the segment must be kept: for its live owner, or because something in it
        exists nowhere else or cannot be read."""
        lost = (SnapshotState.ALONE, SnapshotState.NOT_STORED)
        return self.is_alive or self.unreadable > 0 or any(save.fate in lost for save in self.saves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverReport:
    """The segments in shared memory and the outcome for each."""

    segments: tuple[OrphanedSegment, ...]
    debris: tuple[str, ...] = ()
    """Removed folders that had been half created or half deleted."""

    @property
    def ok(self) -> bool:
        """Return True if every snapshot of a dead process that should be stored was stored."""
        return not self.stays

    @property
    def stays(self) -> tuple[OrphanedSegment, ...]:
        """Return the segments of dead processes with content that could not be stored."""
        return tuple(
            one
            for one in self.segments
            if not (one.is_alive or one.is_removed)
            and (one.unreadable or any(save.fate is SnapshotState.NOT_STORED for save in one.saves))
        )

    def discard(self) -> RecoverReport:
        """Delete the segments in `stays` for good, and return the updated report."""
        gone = {one.folder for one in self.stays if segments.opened(one.folder).remove()}
        left = [_given_up(one) if one.folder in gone else one for one in self.segments]
        return replace(self, segments=tuple(left))


def recover(
    run: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] = BASE,
    keep: bool = False,
    dry_run: bool = False,
) -> RecoverReport:
    """Store the snapshots of dead processes that exist only in shared memory, of one run or of all,
    and remove the segments that are no longer needed. With `keep` nothing is removed; with
    `dry_run` nothing is changed."""
    place = absolute(base)
    found = segments.found(place) if run is None else recovery.segments_of(open_store(run), place)
    alive = {one.folder for one in found if one.is_alive()}
    runs = {one.owner.run: _Rescuer(run or one.owner.run) for one in found}
    if not dry_run:
        for before in {one.owner.run for one in found if one.folder not in alive}:
            runs[before].store_all(place)
    left = []
    for segment in found:
        orphan = runs[segment.owner.run].judge(segment, is_alive=segment.folder in alive)
        if not (orphan.is_needed or keep or dry_run):
            orphan = replace(orphan, is_removed=segment.remove())
        left.append(orphan)
    debris = [] if keep or dry_run or run is not None else segments.remove_debris(place)
    return RecoverReport(segments=tuple(left), debris=tuple(debris))


def _given_up(one: OrphanedSegment) -> OrphanedSegment:
    saves = [
        replace(save, fate=SnapshotState.GIVEN_UP)
        if save.fate is SnapshotState.NOT_STORED
        else save
        for save in one.saves
    ]
    return replace(one, saves=tuple(saves), is_removed=True)


class _Rescuer:
    """One run that has segments in shared memory."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._run: Run | None = None
        self._error: LaststepError | None = None
        """The reason why nothing can be stored in the run."""
        self._recovered: set[str] = set()
        self._failed: dict[str, LaststepError] = {}
        self._has_tried = False
        try:
            self._run = Run.open(open_store(url))
        except LaststepError as error:
            self._error = error

    def store_all(self, base: str) -> None:
        """Store the snapshots of dead processes that exist nowhere else."""
        self._has_tried = True
        if self._run is None:
            return
        store = self._run.store
        with ExitStack() as stack:
            try:
                snapshots = recovery.snapshots_of(store, base)
            except LaststepError as error:
                self._error = error
                return
            for snapshot in snapshots:
                stack.callback(snapshot.close)
            for snapshot in snapshots:
                try:
                    if recovery.store_snapshot(store, snapshot):
                        self._recovered.add(snapshot.folder)
                except LaststepError as error:
                    self._failed[snapshot.folder] = error

    def judge(self, segment: Segment, *, is_alive: bool) -> OrphanedSegment:
        """Describe a segment of this run and the state of each snapshot in it."""
        owner, saves = segment.owner, []
        records = records_in(segment)
        for save in records:
            fate, error = self._fate(save, owner.ranks)
            if is_alive and fate is SnapshotState.NOT_STORED:
                fate, error = SnapshotState.ALONE, None  # its owner is alive: not tried
            saves.append(
                OrphanedSnapshot(
                    step=save.at.step,
                    folder=save.at.folder,
                    created_s=save.created_s,
                    size_bytes=save.tensor_bytes,
                    fate=fate,
                    error=error,
                )
            )
        return OrphanedSegment(
            folder=segment.folder,
            run=owner.run,
            rank=owner.rank,
            ranks=owner.ranks,
            pid=owner.pid,
            host=owner.host,
            created_s=owner.created_s,
            size_bytes=segment.size_bytes,
            is_alive=is_alive,
            saves=tuple(saves),
            unreadable=max(len(segment.records()) - len(records), 0),
        )

    def _fate(self, save: SnapshotRecord, ranks: int) -> tuple[SnapshotState, str | None]:
        folder, run = save.at.folder, self._run
        if run is None:
            return SnapshotState.NOT_STORED, str(self._error)
        if save.run != run.id:
            return (SnapshotState.NOT_STORED, f"its run is gone: {run.store.url} holds another run")
        try:
            if recovery.is_of_another(run.store, save):
                return SnapshotState.LEFT_BEHIND, None
            if isinstance(decision.read(run.store, folder), Commit):
                return (
                    SnapshotState.RECOVERED if folder in self._recovered else SnapshotState.STORED
                ), None
            if recovery.is_left_behind(run.store, save):
                return SnapshotState.LEFT_BEHIND, None
        except LaststepError as error:
            return SnapshotState.NOT_STORED, str(error)
        if not self._has_tried:
            return SnapshotState.ALONE, None
        why: object = self._failed.get(folder, self._error)
        if why is None:
            why = (
                f"it is the snapshot of one of {ranks} ranks, and those of the others are not on "
                "this machine"
            )
        return SnapshotState.NOT_STORED, str(why)
