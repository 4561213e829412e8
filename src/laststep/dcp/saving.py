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
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

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
    from laststep.catalog.attempt import Attempt
    from laststep.dcp.attempts import DcpSave
    from laststep.plan.files import SavePlan

KIND = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files that one rank has written."""

    folder: str
    rank: int
    written: WrittenIndexes


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEntry:
    """The location of an entry, for the coordinator and DCP's metadata."""

    location: Path
    box: Box | None = None
    """The box that was written, if the entry is a tensor."""
    dtype: str | None = None
    is_part: bool = False
    """True if the box is stored as a tensor by itself, because the rank saves separately."""
    tree: bytes | None = None
    """The typed JSON of an entry that is a value; `tensors` is then the number of tensors in it."""
    kind: Literal["value", "typed", "raw"] = "value"
    tensors: int = 1
    tensor_bytes: int = 0
    files: Files | None = None
    """The files of the rank; set only on its first entry."""


@dataclass(slots=True, kw_only=True)
class _WrittenItem:
    """The pieces of one item that this rank writes, and the source of each: an entry of the plan,
    which is resolved just before it is written, or a tensor of a value."""

    pieces: list[Piece] = field(default_factory=list)
    sources: list[WriteItem | torch.Tensor] = field(default_factory=list)

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        size_bytes: int,
        source: WriteItem | torch.Tensor,
        part: BoxPart | None = None,
    ) -> None:
        self.pieces.append(
            Piece(name, dtype, shape, size_bytes, "cpu", contiguous=True, volatile=False, part=part)
        )
        self.sources.append(source)


def write_items(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    locations: dict[str, Path],
    *,
    attempt: Attempt,
    rank: tuple[int, int],
    own: bool,
    allow_pickle: bool,
    threads: int,
) -> list[WriteResult]:
    """Write all items durably. `rank` is (number, count). With `own` the rank saves separately: no
    other rank writes the rest of a tensor, so its part is stored as a tensor by itself.

    A rank without items writes no index; the coordinator writes it instead, because without results
    the rank could not report it.
    """
    if not items:
        return []
    work: dict[str, _WrittenItem] = {}
    entries: list[WrittenEntry] = []
    for item in items:
        location = locations[item.index.fqn]
        into = work.setdefault(str(location[0]), _WrittenItem())
        if item.type is WriteItemType.BYTE_IO:
            entries.append(_add_value(item, planner, location, into, allow_pickle=allow_pickle))
        else:
            entries.append(_add_tensor(item, location, into, own=own))
    specs = tuple(
        ItemSpec(name=name, kind=KIND, standalone=False, pieces=tuple(item.pieces))
        for name, item in work.items()
    )
    plan = plan_save(specs, rank=rank, values=())
    written = _write_files(plan, list(work.values()), planner, attempt, rank, threads)
    files = Files(folder=attempt.folder, rank=rank[0], written=written)
    if entries:
        entries[0] = replace(entries[0], files=files)
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=written.tensor_bytes + len(written.tree or b""),
            storage_data=written,
        )
        for item, written in zip(items, entries, strict=True)
    ]


def _add_value(
    item: WriteItem, planner: SavePlanner, location: Path, into: _WrittenItem, *, allow_pickle: bool
) -> WrittenEntry:
    fqn, given = item.index.fqn, planner.resolve_data(item)
    if isinstance(given, torch.Tensor):
        raise UsageError(f"cannot save {fqn}", expected="bytes from the planner", found="a tensor")
    value = take_apart(given.getvalue(), location, fqn=fqn, allow_pickle=allow_pickle)
    for name, tensor in value.tensors.items():
        into.add(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, tensor)
    return WrittenEntry(
        location=location,
        tree=value.tree,
        kind=value.kind,
        tensors=len(value.tensors),
        tensor_bytes=sum(tensor.nbytes for tensor in value.tensors.values()),
    )


def _add_tensor(item: WriteItem, location: Path, into: _WrittenItem, *, own: bool) -> WrittenEntry:
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
    is_part = own and box != whole(shape)
    if is_part:
        location, shape = (*location, f"at {','.join(map(str, start))}"), sizes
    if size:  # the coordinator writes empty tensors: no rank holds more of them than another
        name, part = tensor_name(location), None
        if not is_part and box != whole(shape):
            # The same name that a Checkpointer uses; `~6` never occurs in a tensor's path.
            name, part = f"{name}~6at{','.join(map(str, start))}", BoxPart(name, shape, start)
        into.add(name, dtype, sizes, size, item, part)
    return WrittenEntry(location=location, box=box, dtype=dtype, tensor_bytes=size, is_part=is_part)


def _write_files(
    plan: SavePlan,
    work: list[_WrittenItem],
    planner: SavePlanner,
    attempt: Attempt,
    rank: tuple[int, int],
    threads: int,
) -> WrittenIndexes:
    sources = [source for item in work for source in item.sources]
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


def _resolved(source: WriteItem | torch.Tensor, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor of a piece. Raise `UsageError` if it differs from the plan."""
    if isinstance(source, torch.Tensor):
        return source
    fqn, data = source.index.fqn, source.tensor_data
    given = planner.resolve_data(source)
    if not isinstance(given, torch.Tensor) or type(given) not in PLAIN_TENSORS:
        raise UsageError(
            f"cannot save {fqn}",
            expected="a plain tensor from the planner",
            found=with_article(type(given)),
            remedy="save the tensors that it is made of",
        )
    assert data is not None  # noqa: S101 (checked when it was added)
    if given.shape != data.chunk.sizes or given.dtype != data.properties.dtype:
        raise UsageError(
            f"cannot save {fqn}: the planner returned something other than it planned",
            expected=f"{data.properties.dtype}{list(data.chunk.sizes)}",
            found=f"{given.dtype}{list(given.shape)}",
            remedy=(
                "make its create_local_plan return the dtype and shape that resolve_data returns"
            ),
        )
    if given.is_meta:
        raise UsageError(f"cannot save {fqn}: it is a meta tensor, without data")
    return given


def _stretches(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in row-major order; a strided tensor is copied a few rows at a
    time."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield bytes_of(tensor)
    elif tensor.nbytes <= CHUNK_BYTES or not tensor.dim():
        yield bytes_of(tensor.resolve_conj().resolve_neg().contiguous())
    else:
        rows = max(CHUNK_BYTES * tensor.shape[0] // tensor.nbytes, 1)
        for part in tensor.split(rows):
            yield from _stretches(part[0] if rows == 1 else part)


_SHARED = f"{SHARED_FILE}.safetensors"


def make_commit(
    save: DcpSave,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    save_id: str,
    allow_pickle: bool,
) -> Commit:
    """Write the remaining files into the attempt's folder and return the commit. Raise `UsageError`
    if the ranks' results do not match the metadata."""
    attempt, at, ranks = save.attempt, save.attempt.name, len(results)
    written: dict[str, list[WrittenEntry]] = {}
    indexes: dict[int, WrittenIndexes] = {}
    for result in chain.from_iterable(results):
        part: WrittenEntry = result.storage_data
        written.setdefault(result.index.fqn, []).append(part)
        if part.files is not None:
            _check_same_save(part.files, attempt.folder)
            indexes[part.files.rank] = part.files.written
    entries = [
        entry
        for fqn, content in metadata.state_dict_metadata.items()
        for entry in _checked(fqn, written.get(fqn, []), content)
    ]
    unknown = sorted(written.keys() - metadata.state_dict_metadata.keys())
    if unknown:
        raise UsageError(
            "the planner's metadata does not list everything that was written",
            found=listed(unknown),
        )
    record = DcpRecord(entries=tuple(entries), planner_data=metadata.planner_data, save_id=save_id)
    trees = nest(
        ((entry.location, _node(entry, written)) for entry in entries), where=attempt.folder
    )
    values = {
        item: objects.encode({"tree": tree, "ties": {}, "views": {}})
        for item, tree in trees.items()
    }
    values[dcp_record.OBJECT_NAME] = dcp_record.encode(record, allow_pickle=allow_pickle)
    for rank in range(ranks):  # a rank without results has written nothing
        indexes[rank] = indexes.get(rank) or _write_index(attempt, (rank, ranks))
    # What belongs to no rank has an index of the coordinator, after those of the ranks.
    empty = _empty_tensors(written, metadata)
    indexes[ranks] = _write_index(attempt, (ranks, ranks), empty, values)
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


def _check_same_save(files: Files, folder: str) -> None:
    if files.folder != folder:
        raise AbortedError(
            "the Writer was used for another save before this one finished",
            expected=f"files in {folder}",
            found=f"files in {files.folder}",
            remedy="make a Writer for each of the saves that run at once",
        )


def _item_records(written: Mapping[str, Sequence[WrittenEntry]]) -> tuple[ItemRecord, ...]:
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for parts in written.values():
        item = str(parts[0].location[0])
        tensors[item] += parts[0].tensors  # a tensor counts once, not per chunk
        sizes[item] += sum(part.tensor_bytes for part in parts)
    return tuple(
        ItemRecord(name=item, kind=KIND, tensors=tensors[item], size_bytes=size)
        for item, size in sizes.items()
    )


def _checked(fqn: str, written: Sequence[WrittenEntry], content: object) -> list[RecordEntry]:
    """Check that an entry of the metadata was written completely and only once, and return its
    records. If a rank saves separately, each part of a tensor is an entry."""
    if not written:
        raise UsageError(f"no rank has written {fqn}, which is in the planner's metadata")
    first = written[0]
    if isinstance(content, TensorStorageMetadata) and all(entry.is_part for entry in written):
        return [
            RecordEntry(
                fqn=fqn,
                location=part.location,
                kind="part",
                start=part.box.start,
                shape=tuple(content.size),
            )
            for part in written
            if part.box is not None
        ]
    if any(other.location != first.location for other in written):
        raise UsageError(
            f"the ranks disagree about the place of {fqn}",
            found=", ".join(sorted({str(other.location) for other in written})),
            remedy="save without the plan caching of the planner",
        )
    if not isinstance(content, TensorStorageMetadata):
        if len(written) > 1 or first.tree is None:
            raise UsageError(f"{fqn} was written {len(written)} times, or as a tensor")
        return [RecordEntry(fqn=fqn, location=first.location, kind=first.kind)]
    boxes = [entry.box for entry in written if entry.box is not None]
    shape = tuple(content.size)
    alike = len(boxes) == len(written) and len({entry.dtype for entry in written}) == 1
    if not alike or not covers_once(shape, [box for box in boxes if box.volume]):
        raise UsageError(
            f"the chunks of {fqn} do not cover it",
            expected=f"every element of {list(shape)} once, of one dtype",
            found=listed(f"[{box.text}]" for box in boxes),
            remedy="save on all ranks that hold a shard of it, without no_dist",
        )
    return [RecordEntry(fqn=fqn, location=first.location, kind="tensor")]


def _node(entry: RecordEntry, written: Mapping[str, Sequence[WrittenEntry]]) -> object:
    if entry.kind in ("tensor", "part"):
        return TensorRef(tensor_name(entry.location))
    return objects.decode(written[entry.fqn][0].tree or b"", where=entry.fqn)


def _empty_tensors(
    written: Mapping[str, Sequence[WrittenEntry]], metadata: Metadata
) -> tuple[TensorEntry, ...]:
    """Return the tensors without elements, of which no rank has written a chunk."""
    entries: dict[str, TensorEntry] = {}
    for fqn, content in metadata.state_dict_metadata.items():
        for part in written[fqn]:
            if not isinstance(content, TensorStorageMetadata) or part.box is None:
                continue
            shape = part.box.shape if part.is_part else tuple(content.size)
            if 0 in shape:
                name = f"{part.location[0]}/{tensor_name(part.location)}"
                entries[name] = TensorEntry(name, part.dtype or "", shape, 0, 0)
    return tuple(entries.values())


def _write_index(
    attempt: Attempt,
    rank: tuple[int, int],
    empty: tuple[TensorEntry, ...] = (),
    values: Mapping[str, bytes] = MappingProxyType({}),
) -> WrittenIndexes:
    """Write an index without tensor bytes."""
    layout = FileLayout(
        name=_SHARED, item=None, header_bytes=header_bytes_of(empty), tensor_bytes=0, tensors=empty
    )
    with closing(SaveWriter(attempt, (layout,) if empty else (), rank=rank)) as writer:
        return writer.finish(values)
