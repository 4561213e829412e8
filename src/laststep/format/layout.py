"""The layout of a data file: its tensors and their offsets.

The planner makes one `FileLayout` per data file. The same value is sent to the flusher, kept in
shared memory and stored in the index. A data file is plain safetensors: its header depends on the
layout alone, so it is complete before any tensor is copied. Also reads headers of other safetensors
files. Pure.
"""

from __future__ import annotations

import math
import operator
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from laststep.codecs import objects
from laststep.constants import ALIGN_BYTES, BLOCK_BYTES, DTYPES, MAX_HEADER_BYTES, align_up
from laststep.errors import CorruptError, UsageError
from laststep.process.threads import ready

if TYPE_CHECKING:
    from collections.abc import Sequence


METADATA = "__metadata__"
MAX_OFFSET = (1 << 63) - 1
LENGTH_BYTES = 8
_MAX_PLAIN_BYTES = 100_000_000
"""Header limit of the safetensors library; `MAX_HEADER_BYTES` is our own, lower limit."""

_NAME_OF_CODE = {dtype.code: dtype.name for dtype in DTYPES.values() if dtype.code is not None}
_NAME = operator.attrgetter("name")
_SUB_BYTE_CODES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class _RawEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry as safetensors writes it."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


class TensorEntry(NamedTuple):
    """A tensor and the position of its bytes. A named tuple, because a header may have 100,000."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def region_bytes_of(prefix: bytes | memoryview, *, size_bytes: int, where: str) -> int:
    """Return the length of the header region of a file that starts with `prefix`."""
    if len(prefix) < LENGTH_BYTES:
        raise _corrupt(where, f"only {len(prefix)} bytes")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > min(_MAX_PLAIN_BYTES, size_bytes - LENGTH_BYTES):
        raise _corrupt(where, f"a header of {length} bytes in a file of {size_bytes}")
    return LENGTH_BYTES + length


def decode_plain(
    region: bytes | memoryview, *, data_bytes: int, where: str
) -> tuple[TensorEntry, ...]:
    """Return the tensors of any safetensors file, in the order of their bytes."""
    whole = region_bytes_of(region, size_bytes=len(region), where=where)
    if whole != len(region):
        raise _corrupt(where, f"a length field for {whole} of {len(region)} bytes")
    text = bytes(region[LENGTH_BYTES:])
    if not text.startswith(b"{"):
        raise _corrupt(where, f"a header that begins with {text[:1]!r}, not with '{{'")
    parsed = objects.parse(text.rstrip(b" "), where=where)
    if not isinstance(parsed, dict):
        raise _corrupt(where, "JSON that is no object")
    try:
        msgspec.convert(parsed.pop(METADATA, None), dict[str, str] | None)
        entries = msgspec.convert(parsed, ready(dict[str, _RawEntry]))
    except msgspec.ValidationError as error:
        raise _corrupt(where, f"unsound metadata or an unsound entry: {error}") from None
    tensors = [
        TensorEntry(name, _dtype_of(name, entry.dtype, where), entry.shape, *entry.data_offsets)
        for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    problem = _tensor_problem(tensors, data_bytes)
    if problem is not None:
        raise _corrupt(where, problem)
    return tuple(tensors)


def _corrupt(where: str, found: str) -> CorruptError:
    return CorruptError(
        "cannot read a data file's header",
        where=where,
        found=found,
        remedy="`laststep verify` lists all damage",
    )


def _dtype_of(name: str, code: str, where: str) -> str:
    if code in _SUB_BYTE_CODES:
        raise UsageError(
            "cannot read a tensor of less than a byte per element",
            where=where,
            found=f"dtype {code} for {name!r}",
            remedy="read it with safetensors, and save it as uint8",
        )
    if code not in _NAME_OF_CODE:
        raise _corrupt(where, f"the unknown dtype {code[:100]!r} for {name!r}")
    return _NAME_OF_CODE[code]


def _tensor_problem(tensors: Sequence[TensorEntry], tensor_bytes: int) -> str | None:
    """Return why these tensors do not exactly fill the bytes from 0 to `tensor_bytes`, or None."""
    at = 0
    for name, dtype, shape, start, stop in tensors:
        if start != at or stop < at:
            return f"{name!r} at [{start}, {stop}) where byte {at} is next"
        at, size = stop, stop - start
        known = DTYPES.get(dtype)
        if (
            known is None
            or math.prod(shape) * known.size_bytes != size
            or min(shape, default=0) < 0
            or stop > MAX_OFFSET
            or (not size and _overflows(shape, known.size_bytes))
        ):
            return f"{size} bytes for {name!r}, a {dtype} of shape {list(shape)}"
    if at != tensor_bytes:
        return f"tensors that end at byte {at} of a tensor area of {tensor_bytes}"
    return None


def _overflows(shape: Sequence[int], element_bytes: int) -> bool:
    """Return True if an empty tensor's sides before its zero overflow in safetensors and torch."""
    largest: int = max(*shape, *accumulate((element_bytes, *shape), operator.mul))
    return largest > MAX_OFFSET


class Part(NamedTuple):
    """The name and shape of the tensor that an entry holds a box of, and its start."""

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


class FileLayout(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """One data file: a header, then the bytes of its tensors without gaps."""

    name: str
    """Relative to the folder of the checkpoint."""
    item: str | None
    """The item of all its tensors; None if each tensor's name starts with its item's name."""
    header_bytes: int
    tensor_bytes: int
    tensors: tuple[TensorEntry, ...]
    """In the order of their bytes. Offsets are relative to the end of the header."""
    parts: dict[str, Part] = {}
    """Entries that hold a box of a larger tensor, by the entry's name."""

    @property
    def size_bytes(self) -> int:
        return self.header_bytes + self.tensor_bytes

    @property
    def block_count(self) -> int:
        return -(-self.tensor_bytes // BLOCK_BYTES)

    def block_size(self, number: int) -> int:
        """Return the size of a block; only the last one may be short."""
        return min(BLOCK_BYTES, self.tensor_bytes - number * BLOCK_BYTES)

    def header(self) -> bytes:
        text = _json_of(self.tensors)
        length = self.header_bytes - LENGTH_BYTES
        return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)

    def problem(self) -> str | None:
        """Return a description of the first problem of this layout, or None."""
        names = set(map(_NAME, self.tensors))
        if len(names) != len(self.tensors) or METADATA in names:
            return f"two tensors of one name, or one named {METADATA}"
        if self.header_bytes % ALIGN_BYTES or not 0 < self.header_bytes <= MAX_HEADER_BYTES:
            return f"a header of {self.header_bytes} bytes"
        problem = _tensor_problem(self.tensors, self.tensor_bytes)
        return self._part_problem() if problem is None and self.parts else problem

    def _part_problem(self) -> str | None:
        shapes = {entry.name: entry.shape for entry in self.tensors}
        for name, part in self.parts.items():
            shape = shapes.get(name)
            if shape is None:
                return f"a shard {name!r} that is not a tensor of the file"
            fits = len(shape) == len(part.shape) == len(part.start) and all(
                start >= 0 and start + size <= side <= MAX_OFFSET
                for start, size, side in zip(part.start, shape, part.shape, strict=True)
            )
            if not fits or not part.tensor:
                return f"{name!r}, of shape {list(shape)}, as the part {part}"
        return None


def header_bytes_of(tensors: Sequence[TensorEntry]) -> int:
    """Return the length of the header region; raise `UsageError` above the limit."""
    size = align_up(LENGTH_BYTES + len(_json_of(tensors)), ALIGN_BYTES)
    if size > MAX_HEADER_BYTES:
        raise UsageError(
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
            raise UsageError("cannot write a header", where=name, found=f"unknown dtype {dtype!r}")
        if known.code is None:  # safetensors has no such dtype; the index has dtype and shape
            entries[name] = _RawEntry("U8", (stop - start,), (start, stop))
        else:
            entries[name] = _RawEntry(known.code, shape, (start, stop))
    try:
        return msgspec.json.encode(entries)
    except UnicodeEncodeError as error:
        raise UsageError(
            "cannot write a header", found=f"a name that is not valid Unicode: {error}"
        ) from None
