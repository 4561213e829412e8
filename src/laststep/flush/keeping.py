"""Keep the newest save in shared memory: it is a checkpoint there before anything of it is written.

The slots of a save stay as they are, instead of going back to the trainer when the disk has them,
until a newer save is whole beside it. So there is always one that nobody writes into. Every slot is
digested when it comes, ahead of writing; when all of them and the plain values are there, a record
is left in the segment, and whoever finds that after this process and its trainer have died has the
checkpoint. What did not change since the save before, and was not sent again, is in the slots of
that one: they are both's. Where there is no room for two, the older one goes as soon as it is
stored elsewhere.

Of a job of several ranks a save is whole when all of them have it, each in its own segment. Ranks
are not equally far, so the older one stays beside the newer until it is committed, or until the
others have the newer one too: as far as they are on this node, their records tell. Knows nothing of
disks and of commits.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from laststep.errors import LaststepError, StorageError
from laststep.flush.unkept import NothingKept
from laststep.format import index as index_format
from laststep.format.index import whole_index
from laststep.memory import segments
from laststep.process import threads
from laststep.terms import CHUNK_BYTES
from laststep.tiers import sealed
from laststep.tiers.nearest import is_lost, sealed_of, segments_of
from laststep.tiers.rescue import put_records, store_snapshot
from laststep.tiers.sealed import SealedSave

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.catalog.lineage import AttemptName
    from laststep.flush.protocol import Seal, Unchanged
    from laststep.flush.server import RunFacts, Save
    from laststep.memory.filled import Filled
    from laststep.memory.segments import Segment
    from laststep.storage.store import Store
    from laststep.tiers.sealed import SealedCheckpoint

log = logging.getLogger(__name__)

_SPARE_SLOTS = 2
"""Of the pool that are never kept: a save announces itself with the first slot that it has filled,
and what is kept goes only then."""

_DIGESTERS = 8
"""Threads that digest, where there are cores: a device fills 48 GB/s, of which 4 threads digested
19, so that a save was whole in memory long after it was captured."""

Place = tuple[int, int]
"""The number of a file and where a chunk begins in it."""


class KeptSave(msgspec.Struct):
    """A save as far as it is in memory."""

    number: int
    is_sealing: bool = False
    """Whether all of it is here, and its record is being made."""
    slots: dict[Place, int] = {}
    digests: dict[Place, bytes] = {}
    records: tuple[str, ...] = ()
    """Under which it lies in the segment; nothing before it is whole."""
    is_stored: bool = False
    """Whether another place has it, or will not get it."""
    is_committed: bool = False
    """Whether another place has it."""


class KeeperServes(Protocol):
    """Whom a keeper serves: the flusher."""

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back to the trainer."""

    def pass_on(self, save: Save, chunk: Filled, sums: bytes) -> None:
        """Go on with a chunk that is digested."""

    def facts_of(self, save: Save) -> RunFacts:
        """What the run knows of a save."""

    def is_in_memory(self, save: Save) -> None:
        """Hear of a save that is whole."""


class Keeper:
    """Holds slots; several threads digest."""

    def __init__(
        self, segment: Segment, pool: memoryview, pool_fd: int, flusher: KeeperServes
    ) -> None:
        self._segment = segment
        self._pool, self._pool_fd = pool, pool_fd
        self._flusher = flusher
        self._lock = threading.Condition()
        """Guards all that follows; told when a save is sealed."""
        self._holders: Counter[int] = Counter()
        """How many want a slot to stay as it is: the disk, and each save that is kept."""
        self._coming: dict[int, KeptSave] = {}
        self._kept = self._left_behind()
        """What is whole, oldest first."""
        self._needs: dict[int, int] = {}
        """How many slots each save wants that is under way and not whole here."""
        self._there = len(pool) // CHUNK_BYTES
        """How many slots there are, or can be."""
        self._more_comes = True
        self._moved: list[Segment] = []
        """What was left when the run was at another place."""
        self._was_lost = False
        """Whether there was nothing of the run when this began."""
        self._told_small = False
        self._chunks: queue.SimpleQueue[tuple[Save, Filled] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def _left_behind(self) -> list[KeptSave]:
        """What a flusher that died has left in this memory: it stays until there is better."""
        saves = sealed.saves_in(self._segment)
        slots = {slot for save in saves for slot in save.needed_slots}
        self._holders.update(slots)
        records = tuple(save.name for save in saves)
        unnamed = {(-1, slot): slot for slot in slots}
        kept = KeptSave(number=0, slots=unnamed, records=records, is_stored=True)
        return [kept] if saves else []

    @threads.outlasting(log, "cannot store what earlier starts have left in shared memory")
    def rescue(self, store: Store) -> None:
        """Store what earlier starts have left in shared memory alone, before anybody goes on; the
        first rank does it for all. But for the newest, which is being restored, nobody needs it
        there any more: starts that die early would fill the memory. Other ranks, which may be on
        other nodes, free what holds no save."""
        there = segments_of(store, self._segment.base)
        self._moved = [one for one in there if one.owner.run != self._segment.owner.run]
        needed: set[str] = set()
        is_first = self._segment.owner.rank == 0
        self._was_lost = is_first and is_lost(store)
        if self._was_lost or not is_first:  # a restore decides whether a lost run goes on
            needed.update(segment.folder for segment in there if segment.records())
        else:
            for checkpoint in sealed_of(store, self._segment.base, flusher_of=self._segment):
                with _trying(checkpoint):
                    store_snapshot(store, checkpoint)
                    needed.clear()
                needed.update(checkpoint.segments)
            needed.update(_with_newest(there))  # other nodes may have the rest of it
        if self._kept or any(segment.is_ending() for segment in there):
            return  # what is of this start, or of one that has not ended, is not to be judged yet
        for segment in there:
            if segment.folder not in needed and not segment.is_alive():
                segment.remove()

    @threads.outlasting(log, "cannot store what was restored out of shared memory")
    def continue_from(self, store: Store, after: AttemptName | None) -> None:
        """The trainer goes on from there: where the run had lost it, with all the rest, it is
        stored anew. A further tier may have brought some of the run back meanwhile."""
        if after is None or self._segment.owner.rank > 0 or not self._was_lost:
            return
        for checkpoint in sealed_of(store, self._segment.base, flusher_of=self._segment):
            with _trying(checkpoint):
                if checkpoint.folder == after.folder:
                    put_records(store, checkpoint.save)
                    store_snapshot(store, checkpoint)

    @threads.outlasting(log, "cannot free what earlier starts have left in shared memory")
    def forget_predecessors(self, save: Save) -> None:
        """Free what earlier starts have left on this node, whichever rank it was: `save` is
        committed, so nobody needs it. Segments of this start stay, also those of dead ranks."""
        moved = [segment for segment in self._moved if not segment.is_alive()]
        dead = segments.of_dead_processes(self._segment.base, self._segment.owner.run)
        for segment in (*dead, *moved):
            if not self._may_be_of_this_start(segment, save):
                segment.remove()

    def _may_be_of_this_start(self, segment: Segment, save: Save) -> bool:
        """Return whether another rank of this start may have left the segment, with a save in it
        that is not older than the one just committed."""
        mine, owner = self._segment.owner, segment.owner
        if owner.ranks != mine.ranks or owner.rank == mine.rank:
            return False
        assert save.at is not None  # noqa: S101 (it is committed)
        run, point = self._flusher.facts_of(save).run, save.at.point
        return any(one.run == run and one.at.point >= point for one in sealed.saves_in(segment))

    def start(self, count: int) -> None:
        """Start the threads that digest, at least so many."""
        for number in range(max(count, min((os.cpu_count() or 1) // 2, _DIGESTERS))):
            name = f"laststep-seal-{number}"
            thread = threading.Thread(target=self._digest_all, name=name, daemon=True)
            threads.start(thread)
            self._threads.append(thread)

    def close(self, *, for_good: bool) -> None:
        """End the threads, when nothing more comes. Where that is so for good, whoever comes next
        need not wait for what this process still does elsewhere."""
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()
        if for_good and self._pool_fd >= 0:
            segments.let_go(self._pool_fd)

    # What comes

    def begin(self, save: Save) -> None:
        """A save is coming: see whether there is room for it, and for the one before beside it."""
        needed = sum(-(-file.tensor_bytes // CHUNK_BYTES) for file in save.begin.files)
        with self._lock:
            self._needs[save.begin.save] = needed
            self._coming[save.begin.save] = KeptSave(number=save.begin.save)
        self._make_room()

    def limit(self, slots: int) -> None:
        """The pool cannot have more slots for now: what is kept of them is lacking elsewhere."""
        with self._lock:
            self._there = min(slots, len(self._pool) // CHUNK_BYTES)
        self._make_room()

    def _make_room(self) -> None:
        """Keep nothing of saves for which there is too little room, and what has to go for them."""
        with self._lock:
            room, freed = self._there - _SPARE_SLOTS, list[int]()
            large = [
                number
                for number, kept in self._coming.items()
                if self._needs[number] > room and not kept.is_sealing
            ]
            for number in large:
                freed += self._released(self._coming.pop(number))
            freed += self._drop_older()
            tell = bool(large) and not self._told_small
            self._told_small |= tell
        self._flusher.free(freed)
        if tell:
            log.warning(
                "a save of %d bytes does not fit into the %d bytes of shared memory that there "
                "are, and is not kept there; pass a larger host_memory_bytes, or make room in %s",
                self._needs.get(large[0], 0) * CHUNK_BYTES,
                self._there * CHUNK_BYTES,
                self._segment.base,
            )

    def take(self, save: Save, chunk: Filled) -> bool:
        """Digest a chunk that has come and pass it on; False if its save is not kept in memory."""
        with self._lock:
            kept = self._coming.get(save.begin.save)
            if kept is None:
                return False
            self._holders[chunk.slot] += 2
            kept.slots[chunk.file, chunk.start] = chunk.slot
        self._chunks.put((save, chunk))
        return True

    def inheritable(self, save: Save, said: Unchanged) -> tuple[tuple[int, int, int], ...]:
        """Of chunks that did not change since an earlier save, those that are still here."""
        with self._lock:
            if save.begin.save not in self._coming:
                return said.chunks
            last = self._find(said.of)
            known: dict[Place, bytes] = {} if last is None else last.digests
            return tuple(chunk for chunk in said.chunks if chunk[:2] in known)

    def inherit(self, save: Save, places: Iterable[Place]) -> None:
        """These chunks do not come: they are what the save has that lends them."""
        with self._lock:
            mine, last = self._coming.get(save.begin.save), self._find(save.base)
            if mine is not None and last is not None:
                for place in places:
                    mine.slots[place], mine.digests[place] = last.slots[place], last.digests[place]
                    self._holders[last.slots[place]] += 1
        self.try_to_seal(save)  # which never succeeds where the lender has gone meanwhile

    def _find(self, number: int) -> KeptSave | None:
        return next((kept for kept in self._kept if kept.number == number), None)

    def release(self, slot: int) -> bool:
        """The disk is done with a slot; whether nobody else wants it."""
        with self._lock:
            return self._let_go(slot)

    def _let_go(self, slot: int) -> bool:
        self._holders[slot] -= 1
        if self._holders[slot] > 0:
            return False
        del self._holders[slot]
        return True

    def _digest_all(self) -> None:
        while (task := self._chunks.get()) is not None:
            save, chunk = task
            sums = b""
            if save.flush is not None and save.error is None and save.dropped is None:
                at = chunk.slot * CHUNK_BYTES
                data = self._pool[at : at + chunk.size_bytes]
                sums = self._digests(save, chunk, data)
                with self._lock:
                    mine = self._coming.get(save.begin.save)
                    if mine is not None and sums:
                        mine.digests[chunk.file, chunk.start] = sums
            self._flusher.pass_on(save, chunk, sums)
            self.try_to_seal(save)

    @staticmethod
    def _digests(save: Save, chunk: Filled, data: memoryview) -> bytes:
        assert save.flush is not None  # noqa: S101 (looked at by the caller)
        try:
            return save.flush.digests(chunk.file, chunk.start, data)
        except Exception as error:  # noqa: BLE001 (whatever it is, the save must hear of it)
            save.flush.fail(StorageError("a chunk cannot be digested", found=repr(error)))
            return b""

    # What becomes of it

    def try_to_seal(self, save: Save) -> None:
        """Leave a record of a save if all of it is here; the one before it then goes."""
        seal, number = save.seal, save.begin.save
        if seal is None or save.at is None or save.error is not None or save.dropped is not None:
            return
        with self._lock:
            mine = self._coming.get(number)
            if mine is None or mine.is_sealing or not _is_whole(save, mine):
                return
            mine.is_sealing = True
        try:
            record = self._record(save, seal, mine)
            sealed.put(self._segment, record)
        except LaststepError as error:
            log.warning("step %d is not kept in shared memory: %s", save.begin.step, error)
            with self._lock:
                del self._coming[number]
                freed = self._released(mine)
                self._lock.notify_all()
            self._flusher.free(freed)
            return
        self._flusher.is_in_memory(save)
        with self._lock:
            mine.records = (record.name,)
            self._kept = sorted([*self._kept, mine], key=lambda kept: kept.number)
            del self._coming[number]
            self._needs.pop(number, None)
            freed = self._drop_older()
            self._lock.notify_all()
        self._flusher.free(freed)

    def settle(self, save: Save) -> None:
        """All of a save has come: see to it that it is whole here, if it can be, before anybody is
        told that it is stored."""
        self.try_to_seal(save)
        with self._lock:
            while save.begin.save in self._coming and self._coming[save.begin.save].is_sealing:
                self._lock.wait()

    def stored(self, save: Save, *, committed: bool) -> None:
        """It is known what became of a save elsewhere: nothing more will be written of it."""
        number, freed = save.begin.save, []
        with self._lock:
            mine = self._coming.get(number) or self._find(number)
            if mine is not None and not mine.is_sealing:
                del self._coming[number]
                freed = self._released(mine)
            elif mine is not None:
                mine.is_stored, mine.is_committed = True, committed
            self._needs.pop(number, None)
            freed += self._drop_older()
        self._flusher.free(freed)

    def nothing_more_comes(self) -> None:
        """The trainer has ended: what is whole stays, for nobody else wants its slots."""
        self._more_comes = False

    def _drop_older(self) -> list[int]:
        """Forget what a newer save stands in for, and what has to make room for one that comes;
        the slots that nobody wants any more."""
        freed: list[int] = []
        while self._more_comes and len(self._kept) > 1:
            older, newer = self._kept[:2]
            if older.is_committed or newer.is_committed or self._is_on_all_ranks(newer):
                freed += self._drop(older)
            elif newer.is_stored:  # it was given up, and some ranks will never have it
                freed += self._drop(newer)
            else:
                break
        room = self._there - max(self._needs.values(), default=0)
        while self._more_comes and self._kept and self._kept[0].is_stored:
            if len({slot for kept in self._kept for slot in kept.slots.values()}) <= room:
                break
            freed += self._drop(self._kept[0])
        return freed

    def _is_on_all_ranks(self, kept: KeptSave) -> bool:
        """Whether all ranks of the job have sealed a save, or nobody could put it together anyway:
        some are on other nodes."""
        mine = self._segment.owner
        if mine.ranks == 1:
            return True
        try:
            there = segments.found(self._segment.base, mine.run)
            have = self._segment.ranks_with(kept.records[-1])
        except LaststepError as error:
            log.warning("cannot see what other ranks have in shared memory: %s", error)
            return False
        here = {segment.owner.rank for segment in there if segment.owner.ranks == mine.ranks}
        return len(have) == mine.ranks or len(here) < mine.ranks

    def _drop(self, kept: KeptSave) -> list[int]:
        for name in kept.records:  # before anybody can write into its slots
            self._segment.drop(name)
        self._kept.remove(kept)
        return self._released(kept)

    def _released(self, kept: KeptSave) -> list[int]:
        return [slot for slot in kept.slots.values() if self._let_go(slot)]

    def _record(self, save: Save, seal: Seal, kept: KeptSave) -> SealedSave:
        assert save.at is not None  # noqa: S101 (looked at before)
        assert save.flush is not None  # noqa: S101 (else there is an error)
        facts, layouts = self._flusher.facts_of(save), save.begin.files
        places = [sorted(p for p in kept.slots if p[0] == n) for n in range(len(layouts))]
        index = whole_index(
            self._segment.owner.rank,
            layouts,
            [b"".join(kept.digests[place] for place in some) for some in places],
            seal.values,
            [save.flush.rounded(number) for number in range(len(layouts))],
        )
        return SealedSave(
            run=facts.run,
            at=save.at,
            created_s=time.time(),
            index=index_format.encode(index),
            slots=tuple(tuple((p[1], kept.slots[p]) for p in some) for some in places),
            items=seal.items,
            metrics=seal.metrics,
            metadata=seal.metadata,
            continues=facts.continues,
            receipt=seal.receipt,
            records=facts.records,
        )


@contextmanager
def _trying(checkpoint: SealedCheckpoint) -> Iterator[None]:
    """Store a checkpoint inside; who cannot has it told, and goes on."""
    step = checkpoint.save.at.step
    with closing(checkpoint), threads.outlasting(log, f"step {step} is in memory alone"):
        yield


def _is_whole(save: Save, kept: KeptSave) -> bool:
    """Whether all of it is there and digested; chunks never overlap."""
    wanted = sum(-(-file.tensor_bytes // CHUNK_BYTES) for file in save.begin.files)
    return len(kept.digests) == wanted


def _with_newest(there: Iterable[Segment]) -> set[str]:
    """The folders of the segments that have something of the newest save in these, or records that
    cannot be read."""
    records = {one.folder: len(one.records()) for one in there}
    points = {one.folder: [save.at.point for save in sealed.saves_in(one)] for one in there}
    newest = max((point for some in points.values() for point in some), default=None)
    return {
        folder for folder, some in points.items() if newest in some or len(some) < records[folder]
    }


def keeper_in(
    folder: str, pool: memoryview, pool_fd: int, flusher: KeeperServes
) -> Keeper | NothingKept:
    """That of the segment in a folder, whose memory has that descriptor in a helper process. If
    somebody has removed the folder, saves go on without being kept."""
    try:
        return Keeper(segments.opened(folder), pool, pool_fd, flusher)
    except StorageError as error:
        log.warning("saves are not kept in shared memory: %s", error)
        return NothingKept()
