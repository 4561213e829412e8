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
import weakref
from contextlib import closing
from itertools import groupby
from pathlib import Path
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
from laststep.adapters.importing import dcp_folder, dcp_metadata
from laststep.adapters.importing.dcp_folder import DcpFileReader
from laststep.browse import StoredTensor
from laststep.codecs.objects import TensorRef
from laststep.constants import CHUNK_BYTES, DTYPES
from laststep.dcp import record as dcp_record
from laststep.dcp import typed
from laststep.dcp import values as dcp_values
from laststep.dcp.record import RecordEntry, tensor_name
from laststep.errors import CorruptError, NotFoundError, UsageError
from laststep.memory.pool import SLOT_BYTES
from laststep.plan.reads import Chunk, FileBox, Read, ReadRequest, plan_reads
from laststep.read.blocks import close_files, refuse
from laststep.read.content import Content, Place
from laststep.read.reader import read_ahead
from laststep.state.boxes import Box, row_major, whole
from laststep.state.tensors import PLAIN_TENSORS, TORCH_DTYPES, box_of, open_view, revive
from laststep.state.tree import rebuild
from laststep.storage.registry import local_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BytesIO

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from laststep.adapters import nesting
    from laststep.adapters.importing.dcp_metadata import StoredPart
    from laststep.codecs.objects import Tagged
    from laststep.dcp.record import Kind
    from laststep.format.manifest import Commit
    from laststep.read.blocks import LayoutBlocks
    from laststep.storage.store import Store

_THREADS = 4


class _ChunkRead(NamedTuple):
    """A request, the stored chunk that it reads from, and the wanted box of the tensor."""

    request: ReadItem
    stored: FileBox
    dtype: torch.dtype
    box: Box

    @property
    def range(self) -> tuple[int, int]:
        """The bytes of the file from the first to the last wanted element."""
        if self.box == self.stored.box:
            return self.stored.start, self.stored.stop
        shape, inner = self.stored.box.shape, self.box.within(self.stored.box)
        first = row_major(shape, inner.start)
        last = row_major(shape, (stop - 1 for stop in inner.stop)) + 1
        itemsize = self.stored.itemsize
        return self.stored.start + first * itemsize, self.stored.start + last * itemsize


def put_whole(tensor: torch.Tensor, request: ReadItem, planner: LoadPlanner) -> None:
    """Copy the requested part of a tensor that has been read to the planner's target."""
    target = _target(request, planner)
    box = whole(tuple(request.lengths)).moved(request.storage_offsets)
    target.copy_(box_of(tensor, box))
    planner.commit_tensor(request, target)


def _copy_chunks(
    files: Sequence[LayoutBlocks], wanted: Sequence[_ChunkRead], planner: LoadPlanner
) -> None:
    """Read, verify and copy the wanted boxes, in the order of the files. Raise `CorruptError` for
    bytes that have changed."""
    used = {want.stored.file for want in wanted}
    # Small reads are still in the CPU caches when they are verified and copied. Requests to a
    # server cost more than reads from a disk, so those are larger.
    most_bytes = SLOT_BYTES if all(files[file].prefer_cached() for file in used) else CHUNK_BYTES
    requests: dict[int, list[ReadRequest]] = {}
    for number, want in enumerate(wanted):
        if want.box.volume:
            of_file = requests.setdefault(want.stored.file, [])
            of_file.append(ReadRequest(*want.range, number))
        else:
            planner.commit_tensor(want.request, _target(want.request, planner))
    planned: list[Read] = []
    for file in sorted(requests):
        planned += plan_reads(file, files[file].layout.tensor_bytes, requests[file], most_bytes)
    extents = (files[read.file].blocks(read.start, read.stop) for read in planned)
    missing = [want.box.volume for want in wanted]
    targets: dict[int, torch.Tensor] = {}
    with closing(read_ahead(extents, threads=_THREADS, buffer_bytes=most_bytes)) as ahead:
        for read, (data, damage) in zip(planned, ahead, strict=True):
            refuse(damage)
            stored = tuple(wanted[part.target].stored for part in read.parts)
            image = torch.frombuffer(data, dtype=torch.uint8)
            for source, box, at in Chunk(read.file, read.start, read.stop, stored).boxes():
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


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


class DcpStorageInfo(NamedTuple):
    """The storage info of an entry in DCP's metadata: its item, the tensor's name there and, for a
    tensor, the box."""

    item: str
    name: str
    box: Box | None


class _SavedEntry(NamedTuple):
    """An entry of the flat state, and its node in the tree of its item."""

    entry: RecordEntry
    node: object

    @property
    def item(self) -> str:
        return str(self.entry.location[0])


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
        self._classes = typed.classes_in(types)
        self.folder = folder
        self._where = f"{store.url}/{folder}"
        self._allow_pickle = allow_pickle
        self._content = Content(store, folder, commit, rank=rank)
        self.close = weakref.finalize(self, close_files, self._content.files)
        self._planner_data: object = None
        self.save_id: str | None = None
        """DCP's id of the save, if DCP saved the checkpoint."""
        self._leaves = list(self._find_leaves())
        self._by_fqn = {leaf.entry.fqn: leaf for leaf in self._leaves}

    def metadata(self) -> Metadata:
        """Return the metadata for DCP's planners."""
        metadata = Metadata(
            state_dict_metadata={}, planner_data=self._planner_data, storage_data={}
        )
        metadata.version = CURRENT_DCP_VERSION
        for leaf in self._leaves:
            fqn, kind, node = leaf.entry.fqn, leaf.entry.kind, leaf.node
            if kind == "tensor" and type(node) is TensorRef:
                self._tell_tensor(leaf, node.name, metadata)
            elif kind == "part" and type(node) is TensorRef:
                self._tell_part(leaf, node.name, metadata)
            else:
                metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(fqn)] = DcpStorageInfo(leaf.item, "", None)
        return metadata

    def _tell_tensor(self, leaf: _SavedEntry, name: str, into: Metadata) -> None:
        fqn = leaf.entry.fqn
        dtype, shape = self._content.item(leaf.item).spec_of(name)
        boxes = sorted(place.box for place in self._places(leaf.item, name)) or [whole(shape)]
        into.state_dict_metadata[fqn] = tensor_metadata(dtype, shape, map(_chunk, boxes))
        for number, box in enumerate(boxes):
            index = MetadataIndex(fqn, box.start, number)
            into.storage_data[index] = DcpStorageInfo(leaf.item, name, box)

    def _tell_part(self, leaf: _SavedEntry, name: str, into: Metadata) -> None:
        entry = leaf.entry
        dtype, shape = self._content.item(leaf.item).spec_of(name)
        fresh = tensor_metadata(dtype, entry.shape, [])
        whole_of = into.state_dict_metadata.setdefault(entry.fqn, fresh)
        ends = map(operator.add, entry.start, shape)
        if (
            not isinstance(whole_of, TensorStorageMetadata)
            or len(shape) != len(entry.shape)
            or any(map(operator.gt, ends, whole_of.size))
        ):
            raise CorruptError(
                "a shard lies outside its tensor", where=self._where, found=repr(leaf)[:200]
            )
        index = MetadataIndex(entry.fqn, entry.start, len(whole_of.chunks))
        whole_of.chunks.append(_chunk(whole(shape).moved(entry.start)))
        into.storage_data[index] = DcpStorageInfo(leaf.item, name, whole(shape))

    def _places(self, item: str, name: str) -> tuple[Place, ...]:
        """Return the places of a tensor's bytes; none for a tensor that is a view of another."""
        stored = self._content.item(item)
        if stored.view_of(name) is not None:
            return ()
        return self._content.places(item, stored.ties.get(name, name))

    def _find_leaves(self) -> Iterator[_SavedEntry]:
        for data, where in self._content.values(dcp_record.OBJECT_NAME):
            record = dcp_record.decode(data, where=where, allow_pickle=self._allow_pickle)
            self._planner_data, self.save_id = record.planner_data, record.save_id
            yield from map(self._leaf_at, record.entries)
            return
        trees = {item.name: item.tree for item in self._content.items.values()}
        by_item = leaves_by_item(
            trees, where=self._where, remedy="load the run with laststep instead"
        )
        self._planner_data = {leaf.name: leaf.path for own in by_item.values() for leaf in own}
        for leaves in by_item.values():
            for leaf in leaves:
                kind: Kind = "tensor" if leaf.is_tensor else "value"
                yield _SavedEntry(
                    RecordEntry(fqn=leaf.name, location=leaf.path, kind=kind), leaf.node
                )

    def _leaf_at(self, entry: RecordEntry) -> _SavedEntry:
        leaf = _SavedEntry(entry, None)
        leaf = leaf._replace(node=self._node_at(self._content.item(leaf.item).tree, entry.location))
        is_tensor = entry.kind in ("tensor", "part")
        if is_tensor and leaf.node != TensorRef(tensor_name(entry.location)):
            raise self._contradiction(repr(entry)[:200])
        return leaf

    def _node_at(self, tree: object, location: nesting.Path) -> object:
        for part in location[1:]:
            match tree:
                case dict() if part in tree:
                    tree = tree[part]
                case list() if isinstance(part, int) and part < len(tree):
                    tree = tree[part]
                case _:
                    raise self._contradiction(f"nothing at {list(location[1:])}")
        return tree

    def _contradiction(self, found: str) -> CorruptError:
        return CorruptError(
            "the DCP record of a checkpoint contradicts its trees", where=self._where, found=found
        )

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, stored: dict[MetadataIndex, DcpStorageInfo]
    ) -> None:
        """Deliver everything that the plan requests to the planner; tensors in the order of their
        files."""
        wanted: list[_ChunkRead] = []
        for request in plan.items:
            item, name, box = stored[request.storage_index]
            if request.type is LoadItemType.BYTE_IO:
                live = getattr(planner, "state_dict", {}).get(request.dest_index.fqn)
                leaf = self._by_fqn[request.storage_index.fqn]
                planner.load_bytes(request, self._bytes(leaf, typed.classes_in(live)))
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

    def _bytes(self, leaf: _SavedEntry, classes: dict[str, type]) -> BytesIO:
        """Return a value as the bytes that a planner loads. Objects of user classes may be created
        from `classes`."""
        fqn, where = leaf.entry.fqn, f"{self._where}, {leaf.entry.fqn}"

        def revived(tagged: Tagged) -> object:
            return revive(tagged, where=where, allow_pickle=self._allow_pickle)

        value = rebuild(
            leaf.node, leaf=lambda ref: self._whole(leaf.item, ref.name), revive=revived
        )
        if leaf.entry.kind == "raw" and isinstance(value, bytes):
            return dcp_values.raw_bytes(value, fqn=fqn, allow_pickle=self._allow_pickle)
        if leaf.entry.kind == "typed":
            value = typed.rebuilt(value, {**self._classes, **classes}, fqn=fqn)
        return dcp_values.put_together(value)

    def _whole(self, item: str, name: str) -> torch.Tensor:
        """Return a tensor that is inside a value or is a view of another tensor."""
        stored = self._content.item(item)
        view, source = stored.view_of(name), stored.source_of(name)
        places = self._content.places(item, source)
        full_name = f"{item}/{name}"
        tensor = StoredTensor(self._content, full_name, stored.tensors[source], places)[()]
        return tensor if view is None else open_view(tensor, view)


class StockFolder:
    """A folder of torch's own storage, with the methods of `DcpContent`, read without running any
    code stored in it.

    Tensors and values are loaded as with `torch.load(weights_only=True)`, unless pickles are
    allowed. Nothing in it has a digest, so nothing is verified.
    """

    save_id: str | None = None

    def __init__(self, path: str, *, rank: int, allow_pickle: bool) -> None:
        self._folder = Path(local_path(path) or path)
        self._allow_pickle = allow_pickle
        told = dcp_folder.metadata_in(self._folder, rank)
        if told is None:
            raise NotFoundError(
                f"rank {rank} has not saved anything here",
                where=path,
                found="ranks that saved separately",
                remedy="load with as many ranks as have saved",
            )
        in_parts = told.name != dcp_folder.METADATA_NAME
        data = told.read_bytes()
        self._entries = dcp_metadata.decode(data, where=str(told), in_parts=in_parts)
        self._dtypes = {
            entry.name: TORCH_DTYPES[entry.dtype] for entry in self._entries if entry.dtype
        }

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def metadata(self) -> Metadata:
        """Return the metadata for DCP's planners; the storage info of a chunk is a `StoredPart`."""
        paths = {entry.name: entry.path for entry in self._entries}
        metadata = Metadata(state_dict_metadata={}, planner_data=paths, storage_data={})
        metadata.version = CURRENT_DCP_VERSION
        for entry in self._entries:
            if entry.dtype is None:
                metadata.state_dict_metadata[entry.name] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(entry.name)] = entry.parts[0]
                continue
            boxes = [part.box for part in entry.parts if part.box is not None]
            told = tensor_metadata(entry.dtype, entry.shape, map(_chunk, boxes))
            metadata.state_dict_metadata[entry.name] = told
            for number, (box, part) in enumerate(zip(boxes, entry.parts, strict=True)):
                metadata.storage_data[MetadataIndex(entry.name, box.start, number)] = part
        return metadata

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, stored: dict[MetadataIndex, StoredPart]
    ) -> None:
        """Deliver everything that the plan requests to the planner; each part is read once, in the
        order of the files."""

        def place(request: ReadItem) -> tuple[str, int, str]:
            part = stored[request.storage_index]
            # In a safetensors file all tensors have the same offset, so add the index.
            return part.file, part.offset, str(request.storage_index)

        wanted = sorted(plan.items, key=place)
        for name, of_file in groupby(wanted, key=lambda request: place(request)[0]):
            path = self._folder / name
            try:
                file = path.open("rb")
            except FileNotFoundError as error:
                raise CorruptError(
                    "a file of the checkpoint is missing",
                    where=str(path),
                    remedy="put the files of all ranks into the folder",
                ) from error
            with file:
                size = path.stat().st_size
                reader = DcpFileReader(file=file, size_bytes=size, where=str(path))
                for _, requests in groupby(of_file, key=place):
                    alike = list(requests)
                    self._give(alike, stored[alike[0].storage_index], reader, planner)

    def _give(
        self,
        requests: list[ReadItem],
        part: StoredPart,
        reader: DcpFileReader,
        planner: LoadPlanner,
    ) -> None:
        if part.box is None:
            reader.file.seek(part.offset)
            data = reader.file.read(part.size_bytes)
            for request in requests:
                safe = dcp_values.raw_bytes(data, fqn=part.name, allow_pickle=self._allow_pickle)
                planner.load_bytes(request, safe)
            return
        tensor = reader.chunk(part, self._dtypes[part.name])
        for request in requests:
            put_whole(tensor, request, planner)
