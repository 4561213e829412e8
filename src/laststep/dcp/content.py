"""A checkpoint, or a folder of torch's own storage, as DCP sees it: flat metadata, values as bytes,
and chunks of tensors.

A checkpoint that a `Writer` wrote appears as the state that was saved. Any other appears as one
nested state of all items by name, flattened as DCP does it. Everything read is verified. Only the
blocks that contain requested elements are read, each once, a few reads ahead. The planner is called
only on the calling thread.
"""

from __future__ import annotations

import ctypes
import operator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from laststep.adapters.export.dcp import add_chunks, add_value, leaves_by_item, new_metadata
from laststep.adapters.export.folder import ItemTensors
from laststep.adapters.importing import dcp_folder
from laststep.codecs.objects import TensorRef
from laststep.constants import CHUNK_BYTES, DTYPES
from laststep.dcp import record as dcp_record
from laststep.dcp import values as dcp_values
from laststep.dcp.record import RecordEntry, tensor_name
from laststep.errors import CorruptError, UsageError
from laststep.memory.pool import SLOT_BYTES
from laststep.plan.reads import FileBox, Wanted, plan_chunks, requested_ranges
from laststep.read.blocks import refuse
from laststep.read.reader import read_ahead
from laststep.state.boxes import Box, whole
from laststep.state.provider import ABSENT
from laststep.state.tensors import PLAIN_TENSORS, TORCH_DTYPES, box_of, revive
from laststep.state.tree import rebuild
from laststep.storage.registry import local_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BytesIO

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from laststep.adapters.importing.dcp_metadata import StoredPart
    from laststep.browse import Checkpoint
    from laststep.read.blocks import LayoutBlocks
    from laststep.read.content import Place


class _ChunkRead(NamedTuple):
    """A request, the stored chunk that it reads from, and the wanted box of the tensor."""

    request: ReadItem
    stored: FileBox
    dtype: torch.dtype
    box: Box


def put_whole(tensor: torch.Tensor, request: ReadItem, planner: LoadPlanner) -> None:
    """Copy the requested part of a tensor that has been read to the planner's target."""
    target = _target(request, planner)
    box = whole(tuple(request.lengths)).moved(request.storage_offsets)
    target.copy_(box_of(tensor, box))
    planner.commit_tensor(request, target)


def _copy_chunks(
    files: Sequence[LayoutBlocks], wanted: Sequence[_ChunkRead], planner: LoadPlanner
) -> None:
    """Read, verify and copy the wanted boxes, in the order of the files."""
    used = {want.stored.file for want in wanted}
    # Small reads are still in the CPU caches when they are verified and copied. Requests to a
    # server cost more than reads from a disk, so those are larger.
    most_bytes = SLOT_BYTES if all(files[file].prefer_cached() for file in used) else CHUNK_BYTES
    requests: list[Wanted] = []
    for want in wanted:
        for start, stop in requested_ranges(want.stored, (want.box,)):
            requests.append((start, stop, want.stored))
        if not want.box.volume:
            planner.commit_tensor(want.request, _target(want.request, planner))
    sizes = {file: files[file].layout.tensor_bytes for file in used}
    planned = plan_chunks(requests, sizes, most_bytes)
    extents = (files[read.file].blocks(read.start, read.stop) for read in planned)
    missing = [want.box.volume for want in wanted]
    targets: dict[int, torch.Tensor] = {}
    with closing(read_ahead(extents, threads=4, buffer_bytes=most_bytes)) as ahead:
        for read, (data, damage) in zip(planned, ahead, strict=True):
            refuse(damage)
            image = torch.frombuffer(data, dtype=torch.uint8)
            for source, box, at in read.boxes():
                number = source.tensor
                request, _, dtype, wanted_box = wanted[number]
                common = box.meet(wanted_box)
                if common is None:
                    continue
                if number not in targets:
                    targets[number] = _target(request, planner)
                part = image[at : at + box.volume * source.itemsize].view(dtype).view(box.shape)
                into = box_of(targets[number], common.within(wanted_box))
                _copy(box_of(part, common.within(box)), into)
                missing[number] -= common.volume
                if not missing[number]:
                    planner.commit_tensor(request, targets.pop(number))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    plain = type(target) in PLAIN_TENSORS and not target.is_conj() and not target.is_neg()
    together = source.is_contiguous() and target.is_contiguous()
    if plain and together and target.device.type == "cpu" and source.dtype == target.dtype:
        # On this thread only: while others read, the copy is done before torch's threads wake up.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if target.shape != request.lengths:
        raise UsageError(
            f"cannot load {request.dest_index.fqn}: the planner gave a tensor of another shape",
            expected=f"{list(request.lengths)}",
            found=f"{list(target.shape)}",
        )
    return target


class DcpStorageInfo(NamedTuple):
    """The storage info of an entry in DCP's metadata; only a tensor has a box and a name."""

    item: str
    name: str
    box: Box | None


class DcpContent:
    def __init__(self, checkpoint: Checkpoint, *, where: str, allow_pickle: bool) -> None:
        self._checkpoint = checkpoint
        self._content = checkpoint.content()
        self._where = where
        self._allow_pickle = allow_pickle
        self.close = checkpoint.close
        self._planner_data: object = None
        self.save_id: str | None = None
        """DCP's id of the save, if DCP saved the checkpoint."""
        self._entries = list(self._find_entries())
        """The entries of the flat state, and the node of each in the tree of its item."""
        self._values = {entry.fqn: (entry, node) for entry, node in self._entries}

    def metadata(self) -> Metadata:
        metadata = new_metadata(self._planner_data)
        for entry, node in self._entries:
            item = str(entry.location[0])
            if type(node) is not TensorRef or entry.kind not in ("tensor", "part"):
                add_value(metadata, entry.fqn, DcpStorageInfo(item, "", None))
                continue
            dtype, shape = self._content.item(item).spec_of(node.name)
            boxes, of, start = [whole(shape)], shape, (0,) * len(shape)
            if entry.kind == "part":
                of, start = entry.shape, entry.start
                if len(of) != len(shape) or any(
                    map(operator.gt, map(operator.add, start, shape), of)
                ):
                    raise CorruptError(
                        "a shard lies outside its tensor",
                        where=self._where,
                        found=repr(entry)[:200],
                    )
            elif places := self._places(item, node.name):
                boxes = sorted(place.box for place in places)
            infos = [(box.moved(start), DcpStorageInfo(item, node.name, box)) for box in boxes]
            add_chunks(metadata, entry.fqn, (dtype, of), infos)
        return metadata

    def _places(self, item: str, name: str) -> tuple[Place, ...]:
        """Return the places of a tensor's bytes; none for a tensor that is a view of another."""
        stored = self._content.item(item)
        if stored.view_of(name) is not None:
            return ()
        return self._content.places(item, stored.ties.get(name, name))

    def _find_entries(self) -> Iterator[tuple[RecordEntry, object]]:
        for data, where in self._content.values(dcp_record.OBJECT_NAME):
            record = dcp_record.decode(data, where=where)
            self._planner_data, self.save_id = record.planner_data, record.save_id
            for entry in record.entries:
                yield entry, self._node_of(entry)
            return
        trees = {item.name: item.tree for item in self._content.items.values()}
        by_item = leaves_by_item(
            trees, where=self._where, remedy="load the run with laststep instead"
        )
        leaves = list(chain.from_iterable(by_item.values()))
        self._planner_data = {leaf.name: leaf.path for leaf in leaves}
        for leaf in leaves:
            yield RecordEntry(leaf.name, leaf.path, leaf.kind), leaf.node

    def _node_of(self, entry: RecordEntry) -> object:
        """Return the node of an entry. Raise CorruptError if the trees contradict the record."""
        node: object = self._content.item(str(entry.location[0])).tree
        for part in entry.location[1:]:
            match node:
                case dict() if part in node:
                    node = node[part]
                case list() if isinstance(part, int) and part < len(node):
                    node = node[part]
                case _:
                    node = ABSENT
        is_tensor = entry.kind in ("tensor", "part")
        if node is ABSENT or (is_tensor and node != TensorRef(tensor_name(entry.location))):
            raise CorruptError(
                "the DCP record of a checkpoint contradicts its trees",
                where=self._where,
                found=repr(entry)[:200],
            )
        return node

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, stored: dict[MetadataIndex, DcpStorageInfo]
    ) -> None:
        """Deliver everything that the plan requests; tensors in the order of their files."""
        wanted: list[_ChunkRead] = []
        for request in plan.items:
            item, name, box = stored[request.storage_index]
            if request.type is LoadItemType.BYTE_IO:
                planner.load_bytes(request, self._bytes(*self._values[request.storage_index.fqn]))
            elif box is None:
                raise UsageError(
                    f"cannot load {request.storage_index.fqn} into a tensor: it is a plain value"
                )
            elif self._content.item(item).view_of(name) is not None:
                put_whole(self._whole(item, name), request, planner)
            else:
                [at] = [place for place in self._places(item, name) if place.box == box]
                dtype, _ = self._content.item(item).spec_of(name)
                size = DTYPES[dtype].size_bytes
                chunk = FileBox(len(wanted), size, at.file, at.start, at.stop, box)
                first = map(operator.add, request.storage_offsets, box.start)
                part = whole(tuple(request.lengths)).moved(tuple(first))
                wanted.append(_ChunkRead(request, chunk, TORCH_DTYPES[dtype], part))
        _copy_chunks(self._content.files, wanted, planner)

    def _bytes(self, entry: RecordEntry, node: object) -> BytesIO:
        """Return a value as the bytes that a planner loads."""
        item, where = str(entry.location[0]), f"{self._where}, {entry.fqn}"
        value = rebuild(
            node,
            leaf=lambda name: self._whole(item, name),
            revive=lambda tag: revive(tag, where=where, allow_pickle=self._allow_pickle),
        )
        if entry.kind == "raw" and isinstance(value, bytes):
            return dcp_values.raw_bytes(value, fqn=entry.fqn, allow_pickle=self._allow_pickle)
        return dcp_values.put_together(value)

    def _whole(self, item: str, name: str) -> torch.Tensor:
        """Return a tensor that is inside a value or is a view of another tensor."""
        return ItemTensors(self._checkpoint, item).whole(name)


class StockFolder:
    """A folder of torch's own storage, with the methods of `DcpContent`. Loaded with
    `weights_only=True` unless pickles are allowed. It has no digests, so nothing is verified."""

    save_id: str | None = None

    def __init__(self, path: str, *, rank: int, allow_pickle: bool) -> None:
        self._folder = Path(local_path(path) or path)
        self._allow_pickle = allow_pickle
        self._entries = dcp_folder.read_metadata(self._folder, rank)
        self._dtypes = {
            entry.name: TORCH_DTYPES[entry.dtype] for entry in self._entries if entry.dtype
        }

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def metadata(self) -> Metadata:
        """Return the metadata for DCP's planners; the storage info of a chunk is a `StoredPart`."""
        metadata = new_metadata({entry.name: entry.path for entry in self._entries})
        for entry in self._entries:
            if entry.dtype is None:
                add_value(metadata, entry.name, entry.parts[0])
            else:
                chunks = [(part.box, part) for part in entry.parts if part.box is not None]
                add_chunks(metadata, entry.name, (entry.dtype, entry.shape), chunks)
        return metadata

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, stored: dict[MetadataIndex, StoredPart]
    ) -> None:
        """Deliver everything that the plan requests; read each part once, in order."""
        requests: dict[StoredPart, list[ReadItem]] = {}
        for request in plan.items:
            requests.setdefault(stored[request.storage_index], []).append(request)
        for part, data, where in dcp_folder.read_parts(self._folder, requests):
            for request in requests[part]:
                if part.box is None:
                    fqn, allow_pickle = part.name, self._allow_pickle
                    safe = dcp_values.raw_bytes(data, fqn=fqn, allow_pickle=allow_pickle)
                    planner.load_bytes(request, safe)
                else:
                    tensor = dcp_folder.chunk(part, data, self._dtypes[part.name], where=where)
                    put_whole(tensor, request, planner)
