"""Find the snapshots of a run in shared memory, and store those that exist nowhere else.

Storing does what the snapshot's own flusher would have done: it takes the lock of the term, whose
writer is dead, begins the attempt again and commits it, unless another job instance has continued
without it or is about to. The order of steps is that of any writer (`Attempt`), so at most one of
the two succeeds. Segments of live processes are never touched. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import mmap
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import terms
from laststep.catalog.attempt import RUN_NAME, Attempt, AttemptName, read_decision
from laststep.catalog.run import Run, newest_point, run_id
from laststep.constants import CHUNK_BYTES, align_up, listed
from laststep.errors import AlreadyExistsError, CorruptError, LaststepError, UsageError
from laststep.format import index as index_format
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.memory import segments
from laststep.process import signals
from laststep.process.system import warn_once
from laststep.settings import WAIT_FOR_OTHERS_S
from laststep.storage.files import absolute
from laststep.storage.registry import open_store, real_place
from laststep.storage.shared_memory import BASE
from laststep.storage.store import write_aligned
from laststep.tiers import snapshots

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from laststep.memory.segments import Segment
    from laststep.storage.store import Store

__all__ = ["OrphanedSegment", "OrphanedSnapshot", "RecoverReport", "SnapshotState", "recover"]

log = logging.getLogger(__name__)

_POLL_S = 0.02


def snapshots_of(
    store: Store, base: str, own: Segment | None = None, flusher_of: Segment | None = None
) -> list[snapshots.MemorySnapshot]:
    """Return the snapshots of the run in a store, oldest first. The caller closes them.

    They come from segments whose processes are dead and from those of this job instance, one of
    which is `own`. If the store has lost the run, the run that saved last is used. A flusher, whose
    trainer may have died meanwhile, passes its own segment as `flusher_of`; otherwise it would wait
    for itself.
    """
    of_run = segments.found(base, real_place(store.url))
    served = None if flusher_of is None else flusher_of.folder
    wait_for_flushers([segment for segment in of_run if segment.folder != served])
    dead = {segment.folder for segment in of_run if not segment.is_alive()}
    this_start = set() if own is None else {own.folder}
    found = [
        parts
        for parts in snapshots.complete(of_run)
        if (folders := {segment.folder for segment, _ in parts if segment is not None}) <= dead
        or folders & this_start
    ]
    if not found:
        return []
    newest = max((parts[0][1] for parts in found), key=lambda record: record.created_s)
    run = run_id(store) or newest.run
    opened = [
        snapshot
        for parts in found
        if parts[0][1].run == run
        and standing_of(store, parts[0][1]) is not SnapshotState.LEFT_BEHIND
        for snapshot in snapshots.opened(parts)
    ]
    return sorted(opened, key=lambda snapshot: snapshot.record.at.point)


def warn_of_incomplete(store: Store, base: str, usable: Sequence[snapshots.MemorySnapshot]) -> None:
    """Log newer steps that cannot be restored, because only some ranks had captured them before
    all processes died. `usable` are the snapshots of all ranks."""
    run = run_id(store)
    newest = max([newest_point(store).commit, *(each.record.at.point for each in usable)])
    dead = [s for s in segments.found(base, real_place(store.url)) if not s.is_alive()]
    missed = {
        part.record.at.step: f"step {part.record.at.step} ({part.present} of {part.ranks} ranks)"
        for part in snapshots.incomplete(dead)
        if part.record.run == run and part.record.at.point > newest
    }
    if missed:
        warn_once(
            log,
            "shared memory holds newer steps that are not restored, because only some ranks had "
            f"captured them: {listed(text for _, text in sorted(missed.items()))}",
        )


def check_records(store: Store, snapshot: snapshots.MemorySnapshot) -> None:
    """Raise `UsageError` if the store has lost the run of a snapshot, or the record of its term,
    without which the lineage does not contain it."""
    at = snapshot.record.at
    is_recorded = bool(run_id(store)) and at.term in terms.Terms(store).numbers()
    if not is_recorded and standing_of(store, snapshot.record) is SnapshotState.ALONE:
        raise UsageError(
            f"step {at.step} is in shared memory, but its run was deleted or replaced",
            where=store.url,
            expected=f"the record of term {at.term}",
            remedy=f"`laststep recover {store.url}` stores the run and that step there again; to "
            f"start over, remove {' and '.join(snapshot.segments)}",
        )


def wait_for_flushers(found: Sequence[Segment]) -> None:
    """Wait, for a limited time, for flushers whose trainers have died: they complete snapshots."""
    deadline = time.monotonic() + WAIT_FOR_OTHERS_S
    for segment in found:
        while segment.is_ending():
            if time.monotonic() >= deadline:
                log.warning(
                    "the flusher of process %d does not end, and %s is left to it",
                    segment.owner.pid,
                    segment.folder,
                )
                return
            signals.check_signals()
            time.sleep(_POLL_S)  # another process: there is no event to wait for


class SnapshotState(enum.StrEnum):
    STORED = "stored"
    """The run has it."""
    RECOVERED = "recovered"
    """It was stored in the run by this call."""
    ALONE = "alone"
    """It exists only in memory."""
    LEFT_BEHIND = "left behind"
    """It exists only in memory. Another job instance has continued without it: an older copy has
    replaced the run and the term is another's, or the last commit does not descend from it."""
    NOT_STORED = "not stored"
    """It exists only in memory and could not be stored."""


def standing_of(store: Store, record: snapshots.SnapshotRecord) -> SnapshotState:
    at, own = record.at, dict(record.records).get(terms.term_record_name(record.at.term))
    with contextlib.suppress(CorruptError):  # a damaged record is no evidence
        if own is not None:
            recorded = terms.Terms(store).read(at.term)
            if recorded not in (None, terms.decode(own, term=at.term, where="memory")):
                return SnapshotState.LEFT_BEHIND
    with contextlib.suppress(CorruptError):  # a damaged manifest is no commit
        if isinstance(read_decision(store, at.folder), Commit):
            return SnapshotState.STORED
    last = newest_point(store).commit
    if at.point < last and not terms.order([at], terms.Terms(store).chain(last[0])):
        return SnapshotState.LEFT_BEHIND
    return SnapshotState.ALONE


def store_snapshot(store: Store, snapshot: snapshots.MemorySnapshot) -> bool:
    """Store and commit a snapshot in its run; return False if it is already committed. Raise
    `AbortedError` if another job instance has continued, `UsageError` if the run is gone."""
    record, at = snapshot.record, snapshot.record.at
    check_records(store, snapshot)
    run = Run.open(store)
    if isinstance(read_decision(store, at.folder), Commit):
        return False

    def check() -> None:
        """Raise `AbortedError` if another job instance has continued, or is alive and may."""
        known, living = terms.Terms(store), run.live_writer()
        is_left_behind = standing_of(store, record) is SnapshotState.LEFT_BEHIND
        if is_left_behind or (living is not None and living.term > at.term):
            raise known.superseded_error(max(known.numbers()), f"no job later than term {at.term}")

    check()
    with closing(run.lock_term(at.term)):
        if isinstance(read_decision(store, at.folder), Commit):
            return False  # another process has stored it meanwhile
        store.delete_folder(at.folder)  # its writer left it incomplete
        attempt = Attempt(store, at, check)
        attempt.begin()
        indexes = [index_format.plain_index(index) for index in snapshot.indexes]
        names = [index_format.index_name(rank, len(indexes)) for rank in range(len(indexes))]
        names += [file.name for index in indexes for file in index.files]
        attempt.make_folders(names)
        written = WrittenIndexes()
        for rank, index in enumerate(indexes):
            _write_layouts(attempt, snapshot, rank)
            data = index_format.encode(index)
            attempt.put(names[rank], data)
            written = written.plus(index_format.written_of(index, data))
        attempt.sync(names)
        attempt.commit(msgspec.structs.replace(snapshot.commit, written=written))
    log.warning("step %d was stored out of shared memory, as %s", at.step, at.folder)
    return True


def _write_layouts(attempt: Attempt, snapshot: snapshots.MemorySnapshot, rank: int) -> None:
    """Write a rank's layouts as plain data files; `CorruptError` if the memory has changed."""
    # Imported late: a flusher needs it only after a job has died.
    from laststep.read.blocks import BlockReader, refuse

    buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # not closed: a traceback may reference it
    with closing(BlockReader(snapshot, snapshot.folder, snapshot.indexes[rank]).sound()) as opened:
        for file in opened.layouts:
            layout = file.layout
            size_bytes = layout.size_bytes
            with closing(attempt.open_writer(layout.name, expected_bytes=size_bytes)) as writer:
                write_aligned(writer, 0, layout.header())
                for start in range(0, layout.tensor_bytes, CHUNK_BYTES):
                    stop = min(start + CHUNK_BYTES, layout.tensor_bytes)
                    refuse(file.blocks(start, stop).read(buffer))
                    padded = align_up(stop - start, writer.alignment_bytes)
                    writer.write_at(layout.header_bytes + start, buffer[:padded])
                writer.finish(layout.size_bytes)


# --- recover ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedSnapshot:
    """A complete snapshot in a segment."""

    step: int
    folder: str
    """The folder of this checkpoint in its run."""
    created_s: float
    size_bytes: int
    state: SnapshotState
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
        """Return True if its owner is alive, or something in it is unreadable or nowhere else."""
        lost = (SnapshotState.ALONE, SnapshotState.NOT_STORED)
        return (
            self.is_alive or self.unreadable > 0 or any(save.state in lost for save in self.saves)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverReport:
    """The segments in shared memory and the outcome for each."""

    segments: tuple[OrphanedSegment, ...]
    debris: tuple[str, ...] = ()
    """Removed folders that had been half created or half deleted."""

    @property
    def ok(self) -> bool:
        """Return True if every snapshot of a dead process that should be stored was stored."""
        return not any(
            segment.unreadable
            or any(save.state is SnapshotState.NOT_STORED for save in segment.saves)
            for segment in self.segments
            if not (segment.is_alive or segment.is_removed)
        )


def recover(
    run: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] = BASE,
    keep: bool = False,
    dry_run: bool = False,
) -> RecoverReport:
    """Store the snapshots of dead processes that exist only in shared memory, of one run or of all,
    and remove the segments that are no longer needed. With `keep` nothing is removed; with
    `dry_run` nothing is changed. A named run that is gone from its place is created again there."""
    base = absolute(base)
    place = None if run is None else real_place(open_store(run).url)
    found = segments.found(base, place)
    alive = {segment.folder for segment in found if segment.is_alive()}
    fates: dict[str, _Fates] = {}
    for place in {segment.owner.run for segment in found}:
        of_run = [segment for segment in found if segment.owner.run == place]
        stores = not dry_run and any(segment.folder not in alive for segment in of_run)
        fates[place] = _fates(of_run, run or place, base, stores=stores, is_named=run is not None)
    left = []
    for segment in found:
        orphan = _described(segment, fates[segment.owner.run], is_alive=segment.folder in alive)
        if not (orphan.is_needed or keep or dry_run):
            orphan = replace(orphan, is_removed=segment.remove())
        left.append(orphan)
    debris = [] if keep or dry_run or run is not None else segments.remove_debris(base)
    return RecoverReport(segments=tuple(left), debris=tuple(debris))


_Fates = dict[tuple[str, AttemptName], tuple[SnapshotState, str | None]]
"""By run id and attempt: what became of a snapshot, and the reason if it could not be stored."""


def _fates(
    of_run: Sequence[Segment],
    url: str | os.PathLike[str],
    base: str,
    *,
    stores: bool,
    is_named: bool,
) -> _Fates:
    """Return the fates of the snapshots in one run's segments, after storing them if `stores`."""
    records = [record for segment in of_run for record in snapshots.records_in(segment)]
    fates, errors, stored = _Fates(), dict[str, str](), set[str]()
    try:
        store = open_store(url)
        for snapshot in snapshots_of(store, base) if stores else ():
            with closing(snapshot):
                try:
                    if is_named:
                        _put_records(store, snapshot.record)
                    if store_snapshot(store, snapshot):
                        stored.add(snapshot.folder)
                except LaststepError as error:
                    errors[snapshot.folder] = str(error)
        run = Run.open(store)
        for record in records:
            folder, why = record.at.folder, None
            state = standing_of(store, record)
            if record.run != run.id:
                state, why = SnapshotState.NOT_STORED, f"{store.url} holds another run by now"
            elif state is SnapshotState.STORED and folder in stored:
                state = SnapshotState.RECOVERED
            elif state is SnapshotState.ALONE and stores:
                state = SnapshotState.NOT_STORED
                why = errors.get(folder, f"not all parts of {of_run[0].owner.ranks} ranks are here")
            fates[record.run, record.at] = state, why
    except LaststepError as error:
        lost = SnapshotState.NOT_STORED, str(error)
        fates = {(record.run, record.at): lost for record in records}
    return fates


def _put_records(store: Store, record: snapshots.SnapshotRecord) -> None:
    """Write the records of the run and the term, in order, if the store has lost them."""
    for name, data in record.records:
        if name != RUN_NAME:
            terms.make_folder(store)
        with contextlib.suppress(AlreadyExistsError):
            store.create(name, data)


def _described(segment: Segment, fates: _Fates, *, is_alive: bool) -> OrphanedSegment:
    owner, saves = segment.owner, []
    records = snapshots.records_in(segment)
    for save in records:
        state, error = fates.get((save.run, save.at), (SnapshotState.ALONE, None))
        if is_alive and state is SnapshotState.NOT_STORED:
            state, error = SnapshotState.ALONE, None  # its owner is alive: not tried
        saves.append(
            OrphanedSnapshot(
                step=save.at.step,
                folder=save.at.folder,
                created_s=save.created_s,
                size_bytes=save.tensor_bytes,
                state=state,
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
