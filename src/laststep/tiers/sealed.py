"""A save that is whole in shared memory, read as the checkpoint that it is.

The flusher leaves a record of it in the segment whose memory holds its chunks: its index, and where
each chunk lies. From that follow, byte for byte, the data files that a whole write of it makes, and
its manifest; nobody writes them, whoever asks for bytes gets them out of the memory. They are
verified like any other. Of a job of several ranks each has a segment with its own files; the first
rank's manifest follows from what all of them have noted (`plan.receipts`), as if it had gathered
that. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.lineage import AttemptName
from laststep.codecs import objects as codec
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format.index import written_of
from laststep.format.manifest import ClassRecord, Commit, ItemRecord, WrittenIndexes
from laststep.memory.segments import open_file
from laststep.plan.files import index_name
from laststep.process.system import warn_once
from laststep.terms import CHUNK_BYTES
from laststep.version import VERSION

if TYPE_CHECKING:
    from laststep.format.index import Index, StoredLayout
    from laststep.memory.segments import Segment

log = logging.getLogger(__name__)

_MADV_POPULATE_READ = 22


class SealedSave(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the record of a save says."""

    run: str
    """The id of the run that it was begun in."""
    at: AttemptName
    created_s: float
    index: bytes
    """Of its rank, with every layout in place."""
    slots: tuple[tuple[tuple[int, int], ...], ...]
    """Of each layout: where each chunk begins in its tensors, in order, and its slot."""
    items: tuple[ItemRecord, ...]
    metrics: bytes
    metadata: bytes
    continues: str | None
    receipt: bytes = b""
    """Of a rank of several: what it would have reported to the first one, but for its files."""
    records: tuple[tuple[str, bytes], ...] = ()
    """Of the first rank: the records of the run and of the epoch, as they lie in the run."""

    @property
    def name(self) -> str:
        """Under which the record lies in its segment."""
        return f"{self.at.epoch}-{self.at.attempt}"

    @property
    def needed_slots(self) -> frozenset[int]:
        """The slots that it needs."""
        return frozenset(slot for layout in self.slots for _, slot in layout)

    @property
    def tensor_bytes(self) -> int:
        """Of the state that it holds, as its slots go."""
        return sum(stored.layout.tensor_bytes for stored in self.decode_index().layouts)

    def decode_index(self) -> Index:
        """Its index, checked throughout."""
        return index_format.decode(self.index, where=f"{self.at.folder} in shared memory")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SealedSave).decode


def put(segment: Segment, save: SealedSave) -> None:
    """Note that it is whole in the memory of that segment."""
    segment.put(save.name, _encode(save))


def saves_in(segment: Segment) -> list[SealedSave]:
    """The saves that are whole there, oldest first; records that cannot be read are skipped."""
    saves = []
    for name in segment.records():
        try:
            data = segment.read(name)
            saves += [] if data is None else [_decode(data)]
        except (CorruptError, StorageError, msgspec.MsgspecError) as error:
            warn_once(log, f"skipped record {name} in {segment.folder}: {error}")
    return saves


SealedByRanks = Sequence[tuple["Segment | None", SealedSave]]
"""The segments of all ranks that took part in a save, in the order of ranks, and what each has;
None for one that is on another node."""


class SealedCheckpoint:
    """The files of a save that is whole in shared memory. Close it when done."""

    def __init__(self, parts: SealedByRanks) -> None:
        self.segments = tuple(segment.folder for segment, _ in parts if segment is not None)
        self.save = parts[0][1]
        """The first rank's, which would have committed it."""
        self.folder = self.save.at.folder
        self.layouts: dict[str, StoredLayout] = {}
        """Its data files, by name."""
        self.indexes: dict[str, bytes] = {}
        """The index of each rank, by name."""
        self._saves = tuple(save for _, save in parts)
        self._written = WrittenIndexes()
        self._places: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {}
        """Of each data file: the rank, and where its chunks lie."""
        self._memory: list[_Memory | None] = []
        for rank, (segment, save) in enumerate(parts):
            index = save.decode_index()
            self.indexes[index_name(rank, len(parts))] = save.index
            self._written = self._written.plus(written_of(index, save.index))
            for stored, slots in zip(index.layouts, save.slots, strict=True):
                self.layouts[stored.layout.name] = stored
                self._places[stored.layout.name] = rank, slots
            try:
                self._memory.append(None if segment is None else _Memory(segment))
            except LaststepError:
                self.close()
                raise

    def close(self) -> None:
        self._memory.clear()  # it is closed with the last of its readers

    @cached_property
    def agreed(self) -> tuple[tuple[ItemRecord, ...], tuple[ClassRecord, ...]]:
        """The items of all ranks, and which ranks hold the same; `CorruptError` where ranks differ
        in what they should have in common, so that it could never have been committed."""
        if len(self._saves) == 1:
            return self.save.items, ()
        # Late: a flusher starts without what this brings, and needs it where a job has died.
        from laststep.tiers.sealed_job import agreed_on

        return agreed_on(self._saves, self.folder)

    @cached_property
    def commit(self) -> Commit:
        """What its manifest says."""
        save, (items, classes) = self.save, self.agreed
        return Commit(
            run=save.run,
            step=save.at.step,
            epoch=save.at.epoch,
            attempt=save.at.attempt,
            created_s=save.created_s,
            laststep=VERSION,
            items=items,
            classes=classes,
            written=self._written,
            ranks=len(self._saves),
            metrics=codec.decode(save.metrics, where="metrics"),  # type: ignore[arg-type]
            metadata=codec.decode(save.metadata, where="metadata"),
            continues=save.continues,
        )

    def sizes(self) -> dict[str, int]:
        """The bytes of each of its files."""
        sizes = {name: stored.layout.size_bytes for name, stored in self.layouts.items()}
        return sizes | {name: len(data) for name, data in self.indexes.items()}

    def reader(self, name: str) -> SealedReader:
        """One of its files; `NotFoundError` for what is none."""
        if name in self.indexes:
            return SealedReader(None, (), self.indexes[name], 0)
        try:
            layout, (rank, slots) = self.layouts[name].layout, self._places[name]
        except KeyError:
            raise NotFoundError("there is no such file", where=f"{self.folder}/{name}") from None
        return SealedReader(self._memory[rank], slots, layout.header(), layout.tensor_bytes)


class _Memory:
    """The memory of a segment, open for reading until the last who has it lets go of it."""

    def __init__(self, segment: Segment) -> None:
        try:
            self.fd = open_file(segment.pool_path)
        except FileNotFoundError:
            raise NotFoundError(
                "the shared memory of a save is gone", where=segment.folder
            ) from None
        except OSError as error:
            raise StorageError(
                "cannot open the shared memory of a save", where=segment.folder, found=str(error)
            ) from error
        weakref.finalize(self, os.close, self.fd)

    @cached_property
    def _map(self) -> mmap.mmap | None:
        try:
            return mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError, MemoryError):  # `ulimit -v`; or somebody has cut it to nothing
            return None

    def part(self, start: int, size_bytes: int) -> memoryview | None:
        """These bytes; None where they cannot be mapped. By one call for all of its pages: a fault
        takes 16 of them, or one after somebody has dropped the caches of the machine."""
        if self._map is None or start + size_bytes > len(self._map):
            return None
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # the kernel is too old for that
            self._map.madvise(_MADV_POPULATE_READ, first, start + size_bytes - first)
        return memoryview(self._map)[start : start + size_bytes]


class SealedReader:
    """A file out of shared memory, read at given offsets; see `store.FileReading`, and
    `store.InPlace`."""

    alignment_bytes = 1
    at_hand = True

    def __init__(
        self,
        memory: _Memory | None,
        slots: Sequence[tuple[int, int]],
        head: bytes,
        tensor_bytes: int,
    ) -> None:
        """`head` comes before the tensors, which lie in these slots."""
        self._memory = memory
        self._head = head
        self._starts = [start for start, _ in slots]
        self._slots = [slot for _, slot in slots]
        self._tensor_bytes = tensor_bytes
        self.header_bytes = len(head)
        self.size_bytes = len(head) + tensor_bytes

    def read_into(self, offset: int, into: memoryview) -> int:
        done, size = 0, max(min(len(into), self.size_bytes - offset), 0)
        while done < size:
            done += self._some(offset + done, into[done:size])
        return done

    def in_place(self, offset: int, size_bytes: int) -> memoryview | None:
        at = offset - len(self._head)
        if at < 0 or at >= self._tensor_bytes or self._memory is None:
            return None
        place, there = self._place(at)
        return self._memory.part(place, size_bytes) if size_bytes <= there else None

    def _place(self, at: int) -> tuple[int, int]:
        """Where in the memory a byte of the tensor area lies, and how many lie together there."""
        number = bisect_right(self._starts, at) - 1
        inside = at - self._starts[number]
        place = self._slots[number] * CHUNK_BYTES + inside
        return place, min(CHUNK_BYTES - inside, self._tensor_bytes - at)

    def _some(self, offset: int, into: memoryview) -> int:
        """Fill the beginning of `into`, as far as the bytes lie together."""
        at = offset - len(self._head)
        if at < 0:
            part = memoryview(self._head)[offset : offset + len(into)]
            into[: len(part)] = part
            return len(part)
        place, there = self._place(at)
        if self._memory is None:
            raise CorruptError("what is wanted lies in the shared memory of another node")
        try:
            got = os.preadv(self._memory.fd, [into[:there]], place)
        except OSError as error:
            raise CorruptError("shared memory cannot be read", found=str(error)) from error
        if got == 0:
            raise CorruptError("shared memory is shorter than what was sealed in it")
        return got

    def close(self) -> None:
        self._memory = None
