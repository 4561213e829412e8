"""Keep the newest save in shared memory: it is a checkpoint there before anything of it is written.

The slots of a save stay as they are, instead of going back to the trainer when the disk has them,
until a newer save is whole beside it. So there is always one that nobody writes into. Every slot is
digested when it comes, ahead of writing; when all of them and the plain values are there, a record
is left in the segment, and whoever finds that after this process and its trainer have died has the
checkpoint. What did not change since the save before, and was not sent again, is in the slots of
that one: they are both's. Where there is no room for two, the older one goes as soon as it is
stored elsewhere. Knows nothing of disks and of commits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import msgspec

from laststep.errors import LaststepError, StorageFailed
from laststep.memory import segments
from laststep.process import threads
from laststep.terms import CHUNK_BYTES
from laststep.tiers import sealed
from laststep.tiers.nearest import sealed_of
from laststep.tiers.rescue import rescue
from laststep.tiers.sealed import SealedFile, SealedSave

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.flush.protocol import Seal, Unchanged
    from laststep.flush.under_way import Save
    from laststep.memory.filled import Filled
    from laststep.memory.segments import Segment
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_SPARE_SLOTS = 2
"""Of the pool that are never kept: a save announces itself with the first slot that it has filled,
and what is kept goes only then."""

Place = tuple[int, int]
"""The number of a file and where a chunk begins in it."""


class KeptSave(msgspec.Struct):
    """A save as far as it is in memory."""

    number: int
    slots: dict[Place, int] = {}
    digests: dict[Place, bytes] = {}
    records: tuple[str, ...] = ()
    """Under which it lies in the segment; nothing before it is whole."""
    is_stored: bool = False
    """Whether another place has it, or will not get it."""


class KeeperServes(Protocol):
    """Whom a keeper serves: the flusher."""

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back to the trainer."""

    def pass_on(self, save: Save, chunk: Filled, sums: bytes) -> None:
        """Go on with a chunk that is digested."""

    def facts_of(self, save: Save) -> tuple[str, str | None]:
        """The id of the run, and the folder that the save continues."""

    def is_in_memory(self, save: Save) -> None:
        """Hear of a save that is whole."""


class NothingKept:
    """What a flusher has without shared memory that outlives it: every slot goes back at once."""

    def start(self, count: int) -> None: ...

    def close(self) -> None: ...

    def rescue(self, store: Store) -> None: ...

    def begin(self, save: Save) -> None: ...

    def takes(self, save: Save) -> bool:
        return False

    def take(self, save: Save, chunk: Filled) -> None: ...

    def inheritable(self, save: Save, said: Unchanged) -> tuple[tuple[int, int, int], ...]:
        return said.chunks

    def inherit(self, save: Save, places: Iterable[Place]) -> None: ...

    def release(self, slot: int) -> bool:
        return True

    def try_to_seal(self, save: Save) -> None: ...

    def stored(self, save: Save) -> None: ...

    def forget_predecessors(self) -> None: ...


class Keeper:
    """Holds slots; several threads digest."""

    def __init__(self, segment: Segment, pool: memoryview, flusher: KeeperServes) -> None:
        self._segment = segment
        self._pool = pool
        self._flusher = flusher
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._holders: Counter[int] = Counter()
        """How many want a slot to stay as it is: the disk, and each save that is kept."""
        self._coming: dict[int, KeptSave] = {}
        self._last = self._left_behind()
        self._must_go = False
        """Whether the last has to make room for what is coming."""
        self._told_small = False
        self._chunks: queue.SimpleQueue[tuple[Save, Filled] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def _left_behind(self) -> KeptSave | None:
        """What a flusher that died has left in this memory: it stays until there is better."""
        saves = sealed.saves_in(self._segment)
        slots = {slot for save in saves for slot in save.slots}
        self._holders.update(slots)
        records = tuple(save.name for save in saves)
        unnamed = {(-1, slot): slot for slot in slots}
        return KeptSave(number=0, slots=unnamed, records=records, is_stored=True) if saves else None

    def rescue(self, store: Store) -> None:
        """Store what earlier starts have left in shared memory alone, before anybody goes on."""
        for checkpoint in sealed_of(store, self._segment.base):
            step = checkpoint.save.at.step
            with closing(checkpoint), threads.outlasting(log, f"step {step} is in memory alone"):
                rescue(store, checkpoint)

    def forget_predecessors(self) -> None:
        """A newer save is stored: nobody needs what earlier starts of this rank have left."""
        mine = self._segment.owner
        for segment in segments.found(self._segment.base, mine.run):
            if segment.owner.rank == mine.rank and not segment.is_alive():
                segment.remove()

    def start(self, count: int) -> None:
        """Start the threads that digest."""
        for number in range(count):
            name = f"laststep-seal-{number}"
            thread = threading.Thread(target=self._digest_all, name=name, daemon=True)
            threads.start(thread)
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads, when nothing more comes."""
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    # What comes

    def begin(self, save: Save) -> None:
        """A save is coming: see whether there is room for it, and for the one before beside it."""
        needed = sum(-(-file.tensor_bytes // CHUNK_BYTES) for file in save.begin.files)
        there = len(self._pool) // CHUNK_BYTES
        freed: list[int] = []
        with self._lock:
            if needed <= there - _SPARE_SLOTS:
                self._coming[save.begin.save] = KeptSave(number=save.begin.save)
            held = 0 if self._last is None else len(set(self._last.slots.values()))
            self._must_go = needed + held > there
            if self._last is not None and self._must_go and self._last.is_stored:
                freed = self._drop_last()
        self._flusher.free(freed)
        if needed > there - _SPARE_SLOTS and not self._told_small:
            self._told_small = True
            log.warning(
                "a save of %d bytes does not fit into the %d bytes of shared memory, and is not "
                "kept there; pass a larger host_memory_bytes",
                needed * CHUNK_BYTES, len(self._pool),
            )  # fmt: skip

    def takes(self, save: Save) -> bool:
        """Whether that save is to be whole in memory."""
        with self._lock:
            return save.begin.save in self._coming

    def take(self, save: Save, chunk: Filled) -> None:
        """A chunk has come: it is digested, and then passed on."""
        with self._lock:
            self._holders[chunk.slot] += 2
            self._coming[save.begin.save].slots[chunk.file, chunk.start] = chunk.slot
        self._chunks.put((save, chunk))

    def inheritable(self, save: Save, said: Unchanged) -> tuple[tuple[int, int, int], ...]:
        """Of chunks that did not change since an earlier save, those that are still here."""
        with self._lock:
            if save.begin.save not in self._coming:
                return said.chunks
            last = self._last
            if last is None or last.number != said.of:
                return ()
            return tuple(chunk for chunk in said.chunks if chunk[:2] in last.digests)

    def inherit(self, save: Save, places: Iterable[Place]) -> None:
        """These chunks do not come: they are what the last save has."""
        with self._lock:
            mine, last = self._coming.get(save.begin.save), self._last
            if mine is not None and last is not None:
                for place in places:
                    mine.slots[place], mine.digests[place] = last.slots[place], last.digests[place]
                    self._holders[last.slots[place]] += 1
        self.try_to_seal(save)

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
            save.flush.fail(StorageFailed("a chunk cannot be digested", found=repr(error)))
            return b""

    # What becomes of it

    def try_to_seal(self, save: Save) -> None:
        """Leave a record of a save if all of it is here; the one before it then goes."""
        seal, number = save.seal, save.begin.save
        if seal is None or save.at is None or save.error is not None or save.dropped is not None:
            return
        with self._lock:
            mine = self._coming.get(number)
            if mine is None or not _is_whole(save, mine):
                return
            del self._coming[number]
        try:
            record = self._record(save, seal, mine)
            sealed.put(self._segment, record)
        except LaststepError as error:
            log.warning("step %d is not kept in shared memory: %s", save.begin.step, error)
            self._flusher.free(self._unheld(mine))
            return
        with self._lock:
            freed = self._drop_last()
            mine.records = (record.name,)
            self._last = mine
        self._flusher.free(freed)
        self._flusher.is_in_memory(save)

    def stored(self, save: Save) -> None:
        """It is known what became of a save elsewhere: nothing more will be written of it."""
        with self._lock:
            mine = self._coming.pop(save.begin.save, None)
            freed = [] if mine is None else self._released(mine)
            if self._last is not None and self._last.number == save.begin.save:
                self._last.is_stored = True
                freed += self._drop_last() if self._must_go else []
        self._flusher.free(freed)

    def _drop_last(self) -> list[int]:
        """Forget the last; the slots that nobody wants any more."""
        last, self._last = self._last, None
        if last is None:
            return []
        for name in last.records:  # before anybody can write into its slots
            self._segment.drop(name)
        return self._released(last)

    def _unheld(self, kept: KeptSave) -> list[int]:
        with self._lock:
            return self._released(kept)

    def _released(self, kept: KeptSave) -> list[int]:
        return [slot for slot in kept.slots.values() if self._let_go(slot)]

    def _record(self, save: Save, seal: Seal, kept: KeptSave) -> SealedSave:
        assert save.at is not None  # noqa: S101 (looked at before)
        assert save.flush is not None  # noqa: S101 (else there is an error)
        run, continues = self._flusher.facts_of(save)
        files = []
        for number, file in enumerate(save.begin.files):
            places = sorted(place for place in kept.slots if place[0] == number)
            files.append(
                SealedFile(
                    name=file.name, item=file.item, region_bytes=file.region_bytes,
                    tensor_bytes=file.tensor_bytes, entries=file.entries, parts=file.parts,
                    chunks=tuple((place[1], kept.slots[place]) for place in places),
                    digests=b"".join(kept.digests[place] for place in places),
                    objects=tuple((name, data) for n, name, data in seal.objects if n == number),
                    lossy=save.flush.rounded(number),
                )
            )  # fmt: skip
        return SealedSave(
            run=run, at=save.at, created_s=time.time(), files=tuple(files), items=seal.items,
            metrics=seal.metrics, metadata=seal.metadata, continues=continues,
        )  # fmt: skip


def _is_whole(save: Save, kept: KeptSave) -> bool:
    """Whether all of it is there and digested; chunks never overlap."""
    wanted = sum(-(-file.tensor_bytes // CHUNK_BYTES) for file in save.begin.files)
    return len(kept.digests) == wanted
