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
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from laststep.adapters.importing import dcp_metadata, tensor_files
from laststep.adapters.importing.dcp_metadata import CutTensor, MetadataEntry, Region
from laststep.adapters.nesting import nest
from laststep.constants import with_article
from laststep.errors import CorruptError, NotFoundError
from laststep.state.tensors import allocate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO

    from laststep.state.boxes import Box

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBox:
    """A region and its content: a box of a tensor, or a value if `box` is None."""

    name: str
    region: Region
    box: Box | None

    def __str__(self) -> str:
        return repr(self.name[:100])


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
    pieces = sorted(_pieces(entries), key=lambda piece: (piece.region.file, piece.region.offset))
    sizes = _sizes_of(folder, pieces)
    claimed, held = sum(entry.content.size_bytes for entry in entries), sum(sizes.values())
    if claimed > held:  # every byte is stored once
        raise CorruptError(
            "cannot import", where=where, expected=f"{claimed} bytes", found=f"files of {held}"
        )
    values: dict[str, object] = {}
    tensors = {
        entry.name: _allocate(entry.content)
        for entry in entries
        if isinstance(entry.content, CutTensor)
    }
    for name, group in groupby(pieces, key=lambda piece: piece.region.file):
        path = folder / name
        with path.open("rb") as file:
            reader = DcpFileReader(file=file, size_bytes=sizes[name], where=str(path))
            for piece in group:
                if piece.box is None:
                    values[piece.name] = reader.archive(piece)
                else:
                    part = checked_chunk(
                        reader.tensor(piece), tensors[piece.name], piece, str(path)
                    )
                    place = tuple(map(slice, piece.box.start, piece.box.stop))
                    tensors[piece.name][place].copy_(part)
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


def _pieces(entries: Iterable[MetadataEntry]) -> Iterable[RegionBox]:
    for entry in entries:
        if isinstance(entry.content, Region):
            yield RegionBox(name=entry.name, region=entry.content, box=None)
        else:
            for box, region in entry.content.chunks:
                yield RegionBox(name=entry.name, region=region, box=box)


def _sizes_of(folder: Path, pieces: Iterable[RegionBox]) -> dict[str, int]:
    """Return the size of every file that is needed. Raise CorruptError if a file is missing or a
    region is outside of its file."""
    sizes: dict[str, int] = {}
    for piece in pieces:
        region = piece.region
        if region.file not in sizes:
            path = folder / region.file
            if not path.is_file():
                raise CorruptError(
                    "cannot import",
                    where=str(path),
                    found=f"no such file, which holds {piece}",
                    remedy="put the files of all ranks into the folder",
                )
            sizes[region.file] = path.stat().st_size
        stop = region.offset + region.size_bytes
        if stop > sizes[region.file]:
            raise CorruptError(
                "cannot import",
                where=str(folder / region.file),
                expected=f"{piece} in bytes {region.offset} to {stop}",
                found=f"a file of {sizes[region.file]} bytes",
            )
    return sizes


def _allocate(entry: CutTensor) -> torch.Tensor:
    try:
        return allocate(entry.dtype, entry.shape, "cpu")
    except RuntimeError as error:  # torch has no own class for lack of CPU memory
        raise MemoryError(f"a tensor of shape {list(entry.shape)}") from error


def checked_chunk(part: object, target: torch.Tensor, piece: RegionBox, where: str) -> torch.Tensor:
    """Return `part` if it is exactly the chunk that the metadata describes, else raise
    CorruptError."""
    shape = () if piece.box is None else piece.box.shape
    if not isinstance(part, torch.Tensor):
        found = with_article(type(part))
    elif part.layout is not torch.strided or part.device.type != "cpu":
        found = f"a tensor on {part.device} with layout {part.layout}"
    elif tuple(part.shape) != shape or part.dtype != target.dtype:
        found = f"a tensor of shape {list(part.shape)} and {part.dtype}"
    else:
        return part.detach()
    raise CorruptError(
        f"cannot import {piece}",
        where=where,
        expected=f"a chunk of shape {list(shape)} and {target.dtype}",
        found=found,
    )


@dataclass(slots=True, kw_only=True)
class DcpFileReader:
    """One file of the folder: consecutive torch.save archives, or values followed by
    safetensors."""

    file: BinaryIO
    size_bytes: int
    where: str
    _parts: dict[int, tensor_files.TensorIndex] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def tensor(self, piece: RegionBox) -> object:
        self.file.seek(piece.region.offset)
        if self.file.read(len(tensor_files.ZIP)) == tensor_files.ZIP:
            return self.archive(piece)
        return self._of_safetensors(piece)

    def archive(self, piece: RegionBox) -> object:
        """Load the torch.save archive in the piece's region."""
        region = piece.region
        self.file.seek(region.offset)
        data = io.BytesIO(self.file.read(region.size_bytes))
        where = f"{self.where}, {piece}"
        try:
            with zipfile.ZipFile(data) as archive:
                claimed = sum(member.file_size for member in archive.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise self._no_payload(piece) from error
        if claimed > region.size_bytes:  # torch.save compresses nothing
            raise CorruptError(
                "cannot import", where=where, found="a zip archive that is compressed"
            )
        data.seek(0)
        return tensor_files.load(data, where=where, remedy=dcp_metadata.REMEDY)

    def _of_safetensors(self, piece: RegionBox) -> torch.Tensor:
        """Read a tensor from safetensors. All tensors of the file share one header, and the
        metadata of each has the header's offset with the tensor's own length."""
        start = piece.region.offset
        self.file.seek(start + 8)
        if self.file.read(1) != b"{":
            raise self._no_payload(piece)
        if start not in self._parts:
            self._parts[start] = tensor_files.open_part(
                self.file, start=start, stop=self.size_bytes, where=self.where
            )
        part = self._parts[start]
        if piece.name not in part.entries or piece.name in self._seen:
            # Two chunks of a tensor get the same name in a file: DCP keeps only the last.
            raise CorruptError(
                "cannot import",
                where=self.where,
                found=f"no bytes for one of the chunks of {piece}",
            )
        self._seen.add(piece.name)
        return tensor_files.read_tensor(self.file, part, piece.name, where=self.where)

    def _no_payload(self, piece: RegionBox) -> CorruptError:
        return CorruptError(
            f"cannot import {piece}",
            where=f"{self.where}, byte {piece.region.offset}",
            found="neither what torch.save writes nor safetensors",
        )
