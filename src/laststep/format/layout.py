"""The layout of a data file: which tensors it holds and where each lies.

The planner makes one `FileLayout` per data file. The same value travels to the flusher, lies in
shared memory and is stored in the index. A data file is plain safetensors: its header follows from
the layout alone, so it is complete before any tensor has moved. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.errors import Usage
from laststep.format.safetensors import LENGTH_BYTES, RawEntry, TensorEntry
from laststep.format.soundness import MAX_OFFSET, METADATA, tensor_problem
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, DTYPES, MAX_HEADER_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Sequence


class Part(NamedTuple):
    """The whole tensor of which an entry holds a box: its name, its shape, where the box starts."""

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


class FileLayout(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One data file: a header, then the bytes of its tensors without gaps."""

    name: str
    """Within the folder of the checkpoint."""
    item: str | None
    """The item of all its tensors; None: each name begins with its item's."""
    header_bytes: int
    tensor_bytes: int
    tensors: tuple[TensorEntry, ...]
    """In the order of their bytes. Offsets count from the end of the header."""
    parts: dict[str, Part] = {}
    """The entries that hold a box of a larger tensor, by the entry's name."""

    @property
    def size_bytes(self) -> int:
        return self.header_bytes + self.tensor_bytes

    @property
    def block_count(self) -> int:
        return -(-self.tensor_bytes // BLOCK_BYTES)

    def block_size(self, number: int) -> int:
        """The bytes of a block; only the last one may be short."""
        return min(BLOCK_BYTES, self.tensor_bytes - number * BLOCK_BYTES)

    def header(self) -> bytes:
        """Return the header region of the file."""
        text = _json_of(self.tensors)
        length = self.header_bytes - LENGTH_BYTES
        return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)

    def problem(self) -> str | None:
        """Return the first thing that is wrong with this layout, in words, or None."""
        if len({entry.name for entry in self.tensors}) != len(self.tensors):
            return "two tensors of one name"
        if any(entry.name == METADATA for entry in self.tensors):
            return f"a tensor named {METADATA}"
        if self.header_bytes % ALIGN_BYTES or not 0 < self.header_bytes <= MAX_HEADER_BYTES:
            return f"a header of {self.header_bytes} bytes"
        return tensor_problem(self.tensors, self.tensor_bytes) or self._part_problem()

    def _part_problem(self) -> str | None:
        shapes = {entry.name: entry.shape for entry in self.tensors} if self.parts else {}
        for name, part in self.parts.items():
            shape = shapes.get(name)
            if shape is None:
                return f"a part {name!r} that is no tensor of the file"
            fits = len(shape) == len(part.shape) == len(part.start) and all(
                start >= 0 and start + size <= side <= MAX_OFFSET
                for start, size, side in zip(part.start, shape, part.shape, strict=True)
            )
            if not fits or not part.tensor:
                return f"{name!r}, of shape {list(shape)}, as the part {part}"
        return None


def header_bytes_of(tensors: Sequence[TensorEntry]) -> int:
    """Return the length of the header region of a file with these tensors."""
    size = align_up(LENGTH_BYTES + len(_json_of(tensors)), ALIGN_BYTES)
    if size > MAX_HEADER_BYTES:
        raise Usage(
            "cannot lay out a data file",
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{size} bytes for {len(tensors)} tensors",
            remedy="split the item over several files",
        )
    return size


def _json_of(tensors: Sequence[TensorEntry]) -> bytes:
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    for name, dtype, shape, start, stop in tensors:
        known = DTYPES.get(dtype)
        if known is None:
            raise Usage("cannot write a header", where=name, found=f"unknown dtype {dtype!r}")
        if known.code is None:  # the index knows dtype and shape
            entries[name] = RawEntry("U8", (stop - start,), (start, stop))
        else:
            entries[name] = RawEntry(known.code, shape, (start, stop))
    try:
        return msgspec.json.encode(entries)
    except UnicodeEncodeError as error:
        raise Usage("cannot write a header", found=f"a name that is no Unicode: {error}") from None
