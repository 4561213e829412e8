"""A checkpoint as DCP sees it: its flat metadata, its values as bytes, its chunks of tensors.

Of a checkpoint that a `Writer` wrote, this is the state as it was saved. Of any other, all items
are one nested state by name, taken apart as DCP does that. Everything read is verified.
"""

from __future__ import annotations

import operator
import weakref
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

from laststep.adapters.dcp import record as dcp_record
from laststep.adapters.dcp import typed
from laststep.adapters.dcp import values as dcp_values
from laststep.adapters.dcp.chunks import ChunkRead, copy_chunks, put_whole
from laststep.adapters.dcp.layout import tensor_name
from laststep.adapters.export.dcp import leaves_by_item, tensor_metadata
from laststep.browse import StoredTensor
from laststep.codecs.objects import TensorRef
from laststep.errors import CorruptError, UsageError
from laststep.read.content import Content, Place
from laststep.read.files import close_files
from laststep.state.boxes import Box, whole
from laststep.state.tensors import open_view, revive
from laststep.state.tree import rebuild

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BytesIO

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from laststep.adapters.dcp.record import Kind
    from laststep.adapters.nesting import Path
    from laststep.codecs.objects import Tagged
    from laststep.format.manifest import Commit
    from laststep.storage.store import Store


_VALUES = ("value", "typed", "raw")


class DcpStorageInfo(NamedTuple):
    """What DCP's metadata hold as the place of an entry: its item, and the path or name there; for
    a tensor also which of its boxes."""

    item: str
    name: str
    box: Box | None


class _DcpLeaf(NamedTuple):
    """An entry of the flat state: a tensor of an item, a part of one that begins at `start` of its
    `shape`, or any other node of its tree."""

    fqn: str
    item: str
    node: object
    kind: Kind
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


class DcpContent:
    """One checkpoint, open for reading; its files close with it."""

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
        """Of items that every rank has for itself, show those of that rank. Objects of a user's
        are made of `types`, or of the classes that the state to load into has."""
        self._classes = typed.classes_in(tuple(types))
        self.folder = folder
        self._where = f"{store.url}/{folder}"
        self._allow_pickle = allow_pickle
        self._content = Content(store, folder, commit, rank=rank)
        self._closing = weakref.finalize(self, close_files, self._content.files)
        self._planner_data: object = None
        self.save_id: str | None = None
        """DCP's id of the save, where DCP saved the checkpoint."""
        self._leaves = list(self._find_leaves())
        self._values = {leaf.fqn: leaf for leaf in self._leaves if leaf.kind in _VALUES}

    def close(self) -> None:
        self._closing()

    # What there is

    def metadata(self) -> Metadata:
        """What DCP's planners want to know."""
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
                "a part of a tensor lies outside of it", where=self._where, found=repr(leaf)[:200]
            )
        start = torch.Size(leaf.start)
        index = MetadataIndex(leaf.fqn, start, len(whole_of.chunks))
        whole_of.chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(shape)))
        into.storage_data[index] = DcpStorageInfo(leaf.item, name, whole(shape))

    def _places(self, item: str, name: str) -> tuple[Place, ...]:
        """Where the bytes of a tensor lie; no place for one that shares its bytes with others."""
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
                    "what a checkpoint says of its DCP state contradicts its trees",
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
        """Give the planner all that it wants; tensors in the order of their files."""
        chunks: list[ChunkRead] = []
        for request in plan.items:
            place = stored[request.storage_index]
            if request.type is LoadItemType.BYTE_IO:
                live = getattr(planner, "state_dict", {}).get(request.dest_index.fqn)
                fqn = request.storage_index.fqn
                planner.load_bytes(request, self._bytes(fqn, typed.classes_in(live)))
            elif place.box is None:
                raise UsageError(
                    f"cannot load {request.storage_index.fqn} into a tensor: a value is stored"
                )
            elif self._content.item(place.item).view_of(place.name) is not None:
                put_whole(self._whole(place.item, place.name), request, planner)
            else:
                [at] = [p for p in self._places(place.item, place.name) if p.box == place.box]
                dtype, _ = self._content.item(place.item).spec_of(place.name)
                chunks.append(ChunkRead(request, at, dtype))
        copy_chunks(self._content.files, chunks, planner)

    def _bytes(self, fqn: str, classes: dict[str, type]) -> BytesIO:
        """A value, of which classes that the state to load into has may be made."""
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
        """A tensor within a value, or one that shares bytes."""
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
                    "what a checkpoint says of its DCP state contradicts its trees",
                    where=where,
                    found=f"nothing at {list(path)}",
                )
    return tree
