"""Write an item as a Hugging Face model: safetensors files, and an index if there are several; or
as a single safetensors file.

Everything that cannot work is found before anything is written. Tensors are split into files as
`save_pretrained` does: in order, with a new file when the next tensor does not fit. safetensors
cannot share bytes, so tied tensors are written under each of their names, or only the first one.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import OrderedDict, deque
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from laststep.adapters.export.folder import (
    Exported,
    ItemTensors,
    new_file,
    new_folder,
    published,
    size_bytes,
)
from laststep.codecs.objects import Tagged, TensorRef
from laststep.constants import DTYPES, align_up, listed
from laststep.errors import UsageError
from laststep.state.tensors import TORCH_DTYPES
from laststep.state.tree import OWNED, owned

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    from laststep.browse import Checkpoint
    from laststep.state.tree import Path as KeyPath
    from laststep.state.tree import Shape

_RESERVED = "__metadata__"
_MAX_TENSORS = 100_000
"""Maximum number of tensors per file: safetensors refuses headers above 100 MB."""
_NO_CAST = frozenset({"float4_e2m1fn_x2"})
"""Floating dtypes with two numbers in a byte, which are not cast."""


class Cast(NamedTuple):
    """Write floating tensors in another dtype: those whose new name matches the pattern, or all."""

    pattern: re.Pattern[str] | None
    dtype: str


class Choices(NamedTuple):
    """Options of an export. A rename replaces every match of a pattern. If several casts match a
    tensor, the last one applies; casts with a pattern take precedence over casts without."""

    shard_bytes: int = 5 * 10**9
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    casts: tuple[Cast, ...] = ()
    drop_tied: bool = False
    """Write only the first of several tied tensors, as `save_pretrained` does."""


class ExportTensor(NamedTuple):
    """A tensor to write: its names in the item and in the file, and its dtype in the file."""

    stored: str
    name: str
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.dtype, self.shape)


def export_hf(
    checkpoint: Checkpoint, target: str | os.PathLike[str], *, item: str, choices: Choices
) -> Exported:
    """Write an item to a new folder. Raise UsageError if the request cannot be fulfilled."""
    with new_folder(target) as folder:
        return write_weights(checkpoint, folder, item=item, choices=choices)


def export_safetensors(
    checkpoint: Checkpoint, target: str | os.PathLike[str], *, item: str, choices: Choices
) -> Exported:
    """Write an item to one new file. Raise UsageError if the request cannot be fulfilled."""
    tensors = ItemTensors(checkpoint, item)
    plan = _plan(tensors, choices._replace(shard_bytes=sys.maxsize))
    if len(plan.files) > 1:
        raise UsageError(
            "the tensors do not fit into one safetensors file",
            where=f"{tensors.where}, item {tensors.item}",
            expected=f"at most {_MAX_TENSORS:,} tensors",
            found=f"{plan.tensors:,}",
            remedy="--format hf writes several files",
        )
    [entries] = plan.files.values()
    with published(target) as path:
        size = _write_file(path, entries, tensors)
    return plan.exported({Path(target).name: size})


def write_weights(checkpoint: Checkpoint, folder: Path, *, item: str, choices: Choices) -> Exported:
    """Write an item to a folder without such files."""
    tensors = ItemTensors(checkpoint, item)
    plan = _plan(tensors, choices)
    files = {
        name: _write_file(folder / name, entries, tensors) for name, entries in plan.files.items()
    }
    if len(files) > 1:
        with new_file(folder / "model.safetensors.index.json") as file:
            file.write(_index(plan.files))
    return plan.exported(files)


class _ExportPlan(NamedTuple):
    files: dict[str, tuple[ExportTensor, ...]]
    """The tensors of each file."""
    dropped: dict[str, str]
    omitted_values: tuple[str, ...]

    @property
    def tensors(self) -> int:
        return sum(map(len, self.files.values()))

    def exported(self, sizes: dict[str, int]) -> Exported:
        return Exported(
            files=sizes,
            tensors=self.tensors,
            dropped=self.dropped,
            omitted_values=self.omitted_values,
        )


def _plan(tensors: ItemTensors, choices: Choices) -> _ExportPlan:
    """Choose names, dtypes and files of all tensors; raise UsageError if that is impossible."""
    paths, omitted_values = _leaves(tensors)
    names = _renamed(paths, choices.renames, tensors)
    first: dict[str, str] = {}
    dropped: dict[str, str] = {}
    kept: dict[str, str] = {}
    for stored, name in names.items():
        known = first.setdefault(tensors.source_of(stored), stored)
        if known == stored or not choices.drop_tied:
            kept[stored] = name
        else:
            dropped[name] = names[known]
    if not kept:
        raise UsageError(
            "there is nothing to export",
            where=f"{tensors.where}, item {tensors.item}",
            expected="tensors",
            found="none",
            remedy="name another item with --item",
        )
    _check_names(kept, tensors)
    for cast in choices.casts:
        if cast.pattern is not None:
            _check_used("--dtype", cast.pattern, kept.values(), tensors)
    to_write = [_entry(stored, name, tensors, choices.casts) for stored, name in kept.items()]
    return _ExportPlan(_files(to_write, choices.shard_bytes), dropped, omitted_values)


def _write_file(path: Path, entries: Sequence[ExportTensor], tensors: ItemTensors) -> int:
    """Write a new safetensors file; return its size."""
    with new_file(path) as file:
        file.write(_header(entries))
        for entry in entries:
            for _, piece in tensors.pieces(entry.stored):
                made = _cast(piece, entry, tensors.item).contiguous()
                file.write(made.reshape(-1).view(torch.uint8).numpy().data)
        return file.tell()


def _leaves(tensors: ItemTensors) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return stored name → dotted path of every tensor, and the paths of all other values."""
    paths: dict[str, str] = {}
    omitted_values: list[str] = []

    def see(node: object, path: KeyPath) -> None:
        dotted = ".".join(map(str, path)) or tensors.item
        match node:
            case TensorRef(name) | Tagged(tag="ndarray", value=[_, TensorRef(name)]):
                paths[name] = dotted
            case Tagged() if node.tag == OWNED:
                see(owned(node).state, path)
            case Tagged(tag="sparse" | "subclass"):
                raise UsageError(
                    f"cannot export a tensor that is stored as {node.tag}",
                    where=f"{tensors.item}/{dotted}",
                    expected="dense tensors",
                    remedy="--format dcp keeps it",
                )
            case dict() | OrderedDict():
                for key, inner in node.items():
                    see(inner, (*path, key))
            case list() | tuple() | deque():
                for i, inner in enumerate(node):
                    see(inner, (*path, i))
            case _:
                omitted_values.append(dotted)

    see(tensors.tree, ())
    return paths, tuple(omitted_values)


def _renamed(
    paths: Mapping[str, str], renames: Sequence[tuple[re.Pattern[str], str]], tensors: ItemTensors
) -> dict[str, str]:
    names = dict(paths)
    for pattern, replacement in renames:
        _check_used("--rename", pattern, names.values(), tensors)
        try:
            names = {stored: pattern.sub(replacement, name) for stored, name in names.items()}
        except (re.error, IndexError) as error:
            raise UsageError(
                "a replacement is malformed",
                found=f"{replacement!r}: {error}",
                remedy=r"a group is \1 or \g<name>",
            ) from error
    return names


def _check_names(kept: Mapping[str, str], tensors: ItemTensors) -> None:
    taken: dict[str, str] = {}
    for stored, name in kept.items():
        other = taken.setdefault(name, stored)
        if name in ("", _RESERVED) or other != stored:
            holders = dict.fromkeys(f"{tensors.item}/{holder}" for holder in (other, stored))
            raise UsageError(
                "a tensor has an invalid name, or that of another",
                where=tensors.where,
                expected="a name for each",
                found=f"{name!r} for {' and '.join(holders)}",
                remedy="change the --rename, or give each a new name by one",
            )


def _check_used(
    option: str, pattern: re.Pattern[str], names: Collection[str], tensors: ItemTensors
) -> None:
    if not any(map(pattern.search, names)):
        raise UsageError(
            f"no tensor name matches {option}",
            where=f"{tensors.where}, item {tensors.item}",
            expected=f"the pattern {pattern.pattern!r} in a name",
            found=listed(names, 3),
            remedy="`laststep show --all` lists the names",
        )


def _entry(stored: str, name: str, tensors: ItemTensors, casts: Sequence[Cast]) -> ExportTensor:
    dtype, shape = tensors.spec(stored)
    if TORCH_DTYPES[dtype].is_floating_point and dtype not in _NO_CAST:
        for cast in sorted(casts, key=lambda cast: cast.pattern is not None):
            if cast.pattern is None or cast.pattern.search(name):
                dtype = cast.dtype
    if DTYPES[dtype].code is None:
        raise UsageError(
            "safetensors does not know this dtype",
            where=f"{tensors.item}/{stored}",
            found=dtype,
            remedy="--format dcp keeps it; --dtype writes floating tensors as another",
        )
    return ExportTensor(stored=stored, name=name, dtype=dtype, shape=shape)


def _files(
    entries: Sequence[ExportTensor], shard_bytes: int
) -> dict[str, tuple[ExportTensor, ...]]:
    shards: list[list[ExportTensor]] = [[]]
    filled = 0
    for entry in entries:
        full = filled + entry.size_bytes > shard_bytes or len(shards[-1]) == _MAX_TENSORS
        if full and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size_bytes
    files: dict[str, tuple[ExportTensor, ...]] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # The largest elements first, so that each tensor is aligned.
        shard.sort(key=lambda entry: -DTYPES[entry.dtype].size_bytes)
        files["model.safetensors" if len(shards) == 1 else name] = tuple(shard)
    return files


def _header(entries: Sequence[ExportTensor]) -> bytes:
    document: dict[str, object] = {_RESERVED: {"format": "pt"}}
    at = 0
    for entry in entries:
        stop = at + entry.size_bytes
        document[entry.name] = {
            "dtype": DTYPES[entry.dtype].code,
            "shape": list(entry.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(align_up(len(text), 8))
    return len(padded).to_bytes(8, "little") + padded


def _cast(piece: torch.Tensor, entry: ExportTensor, item: str) -> torch.Tensor:
    made = piece.to(TORCH_DTYPES[entry.dtype])
    if made is not piece and not torch.equal(_finite(made), _finite(piece)):
        raise UsageError(
            f"a value of a tensor does not fit into {entry.dtype}",
            where=f"{item}/{entry.stored}",
            found=str(piece.dtype).removeprefix("torch."),
            remedy="leave it as it is, or write it as bf16 or f32, by --dtype 'REGEX=…'",
        )
    return made


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    # torch has no isfinite for 8-bit floats.
    return torch.isfinite(tensor if tensor.element_size() > 1 else tensor.float())


def _index(files: Mapping[str, Sequence[ExportTensor]]) -> bytes:
    entries = list(chain.from_iterable(files.values()))
    document = {
        "metadata": {
            "total_parameters": sum(math.prod(entry.shape) for entry in entries),
            "total_size": sum(entry.size_bytes for entry in entries),
        },
        "weight_map": {entry.name: file for file, inside in files.items() for entry in inside},
    }
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
