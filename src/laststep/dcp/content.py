"""A checkpoint as DCP sees it: flat metadata, values as bytes, and chunks of tensors.

A checkpoint that a `Writer` wrote appears as the state that was saved. Any other appears as one
nested state of all items by name, flattened as DCP does it. Everything read is verified. Of a chunk
only the rows that contain requested data are read, each block once, a few reads ahead. The planner
is called only on the calling thread.
"""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from laststep.adapters.export.dcp import leaves_by_item, tensor_metadata
from laststep.browse import StoredTensor
from laststep.codecs.objects import TensorRef
from laststep.constants import CHUNK_BYTES, DTYPES
from laststep.dcp import record as dcp_record
from laststep.dcp import typed
from laststep.dcp import values as dcp_values
from laststep.dcp.record import tensor_name
from laststep.errors import CorruptError, UsageError
from laststep.memory.slots import SLOT_BYTES
from laststep.plan.reads import Read, ReadRequest, plan_reads
from laststep.read.blocks import close_files, refuse
from laststep.read.content import Content, Place
from laststep.read.reader import read_ahead
from laststep.state.boxes import Box, whole
from laststep.state.tensors import TORCH_DTYPES, open_view, revive
from laststep.state.tensors.kinds import PLAIN_TENSORS
from laststep.state.tree import rebuild

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BytesIO

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from laststep.adapters.nesting import Path
    from laststep.codecs.objects import Tagged
    from laststep.dcp.record import Kind
    from laststep.format.manifest import Commit
    from laststep.read.blocks import LayoutBlocks
    from laststep.read.content import Place
    from laststep.storage.store import Store

_THREADS = 4


class ChunkRead(NamedTuple):
    """A request, the place of the chunk that it reads from, and the chunk's dtype."""

    request: ReadItem
    place: Place
    dtype: str


class _Rows(NamedTuple):
    """Rows of one read's chunk, and their byte range in the tensor area of the file."""

    read: int
    first: int
    number: int
    start: int
    stop: int


def put_whole(tensor: torch.Tensor, request: ReadItem, planner: LoadPlanner) -> None:
    """Copy the requested part of a tensor that has been read to the planner's target."""
    target = _target(request, planner)
    target.copy_(_narrowed(tensor, request.storage_offsets, request.lengths))
    planner.commit_tensor(request, target)


def copy_chunks(
    files: Sequence[LayoutBlocks], reads: Sequence[ChunkRead], planner: LoadPlanner
) -> None:
    """Read, verify and copy the requested chunks, in the order of the files."""
    used = {read.place.file for read in reads}
    # Small reads are still in the CPU caches when they are verified and copied. Requests to a
    # server cost more than reads from a disk, so those are larger.
    most_bytes = SLOT_BYTES if all(files[file].prefer_cached() for file in used) else CHUNK_BYTES
    missing = [0] * len(reads)
    wanted: list[_Rows] = []
    for number, read in enumerate(reads):
        before = len(wanted)
        wanted += _rows_of(number, read, most_bytes)
        missing[number] = len(wanted) - before
        if not missing[number]:
            planner.commit_tensor(read.request, _target(read.request, planner))
    targets: dict[int, torch.Tensor] = {}
    for rows, data in _read_rows(files, reads, wanted, most_bytes):
        read = reads[rows.read]
        if rows.read not in targets:
            targets[rows.read] = _target(read.request, planner)
        _copy_rows(torch.frombuffer(data, dtype=torch.uint8), rows, read, targets[rows.read])
        missing[rows.read] -= 1
        if not missing[rows.read]:
            planner.commit_tensor(read.request, targets.pop(rows.read))


def _rows_of(number: int, read: ChunkRead, most_bytes: int) -> Iterator[_Rows]:
    """Yield the rows that contain requested data; none if the request is empty. Rows within the
    same `most_bytes` of the file are grouped; a row that crosses such a boundary is yielded
    alone."""
    request, place, dtype = read
    if 0 in request.lengths:
        return
    row_bytes = math.prod(place.box.shape[1:]) * DTYPES[dtype].size_bytes
    row, last = 0, 1
    if place.box.shape:
        row, last = request.storage_offsets[0], request.storage_offsets[0] + request.lengths[0]
    while row < last:
        start = place.start + row * row_bytes
        count = min(max((most_bytes - start % most_bytes) // row_bytes, 1), last - row)
        yield _Rows(number, row, count, start, start + count * row_bytes)
        row += count


def _read_rows(
    files: Sequence[LayoutBlocks],
    reads: Sequence[ChunkRead],
    wanted: Sequence[_Rows],
    most_bytes: int,
) -> Iterator[tuple[_Rows, memoryview | bytearray]]:
    """Yield all rows with their bytes, which are valid only until the next iteration. Raise
    `CorruptError` for bytes that have changed."""
    requests: dict[int, list[ReadRequest]] = {}
    for number, rows in enumerate(wanted):
        file = reads[rows.read].place.file
        requests.setdefault(file, []).append(ReadRequest(rows.start, rows.stop, number))
    planned: list[Read] = []
    for file in sorted(requests):
        planned += plan_reads(file, files[file].layout.tensor_bytes, requests[file], most_bytes)
    extents = (files[read.file].blocks(read.start, read.stop) for read in planned)
    cut: dict[int, bytearray] = {}  # rows that have been read in part
    with closing(read_ahead(extents, threads=_THREADS, buffer_bytes=most_bytes)) as ahead:
        for read, (data, damage) in zip(planned, ahead, strict=True):
            refuse(damage)
            for part in read.parts:
                rows, piece = wanted[part.target], data[part.at : part.at + part.size_bytes]
                size = rows.stop - rows.start
                if part.size_bytes == size:
                    yield rows, piece
                    continue
                if part.target not in cut:
                    cut[part.target] = bytearray(size)
                stop = part.target_at + part.size_bytes
                cut[part.target][part.target_at : stop] = piece
                if stop == size:
                    yield rows, cut.pop(part.target)


def _copy_rows(data: torch.Tensor, rows: _Rows, read: ChunkRead, target: torch.Tensor) -> None:
    request, place, dtype = read
    stored = data.view(TORCH_DTYPES[dtype])
    if not place.box.shape:
        _copy(stored.view(()), target)
        return
    stored = stored.view(rows.number, *place.box.shape[1:])
    offsets, lengths = request.storage_offsets[1:], request.lengths[1:]
    at = rows.first - request.storage_offsets[0]
    part = _narrowed(stored, (0, *offsets), (rows.number, *lengths))
    _copy(part, target[at : at + rows.number])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    plain = type(target) in PLAIN_TENSORS and not target.is_conj() and not target.is_neg()
    together = source.is_contiguous() and target.is_contiguous()
    if plain and together and target.device.type == "cpu" and source.dtype == target.dtype:
        # On this thread only: while others read, the copy is done before torch's threads wake up.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if target.shape != request.lengths:
        raise UsageError(
            f"cannot load {request.dest_index.fqn}: the planner gave a tensor of another shape",
            expected=f"{list(request.lengths)}",
            found=f"{list(target.shape)}",
        )
    return target


_VALUES = ("value", "typed", "raw")


class DcpStorageInfo(NamedTuple):
    """The storage info of an entry in DCP's metadata: its item, the tensor's name there and, for a
    tensor, the box."""

    item: str
    name: str
    box: Box | None


class _DcpLeaf(NamedTuple):
    """An entry of the flat state: a tensor of an item, a part of a tensor of the given `shape` that
    begins at `start`, or any other node of the item's tree."""

    fqn: str
    item: str
    node: object
    kind: Kind
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


class DcpContent:
    """A checkpoint, open for reading. `close` closes its files."""

    def __init__(
        self,
        store: Store,
        folder: str,
        commit: Commit,
        *,
        rank: int,
        allow_pickle: bool,
        types: Sequence[type] = (),
    ) -> None:
        """Open a checkpoint. Of per-rank items, those of `rank` are shown. Objects of user classes
        are created only if the class is in `types` or occurs in the state to load into."""
        self._classes = typed.classes_in(tuple(types))
        self.folder = folder
        self._where = f"{store.url}/{folder}"
        self._allow_pickle = allow_pickle
        self._content = Content(store, folder, commit, rank=rank)
        self._closing = weakref.finalize(self, close_files, self._content.files)
        self._planner_data: object = None
        self.save_id: str | None = None
        """DCP's id of the save, if DCP saved the checkpoint."""
        self._leaves = list(self._find_leaves())
        self._values = {leaf.fqn: leaf for leaf in self._leaves if leaf.kind in _VALUES}

    def close(self) -> None:
        self._closing()

    # Metadata

    def metadata(self) -> Metadata:
        """Return the metadata for DCP's planners."""
        metadata = Metadata(
            state_dict_metadata={}, planner_data=self._planner_data, storage_data={}
        )
        metadata.version = CURRENT_DCP_VERSION
        for leaf in self._leaves:
            if leaf.kind == "tensor" and type(leaf.node) is TensorRef:
                self._tell_tensor(leaf, leaf.node.name, metadata)
            elif leaf.kind == "part" and type(leaf.node) is TensorRef:
                self._tell_part(leaf, leaf.node.name, metadata)
            else:
                metadata.state_dict_metadata[leaf.fqn] = BytesStorageMetadata()
                index = MetadataIndex(leaf.fqn)
                metadata.storage_data[index] = DcpStorageInfo(leaf.item, "", None)
        return metadata

    def _tell_tensor(self, leaf: _DcpLeaf, name: str, into: Metadata) -> None:
        dtype, shape = self._content.item(leaf.item).spec_of(name)
        boxes = [place.box for place in self._places(leaf.item, name)] or [whole(shape)]
        boxes.sort()
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))
            for box in boxes
        ]
        into.state_dict_metadata[leaf.fqn] = tensor_metadata(dtype, shape, chunks)
        for number, box in enumerate(boxes):
            index = MetadataIndex(leaf.fqn, box.start, number)
            into.storage_data[index] = DcpStorageInfo(leaf.item, name, box)

    def _tell_part(self, leaf: _DcpLeaf, name: str, into: Metadata) -> None:
        dtype, shape = self._content.item(leaf.item).spec_of(name)
        fresh = tensor_metadata(dtype, leaf.shape, [])
        whole_of = into.state_dict_metadata.setdefault(leaf.fqn, fresh)
        ends = map(operator.add, leaf.start, shape)
        if (
            not isinstance(whole_of, TensorStorageMetadata)
            or len(shape) != len(leaf.shape)
            or any(map(operator.gt, ends, whole_of.size))
        ):
            raise CorruptError(
                "a shard lies outside its tensor", where=self._where, found=repr(leaf)[:200]
            )
        start = torch.Size(leaf.start)
        index = MetadataIndex(leaf.fqn, start, len(whole_of.chunks))
        whole_of.chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(shape)))
        into.storage_data[index] = DcpStorageInfo(leaf.item, name, whole(shape))

    def _places(self, item: str, name: str) -> tuple[Place, ...]:
        """Return the places of a tensor's bytes; none for a tensor that is a view of another."""
        stored = self._content.item(item)
        if stored.view_of(name) is not None:
            return ()
        return self._content.places(item, stored.ties.get(name, name))

    def _find_leaves(self) -> Iterator[_DcpLeaf]:
        record = self._record()
        if record is None:
            yield from self._leaves_of_items()
            return
        self._planner_data, self.save_id = record.planner_data, record.save_id
        for entry in record.entries:
            item = str(entry.location[0])
            node = _node_at(self._content.item(item).tree, entry.location[1:], self._where)
            if entry.kind in ("tensor", "part") and node != TensorRef(tensor_name(entry.location)):
                raise CorruptError(
                    "the DCP record of a checkpoint contradicts its trees",
                    where=self._where,
                    found=repr(entry)[:200],
                )
            yield _DcpLeaf(entry.fqn, item, node, entry.kind, entry.start, entry.shape)

    def _record(self) -> dcp_record.DcpRecord | None:
        for data, where in self._content.values(dcp_record.OBJECT_NAME):
            return dcp_record.decode(data, where=where, allow_pickle=self._allow_pickle)
        return None

    def _leaves_of_items(self) -> Iterator[_DcpLeaf]:
        trees = {item.name: item.tree for item in self._content.items.values()}
        remedy = "load the run with laststep instead"
        by_item = leaves_by_item(trees, where=self._where, remedy=remedy)
        self._planner_data = {leaf.name: leaf.path for own in by_item.values() for leaf in own}
        for item, leaves in by_item.items():
            for leaf in leaves:
                yield _DcpLeaf(leaf.name, item, leaf.node, "tensor" if leaf.is_tensor else "value")

    # Reading

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, stored: dict[MetadataIndex, DcpStorageInfo]
    ) -> None:
        """Deliver everything that the plan requests to the planner; tensors in the order of their
        files."""
        chunks: list[ChunkRead] = []
        for request in plan.items:
            place = stored[request.storage_index]
            if request.type is LoadItemType.BYTE_IO:
                live = getattr(planner, "state_dict", {}).get(request.dest_index.fqn)
                fqn = request.storage_index.fqn
                planner.load_bytes(request, self._bytes(fqn, typed.classes_in(live)))
            elif place.box is None:
                raise UsageError(
                    f"cannot load {request.storage_index.fqn} into a tensor: it is a plain value"
                )
            elif self._content.item(place.item).view_of(place.name) is not None:
                put_whole(self._whole(place.item, place.name), request, planner)
            else:
                [at] = [p for p in self._places(place.item, place.name) if p.box == place.box]
                dtype, _ = self._content.item(place.item).spec_of(place.name)
                chunks.append(ChunkRead(request, at, dtype))
        copy_chunks(self._content.files, chunks, planner)

    def _bytes(self, fqn: str, classes: dict[str, type]) -> BytesIO:
        """Return a value as the bytes that a planner loads. Objects of user classes may be created
        from `classes`."""
        leaf = self._values[fqn]
        where = f"{self._where}, {fqn}"

        def revived(tagged: Tagged) -> object:
            return revive(tagged, where=where, allow_pickle=self._allow_pickle)

        value = rebuild(
            leaf.node, leaf=lambda ref: self._whole(leaf.item, ref.name), revive=revived
        )
        if leaf.kind == "raw" and isinstance(value, bytes):
            return dcp_values.raw_bytes(value, fqn=fqn, allow_pickle=self._allow_pickle)
        if leaf.kind == "typed":
            value = typed.rebuilt(value, {**self._classes, **classes}, fqn=fqn)
        return dcp_values.put_together(value)

    def _whole(self, item: str, name: str) -> torch.Tensor:
        """Return a tensor that is inside a value or is a view of another tensor."""
        stored = self._content.item(item)
        view = stored.view_of(name)
        source = stored.source_of(name)
        places = self._content.places(item, source)
        full_name = f"{item}/{name}"
        tensor = StoredTensor(self._content, full_name, stored.tensors[source], places)[()]
        return tensor if view is None else open_view(tensor, view)


def _node_at(tree: object, path: Path, where: str) -> object:
    for part in path:
        match tree:
            case dict() if part in tree:
                tree = tree[part]
            case list() if isinstance(part, int) and part < len(tree):
                tree = tree[part]
            case _:
                raise CorruptError(
                    "the DCP record of a checkpoint contradicts its trees",
                    where=where,
                    found=f"nothing at {list(path)}",
                )
    return tree
