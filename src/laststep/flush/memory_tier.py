"""Keep the newest save in shared memory: it is a checkpoint there before any of it is written.

The slots of a save are held after they are written to disk, until a newer save is complete beside
it. So there is always one snapshot that nothing overwrites. Every slot is digested ahead of
writing. When all slots and the plain values have arrived, a record is put into the segment; a
process that finds the record after this flusher and its trainer have died can read the checkpoint.
Chunks that have not changed since the save before, and were not sent again, share the slots of that
save. If there is no room for two saves, the older one is dropped as soon as it is stored elsewhere.

In a job of several ranks a save is complete when all ranks have it, each in its own segment. Ranks
progress at different speeds, so the older save is kept beside the newer one until one of them is
committed, or until the other ranks have the newer one too, as their records on this node show. Does
not write to disks and does not commit.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import msgspec

from laststep.constants import CHUNK_BYTES, MEMORY
from laststep.errors import LaststepError
from laststep.flush.listeners import Listener
from laststep.memory import segments
from laststep.process import threads
from laststep.tiers import snapshots
from laststep.tiers.recovery import snapshots_of, store_snapshot
from laststep.tiers.replicating import TierStatus
from laststep.tiers.snapshots import SnapshotRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from laststep.catalog.run import RunWriter
    from laststep.flush.listeners import FlusherSave, SlotHolds
    from laststep.flush.protocol import CaptureDone, ToTrainer, Unchanged
    from laststep.memory.pool import Filled
    from laststep.memory.segments import Segment
    from laststep.storage.store import Store
    from laststep.tiers.snapshots import MemorySnapshot

log = logging.getLogger(__name__)

_SPARE_SLOTS = 2
"""Slots of the pool that are never kept: a save announces itself with its first filled slot, and
older snapshots make room only then."""

Place = tuple[int, int]
"""Number of a file, and the offset of a chunk in it."""


class ResidentSave(msgspec.Struct):
    number: int
    expected: int = 0
    """Number of chunks that it has in all."""
    is_whole: bool = False
    """True once all of it is in memory, at first without its record."""
    is_given_up: bool = False
    """True if it is not kept, although it still needs room in the pool."""
    chunks: dict[Place, tuple[int, bytes]] = {}
    """Slot and digests of each chunk that is in memory."""
    records: tuple[str, ...] = ()
    """Names of its records in the segment; empty before it is complete."""
    outcome: bool | None = None
    """True once it is committed on disk, False once it has failed."""

    def slots(self) -> list[int]:
        return [slot for slot, _ in self.chunks.values()]


class MemoryTier(Listener):
    def __init__(
        self,
        folder: str,
        store: Store,
        run_writer: RunWriter,
        slots: SlotHolds,
        send: Callable[[ToTrainer], None],
        *,
        slots_there: int,
        is_gone: Callable[[], bool],
        pool_fd: int,
    ) -> None:
        """Keep saves in the segment in `folder`; `pool_fd` is the descriptor of its memory in a
        helper process, -1 in a thread. `is_gone` returns True once the trainer is gone for good."""
        self._segment = segments.opened(folder)
        self._store, self._run_writer = store, run_writer
        self._slots, self._send = slots, send
        self._is_gone, self._pool_fd = is_gone, pool_fd
        self._lock = threading.Lock()
        """Guards all attributes below."""
        self._coming: dict[int, ResidentSave] = {}
        """Saves that are in progress and not complete here."""
        self._kept = self._left_behind()
        """Complete saves, oldest first."""
        self._most = self._there = slots_there
        """Maximum number of slots, and the number that exist or can be had for now."""
        self._more_comes = True
        self._told_small = False

    def _left_behind(self) -> list[ResidentSave]:
        """Return what a dead flusher has left in this segment, kept until there is a newer save."""
        saves = snapshots.records_in(self._segment)
        slots = {slot for save in saves for slot in save.needed_slots}
        self._slots.hold(slots)
        records = tuple(save.name for save in saves)
        unnamed = {(-1, slot): (slot, b"") for slot in slots}
        kept = ResidentSave(number=0, chunks=unnamed, records=records, outcome=False)
        return [kept] if saves else []

    @threads.outlasting(log, "cannot store orphaned snapshots from shared memory")
    def started(self) -> None:
        """Store the snapshots that earlier job instances have left only in shared memory, before
        training continues; rank 0 does this for all. All but the newest, which is being restored,
        are then removed: instances that die early would otherwise fill the memory. Other ranks,
        which may be on other nodes, remove segments without a save."""
        found = segments.found(self._segment.base, self._segment.owner.run)
        needed: set[str] = set()
        if self._segment.owner.rank > 0:
            needed.update(segment.folder for segment in found if segment.records())
        else:
            base = self._segment.base
            for checkpoint in snapshots_of(self._store, base, flusher_of=self._segment):
                with _trying(checkpoint):
                    store_snapshot(self._store, checkpoint)
                    needed.clear()
                needed.update(checkpoint.segments)
            needed.update(_with_newest(found))  # other nodes may hold the rest of that save
        if self._kept or any(segment.is_ending() for segment in found):
            return  # segments of this job instance, or of one still ending, must not be removed yet
        for segment in found:
            if segment.folder not in needed and not segment.is_alive():
                segment.remove()

    @threads.outlasting(log, "cannot free orphaned snapshots in shared memory")
    def _forget_predecessors(self, save: FlusherSave) -> None:
        """Remove the segments of earlier job instances on this node, of any rank, once `save` is
        committed. Those of this instance stay, even of dead ranks."""
        for segment in segments.of_dead_processes(self._segment.base, self._segment.owner.run):
            if not self._may_be_of_this_start(segment, save):
                segment.remove()

    def _may_be_of_this_start(self, segment: Segment, save: FlusherSave) -> bool:
        """Return True if another rank of this job instance may have it: its save is not older."""
        own, other = self._segment.owner, segment.owner
        if other.ranks != own.ranks or other.rank == own.rank:
            return False
        assert save.attempt is not None  # noqa: S101 (it is committed)
        run, point = self._run_writer.run.id, save.attempt.name.point
        return any(
            record.run == run and record.at.point >= point
            for record in snapshots.records_in(segment)
        )

    def close(self, at_once: bool) -> None:  # noqa: FBT001 (as in Listener)
        """Release the pool once the trainer is gone for good, so that a new start need not wait."""
        if self._pool_fd >= 0 and self._is_gone():
            fcntl.flock(self._pool_fd, fcntl.LOCK_UN)  # the memory will not change any more

    # Arriving saves

    def begun(self, save: FlusherSave) -> None:
        """Make room for a new save, and for the previous one beside it if possible."""
        number = save.begin.save
        expected = sum(-(-file.tensor_bytes // CHUNK_BYTES) for file in save.begin.files)
        with self._lock:
            self._coming[number] = ResidentSave(number=number, expected=expected)
            self._make_room()

    def limit(self, slots: int) -> None:
        with self._lock:
            self._there = min(slots, self._most)
            self._make_room()

    def _make_room(self) -> None:
        """Give up saves that do not fit, and drop older ones to make room for those that do.
        Requires the lock, like the methods that it calls."""
        room = self._there - _SPARE_SLOTS
        for kept in self._coming.values():
            if kept.expected > room and not kept.is_whole and not kept.is_given_up:
                self._give_up(kept)
                if not self._told_small:
                    self._told_small = True
                    log.warning(
                        "a save of %d bytes does not fit into %d bytes of shared memory and is not "
                        "kept there; pass a larger host_memory_bytes, or free space in %s",
                        kept.expected * CHUNK_BYTES,
                        self._there * CHUNK_BYTES,
                        self._segment.base,
                    )
        self._drop_older()

    def _give_up(self, kept: ResidentSave) -> None:
        kept.is_given_up = True
        self._release(kept)

    def _release(self, kept: ResidentSave) -> None:
        slots, kept.chunks = kept.slots(), {}
        self._slots.release(slots)

    def chunk(self, save: FlusherSave, chunk: Filled, digests: bytes) -> None:
        with self._lock:
            resident = self._coming.get(save.begin.save)
            if resident is None or resident.is_given_up:
                return
            self._slots.hold([chunk.slot])
            resident.chunks[chunk.file, chunk.start] = chunk.slot, digests
        self._try_to_seal(save)

    def reusable(self, save: FlusherSave, said: Unchanged) -> tuple[tuple[int, int, int], ...]:
        """Return the unchanged chunks that are still in memory; all if the save is not kept."""
        with self._lock:
            resident = self._coming.get(save.begin.save)
            if resident is None or resident.is_given_up:
                return said.chunks
            last = self._find(said.of)
            return tuple(chunk for chunk in said.chunks if last and chunk[:2] in last.chunks)

    def reuse(self, save: FlusherSave, chunks: Iterable[tuple[int, int, int]]) -> None:
        """Take over chunks that will not arrive from the save that holds the same bytes."""
        with self._lock:
            resident, last = self._coming.get(save.begin.save), self._find(save.base)
            if resident is not None and not resident.is_given_up and last is not None:
                for file, start, _ in chunks:
                    resident.chunks[file, start] = held = last.chunks[file, start]
                    self._slots.hold([held[0]])
        self._try_to_seal(save)  # incomplete if the earlier save was dropped meanwhile

    def _find(self, number: int) -> ResidentSave | None:
        return next((kept for kept in self._kept if kept.number == number), None)

    # Outcome

    def captured(self, save: FlusherSave) -> None:
        self._try_to_seal(save)

    opened = captured  # some ranks know the attempt last

    def _try_to_seal(self, save: FlusherSave) -> None:
        """Write a save's record once all of it is in memory. Callers run before it is finished."""
        seal, number = save.captured, save.begin.save
        if seal is None or save.attempt is None or save.error is not None:
            return
        with self._lock:
            resident = self._coming.get(number)
            if resident is None or resident.is_whole or resident.is_given_up:
                return
            resident.is_whole = len(resident.chunks) == resident.expected  # chunks never overlap
            if not resident.is_whole:
                return
        try:
            record = self._record(save, seal, resident)
            snapshots.put(self._segment, record)
        except LaststepError as error:
            log.warning("step %d is not kept in shared memory: %s", save.begin.step, error)
            with self._lock:
                self._give_up(resident)
            return
        self._send(TierStatus(at=save.attempt.name, tier=MEMORY, state="held", save=number))
        with self._lock:
            resident.records = (record.name,)
            self._kept = sorted([*self._kept, resident], key=lambda kept: kept.number)
            del self._coming[number]
            self._drop_older()

    def committed(self, save: FlusherSave) -> None:
        self._end(save, is_committed=True)
        self._forget_predecessors(save)

    def failed(self, save: FlusherSave) -> None:
        self._end(save, is_committed=False)

    def _end(self, save: FlusherSave, *, is_committed: bool) -> None:
        """Record the outcome of a save on disk; nothing more of it will be written."""
        number = save.begin.save
        with self._lock:
            if (partial := self._coming.pop(number, None)) is not None:
                self._release(partial)
            elif (whole := self._find(number)) is not None:
                whole.outcome = is_committed
            self._drop_older()

    def ending(self) -> None:
        """Keep complete saves after the trainer has ended: its slots have no other use."""
        self._more_comes = False

    def _drop_older(self) -> None:
        """Drop saves that a newer one replaces, and saves that must make room for the next."""
        while self._more_comes and len(self._kept) > 1:
            older, newer = self._kept[:2]
            if older.outcome or newer.outcome or self._is_on_all_ranks(newer):
                self._drop(older)
            elif newer.outcome is False:  # some ranks will never have it
                self._drop(newer)
            else:
                break
        room = self._there - max((kept.expected for kept in self._coming.values()), default=0)
        while self._more_comes and self._kept and self._kept[0].outcome is not None:
            if len({slot for kept in self._kept for slot in kept.slots()}) <= room:
                break
            self._drop(self._kept[0])

    def _is_on_all_ranks(self, kept: ResidentSave) -> bool:
        """Return True if all ranks of the job have the save, or if some ranks are on other nodes,
        where the save could not be assembled anyway."""
        owner = self._segment.owner
        if owner.ranks == 1:
            return True
        try:
            found = segments.found(self._segment.base, owner.run)
            have = self._segment.ranks_with(kept.records[-1])
        except LaststepError as error:
            log.warning("cannot see the snapshots of other ranks in shared memory: %s", error)
            return False
        here = {segment.owner.rank for segment in found if segment.owner.ranks == owner.ranks}
        return len(have) == owner.ranks or len(here) < owner.ranks

    def _drop(self, kept: ResidentSave) -> None:
        for name in kept.records:  # before its slots can be overwritten
            self._segment.drop(name)
        self._kept.remove(kept)
        self._release(kept)

    def _record(self, save: FlusherSave, seal: CaptureDone, kept: ResidentSave) -> SnapshotRecord:
        assert save.attempt is not None  # noqa: S101 (looked at before)
        assert save.writer is not None  # noqa: S101 (else there is an error)
        stored = []
        for number, layout in enumerate(save.begin.files):
            chunks = [chunk for place, chunk in sorted(kept.chunks.items()) if place[0] == number]
            slots = [slot for slot, _ in chunks]
            digests = b"".join(sums for _, sums in chunks)
            stored.append(snapshots.in_slots(layout, slots, digests, save.writer.lossy(number)))
        return SnapshotRecord(
            run=self._run_writer.run.id,
            at=save.attempt.name,
            created_s=time.time(),
            index=snapshots.pool_index(self._segment.owner.rank, stored, seal.values),
            items=seal.items,
            metrics=seal.metrics,
            metadata=seal.metadata,
            continues=self._run_writer.last_folder,
            receipt=seal.receipt,
            records=self._run_writer.records(),
        )


@contextmanager
def _trying(checkpoint: MemorySnapshot) -> Iterator[None]:
    """Store a checkpoint inside the context; log a warning and continue if that fails."""
    step = checkpoint.record.at.step
    with closing(checkpoint), threads.outlasting(log, f"step {step} is in memory alone"):
        yield


def _with_newest(found: Iterable[Segment]) -> set[str]:
    """Return the segments that hold part of the newest save, or records that cannot be read."""
    records = {segment.folder: len(segment.records()) for segment in found}
    points = {
        segment.folder: [save.at.point for save in snapshots.records_in(segment)]
        for segment in found
    }
    newest = max((point for held in points.values() for point in held), default=None)
    return {
        folder for folder, held in points.items() if newest in held or len(held) < records[folder]
    }
