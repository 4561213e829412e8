"""Write the data that a DCP plan assigns to the ranks, and combine it into one checkpoint.

Each rank writes data files of its own and reports the locations of its entries. Offsets are fixed
before anything is copied. Tensors are resolved one at a time, in the order of the files, and pass
through a few 16 MiB buffers: the calling thread fills them, worker threads digest and write them.

After every rank has made its files durable, the coordinator checks the reported entries, writes the
trees and builds the commit. Anything that a reader would reject is refused there, before the
commit.
"""

from __future__ import annotations

import mmap
import queue
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from laststep.adapters.nesting import nest
from laststep.capture.gather import bytes_of
from laststep.codecs import objects
from laststep.codecs.objects import TensorRef
from laststep.constants import CHUNK_BYTES, DTYPES, listed, with_article
from laststep.dcp import record as dcp_record
from laststep.dcp.record import DcpRecord, RecordEntry, tensor_name
from laststep.dcp.values import take_apart
from laststep.errors import AbortedError, UsageError
from laststep.flush.writer import SaveWriter
from laststep.format.layout import FileLayout, TensorEntry, header_bytes_of
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.plan.files import SHARED_FILE, ItemSpec, plan_save
from laststep.process.threads import WorkerPool
from laststep.state.boxes import Box, covers_once, whole
from laststep.state.tensors import DTYPE_NAMES, PLAIN_TENSORS
from laststep.state.tree import BoxPart, Piece
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from laststep.adapters.nesting import Path
    from laststep.catalog.attempt import Attempt, AttemptName
    from laststep.dcp.attempts import DcpSave
    from laststep.plan.files import SavePlan
    from laststep.state.boxes import Index

KIND = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEntry:
    """An entry that was written, for the coordinator and DCP's metadata. Its record is a `part` if
    the box is stored as a tensor by itself, because the rank saves separately."""

    record: RecordEntry
    box: Box | None = None
    """The box that was written, if the entry is a tensor."""
    dtype: str = ""
    shape: Index = ()
    """The shape of the tensor that is stored: the whole one, or a `part` of it."""
    tree: bytes | None = None
    """The typed JSON of an entry that is a value; `tensors` is then the number of tensors in it."""
    tensors: int = 1
    tensor_bytes: int = 0
    files: tuple[str, int, WrittenIndexes] | None = None
    """The folder, the rank and its files; set only on the rank's first entry."""


Source: TypeAlias = "WriteItem | torch.Tensor"
"""An entry of the plan, which is resolved just before it is written, or a tensor of a value."""


class RankPlan(NamedTuple):
    at: AttemptName
    """The attempt to write to."""
    rank: tuple[int, int]
    """Number and count."""
    locations: dict[str, Path]
    """Paths of its entries in the state, by name."""
    own: bool
    """True if the rank saves separately: its part of a tensor is stored as a tensor by itself."""


def write_items(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    assigned: RankPlan,
    attempt: Attempt,
    *,
    allow_pickle: bool,
    threads: int,
) -> list[WriteResult]:
    """Write all items durably. A rank without items writes no index, since it could not report it:
    the coordinator writes it instead."""
    if not items:
        return []
    work: dict[str, list[tuple[Piece, Source]]] = {}
    entries: list[WrittenEntry] = []
    for item in items:
        location = assigned.locations[item.index.fqn]
        pieces = work.setdefault(str(location[0]), [])
        if item.type is WriteItemType.BYTE_IO:
            entries.append(_add_value(item, planner, location, pieces, allow_pickle=allow_pickle))
        else:
            entries.append(_add_tensor(item, location, pieces, own=assigned.own))
    specs = tuple(
        ItemSpec(name=name, kind=KIND, standalone=False, pieces=tuple(piece for piece, _ in pieces))
        for name, pieces in work.items()
    )
    plan = plan_save(specs, rank=assigned.rank, values=())
    sources = [source for _, source in chain.from_iterable(work.values())]
    written = _write_files(plan, sources, planner, attempt, assigned.rank, threads)
    entries[0] = replace(entries[0], files=(attempt.folder, assigned.rank[0], written))
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=written.tensor_bytes + len(written.tree or b""),
            storage_data=written,
        )
        for item, written in zip(items, entries, strict=True)
    ]


def _add_value(
    item: WriteItem,
    planner: SavePlanner,
    location: Path,
    pieces: list[tuple[Piece, Source]],
    *,
    allow_pickle: bool,
) -> WrittenEntry:
    fqn, given = item.index.fqn, planner.resolve_data(item)
    if isinstance(given, torch.Tensor):
        raise UsageError(f"cannot save {fqn}", expected="bytes from the planner", found="a tensor")
    value = take_apart(given.getvalue(), location, fqn=fqn, allow_pickle=allow_pickle)
    for name, tensor in value.tensors.items():
        dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        pieces.append((_piece(name, dtype, shape, tensor.nbytes), tensor))
    return WrittenEntry(
        record=RecordEntry(fqn, location, value.kind),
        tree=value.tree,
        tensors=len(value.tensors),
        tensor_bytes=sum(tensor.nbytes for tensor in value.tensors.values()),
    )


def _piece(
    name: str, dtype: str, shape: Index, size_bytes: int, part: BoxPart | None = None
) -> Piece:
    return Piece(name, dtype, shape, size_bytes, "cpu", contiguous=True, volatile=False, part=part)


def _add_tensor(
    item: WriteItem, location: Path, pieces: list[tuple[Piece, Source]], *, own: bool
) -> WrittenEntry:
    fqn, data = item.index.fqn, item.tensor_data
    if data is None or data.chunk is None:
        raise UsageError(
            f"cannot save {fqn}: the planner does not say which shard of which tensor it is"
        )
    if data.properties.layout is not torch.strided or data.properties.dtype not in DTYPE_NAMES:
        raise UsageError(
            f"cannot save {fqn}",
            expected="a dense tensor of a plain dtype",
            found=f"{data.properties.layout}, {data.properties.dtype}",
            remedy="convert it in the state, e.g. with to_dense() or dequantize()",
        )
    dtype, shape = DTYPE_NAMES[data.properties.dtype], tuple(data.size)
    start, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    box = whole(sizes).moved(start)
    size = box.volume * DTYPES[dtype].size_bytes
    record = RecordEntry(fqn, location, "tensor")
    if is_part := own and box != whole(shape):
        location = (*location, f"at {','.join(map(str, start))}")
        record = RecordEntry(fqn, location, "part", start, shape)
    if size:  # the coordinator writes empty tensors: no rank holds more of them than another
        name, part = tensor_name(location), None
        if not is_part and box != whole(shape):
            # The same name that a Checkpointer uses; `~6` never occurs in a tensor's path.
            name, part = f"{name}~6at{','.join(map(str, start))}", BoxPart(name, shape, start)
        pieces.append((_piece(name, dtype, sizes, size, part), item))
    stored_shape = sizes if is_part else shape
    return WrittenEntry(record=record, box=box, dtype=dtype, shape=stored_shape, tensor_bytes=size)


def _write_files(
    plan: SavePlan,
    sources: list[Source],
    planner: SavePlanner,
    attempt: Attempt,
    rank: tuple[int, int],
    threads: int,
) -> WrittenIndexes:
    layouts = [file.layout for file in plan.files]
    free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(threads + 1):
        free.put(mmap.mmap(-1, CHUNK_BYTES))
    with closing(SaveWriter(attempt, layouts, rank=rank)) as writer:

        def write(file: int, start: int, buffer: mmap.mmap, size: int) -> None:
            image = memoryview(buffer)
            sums = writer.digests(file, start, image[:size])
            writer.write(file, start, image, size, sums)  # stores an error in writer.error
            free.put(buffer)

        with WorkerPool("dcp-write", threads) as pool:
            for number, file in enumerate(plan.files):
                start = 0
                tensors = (_resolved(sources[piece], planner) for piece in file.pieces)
                for buffer, size in _filled(tensors, free):
                    if writer.error is not None:
                        raise writer.error
                    pool.put(write, number, start, buffer, size)
                    start += size
        return writer.finish({})


def _filled(
    tensors: Iterable[torch.Tensor], free: queue.SimpleQueue[mmap.mmap]
) -> Iterator[tuple[mmap.mmap, int]]:
    """Fill free buffers with the bytes of the tensors in order, and yield each with its size."""
    buffer, filled = None, 0
    for data in (part for tensor in tensors for part in _stretches(tensor)):
        at = 0
        while at < data.numel():
            buffer = buffer or free.get()
            size = min(data.numel() - at, CHUNK_BYTES - filled)
            target = torch.frombuffer(buffer, dtype=torch.uint8)
            target[filled : filled + size].copy_(data[at : at + size])
            at, filled = at + size, filled + size
            if filled == CHUNK_BYTES:
                yield buffer, filled
                buffer, filled = None, 0
    if buffer is not None:
        yield buffer, filled


def _resolved(source: Source, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor of a piece. Raise `UsageError` if it differs from the plan."""
    if isinstance(source, torch.Tensor):
        return source
    data, given = source.tensor_data, planner.resolve_data(source)
    assert data is not None  # noqa: S101 (checked when it was added)
    if not isinstance(given, torch.Tensor) or type(given) not in PLAIN_TENSORS:
        found = with_article(type(given))
    elif given.is_meta:
        found = "a meta tensor, without data"
    elif given.shape != data.chunk.sizes or given.dtype != data.properties.dtype:
        found = f"{given.dtype}{list(given.shape)}"
    else:
        return given
    raise UsageError(
        f"cannot save {source.index.fqn}: the planner returned something other than it planned",
        expected=f"a plain tensor of {data.properties.dtype}{list(data.chunk.sizes)}",
        found=found,
        remedy="save the tensors that it is made of; or plan the dtype and shape that it has",
    )


def _stretches(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in row-major order, of a strided one a few rows at a time."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield bytes_of(tensor)
    elif tensor.nbytes <= CHUNK_BYTES or not tensor.dim():
        yield bytes_of(tensor.resolve_conj().resolve_neg().contiguous())
    else:
        rows = max(CHUNK_BYTES * tensor.shape[0] // tensor.nbytes, 1)
        for part in tensor.split(rows):
            yield from _stretches(part[0] if rows == 1 else part)


def make_commit(
    save: DcpSave, metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, save_id: str
) -> Commit:
    """Write the remaining files. Raise `UsageError` if results and metadata differ."""
    attempt, at, ranks = save.attempt, save.attempt.name, len(results)
    written: dict[str, list[WrittenEntry]] = {}
    indexes: dict[int, WrittenIndexes] = {}
    for result in chain.from_iterable(results):
        part: WrittenEntry = result.storage_data
        written.setdefault(result.index.fqn, []).append(part)
        if part.files is not None:
            folder, rank, indexes[rank] = part.files
            if folder != attempt.folder:
                raise AbortedError(
                    "the Writer was used for another save before this one finished",
                    expected=f"files in {attempt.folder}",
                    found=f"files in {folder}",
                    remedy="make a Writer for each of the saves that run at once",
                )
    fqns = dict.fromkeys([*metadata.state_dict_metadata, *written])
    entries = [
        entry
        for fqn in fqns
        for entry in _checked(fqn, written.get(fqn, []), metadata.state_dict_metadata.get(fqn))
    ]
    record = DcpRecord(entries=tuple(entries), planner_data=metadata.planner_data, save_id=save_id)
    nodes: list[tuple[Path, object]] = []
    for entry in entries:
        tree = written[entry.fqn][0].tree
        name = tensor_name(entry.location)
        node = TensorRef(name) if tree is None else objects.decode(tree, where=entry.fqn)
        nodes.append((entry.location, node))
    trees = nest(nodes, where=attempt.folder)
    values = {
        item: objects.encode({"tree": tree, "ties": {}, "views": {}})
        for item, tree in trees.items()
    }
    values[dcp_record.OBJECT_NAME] = dcp_record.encode(record)
    for rank in range(ranks):  # a rank without results has written nothing
        indexes[rank] = indexes.get(rank) or _write_index(attempt, (rank, ranks))
    # What belongs to no rank has an index of the coordinator, after those of the ranks: values, and
    # tensors without elements, of which no rank has written a chunk.
    empty: dict[str, TensorEntry] = {}
    for part in chain.from_iterable(written.values()):
        if part.box is not None and 0 in part.shape:
            name = f"{part.record.location[0]}/{tensor_name(part.record.location)}"
            empty[name] = TensorEntry(name, part.dtype, part.shape, 0, 0)
    indexes[ranks] = _write_index(attempt, (ranks, ranks), tuple(empty.values()), values)
    return Commit(
        run=save.writer.run.id,
        step=at.step,
        term=at.term,
        attempt=at.attempt,
        created_s=time.time(),
        laststep=VERSION,
        written=reduce(WrittenIndexes.plus, (indexes[n] for n in range(ranks + 1))),
        items=_item_records(written),
        continues=save.continues,
        ranks=ranks,
    )


def _item_records(written: Mapping[str, Sequence[WrittenEntry]]) -> tuple[ItemRecord, ...]:
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for parts in written.values():
        item = str(parts[0].record.location[0])
        tensors[item] += parts[0].tensors  # a tensor counts once, not per chunk
        sizes[item] += sum(part.tensor_bytes for part in parts)
    return tuple(
        ItemRecord(name=item, kind=KIND, tensors=tensors[item], size_bytes=size)
        for item, size in sizes.items()
    )


def _checked(fqn: str, written: Sequence[WrittenEntry], content: object) -> list[RecordEntry]:
    """Check that an entry is written completely and only once; return the record of each part."""
    records = [entry.record for entry in written]
    boxes = [entry.box for entry in written if entry.box is not None]
    is_at_one_place = len({(entry.record.location, entry.dtype) for entry in written}) == 1
    is_whole = False
    if isinstance(content, TensorStorageMetadata):
        if records and all(record.kind == "part" for record in records):
            return records
        is_whole = len(boxes) == len(written) and covers_once(
            tuple(content.size), [box for box in boxes if box.volume]
        )
    elif content is not None:
        is_whole = len(written) == 1 and not boxes
    if is_at_one_place and is_whole:
        return records[:1]
    raise UsageError(
        f"the ranks have not written {fqn} as a whole and once",
        expected=f"what the planner's metadata says: {content}"[:200],
        found=listed(
            f"{'.'.join(map(str, entry.record.location))} {entry.dtype}"
            f"{'' if entry.box is None else f'[{entry.box.text}]'}"
            for entry in written
        ),
        remedy="save on all ranks that hold a shard of it, without no_dist",
    )


def _write_index(
    attempt: Attempt,
    rank: tuple[int, int],
    empty: tuple[TensorEntry, ...] = (),
    values: Mapping[str, bytes] = MappingProxyType({}),
) -> WrittenIndexes:
    """Write an index without tensor bytes."""
    layout = FileLayout(
        name=f"{SHARED_FILE}.safetensors",
        item=None,
        header_bytes=header_bytes_of(empty),
        tensor_bytes=0,
        tensors=empty,
    )
    with closing(SaveWriter(attempt, (layout,) if empty else (), rank=rank)) as writer:
        return writer.finish(values)
