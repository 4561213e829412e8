"""A save that is whole in shared memory, read as the checkpoint that it is.

The flusher leaves a record of it in the segment whose memory holds its chunks: what it is, where
each chunk lies, and the digests of all blocks. From that follow, byte for byte, the data files that
a whole write of it makes, and its manifest; nobody writes them, whoever asks for bytes gets them
out of the memory. They are verified like any other. Of a job of several ranks each has a segment
with its own files; the first rank's manifest follows from what all of them have noted
(`plan.receipts`), as if it had gathered that. Knows nothing of torch.
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

from laststep.catalog.names import AttemptName
from laststep.codecs import objects as codec
from laststep.codecs.digests import digest_text
from laststep.errors import Corrupt, LaststepError, NotFound, StorageFailed
from laststep.format.header import Header, PartEntry, encode_header, object_entries, shortest_region
from laststep.format.manifest import ClassRecord, Commit, FileRecord, ItemRecord
from laststep.format.safetensors import TensorEntry
from laststep.memory.segments import open_file
from laststep.process.logs import warn_once
from laststep.terms import CHUNK_BYTES
from laststep.version import VERSION

if TYPE_CHECKING:
    from laststep.memory.segments import Segment

log = logging.getLogger(__name__)

_MADV_POPULATE_READ = 22


class SealedFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A data file whose tensor area lies in slots."""

    name: str
    item: str | None
    region_bytes: int
    tensor_bytes: int
    entries: tuple[TensorEntry, ...]
    parts: dict[str, PartEntry]
    chunks: tuple[tuple[int, int], ...]
    """Where each begins in the tensor area, in order, and its slot."""
    digests: bytes
    objects: tuple[tuple[str, bytes], ...]
    lossy: dict[str, str] = {}


class SealedSave(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the record of a save says."""

    run: str
    """The id of the run that it was begun in."""
    at: AttemptName
    created_s: float
    files: tuple[SealedFile, ...]
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
    def slots(self) -> frozenset[int]:
        """The slots that it needs."""
        return frozenset(slot for file in self.files for _, slot in file.chunks)


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
        except (Corrupt, StorageFailed, msgspec.MsgspecError) as error:
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
        self.files: dict[str, SealedFile] = {}
        self._saves = tuple(save for _, save in parts)
        self._rank_of: dict[str, int] = {}
        self._heads: dict[str, tuple[bytes, bytes]] = {}
        self._memory: list[_Memory | None] = []
        for rank, (segment, save) in enumerate(parts):
            self.files.update((file.name, file) for file in save.files)
            self._rank_of.update((file.name, rank) for file in save.files)
            try:
                self._memory.append(None if segment is None else _Memory(segment))
            except LaststepError:
                self.close()
                raise

    def close(self) -> None:
        self._memory.clear()  # it is closed with the last of its readers

    @cached_property
    def agreed(self) -> tuple[tuple[ItemRecord, ...], tuple[ClassRecord, ...]]:
        """The items of all ranks, and which ranks hold the same; `Corrupt` where ranks differ in
        what they should have in common, so that it could never have been committed."""
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
            run=save.run, step=save.at.step, epoch=save.at.epoch, attempt=save.at.attempt,
            created_s=save.created_s, laststep=VERSION, items=items, classes=classes,
            files=tuple(map(self._record, self.files.values())), ranks=len(self._saves),
            metrics=codec.decode(save.metrics, where="metrics"),  # type: ignore[arg-type]
            metadata=codec.decode(save.metadata, where="metadata"), continues=save.continues,
        )  # fmt: skip

    def sizes(self) -> dict[str, int]:
        """The bytes of each of its files."""
        return {record.name: record.size_bytes for record in self.commit.files}

    def reader(self, name: str) -> SealedReader:
        """One of its files; `NotFound` for what is none."""
        try:
            file = self.files[name]
        except KeyError:
            raise NotFound("there is no such file", where=f"{self.folder}/{name}") from None
        return SealedReader(self._memory[self._rank_of[name]], file, *self._around(file))

    def _record(self, file: SealedFile) -> FileRecord:
        region, tail = self._around(file)
        return FileRecord(
            name=file.name, size_bytes=len(region) + file.tensor_bytes + len(tail),
            header_bytes=len(region), header_digest=digest_text(region),
            rank=self._rank_of[file.name],
            lossy=tuple(sorted(set(file.lossy.values()))),
        )  # fmt: skip

    def _around(self, file: SealedFile) -> tuple[bytes, bytes]:
        """What lies before and behind the tensor area."""
        if file.name not in self._heads:
            header = Header(
                item=file.item, tensors=file.entries, tensor_bytes=file.tensor_bytes,
                objects=object_entries(file.objects, file.tensor_bytes), blocks=file.digests,
                parts=file.parts, lossy=file.lossy,
            )  # fmt: skip
            size = max(file.region_bytes, shortest_region(header)) if file.lossy else None
            region = encode_header(header, region_bytes=size or file.region_bytes)
            self._heads[file.name] = region, b"".join(data for _, data in file.objects)
        return self._heads[file.name]


class _Memory:
    """The memory of a segment, open for reading until the last who has it lets go of it."""

    def __init__(self, segment: Segment) -> None:
        try:
            self.fd = open_file(segment.pool_path)
        except FileNotFoundError:
            raise NotFound("the shared memory of a save is gone", where=segment.folder) from None
        except OSError as error:
            raise StorageFailed(
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
    """A data file out of shared memory, read at given offsets; see `store.FileReading`, and
    `store.InPlace`."""

    alignment_bytes = 1
    at_hand = True

    def __init__(self, memory: _Memory | None, file: SealedFile, head: bytes, tail: bytes) -> None:
        self._memory = memory
        self._head, self._tail = head, tail
        self._starts = [start for start, _ in file.chunks]
        self._slots = [slot for _, slot in file.chunks]
        self._tensor_bytes = file.tensor_bytes
        self.header_bytes = len(head)
        self.size_bytes = len(head) + file.tensor_bytes + len(tail)

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
        if at < 0 or at >= self._tensor_bytes:
            data, first = (self._head, offset) if at < 0 else (self._tail, at - self._tensor_bytes)
            part = memoryview(data)[first : first + len(into)]
            into[: len(part)] = part
            return len(part)
        place, there = self._place(at)
        if self._memory is None:
            raise Corrupt("what is wanted lies in the shared memory of another node")
        try:
            got = os.preadv(self._memory.fd, [into[:there]], place)
        except OSError as error:
            raise Corrupt("shared memory cannot be read", found=str(error)) from error
        if got == 0:
            raise Corrupt("shared memory is shorter than what was sealed in it")
        return got

    def close(self) -> None:
        self._memory = None
