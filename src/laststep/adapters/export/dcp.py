"""Write a checkpoint as a folder that `torch.distributed.checkpoint` loads.

The folder has one `__0_N.distcp` per item, and `.metadata`. The state contains all items by name,
flattened as DCP does: dicts, and lists that hold tensors or dicts, become entries with dotted
names; anything else is a value written by torch.save. Large tensors are written in pieces, as if by
several ranks; tied tensors refer to the same bytes. The state of an optimizer gets the form that
`torch.distributed.checkpoint.state_dict` gives it.
"""

from __future__ import annotations

import functools
import io
import pickle
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from laststep.adapters.export.folder import Exported, ItemTensors, new_file, new_folder
from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import CorruptError, UsageError
from laststep.state.boxes import whole
from laststep.state.optimizers import torch_form
from laststep.state.tensors import TORCH_DTYPES, revive
from laststep.state.tree import OWNED, owned, rebuild

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.adapters.nesting import Path
    from laststep.browse import Checkpoint
    from laststep.state.boxes import Box


class Leaf(NamedTuple):
    """An entry: its path in the state, and its node, a tensor or any other value."""

    path: Path
    node: object

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def kind(self) -> Literal["tensor", "value"]:
        return "tensor" if type(self.node) is TensorRef else "value"


def export_dcp(
    checkpoint: Checkpoint, target: str | os.PathLike[str], *, items: Sequence[str]
) -> Exported:
    sources = [ItemTensors(checkpoint, item) for item in items]
    leaves = leaves_by_item(
        {tensors.item: tensors.tree for tensors in sources},
        where=checkpoint.folder,
        remedy="name an item without these with --item, or use hf",
    )
    metadata = new_metadata({})
    files: dict[str, int] = {}
    with new_folder(target) as folder:
        for number, tensors in enumerate(sources):
            name = f"__0_{number}.distcp"
            with new_file(folder / name) as file:
                _write_item(file, name, tensors, leaves[tensors.item], metadata)
                files[name] = file.tell()
        with new_file(folder / ".metadata") as file:
            pickle.dump(metadata, file)
    kinds = [leaf.kind for leaf in chain.from_iterable(leaves.values())]
    return Exported(files=files, tensors=kinds.count("tensor"), values=kinds.count("value"))


def leaves_by_item(
    trees: Mapping[str, object], *, where: str, remedy: str
) -> dict[str, list[Leaf]]:
    """Return the entries of each item's tree. Raise UsageError if two have the same name."""
    leaves = {item: list(_leaves_of(_torch_form(tree), (item,))) for item, tree in trees.items()}
    taken: dict[str, Path] = {}
    for leaf in chain.from_iterable(leaves.values()):
        other = taken.setdefault(leaf.name, leaf.path)
        if other is not leaf.path:
            raise UsageError(
                "two entries have the same name in DCP, which joins keys by dots",
                where=where,
                expected="a name for each",
                found=f"{leaf.name!r} for {other} and {leaf.path}",
                remedy=remedy,
            )
    return leaves


def new_metadata(planner_data: object) -> Metadata:
    metadata = Metadata(state_dict_metadata={}, planner_data=planner_data, storage_data={})
    metadata.version = CURRENT_DCP_VERSION
    return metadata


def add_value(metadata: Metadata, fqn: str, info: object) -> None:
    metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(fqn)] = info


def add_chunks(
    metadata: Metadata,
    fqn: str,
    spec: tuple[str, Sequence[int]],
    chunks: Iterable[tuple[Box, object]],
) -> None:
    """Add chunks of a tensor, which has this dtype and shape, each with its storage info."""
    dtype, shape = spec
    tensor = metadata.state_dict_metadata.setdefault(
        fqn,
        TensorStorageMetadata(
            properties=_properties(dtype, shape), size=torch.Size(shape), chunks=[]
        ),
    )
    if not isinstance(tensor, TensorStorageMetadata) or tensor.size != torch.Size(shape):
        raise CorruptError("two entries have one name", where=fqn, found=f"shape {list(shape)}")
    for box, info in chunks:
        offsets, sizes = torch.Size(box.start), torch.Size(box.shape)
        metadata.storage_data[MetadataIndex(fqn, offsets, len(tensor.chunks))] = info
        tensor.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))


def _properties(dtype: str, shape: Sequence[int]) -> TensorProperties:
    """Return the properties of a contiguous tensor, which since torch 2.15 include its strides."""
    tensor = torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device="meta")
    return TensorProperties.create_from_tensor(tensor)


def _leaves_of(node: object, path: Path) -> Iterator[Leaf]:
    """Yield the entries of a state in the order of DCP's own traversal."""
    if not _is_taken_apart(node):
        yield Leaf(path, node)
    elif isinstance(node, dict):
        for key, inner in node.items():
            yield from _leaves_of(inner, (*path, str(key)))
    elif isinstance(node, list):
        for i, inner in enumerate(node):
            yield from _leaves_of(inner, (*path, i))


def _is_taken_apart(node: object) -> bool:
    if isinstance(node, list):
        return any(type(inner) is TensorRef or _is_taken_apart(inner) for inner in node)
    return isinstance(node, dict)


def _torch_form(tree: object) -> object:
    """Return the tree without the tags for source classes, and with optimizers in torch's form."""

    def open_tag(tagged: Tagged) -> object:
        if tagged.tag == "counter":
            return tagged.value  # DCP treats it as a dict
        return torch_form(owned(tagged).state) if tagged.tag == OWNED else tagged

    return rebuild(tree, leaf=TensorRef, revive=open_tag)


def _write_item(
    file: BinaryIO, name: str, tensors: ItemTensors, leaves: Sequence[Leaf], metadata: Metadata
) -> None:
    """Append entries to a file, and record their locations in the metadata."""

    def append(value: object) -> _StorageInfo:
        # Not directly into the file: torch's writer hides the file's errors, such as a full disk.
        buffer = io.BytesIO()
        torch.save(value, buffer)
        start = file.tell()
        file.write(buffer.getbuffer())
        return _StorageInfo(name, start, file.tell() - start)

    pieces: dict[str, list[tuple[Box, _StorageInfo]]] = {}  # of the tensors that are written
    for leaf in leaves:
        metadata.planner_data[leaf.name] = leaf.path
        if type(leaf.node) is not TensorRef:
            try:
                value = rebuild(
                    leaf.node,
                    leaf=tensors.whole,
                    revive=functools.partial(_revived, where=leaf.name),
                )
                add_value(metadata, leaf.name, append(value))
            except pickle.PicklingError as error:
                raise UsageError(
                    "cannot export a value that only code could load",
                    where=leaf.name,
                    expected="what torch.save can pickle",
                    found=str(error)[:200],
                    remedy="export the items without it, each with --item",
                ) from error
            continue
        stored = leaf.node.name
        source = tensors.source_of(stored)
        if source not in pieces:
            pieces[source] = []
            for first, piece in tensors.pieces(stored):
                box = whole(tuple(piece.shape)).moved((first,) + (0,) * (piece.dim() - 1))
                pieces[source].append((box, append(_alone(piece))))
        add_chunks(metadata, leaf.name, tensors.spec(stored), pieces[source])


def _revived(tagged: Tagged, where: str) -> object:
    if tagged.tag == "pickle":
        raise pickle.PicklingError("a pickled object, which can run any code when loaded")
    return revive(tagged, where=where, allow_pickle=False)


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """Return the tensor in memory of its own: torch.save writes a tensor's whole storage."""
    return piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()
