"""In-memory snapshots: saves that are complete in shared memory, read as checkpoints.

The flusher writes a record of each snapshot into the segment whose pool holds its chunks. The
record contains an index like that of any checkpoint, except that its only file is the pool, in
which a chunk is stored at its slot's offset. In a job of several ranks, each rank has a segment and
an index; the manifest is computed from all their records, just as rank 0 would have written it.
Ranks may be on several nodes: the nodes exchange records, and each rank reads the pools on its own
node. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from laststep.catalog.attempt import AttemptName
from laststep.codecs import objects as codec
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES, MANIFEST_NAME
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.memory import segments
from laststep.plan.files import LAYOUT_NAME
from laststep.process.system import warn_once
from laststep.process.threads import ready
from laststep.storage.store import StoreEntry
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.format.layout import FileLayout
    from laststep.memory.segments import Segment
    from laststep.storage.store import FileReading

log = logging.getLogger(__name__)

_MADV_POPULATE_READ = 22


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's part of a snapshot, as recorded in its segment."""

    run: str
    """The id of the run in which the save was begun."""
    at: AttemptName
    created_s: float
    index: bytes
    items: tuple[manifest.ItemRecord, ...]
    metrics: bytes
    metadata: bytes
    continues: str | None
    receipt: bytes = b""
    """With several ranks: the receipt for rank 0, without its files."""
    records: tuple[tuple[str, bytes], ...] = ()
    """On rank 0: the names and contents of the run's record and the term's record."""

    @property
    def name(self) -> str:
        """The name of the record in its segment."""
        return f"{self.at.term}-{self.at.attempt}"

    @property
    def needed_slots(self) -> frozenset[int]:
        """The slots of the pool that hold the snapshot."""
        layouts = self.decode_index().layouts
        return frozenset(run.offset // CHUNK_BYTES for layout in layouts for run in layout.runs)

    @property
    def tensor_bytes(self) -> int:
        return sum(stored.layout.tensor_bytes for stored in self.decode_index().layouts)

    def decode_index(self) -> index_format.Index:
        """Decode and validate the index. Raise `CorruptError` if it is damaged."""
        return index_format.decode(self.index, where=f"{self.at.folder} in shared memory")


def pool_index(
    rank: int, layouts: Iterable[index_format.StoredLayout], values: Mapping[str, bytes]
) -> bytes:
    """Encode the index of a snapshot whose layouts are stored in the pool (see `in_slots`)."""
    stored = tuple(layouts)
    stop = max((run.offset for layout in stored for run in layout.runs), default=-CHUNK_BYTES)
    pool = index_format.StoredFile(name=f"pool-r{rank:05d}.pack", size_bytes=stop + CHUNK_BYTES)
    files = (pool,) if pool.size_bytes else ()
    return index_format.encode(
        index_format.Index(rank=rank, files=files, layouts=stored, values=dict(values))
    )


def in_slots(
    layout: FileLayout, slots: Sequence[int], digests: bytes, lossy: dict[str, str]
) -> index_format.StoredLayout:
    """Return the stored layout whose chunks are, in order, in these slots of the pool."""
    each = CHUNK_BYTES // BLOCK_BYTES
    runs = tuple(
        index_format.BlockRun(min(each, layout.block_count - number * each), 0, slot * CHUNK_BYTES)
        for number, slot in enumerate(slots)
    )
    return index_format.StoredLayout(layout=layout, digests=digests, runs=runs, lossy=lossy)


_Place = TypeVar("_Place")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ready(SnapshotRecord)).decode


def put(segment: Segment, record: SnapshotRecord) -> None:
    """Record that a snapshot is complete in the pool of this segment."""
    segment.put(record.name, _encode(record))


def records_in(segment: Segment) -> list[SnapshotRecord]:
    """Return the snapshots in a segment, oldest first; unreadable records are skipped."""
    found = []
    for name in segment.records():
        try:
            data = segment.read(name)
            found += [] if data is None else [_decode(data)]
        except (CorruptError, StorageError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            warn_once(log, f"skipped record {name} in {segment.folder}: {error}")
    return found


RankParts = Sequence[tuple["Segment | None", SnapshotRecord]]
"""The parts of a snapshot in the order of ranks; the segment is None for a part on another node."""


class MemorySnapshot:
    """A snapshot as the files of a checkpoint: manifest, indexes, pools. Close it when done."""

    url: str = "shared memory"

    def __init__(self, parts: RankParts) -> None:
        """Raise `CorruptError` if the ranks' parts do not match."""
        self.segments = tuple(segment.folder for segment, _ in parts if segment is not None)
        self.record = parts[0][1]
        """The record of rank 0, which would have committed the save."""
        self.folder = self.record.at.folder
        self.indexes = [record.decode_index() for _, record in parts]
        written = manifest.WrittenIndexes()
        self._data: dict[str, bytes] = {}
        self._pools: dict[str, _PoolReader] = {}
        for rank, (segment, record) in enumerate(parts):
            index = self.indexes[rank]
            written = written.plus(index_format.written_of(index, record.index))
            self._data[index_format.index_name(rank, len(parts))] = record.index
            for file in index.files:
                self._pools[file.name] = _PoolReader(segment, file.size_bytes)
        self.commit = _commit([record for _, record in parts], written)
        self._data[MANIFEST_NAME] = manifest.encode(self.commit)

    def close(self) -> None:
        self._pools.clear()  # the last reader of a pool closes it

    def list(self, _folder: str) -> list[StoreEntry]:
        created_s = self.record.created_s
        sizes = {name: pool.size_bytes for name, pool in self._pools.items()}
        sizes |= {name: len(data) for name, data in self._data.items()}
        return [
            StoreEntry(name=name, is_folder=False, size_bytes=size, modified_s=created_s)
            for name, size in sorted(sizes.items())
        ]

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return the content of the manifest or an index."""
        data = self._data.get(name.removeprefix(f"{self.folder}/"))
        if data is None or len(data) > limit_bytes:
            raise NotFoundError("there is no such file", where=f"{self.url}/{name}")
        return data

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        pool = self._pools.get(name.removeprefix(f"{self.folder}/"))
        return pool or _BytesReader(self.read(name, limit_bytes=sys.maxsize))


def _commit(records: Sequence[SnapshotRecord], written: manifest.WrittenIndexes) -> manifest.Commit:
    """Return the manifest that rank 0 would have written."""
    first = records[0]
    items, layout_groups = (first.items, ()) if len(records) == 1 else _agreed(records)
    return manifest.Commit(
        run=first.run,
        step=first.at.step,
        term=first.at.term,
        attempt=first.at.attempt,
        created_s=first.created_s,
        laststep=VERSION,
        items=items,
        layout_groups=layout_groups,
        written=written,
        ranks=len(records),
        metrics=codec.decode(first.metrics, where="metrics"),  # type: ignore[arg-type]
        metadata=codec.decode(first.metadata, where="metadata"),
        continues=first.continues,
    )


def _agreed(
    records: Sequence[SnapshotRecord],
) -> tuple[tuple[manifest.ItemRecord, ...], tuple[manifest.LayoutGroupRecord, ...]]:
    """Return items and layout groups, from the receipts that rank 0 would have gathered."""
    # Imported late: a flusher needs these only after a job has died.
    from laststep.codecs.digests import digest
    from laststep.plan.layouts import global_layout_of
    from laststep.plan.receipts import Receipt, items_of, layout_groups_of, objection_to, summarise

    folder = records[0].at.folder
    decode = msgspec.msgpack.Decoder(ready(Receipt)).decode
    receipts = {rank: decode(record.receipt) for rank, record in enumerate(records)}
    members: dict[int, list[int]] = {}
    for rank, receipt in receipts.items():
        members.setdefault(receipt.layout_group, []).append(rank)
    firsts = [records[ranks[0]].decode_index() for ranks in members.values()]
    local_layouts = [index.values.get(LAYOUT_NAME, b"") for index in firsts]
    layout_groups = [
        manifest.LayoutGroupRecord(
            local_layout=digest(local_layout).hex(), spans=manifest.spans_of(ranks)
        )
        for local_layout, ranks in zip(local_layouts, members.values(), strict=True)
    ]
    global_layout = global_layout_of(local_layouts, layout_groups, len(records), folder)
    summary = summarise(receipts, global_layout)
    if objection := objection_to([summary], global_layout):
        raise CorruptError(
            "the snapshots of the ranks in shared memory do not match",
            where=folder,
            found=str(objection),
        )
    return items_of([summary], global_layout), layout_groups_of(global_layout)


class _PoolReader:
    """The memory of a segment as a file, open until its last reference is gone; see
    `store.FileReading` and `store.InPlace`."""

    alignment_bytes = 1
    at_hand = True

    def __init__(self, segment: Segment | None, size_bytes: int) -> None:
        """Open the pool of a segment, which is None if it is on another node."""
        self.size_bytes = size_bytes
        self._fd: int | None = None
        if segment is not None:
            try:
                self._fd = segments.open_file(segment.pool_path)
            except OSError as error:
                raise StorageError(
                    "cannot open the memory of a save", where=segment.folder, found=str(error)
                ) from error
            weakref.finalize(self, os.close, self._fd)

    @cached_property
    def _map(self) -> mmap.mmap | None:
        if self._fd is not None:
            # It fails because of `ulimit -v`, or if the file was truncated to 0 bytes.
            with contextlib.suppress(OSError, ValueError, MemoryError):
                return mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        return None

    def read_into(self, offset: int, into: memoryview) -> int:
        if self._fd is None:
            raise CorruptError("the block is in the shared memory of another node")
        done, size = 0, max(min(len(into), self.size_bytes - offset), 0)
        while done < size:
            try:
                got = os.preadv(self._fd, [into[done:size]], offset + done)
            except OSError as error:
                raise CorruptError("shared memory cannot be read", found=str(error)) from error
            if not got:
                break  # truncated by another process
            done += got
        return done

    def in_place(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return a view of these bytes, or None if they cannot be mapped. All their pages are
        populated with one call, because a page fault maps only 16 pages."""
        if self._map is None or offset + size_bytes > len(self._map):
            return None
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # the kernel is too old
            self._map.madvise(_MADV_POPULATE_READ, first, offset + size_bytes - first)
        return memoryview(self._map)[offset : offset + size_bytes]

    def close(self) -> None:
        pass


class _BytesReader:
    alignment_bytes = 1

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, into: memoryview) -> int:
        part = self._data[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


# --- finding the parts --------------------------------------------------------------------------


def complete(found: Iterable[Segment]) -> list[RankParts]:
    """Return the snapshots of which these segments hold the parts of all ranks."""
    return _whole(
        (segment.owner.rank, segment.owner.ranks, record, segment)
        for segment in found
        for record in records_in(segment)
    )


class Incomplete(NamedTuple):
    """A snapshot of which the parts of some ranks are missing."""

    record: SnapshotRecord
    present: int
    ranks: int


def incomplete(found: Iterable[Segment]) -> list[Incomplete]:
    """Return the snapshots of which these segments hold the parts of some ranks only."""
    parts = (
        (segment.owner.rank, segment.owner.ranks, record, segment)
        for segment in found
        for record in records_in(segment)
    )
    return [
        Incomplete(next(iter(by_rank.values()))[1], len(by_rank), ranks)
        for ranks, by_rank in _by_attempt(parts)
        if len(by_rank) < ranks
    ]


def _whole(
    parts: Iterable[tuple[int, int, SnapshotRecord, _Place]],
) -> list[Sequence[tuple[_Place, SnapshotRecord]]]:
    """Assemble parts (rank, ranks, record, place). An attempt belongs to one job instance, so all
    parts of it do."""
    return [
        [by_rank[rank] for rank in range(ranks)]
        for ranks, by_rank in _by_attempt(parts)
        if by_rank.keys() == set(range(ranks))
    ]


def _by_attempt(
    parts: Iterable[tuple[int, int, SnapshotRecord, _Place]],
) -> list[tuple[int, dict[int, tuple[_Place, SnapshotRecord]]]]:
    """Group parts by attempt: the number of ranks that saved, and the parts by rank."""
    found: dict[tuple[str, int, AttemptName], dict[int, tuple[_Place, SnapshotRecord]]] = {}
    for rank, ranks, record, place in parts:
        found.setdefault((record.run, ranks, record.at), {})[rank] = place, record
    return [(ranks, by_rank) for (_, ranks, _), by_rank in found.items()]


def opened(parts: RankParts) -> list[MemorySnapshot]:
    """Open the snapshot with these parts; empty, with a warning, if they do not match."""
    try:
        return [MemorySnapshot(parts)]
    except (LaststepError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s in shared memory does not count: %s", parts[0][1].at.folder, error)
        return []


class NodePart(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a snapshot, in a segment of one node."""

    folder: str
    rank: int
    ranks: int
    record: SnapshotRecord


Readers = Mapping[int, frozenset[int]]
"""For each rank that wrote: the ranks of this job on the node that holds its part."""


def complete_over_nodes(
    nodes: Sequence[str], parts: Mapping[str, Sequence[NodePart]], this_node: str
) -> list[tuple[RankParts, Readers]]:
    """Return the snapshots whose parts are all on some node, with the segments that ranks of this
    node can open. `nodes` has the node of every rank, `parts` the parts on each node."""
    whole = _whole(
        (part.rank, part.ranks, part.record, (node, part.folder))
        for node, lying in parts.items()
        for part in lying
    )
    return [
        (
            [(_opened(folder, node == this_node), record) for (node, folder), record in each],
            {
                writer: frozenset(rank for rank, name in enumerate(nodes) if name == node)
                for writer, ((node, _), _) in enumerate(each)
            },
        )
        for each in whole
    ]


def _opened(folder: str, is_here: bool) -> Segment | None:  # noqa: FBT001
    with contextlib.suppress(StorageError):  # removed meanwhile
        return segments.opened(folder) if is_here else None
    return None
