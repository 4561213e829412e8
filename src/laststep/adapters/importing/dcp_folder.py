"""Read a folder that torch.distributed.checkpoint (DCP) wrote, from any number of ranks.

The result is the state that `dcp_to_torch_save` would give: whole tensors on the CPU, in the nested
dicts and lists they were saved from. Files are read one after the other, front to back.

Nothing in the folder is run. Before memory is allocated for tensors, the metadata is compared with
the sizes of the files, so damage cannot cost more memory than the folder's size.
"""

from __future__ import annotations

import io
from itertools import chain, groupby
from typing import TYPE_CHECKING

import torch

from laststep.adapters.importing import dcp_metadata, tensor_files
from laststep.adapters.nesting import nest
from laststep.constants import with_article
from laststep.errors import CorruptError, NotFoundError
from laststep.state.tensors import allocate, box_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from laststep.adapters.importing.dcp_metadata import MetadataEntry, StoredPart

METADATA_NAME = ".metadata"


def metadata_in(folder: Path, rank: int | None) -> Path | None:
    """Return the metadata file of a save, or of a rank that saved separately, if there is one."""
    names = [METADATA_NAME] if rank is None else [METADATA_NAME, f"__{rank}{METADATA_NAME}"]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_metadata(folder: Path, rank: int | None = None) -> tuple[MetadataEntry, ...]:
    """Return the entries of a save, or of a rank that saved separately."""
    path = metadata_in(folder, rank)
    if path is None:
        raise NotFoundError(
            "there is no checkpoint of DCP",
            where=str(folder),
            expected=f"a {METADATA_NAME}",
            found="no save that has finished, or only those of other ranks by themselves",
            remedy="name another folder or file, or load with as many ranks as have saved",
        )
    in_parts = path.name != METADATA_NAME
    return dcp_metadata.decode(path.read_bytes(), where=str(path), in_parts=in_parts)


def read_folder(folder: Path) -> dict[str, object]:
    where = str(folder)
    entries = read_metadata(folder)
    parts = list(chain.from_iterable(entry.parts for entry in entries))
    held = sum(_found(folder / name).stat().st_size for name in {part.file for part in parts})
    claimed = sum(entry.size_bytes for entry in entries)
    if claimed > held:  # every byte is stored once
        raise CorruptError(
            "cannot import", where=where, expected=f"{claimed} bytes", found=f"files of {held}"
        )
    values: dict[str, object] = {}
    tensors = {
        entry.name: allocate(entry.dtype, entry.shape, "cpu")
        for entry in entries
        if entry.dtype is not None
    }
    for part, data, at in read_parts(folder, parts):
        if part.box is None:
            values[part.name] = _load(part, data, at)
        else:
            target = tensors[part.name]
            box_of(target, part.box).copy_(chunk(part, data, target.dtype, where=at))
    values |= tensors
    return nest(((entry.path, values[entry.name]) for entry in entries), where=where)


def read_parts(
    folder: Path, parts: Iterable[StoredPart]
) -> Iterator[tuple[StoredPart, bytes, str]]:
    """Yield each part with its bytes and their place, in the order of the files. Raise CorruptError
    if a file is missing or too short."""
    ordered = sorted(parts, key=lambda part: (part.file, part.offset))
    for name, of_file in groupby(ordered, key=lambda part: part.file):
        path = _found(folder / name)
        with path.open("rb") as file:
            for part in of_file:
                where = f"{path}, byte {part.offset}"
                size_bytes = path.stat().st_size
                if part.offset + part.size_bytes > size_bytes:
                    raise CorruptError(
                        f"cannot import {part}",
                        where=where,
                        expected=f"{part.size_bytes} bytes",
                        found=f"a file of {size_bytes} bytes",
                    )
                file.seek(part.offset)
                yield part, file.read(part.size_bytes), where


def _found(path: Path) -> Path:
    if not path.is_file():
        raise CorruptError(
            "a file of the checkpoint is missing",
            where=str(path),
            remedy="put the files of all ranks into the folder",
        )
    return path


def chunk(part: StoredPart, data: bytes, dtype: torch.dtype, *, where: str) -> torch.Tensor:
    """Load a chunk of a tensor. Raise CorruptError if it is not what the metadata describes."""
    tensor = _load(part, data, where)
    shape = () if part.box is None else part.box.shape
    found = with_article(type(tensor))
    if isinstance(tensor, torch.Tensor):
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if is_plain and tuple(tensor.shape) == shape and tensor.dtype == dtype:
            return tensor.detach()
        found = f"{tensor.dtype}{list(tensor.shape)}, {tensor.layout} on {tensor.device}"
    expected = f"{dtype}{list(shape)}"
    raise CorruptError(f"cannot import {part}", where=where, expected=expected, found=found)


def _load(part: StoredPart, data: bytes, where: str) -> object:
    return tensor_files.load(io.BytesIO(data), where=f"{where}, {part}", remedy=dcp_metadata.REMEDY)
