"""The header of a data file: what lies where in it, as safetensors JSON and back.

Knows nothing of how bytes get there, what tensors mean or how files are named. A header region is
8 bytes of length, the JSON, and spaces up to a multiple of 4,096; offsets count from its end. What
`encode_header` gives is accepted by the safetensors library; what `decode_header` gives covers the
data exactly, in order, without holes, so a reader need check nothing again. `decode_*` raise only
`Corrupt`, and `Usage` for a file that needs something newer or other than this library.
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec

from laststep.codecs import strict
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import Corrupt, Usage
from laststep.format.versions import refuse_later
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, DTYPES, MAX_HEADER_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LENGTH_BYTES = 8
_MAX_OFFSET = (1 << 63) - 1
_MAX_PLAIN_BYTES = 100_000_000
"""What the safetensors library takes as a header; `MAX_HEADER_BYTES` is our own, lower limit."""

_METADATA = "__metadata__"
_NAME_OF_CODE = {dtype.code: dtype.name for dtype in DTYPES.values() if dtype.code is not None}
_SUB_BYTE_CODES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


class TensorEntry(NamedTuple):
    """A tensor and its bytes' place in the data; `dtype` is a key of `terms.DTYPES`.

    A named tuple, because a header may have 100,000 of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class PartEntry(NamedTuple):
    """What an entry is that holds not a whole tensor but a box of one: the tensor's name and shape,
    and the first index of the box; its own shape is the entry's."""

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


class ObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A serialised object, its place in the data and the digest of its bytes."""

    name: str
    start: int
    stop: int
    digest: bytes


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """All that a header says. `blocks` is the digests of the tensor area's blocks, joined."""

    item: str | None
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    tensor_bytes: int
    blocks: bytes
    parts: dict[str, PartEntry] = {}
    """By the name of their entries."""


_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_OFFSET)]


class _RawEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry as safetensors writes it."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class _Laststep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document under `laststep` in the metadata."""

    version: Literal[1] = 1
    item: str | None
    digest: Literal["xxh3-128"] = "xxh3-128"
    block_bytes: Literal[1048576] = 1048576
    tensor_bytes: _Size
    blocks: str
    objects: dict[str, str]
    dtypes: dict[str, tuple[str, tuple[_Size, ...]]]
    codec: Literal["raw"] = "raw"
    parts: dict[str, PartEntry] | msgspec.UnsetType = msgspec.UNSET


class _Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["pt"] = "pt"
    laststep: str


# --- encoding ---------------------------------------------------------------------------------


def reserve_bytes(
    *,
    item: str | None,
    tensors: Sequence[TensorEntry],
    object_names: Iterable[str],
    tensor_bytes: int,
    parts: dict[str, PartEntry] | None = None,
) -> int:
    """The most that the header region of such a file can take, whatever its objects come to."""
    widest = _MAX_OFFSET  # no offset has more digits
    objects = tuple(
        ObjectEntry(name=name, start=widest, stop=2 * widest, digest=bytes(DIGEST_BYTES))
        for name in object_names
    )
    blocks = bytes(_block_count(tensor_bytes) * DIGEST_BYTES)
    header = Header(
        item=item, tensors=tuple(tensors), objects=objects, tensor_bytes=tensor_bytes,
        blocks=blocks, parts=parts or {},
    )  # fmt: skip
    region_bytes = align_up(_LENGTH_BYTES + len(_json_of(header)), ALIGN_BYTES)
    if region_bytes > MAX_HEADER_BYTES:
        raise Usage(
            "cannot lay out a data file",
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{region_bytes} bytes for {len(tensors)} tensors",
            remedy="split the item over several files",
        )
    return region_bytes


def encode_header(header: Header, *, region_bytes: int) -> bytes:
    """The header region, of exactly `region_bytes`; `Usage` if it does not fit or is unsound."""
    if region_bytes % ALIGN_BYTES or not 0 < region_bytes <= MAX_HEADER_BYTES:
        raise Usage(
            "cannot write a header",
            expected=f"a region of a multiple of {ALIGN_BYTES}, at most {MAX_HEADER_BYTES} bytes",
            found=f"{region_bytes} bytes",
        )
    problem = _problem(header)
    if problem is not None:
        raise Usage("cannot write a header", found=problem)
    text = _json_of(header)
    if _LENGTH_BYTES + len(text) > region_bytes:
        raise Usage(
            "cannot write a header",
            expected=f"at most the {region_bytes} bytes that were reserved",
            found=f"{_LENGTH_BYTES + len(text)} bytes",
        )
    length = region_bytes - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def _json_of(header: Header) -> bytes:
    entries: dict[str, object] = {_METADATA: None}
    dtypes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dtype, shape, start, stop in header.tensors:
        known = DTYPES.get(dtype)
        if known is None:
            raise Usage("cannot write a header", where=name, found=f"unknown dtype {dtype!r}")
        if known.code is None:
            dtypes[name] = (dtype, shape)
            entries[name] = _RawEntry("U8", (stop - start,), (start, stop))
        else:
            entries[name] = _RawEntry(known.code, shape, (start, stop))
    for stored in header.objects:
        size = stored.stop - stored.start
        entries[stored.name] = _RawEntry("U8", (size,), (stored.start, stored.stop))
    document = _Laststep(
        item=header.item,
        tensor_bytes=header.tensor_bytes,
        blocks=base64.b64encode(header.blocks).decode("ascii"),
        objects={stored.name: stored.digest.hex() for stored in header.objects},
        dtypes=dtypes,
        parts=header.parts or msgspec.UNSET,
    )
    try:
        entries[_METADATA] = _Metadata(laststep=msgspec.json.encode(document).decode())
        return msgspec.json.encode(entries)
    except UnicodeEncodeError as error:
        raise Usage("cannot write a header", found=f"a name that is no Unicode: {error}") from None


# --- what makes a header sound ----------------------------------------------------------------


def _block_count(tensor_bytes: int) -> int:
    return -(-tensor_bytes // BLOCK_BYTES)


def _problem(header: Header) -> str | None:
    """The first thing that makes a header unsound, in words, or None."""
    names = {entry.name for entry in header.tensors}
    names.update(entry.name for entry in header.objects)
    if len(names) != len(header.tensors) + len(header.objects):
        return "a name twice"
    if _METADATA in names:
        return f"an entry named {_METADATA}"
    return (
        _tensor_problem(header.tensors, header.tensor_bytes)
        or _object_problem(header.objects, header.tensor_bytes)
        or _block_problem(header)
        or _part_problem(header)
    )


def _tensor_problem(tensors: Sequence[TensorEntry], tensor_bytes: int) -> str | None:
    """Why these tensors do not fill the range from 0 to `tensor_bytes`, in words, or None."""
    at = 0
    for tensor in tensors:
        if tensor.start != at or tensor.stop < at:
            place = f"[{tensor.start}, {tensor.stop})"
            return f"{tensor.name!r} at {place} where byte {at} is next"
        at = tensor.stop
        if not _fits(tensor):
            return (
                f"{at - tensor.start} bytes for {tensor.name!r}, a {tensor.dtype} of shape "
                f"{list(tensor.shape)}"
            )
    if at != tensor_bytes:
        return f"tensors that end at byte {at} of a tensor area of {tensor_bytes}"
    return None


def _fits(tensor: TensorEntry) -> bool:
    """Whether dtype and shape come to the bytes that the entry has."""
    shape, dtype = tensor.shape, DTYPES.get(tensor.dtype)
    if dtype is None or math.prod(shape) * dtype.size_bytes != tensor.stop - tensor.start:
        return False
    if tensor.start != tensor.stop:
        return min(shape, default=0) >= 0 and tensor.stop <= _MAX_OFFSET
    # An empty tensor may have huge sides, but safetensors and torch multiply them up to the zero.
    leading = 1
    for side in shape:
        leading *= side
        if not 0 <= side <= _MAX_OFFSET or leading * dtype.size_bytes > _MAX_OFFSET:
            return False
    return True


def _object_problem(objects: Sequence[ObjectEntry], tensor_bytes: int) -> str | None:
    """Why these objects do not follow the tensor area without a hole, in words, or None."""
    at = tensor_bytes
    for stored in objects:
        if stored.start != at or not at <= stored.stop <= _MAX_OFFSET:
            return f"{stored.name!r} at [{stored.start}, {stored.stop}) where byte {at} is next"
        if len(stored.digest) != DIGEST_BYTES:
            return f"a digest of {len(stored.digest)} bytes for {stored.name!r}"
        at = stored.stop
    return None


def _block_problem(header: Header) -> str | None:
    wanted = _block_count(header.tensor_bytes) * DIGEST_BYTES
    if len(header.blocks) == wanted:
        return None
    return f"{len(header.blocks)} bytes of block digests where {wanted} are due"


def _part_problem(header: Header) -> str | None:
    """Why these parts are not boxes of larger tensors, in words, or None."""
    if not header.parts:
        return None
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name, part in header.parts.items():
        shape = shapes.get(name)
        if shape is None:
            return f"a part {name!r} that is no tensor of the file"
        fits = len(shape) == len(part.shape) == len(part.start) and all(
            start >= 0 and start + size <= whole <= _MAX_OFFSET
            for start, size, whole in zip(part.start, shape, part.shape, strict=True)
        )
        if not fits or not part.tensor:
            return f"{name!r}, of shape {list(shape)}, as the part {part}"
    return None


# --- decoding ---------------------------------------------------------------------------------


def region_bytes_of(prefix: bytes | memoryview, *, size_bytes: int, where: str) -> int:
    """The length of the header region of a file of `size_bytes` that begins with `prefix`."""
    if len(prefix) < _LENGTH_BYTES:
        raise _corrupt(where, f"only {len(prefix)} bytes")
    length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if length > min(_MAX_PLAIN_BYTES, size_bytes - _LENGTH_BYTES):
        raise _corrupt(where, f"a header of {length} bytes in a file of {size_bytes}")
    return _LENGTH_BYTES + length


def decode_header(region: bytes | memoryview, *, data_bytes: int, where: str) -> Header:
    """The header of a file of ours that has `data_bytes` behind its header region."""
    if len(region) % ALIGN_BYTES:
        raise _corrupt(where, f"a region of {len(region)} bytes, no multiple of {ALIGN_BYTES}")
    parsed = _parse(region, where)
    document = _document(parsed.pop(_METADATA, None), where)
    digests = {name: _digest(text, name, where) for name, text in document.objects.items()}
    entries = _entries(parsed, where)
    tensors, objects = _sorted_out(entries, digests, document.dtypes, where)
    header = Header(
        item=document.item,
        tensors=tensors,
        objects=objects,
        tensor_bytes=document.tensor_bytes,
        blocks=_blocks(document.blocks, where),
        parts={} if document.parts is msgspec.UNSET else document.parts,
    )
    problem = _problem(header)
    if problem is not None:
        raise _corrupt(where, problem)
    _check_end(objects[-1].stop if objects else document.tensor_bytes, data_bytes, where)
    return header


def decode_plain(
    region: bytes | memoryview, *, data_bytes: int, where: str
) -> tuple[TensorEntry, ...]:
    """The tensors of any safetensors file, in the order of their bytes."""
    parsed = _parse(region, where)
    try:
        msgspec.convert(parsed.pop(_METADATA, None), dict[str, str] | None)
    except msgspec.ValidationError as error:
        raise _corrupt(where, f"metadata that is no map of strings: {error}") from None
    entries = _entries(parsed, where)
    tensors = [_tensor(name, entry, where) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    problem = _tensor_problem(tensors, data_bytes)
    if problem is not None:
        raise _corrupt(where, problem)
    return tuple(tensors)


def _corrupt(where: str, found: str) -> Corrupt:
    return Corrupt(
        "cannot read a data file's header",
        where=where,
        found=found,
        remedy="`laststep verify` lists all damage",
    )


def _parse(region: bytes | memoryview, where: str) -> dict[str, object]:
    """The members of the header's JSON, with the length field checked."""
    whole = region_bytes_of(region, size_bytes=len(region), where=where)
    if whole != len(region):
        raise _corrupt(where, f"a length field for {whole} of {len(region)} bytes")
    text = bytes(region[_LENGTH_BYTES:])
    if not text.startswith(b"{"):
        raise _corrupt(where, f"a header that begins with {text[:1]!r}, not with '{{'")
    parsed = strict.parse(text.rstrip(b" "), where=where)
    if not isinstance(parsed, dict):
        raise _corrupt(where, "JSON that is no object")
    return parsed


def _document(metadata: object, where: str) -> _Laststep:
    try:
        text = msgspec.convert(metadata, _Metadata).laststep
    except msgspec.ValidationError as error:
        raise _corrupt(where, f"metadata not of laststep: {error}") from None
    document = strict.parse(text.encode(), where=where)
    if isinstance(document, dict):
        writer = document.get("laststep")
        refuse_later(document.get("version"), what="data file", where=where, writer=writer)
    try:
        return msgspec.convert(document, _Laststep)
    except msgspec.ValidationError as error:
        raise _corrupt(where, f"unsound metadata: {error}") from None


def _entries(parsed: dict[str, object], where: str) -> dict[str, _RawEntry]:
    try:
        return msgspec.convert(parsed, dict[str, _RawEntry])
    except msgspec.ValidationError as error:
        raise _corrupt(where, f"an unsound entry: {error}") from None


def _digest(text: str, name: str, where: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != DIGEST_BYTES or value.hex() != text:
        raise _corrupt(where, f"{text[:100]!r} as the digest of {name!r}")
    return value


def _blocks(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise _corrupt(where, "block digests that are no base64") from None


def _tensor(name: str, entry: _RawEntry, where: str) -> TensorEntry:
    dtype = _NAME_OF_CODE.get(entry.dtype)
    if dtype is None:
        if entry.dtype in _SUB_BYTE_CODES:
            raise Usage(
                "cannot read a tensor of less than a byte per element",
                where=where,
                found=f"dtype {entry.dtype} for {name!r}",
                remedy="read it with safetensors, and save it as uint8",
            )
        raise _corrupt(where, f"the unknown dtype {entry.dtype[:100]!r} for {name!r}")
    start, stop = entry.data_offsets
    return TensorEntry(name=name, dtype=dtype, shape=entry.shape, start=start, stop=stop)


def _sorted_out(
    entries: dict[str, _RawEntry],
    digests: dict[str, bytes],
    dtypes: dict[str, tuple[str, tuple[int, ...]]],
    where: str,
) -> tuple[tuple[TensorEntry, ...], tuple[ObjectEntry, ...]]:
    """The entries as tensors and objects; each digest and each dtype MUST have its entry."""
    tensors: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    described = 0
    for name, entry in entries.items():
        tensor = _own_tensor(name, entry, where)
        if name in digests or name in dtypes:
            _check_bytes(tensor, where)
        if name in digests:
            start, stop = entry.data_offsets
            stored = ObjectEntry(name=name, start=start, stop=stop, digest=digests[name])
            objects.append(stored)
            continue
        if objects:
            raise _corrupt(where, f"the tensor {name!r} behind an object")
        if name in dtypes:
            described += 1
            dtype, shape = dtypes[name]
            tensor = TensorEntry(
                name=name, dtype=dtype, shape=shape, start=tensor.start, stop=tensor.stop
            )
        tensors.append(tensor)
    if len(objects) != len(digests):
        raise _corrupt(where, "a digest of an object that is not there")
    if described != len(dtypes):
        raise _corrupt(where, "a dtype of a tensor that is not there")
    return tuple(tensors), tuple(objects)


def _own_tensor(name: str, entry: _RawEntry, where: str) -> TensorEntry:
    try:
        return _tensor(name, entry, where)
    except Usage as error:  # we never write such a dtype
        raise _corrupt(where, error.found or error.what) from None


def _check_bytes(tensor: TensorEntry, where: str) -> None:
    """An object, and a tensor with a dtype of its own, MUST be stored as a row of bytes."""
    if tensor.dtype != "uint8" or tensor.shape != (tensor.stop - tensor.start,):
        shape = list(tensor.shape)
        raise _corrupt(where, f"{tensor.name!r} as {tensor.dtype} {shape}, not as a row of bytes")


def _check_end(stop: int, data_bytes: int, where: str) -> None:
    if stop != data_bytes:
        raise _corrupt(where, f"{data_bytes} bytes of data where entries end at byte {stop}")
