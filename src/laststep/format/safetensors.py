"""The header of any safetensors file: its JSON, the entries in it, and where its data begin.

A header region is 8 bytes of length and the JSON, which may end in spaces; offsets count from its
end. `Corrupt` for whatever is not so, `Usage` for what only other libraries read.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from laststep.codecs import strict
from laststep.errors import Corrupt, Usage
from laststep.format.soundness import MAX_OFFSET, METADATA, tensor_problem
from laststep.terms import DTYPES

LENGTH_BYTES = 8
_MAX_PLAIN_BYTES = 100_000_000
"""What the safetensors library takes as a header; `MAX_HEADER_BYTES` is our own, lower limit."""

_NAME_OF_CODE = {dtype.code: dtype.name for dtype in DTYPES.values() if dtype.code is not None}
_SUB_BYTE_CODES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class RawEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry as safetensors writes it."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


class TensorEntry(NamedTuple):
    """A tensor and its bytes' place in the data; `dtype` is a key of `terms.DTYPES`.

    A named tuple, because a header may have 100,000 of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def region_bytes_of(prefix: bytes | memoryview, *, size_bytes: int, where: str) -> int:
    """The length of the header region of a file of `size_bytes` that begins with `prefix`."""
    if len(prefix) < LENGTH_BYTES:
        raise corrupt(where, f"only {len(prefix)} bytes")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > min(_MAX_PLAIN_BYTES, size_bytes - LENGTH_BYTES):
        raise corrupt(where, f"a header of {length} bytes in a file of {size_bytes}")
    return LENGTH_BYTES + length


def decode_plain(
    region: bytes | memoryview, *, data_bytes: int, where: str
) -> tuple[TensorEntry, ...]:
    """The tensors of any safetensors file, in the order of their bytes."""
    parsed = parse(region, where)
    try:
        msgspec.convert(parsed.pop(METADATA, None), dict[str, str] | None)
    except msgspec.ValidationError as error:
        raise corrupt(where, f"metadata that is no map of strings: {error}") from None
    entries = entries_of(parsed, where)
    tensors = [tensor_of(name, entry, where) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    problem = tensor_problem(tensors, data_bytes)
    if problem is not None:
        raise corrupt(where, problem)
    return tuple(tensors)


def corrupt(where: str, found: str) -> Corrupt:
    return Corrupt(
        "cannot read a data file's header",
        where=where,
        found=found,
        remedy="`laststep verify` lists all damage",
    )


def parse(region: bytes | memoryview, where: str) -> dict[str, object]:
    """The members of the header's JSON, with the length field checked."""
    whole = region_bytes_of(region, size_bytes=len(region), where=where)
    if whole != len(region):
        raise corrupt(where, f"a length field for {whole} of {len(region)} bytes")
    text = bytes(region[LENGTH_BYTES:])
    if not text.startswith(b"{"):
        raise corrupt(where, f"a header that begins with {text[:1]!r}, not with '{{'")
    parsed = strict.parse(text.rstrip(b" "), where=where)
    if not isinstance(parsed, dict):
        raise corrupt(where, "JSON that is no object")
    return parsed


def entries_of(parsed: dict[str, object], where: str) -> dict[str, RawEntry]:
    try:
        return msgspec.convert(parsed, dict[str, RawEntry])
    except msgspec.ValidationError as error:
        raise corrupt(where, f"an unsound entry: {error}") from None


def tensor_of(name: str, entry: RawEntry, where: str) -> TensorEntry:
    dtype = _NAME_OF_CODE.get(entry.dtype)
    if dtype is None:
        if entry.dtype in _SUB_BYTE_CODES:
            raise Usage(
                "cannot read a tensor of less than a byte per element",
                where=where,
                found=f"dtype {entry.dtype} for {name!r}",
                remedy="read it with safetensors, and save it as uint8",
            )
        raise corrupt(where, f"the unknown dtype {entry.dtype[:100]!r} for {name!r}")
    start, stop = entry.data_offsets
    return TensorEntry(name=name, dtype=dtype, shape=entry.shape, start=start, stop=stop)
