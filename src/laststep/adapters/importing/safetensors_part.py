"""Read safetensors: a whole file, or the part of a file from an offset to its end.

Checked as strictly as our own files. Knows nothing of the purpose of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.errors import CorruptError
from laststep.format.layout import TensorEntry, decode_plain, region_bytes_of
from laststep.state import tensors

if TYPE_CHECKING:
    from typing import BinaryIO

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """The tensors of one header by name, in the order of their bytes, and the offset of their
    data."""

    entries: dict[str, TensorEntry]
    data_at: int


def open_part(file: BinaryIO, *, start: int, stop: int, where: str) -> TensorIndex:
    """Decode the header at `start`. Its data must end at `stop`, the end of the file."""
    size_bytes = stop - start
    file.seek(start)
    prefix = file.read(8)
    header_bytes = region_bytes_of(prefix, size_bytes=size_bytes, where=where)
    region = prefix + file.read(header_bytes - len(prefix))
    entries = decode_plain(region, data_bytes=size_bytes - header_bytes, where=where)
    by_name = {entry.name: entry for entry in entries}
    return TensorIndex(entries=by_name, data_at=start + header_bytes)


def read_tensor(file: BinaryIO, part: TensorIndex, name: str, *, where: str) -> torch.Tensor:
    """Read one tensor of a part."""
    entry = part.entries[name]
    data = bytearray(entry.stop - entry.start)
    file.seek(part.data_at + entry.start)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise CorruptError("cannot import", where=where, found="a file that became shorter")
    return tensors.from_bytes(data, entry.dtype, entry.shape)
