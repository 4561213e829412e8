"""Write a checkpoint as a folder that `torch.distributed.checkpoint` loads.

The folder has one `__0_N.distcp` per item, and `.metadata`. The state contains all items by name,
flattened as DCP does: dicts, and lists that hold tensors or dicts, become entries with dotted
names; anything else is a value written by torch.save. Large tensors are written in pieces, as if by
several ranks; tied tensors refer to the same bytes. The state of an optimizer gets the form that
`torch.distributed.checkpoint.state_dict` gives it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO

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

from laststep.adapters.export.folder import Exported, ItemTensors, WrittenFile, new_file, new_folder
from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import UsageError
from laststep.state.tensors import TORCH_DTYPES, revive
from laststep.state.tree import OWNED, owned, rebuild

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.adapters.nesting import Path
    from laststep.browse import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An entry: its path in the state, and its node, a tensor or any other value."""

    path: Path
    node: object

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def is_tensor(self) -> bool:
        return type(self.node) is TensorRef


def export_dcp(
    checkpoint: Checkpoint, target: str | os.PathLike[str], *, items: Sequence[str]
) -> Exported:
    """Write items to a new folder."""
    sources = [ItemTensors(checkpoint, item) for item in items]
    leaves = leaves_by_item(
        {tensors.item: tensors.tree for tensors in sources},
        where=checkpoint.folder,
        remedy="name an item without these with --item, or use hf",
    )
    metadata = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    metadata.version = CURRENT_DCP_VERSION
    files: list[WrittenFile] = []
    with new_folder(target) as folder:
        for number, tensors in enumerate(sources):
            name = f"__0_{number}.distcp"
            with new_file(folder / name) as file:
                writer = _EntryAppender(file, name, tensors, metadata)
                for leaf in leaves[tensors.item]:
                    writer.write(leaf)
                count = sum(leaf.is_tensor for leaf in leaves[tensors.item])
                files.append(WrittenFile(name=name, tensors=count, size_bytes=file.tell()))
        with new_file(folder / ".metadata") as file:
            pickle.dump(metadata, file)
    values = sum(not leaf.is_tensor for of_item in leaves.values() for leaf in of_item)
    return Exported(files=tuple(files), values=values)


def leaves_by_item(
    trees: Mapping[str, object], *, where: str, remedy: str
) -> dict[str, list[Leaf]]:
    """Return the entries of each item's tree. Raise UsageError if two entries would have the same
    name."""
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


def tensor_metadata(
    dtype: str, shape: Sequence[int], chunks: Iterable[ChunkStorageMetadata]
) -> TensorStorageMetadata:
    """Return DCP's metadata of a tensor."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[dtype]),
        size=torch.Size(shape),
        chunks=list(chunks),
    )


def _leaves_of(node: object, path: Path) -> Iterator[Leaf]:
    """Yield the entries of a state in the order of DCP's own traversal."""
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _leaves_of(inner, (*path, str(key)))
    elif isinstance(node, list) and _is_taken_apart(node):
        for i, inner in enumerate(node):
            yield from _leaves_of(inner, (*path, i))
    else:
        yield Leaf(path=path, node=node)


def _is_taken_apart(node: object) -> bool:
    if isinstance(node, list):
        return any(type(inner) is TensorRef or _is_taken_apart(inner) for inner in node)
    return isinstance(node, dict)


def _torch_form(tree: object) -> object:
    """Return the tree without the tags for source classes, and with optimizers in torch's form."""

    def open_tag(tagged: Tagged) -> object:
        if tagged.tag == "counter":
            return tagged.value  # DCP treats it as a dict
        if tagged.tag != OWNED:
            return tagged
        return _as_torch(owned(tagged).state)

    return rebuild(tree, leaf=lambda ref: ref, revive=open_tag)


def _as_torch(state: object) -> object:
    """Convert an optimizer's state, keyed by parameter names, to torch's form; return any other
    state unchanged."""
    match state:
        case {"state": dict(by_name), "groups": list(groups), **rest} if not rest:
            made: list[object] = []
            for group in groups:
                match group:
                    case {"params": dict(names), "options": dict(options)}:
                        made.append({**options, "params": list(names)})
                    case _:
                        return state
            return {"state": by_name, "param_groups": made}
    return state


class _EntryAppender:
    """Appends entries to one file, and records their locations in the metadata."""

    def __init__(self, file: BinaryIO, name: str, tensors: ItemTensors, metadata: Metadata) -> None:
        self._file = file
        self._name = name
        self._tensors = tensors
        self._metadata = metadata
        self._pieces: dict[str, list[tuple[ChunkStorageMetadata, _StorageInfo]]] = {}
        """The pieces of each tensor that has been written."""

    def write(self, leaf: Leaf) -> None:
        self._metadata.planner_data[leaf.name] = leaf.path
        if type(leaf.node) is TensorRef:
            self._write_tensor(leaf.name, leaf.node.name)
        else:
            value = rebuild(
                leaf.node,
                leaf=lambda ref: self._tensors.whole(ref.name),
                revive=lambda tagged: self._revived(tagged, leaf),
            )
            self._metadata.state_dict_metadata[leaf.name] = BytesStorageMetadata()
            try:
                self._metadata.storage_data[MetadataIndex(leaf.name)] = self._append(value)
            except pickle.PicklingError as error:
                raise UsageError(
                    "cannot export a value of a private class",
                    where=leaf.name,
                    expected="what torch.save can pickle",
                    found=str(error)[:200],
                    remedy="export the items without it, each with --item",
                ) from error

    def _write_tensor(self, name: str, stored: str) -> None:
        source = self._tensors.source_of(stored)
        if source not in self._pieces:
            self._pieces[source] = [
                (_chunk(first, piece), self._append(_alone(piece)))
                for first, piece in self._tensors.pieces(stored)
            ]
        dtype, shape = self._tensors.spec(stored)
        chunks = [chunk for chunk, _ in self._pieces[source]]
        self._metadata.state_dict_metadata[name] = tensor_metadata(dtype, shape, chunks)
        for number, (chunk, info) in enumerate(self._pieces[source]):
            self._metadata.storage_data[MetadataIndex(name, chunk.offsets, number)] = info

    def _append(self, value: object) -> _StorageInfo:
        # Not directly into the file: torch's writer hides the file's errors, such as a full disk.
        buffer = io.BytesIO()
        torch.save(value, buffer)
        start = self._file.tell()
        self._file.write(buffer.getbuffer())
        return _StorageInfo(self._name, start, self._file.tell() - start)

    def _revived(self, tagged: Tagged, leaf: Leaf) -> object:
        if tagged.tag == "pickle":
            raise UsageError(
                "cannot export a pickled object, which can run any code when loaded",
                where=leaf.name,
                remedy="export the items without it, each with --item",
            )
        return revive(tagged, where=leaf.name, allow_pickle=False)


def _chunk(first: int, piece: torch.Tensor) -> ChunkStorageMetadata:
    offsets = torch.Size([first] + [0] * (piece.dim() - 1)) if piece.dim() else torch.Size([])
    return ChunkStorageMetadata(offsets=offsets, sizes=piece.shape)


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """Return the tensor in memory of its own: torch.save writes a tensor's whole storage."""
    return piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()
