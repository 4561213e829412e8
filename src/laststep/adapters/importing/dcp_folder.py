"""Read a folder that torch.distributed.checkpoint (DCP) wrote, from any number of ranks.

The result is the state that `dcp_to_torch_save` would give: whole tensors on the CPU, in the nested
dicts and lists they were saved from. Files are read one after the other, front to back.

Nothing in the folder is run. Before memory is allocated for tensors, the metadata is checked
against the sizes of the files, so a false claim cannot cost more memory than the folder's size.
"""

from __future__ import annotations

import io
import zipfile
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
    from typing import BinaryIO

    from laststep.adapters.importing.dcp_metadata import StoredPart

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


def metadata_in(folder: Path, rank: int = 0) -> Path | None:
    """Return the metadata file of a save, or of a rank that saved separately, if there is one."""
    names = METADATA_NAME, f"__{rank}{METADATA_NAME}"
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_folder(folder: Path) -> dict[str, object]:
    """Return the nested state that the folder holds."""
    where = str(folder)
    metadata = folder / METADATA_NAME
    if not metadata.is_file():
        raise NotFoundError(
            "cannot import",
            where=where,
            expected=f"a torch.save or safetensors file, or a folder with a {METADATA_NAME}",
            found="a folder without it: no save there has finished, or each rank saved separately",
            remedy="name a file in it, or another folder",
        )
    if (size_bytes := metadata.stat().st_size) > _MAX_METADATA_BYTES:
        raise CorruptError("cannot import", where=str(metadata), found=f"{size_bytes} bytes")
    entries = dcp_metadata.decode(metadata.read_bytes(), where=str(metadata))
    parts = list(chain.from_iterable(entry.parts for entry in entries))
    sizes = _sizes_of(folder, parts)
    claimed, held = sum(entry.size_bytes for entry in entries), sum(sizes.values())
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
    for part, reader in read_parts(folder, parts):
        if part.box is None:
            values[part.name] = reader.archive(part)
        else:
            target = tensors[part.name]
            box_of(target, part.box).copy_(reader.chunk(part, target.dtype))
    values |= tensors
    return nest(((entry.path, values[entry.name]) for entry in entries), where=where)


def read_parts(
    folder: Path, parts: Iterable[StoredPart]
) -> Iterator[tuple[StoredPart, DcpFileReader]]:
    """Yield each part with a reader of its file, in the order of the files. Raise CorruptError if a
    file is missing."""
    ordered = sorted(parts, key=lambda part: (part.file, part.offset))
    for name, of_file in groupby(ordered, key=lambda part: part.file):
        path = folder / name
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise CorruptError(
                "a file of the checkpoint is missing",
                where=str(path),
                remedy="put the files of all ranks into the folder",
            ) from error
        with file:
            reader = DcpFileReader(file, path.stat().st_size, str(path))
            for part in of_file:
                yield part, reader


def _sizes_of(folder: Path, parts: Iterable[StoredPart]) -> dict[str, int]:
    """Return the size of every file. Raise CorruptError if a part is not in its file."""
    sizes: dict[str, int] = {}
    for part in parts:
        path = folder / part.file
        if part.file not in sizes:
            sizes[part.file] = path.stat().st_size if path.is_file() else 0
        stop = part.offset + part.size_bytes
        if stop > sizes[part.file]:
            raise CorruptError(
                "cannot import",
                where=str(path),
                expected=f"{part} in bytes {part.offset} to {stop}",
                found=f"{sizes[part.file]} bytes",
                remedy="put the files of all ranks into the folder",
            )
    return sizes


class DcpFileReader:
    """One file of the folder: torch.save archives, or values followed by safetensors."""

    def __init__(self, file: BinaryIO, size_bytes: int, where: str) -> None:
        self.file = file
        self._size_bytes = size_bytes
        self._where = where
        self._safetensors: dict[int, tensor_files.Safetensors] = {}
        """By the offset of the header."""
        self._seen: set[str] = set()

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
        raise self._corrupt(part, found, expected=f"a chunk of shape {list(shape)} and {dtype}")

    def archive(self, part: StoredPart) -> object:
        """Load a torch.save archive."""
        self.file.seek(part.offset)
        data = io.BytesIO(self.file.read(part.size_bytes))
        try:
            with zipfile.ZipFile(data) as archive:
                claimed = sum(member.file_size for member in archive.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise self._corrupt(part, _NO_PAYLOAD) from error
        if claimed > part.size_bytes:  # torch.save compresses nothing
            raise self._corrupt(part, "a zip archive that is compressed")
        where = f"{self._where}, {part}"
        return tensor_files.load(data, where=where, remedy=dcp_metadata.REMEDY)

    def _of_safetensors(self, part: StoredPart) -> torch.Tensor:
        """Read a tensor from safetensors. All tensors of the file share one header, and the
        metadata of each has the header's offset with the tensor's own length."""
        start = part.offset
        self.file.seek(start + 8)
        if self.file.read(1) != b"{":
            raise self._corrupt(part, _NO_PAYLOAD)
        if start not in self._safetensors:
            self._safetensors[start] = tensor_files.Safetensors(
                self.file, start, self._size_bytes, where=self._where
            )
        tensors = self._safetensors[start]
        if part.name not in tensors.entries or part.name in self._seen:
            # Two chunks of a tensor get the same name in a file: DCP keeps only the last.
            raise self._corrupt(part, f"no bytes for one of the chunks of {part}")
        self._seen.add(part.name)
        return tensors.read(part.name)

    def _corrupt(
        self, part: StoredPart, found: str, *, expected: str | None = None
    ) -> CorruptError:
        where = f"{self._where}, byte {part.offset}"
        return CorruptError(f"cannot import {part}", where=where, expected=expected, found=found)


_NO_PAYLOAD = "neither what torch.save writes nor safetensors"
