"""What lies in shared memory, and what is to become of it: for the end of a job, and for those who
come to a machine later.

Nothing of a living process is touched. What the dead have left, and no other place has, is stored
in its run. A segment goes when its run has all that is in it, or has gone on without it; one of
which something could not be stored stays. Knows nothing of torch.
"""

from __future__ import annotations

import enum
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog.run import Run
from laststep.errors import LaststepError
from laststep.format.manifest import Commit
from laststep.memory import segments
from laststep.storage.files import absolute
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.tiers import rescue as rescuing
from laststep.tiers.nearest import sealed_of, segments_of
from laststep.tiers.sealed import saves_in

if TYPE_CHECKING:
    import os

    from laststep.memory.segments import Segment
    from laststep.tiers.sealed import SealedSave

__all__ = ["Leftover", "LeftoverSave", "RescueReport", "SaveFate", "rescue"]


class SaveFate(enum.StrEnum):
    """What became of a save in shared memory."""

    STORED = "stored"
    """The run has it."""
    RESCUED = "rescued"
    """The run has it since just now."""
    ALONE = "alone"
    """It is nowhere else."""
    LEFT_BEHIND = "left behind"
    """It is nowhere else, and another start of the job has gone on without it."""
    NOT_STORED = "not stored"
    """It is nowhere else, and could not be stored."""
    GIVEN_UP = "given up"
    """The same, and now it is gone, as somebody has wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverSave:
    """A save that is whole in a segment."""

    step: int
    folder: str
    """Of the checkpoint that it is, in its run."""
    created_s: float
    size_bytes: int
    fate: SaveFate
    error: str | None = None
    """Why it could not be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A segment: one rank's shared memory of one start of a job."""

    folder: str
    run: str
    rank: int
    ranks: int
    pid: int
    host: str
    created_s: float
    size_bytes: int
    """The memory that it takes."""
    is_alive: bool
    """Whether its trainer or its flusher lives."""
    saves: tuple[LeftoverSave, ...]
    unreadable: int
    """How many records in it make no sense to this version."""
    is_removed: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether it has to stay: for its owner, or for what is nowhere else."""
        lost = (SaveFate.ALONE, SaveFate.NOT_STORED)
        return self.is_alive or self.unreadable > 0 or any(save.fate in lost for save in self.saves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueReport:
    """What lies in shared memory, and what became of it."""

    segments: tuple[Leftover, ...]
    debris: tuple[str, ...] = ()
    """Folders that were half made or half removed, and are gone now."""

    @property
    def ok(self) -> bool:
        """Whether nothing is left of the dead that should have been stored."""
        return not self.stays

    @property
    def stays(self) -> tuple[Leftover, ...]:
        """What the dead have left and could not be stored."""
        return tuple(
            one
            for one in self.segments
            if not (one.is_alive or one.is_removed)
            and (one.unreadable or any(save.fate is SaveFate.NOT_STORED for save in one.saves))
        )

    def discard(self) -> RescueReport:
        """Give that up: nobody gets it back. Returns what is so then."""
        gone = {one.folder for one in self.stays if segments.opened(one.folder).remove()}
        left = [_given_up(one) if one.folder in gone else one for one in self.segments]
        return replace(self, segments=tuple(left))


def rescue(
    run: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] = BASE,
    keep: bool = False,
    dry_run: bool = False,
) -> RescueReport:
    """Store what dead processes have left in shared memory alone, of one run or of all, and remove
    what nobody needs any more; with `keep` nothing is removed, with `dry_run` nothing is done."""
    place = absolute(base)
    found = segments.found(place) if run is None else segments_of(open_store(run), place)
    alive = {one.folder for one in found if one.is_alive()}
    runs = {one.owner.run: _Rescuer(run or one.owner.run) for one in found}
    if not dry_run:
        for before in {one.owner.run for one in found if one.folder not in alive}:
            runs[before].store_all(place)
    left = []
    for segment in found:
        leftover = runs[segment.owner.run].judge(segment, is_alive=segment.folder in alive)
        if not (leftover.is_needed or keep or dry_run):
            leftover = replace(leftover, is_removed=segment.remove())
        left.append(leftover)
    debris = [] if keep or dry_run or run is not None else segments.remove_debris(place)
    return RescueReport(segments=tuple(left), debris=tuple(debris))


def _given_up(one: Leftover) -> Leftover:
    saves = [
        replace(save, fate=SaveFate.GIVEN_UP) if save.fate is SaveFate.NOT_STORED else save
        for save in one.saves
    ]
    return replace(one, saves=tuple(saves), is_removed=True)


class _Rescuer:
    """One run, as far as shared memory has something of it."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._run: Run | None = None
        self._error: LaststepError | None = None
        """Why nothing can be stored in it."""
        self._rescued: set[str] = set()
        self._failed: dict[str, LaststepError] = {}
        self._has_tried = False
        try:
            self._run = Run.open(open_store(url))
        except LaststepError as error:
            self._error = error

    def store_all(self, base: str) -> None:
        """Store what dead processes have left and nobody else has."""
        self._has_tried = True
        if self._run is None:
            return
        store = self._run.store
        with ExitStack() as stack:
            try:
                checkpoints = sealed_of(store, base)
            except LaststepError as error:
                self._error = error
                return
            for checkpoint in checkpoints:
                stack.callback(checkpoint.close)
            for checkpoint in checkpoints:
                try:
                    if rescuing.store_snapshot(store, checkpoint):
                        self._rescued.add(checkpoint.folder)
                except LaststepError as error:
                    self._failed[checkpoint.folder] = error

    def judge(self, segment: Segment, *, is_alive: bool) -> Leftover:
        """What there is in a segment of this run, and where else it is."""
        owner, saves = segment.owner, []
        sealed = saves_in(segment)
        for save in sealed:
            fate, error = self._fate(save, owner.ranks)
            if is_alive and fate is SaveFate.NOT_STORED:
                fate, error = SaveFate.ALONE, None  # nobody has tried to
            saves.append(
                LeftoverSave(
                    step=save.at.step,
                    folder=save.at.folder,
                    created_s=save.created_s,
                    size_bytes=save.tensor_bytes,
                    fate=fate,
                    error=error,
                )
            )
        return Leftover(
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
            unreadable=max(len(segment.records()) - len(sealed), 0),
        )

    def _fate(self, save: SealedSave, ranks: int) -> tuple[SaveFate, str | None]:
        folder, run = save.at.folder, self._run
        if run is None:
            return SaveFate.NOT_STORED, str(self._error)
        if save.run != run.id:
            return (
                SaveFate.NOT_STORED,
                f"its run is gone: what lies at {run.store.url} is another one",
            )
        try:
            if rescuing.is_of_another(run.store, save):
                return SaveFate.LEFT_BEHIND, None
            if isinstance(run.decision(folder), Commit):
                return (SaveFate.RESCUED if folder in self._rescued else SaveFate.STORED), None
            if rescuing.is_left_behind(run.store, save):
                return SaveFate.LEFT_BEHIND, None
        except LaststepError as error:
            return SaveFate.NOT_STORED, str(error)
        if not self._has_tried:
            return SaveFate.ALONE, None
        why: object = self._failed.get(folder, self._error)
        if why is None:
            why = f"it is one of {ranks} ranks', and not all of these have left theirs here"
        return SaveFate.NOT_STORED, str(why)
