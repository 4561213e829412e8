"""Read a folder that torch.distributed.checkpoint (DCP) wrote, from any number of ranks.

The result is the state that `dcp_to_torch_save` would give: whole tensors on the CPU, in the nested
dicts and lists they were saved from. Files are read one after the other, front to back.

Nothing in the folder is run. Before memory is allocated for tensors, the metadata is checked
against the sizes of the files, so a false claim cannot cost more memory than the folder's size.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING

import torch

from laststep.adapters.importing import dcp_metadata, tensor_files
from laststep.adapters.nesting import nest
from laststep.constants import with_article
from laststep.errors import CorruptError, NotFoundError
from laststep.state.tensors import allocate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO

    from laststep.adapters.importing.dcp_metadata import StoredPart

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


def is_one(folder: Path) -> bool:
    """Return True if DCP wrote to this folder, even if the save did not finish."""
    return metadata_in(folder) is not None or any(folder.glob("*.distcp"))


def metadata_in(folder: Path, rank: int = 0) -> Path | None:
    """Return the metadata file of a save, or of a rank that saved separately; None if there is
    neither."""
    names = METADATA_NAME, f"__{rank}{METADATA_NAME}"
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_folder(folder: Path) -> dict[str, object]:
    """Return the nested state that the folder holds."""
    where = str(folder)
    entries = dcp_metadata.decode(_metadata_of(folder), where=f"{where}/{METADATA_NAME}")
    parts = sorted(
        chain.from_iterable(entry.parts for entry in entries),
        key=lambda part: (part.file, part.offset),
    )
    sizes = _sizes_of(folder, parts)
    claimed, held = sum(entry.size_bytes for entry in entries), sum(sizes.values())
    if claimed > held:  # every byte is stored once
        raise CorruptError(
            "cannot import", where=where, expected=f"{claimed} bytes", found=f"files of {held}"
        )
    values: dict[str, object] = {}
    tensors = {
        entry.name: _allocate(entry.dtype, entry.shape)
        for entry in entries
        if entry.dtype is not None
    }
    for name, group in groupby(parts, key=lambda part: part.file):
        path = folder / name
        with path.open("rb") as file:
            reader = DcpFileReader(file=file, size_bytes=sizes[name], where=str(path))
            for part in group:
                if part.box is None:
                    values[part.name] = reader.archive(part)
                else:
                    place = tuple(map(slice, part.box.start, part.box.stop))
                    target = tensors[part.name]
                    target[place].copy_(reader.chunk(part, target.dtype))
    values |= tensors
    return nest(((entry.path, values[entry.name]) for entry in entries), where=where)


def _metadata_of(folder: Path) -> bytes:
    path = folder / METADATA_NAME
    if not path.is_file():
        raise NotFoundError(
            "cannot import",
            where=str(folder),
            expected=f"a {METADATA_NAME}",
            found="none: the save did not finish, or each rank saved separately",
            remedy="name the folder of a save that ended",
        )
    size_bytes = path.stat().st_size
    if size_bytes > _MAX_METADATA_BYTES:
        raise CorruptError(
            "cannot import", where=str(path), found=f"metadata of {size_bytes} bytes"
        )
    return path.read_bytes()


def _sizes_of(folder: Path, parts: Iterable[StoredPart]) -> dict[str, int]:
    """Return the size of every file that is needed. Raise CorruptError if a file is missing or a
    part is outside of its file."""
    sizes: dict[str, int] = {}
    for part in parts:
        if part.file not in sizes:
            path = folder / part.file
            if not path.is_file():
                raise CorruptError(
                    "cannot import",
                    where=str(path),
                    found=f"no such file, which holds {part}",
                    remedy="put the files of all ranks into the folder",
                )
            sizes[part.file] = path.stat().st_size
        stop = part.offset + part.size_bytes
        if stop > sizes[part.file]:
            raise CorruptError(
                "cannot import",
                where=str(folder / part.file),
                expected=f"{part} in bytes {part.offset} to {stop}",
                found=f"a file of {sizes[part.file]} bytes",
            )
    return sizes


def _allocate(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return allocate(dtype, shape, "cpu")
    except RuntimeError as error:  # torch has no own class for lack of CPU memory
        raise MemoryError(f"a tensor of shape {list(shape)}") from error


@dataclass(slots=True, kw_only=True)
class DcpFileReader:
    """One file of the folder: consecutive torch.save archives, or values followed by
    safetensors."""

    file: BinaryIO
    size_bytes: int
    where: str
    _indexes: dict[int, tensor_files.TensorIndex] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def chunk(self, part: StoredPart, dtype: torch.dtype) -> torch.Tensor:
        """Read a chunk of a tensor. Raise CorruptError if it is not what the metadata describes."""
        self.file.seek(part.offset)
        is_archive = self.file.read(len(tensor_files.ZIP)) == tensor_files.ZIP
        tensor = self.archive(part) if is_archive else self._of_safetensors(part)
        shape = () if part.box is None else part.box.shape
        if not isinstance(tensor, torch.Tensor):
            found = with_article(type(tensor))
        elif tensor.layout is not torch.strided or tensor.device.type != "cpu":
            found = f"a tensor on {tensor.device} with layout {tensor.layout}"
        elif tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = f"a tensor of shape {list(tensor.shape)} and {tensor.dtype}"
        else:
            return tensor.detach()
        raise CorruptError(
            f"cannot import {part}",
            where=self.where,
            expected=f"a chunk of shape {list(shape)} and {dtype}",
            found=found,
        )

    def archive(self, part: StoredPart) -> object:
        """Load a torch.save archive."""
        self.file.seek(part.offset)
        data = io.BytesIO(self.file.read(part.size_bytes))
        where = f"{self.where}, {part}"
        try:
            with zipfile.ZipFile(data) as archive:
                claimed = sum(member.file_size for member in archive.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise self._no_payload(part) from error
        if claimed > part.size_bytes:  # torch.save compresses nothing
            raise CorruptError(
                "cannot import", where=where, found="a zip archive that is compressed"
            )
        data.seek(0)
        return tensor_files.load(data, where=where, remedy=dcp_metadata.REMEDY)

    def _of_safetensors(self, part: StoredPart) -> torch.Tensor:
        """Read a tensor from safetensors. All tensors of the file share one header, and the
        metadata of each has the header's offset with the tensor's own length."""
        start = part.offset
        self.file.seek(start + 8)
        if self.file.read(1) != b"{":
            raise self._no_payload(part)
        if start not in self._indexes:
            self._indexes[start] = tensor_files.open_part(
                self.file, start=start, stop=self.size_bytes, where=self.where
            )
        index = self._indexes[start]
        if part.name not in index.entries or part.name in self._seen:
            # Two chunks of a tensor get the same name in a file: DCP keeps only the last.
            raise CorruptError(
                "cannot import", where=self.where, found=f"no bytes for one of the chunks of {part}"
            )
        self._seen.add(part.name)
        return tensor_files.read_tensor(self.file, index, part.name, where=self.where)

    def _no_payload(self, part: StoredPart) -> CorruptError:
        return CorruptError(
            f"cannot import {part}",
            where=f"{self.where}, byte {part.offset}",
            found="neither what torch.save writes nor safetensors",
        )
