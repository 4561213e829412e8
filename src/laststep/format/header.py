"""The header of a data file: what lies where in it, as safetensors JSON and back.

Knows nothing of how bytes get there, what tensors mean or how files are named. A header region is
8 bytes of length, the JSON, and spaces up to a multiple of 4,096; offsets count from its end. What
`encode_header` gives is accepted by the safetensors library; what `decode_header` gives covers the
data exactly, in order, without holes, so a reader need check nothing again. `decode_*` raise only
`Corrupt`, and `Usage` for a file that needs something newer or other than this library. A file that
borrows blocks (`format.borrowing`) has those that it holds as one entry of bytes, and no tensors.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec

from laststep.codecs import strict
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import Corrupt, Usage
from laststep.format import borrowing
from laststep.format.borrowing import Stretch
from laststep.format.soundness import (
    MAX_OFFSET,
    METADATA,
    block_count,
    header_problem,
    tensor_problem,
)
from laststep.format.versions import refuse_later
from laststep.terms import ALIGN_BYTES, DTYPES, MAX_HEADER_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LENGTH_BYTES = 8
_MAX_PLAIN_BYTES = 100_000_000
"""What the safetensors library takes as a header; `MAX_HEADER_BYTES` is our own, lower limit."""

HELD_NAME = "~6blocks"
"""The entry of a file that borrows: the blocks that it holds itself."""
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
    file: int = 0
    """In which of the files that are borrowed from; 0: in this one."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """All that a header says. `blocks` is the digests of the blocks that the file holds, joined:
    those of the tensor area, or some of its blocks where the others are borrowed."""

    item: str | None
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    tensor_bytes: int
    blocks: bytes
    parts: dict[str, PartEntry] = {}
    """By the name of their entries."""
    lent: tuple[str, ...] = ()
    """The files that blocks are borrowed of; the first says what tensors there are."""
    stretches: tuple[Stretch, ...] = ()
    """Where the blocks of the tensor area lie, if not all in this file."""

    @property
    def held_bytes(self) -> int:
        """The bytes in front of the objects: the tensor area, or the blocks of it that are here."""
        if not self.lent:
            return self.tensor_bytes
        return borrowing.held_bytes(self.stretches, self.tensor_bytes, self.blocks)


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class _RawEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry as safetensors writes it."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class _Laststep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document under `laststep` in the metadata."""

    version: Literal[1, 2] = 1
    item: str | None
    digest: Literal["xxh3-128"] = "xxh3-128"
    block_bytes: Literal[1048576] = 1048576
    tensor_bytes: _Size
    blocks: str
    objects: dict[str, str]
    dtypes: dict[str, tuple[str, tuple[_Size, ...]]]
    codec: Literal["raw"] = "raw"
    parts: dict[str, PartEntry] | msgspec.UnsetType = msgspec.UNSET
    lent: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    stretches: tuple[tuple[_Size, _Size, _Size], ...] | msgspec.UnsetType = msgspec.UNSET
    borrowed: dict[str, tuple[_Size, _Size, _Size, str]] | msgspec.UnsetType = msgspec.UNSET
    """Objects of lent files: the number of the file, where it lies there, its digest."""


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
    widest = MAX_OFFSET  # no offset has more digits
    objects = tuple(
        ObjectEntry(name=name, start=widest, stop=2 * widest, digest=bytes(DIGEST_BYTES))
        for name in object_names
    )
    blocks = bytes(block_count(tensor_bytes) * DIGEST_BYTES)
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


def reserve_borrowing_bytes(
    *, item: str | None, object_names: Iterable[str], tensor_bytes: int, lent: Sequence[str]
) -> int:
    """The same for a file that borrows of these others, whichever of its blocks it holds."""
    count, widest = block_count(tensor_bytes), MAX_OFFSET
    stretches = (Stretch(count, len(lent), count),) * count
    objects = tuple(
        ObjectEntry(name=name, start=widest, stop=widest, digest=bytes(DIGEST_BYTES), file=file)
        for name in object_names
        for file in (0, len(lent))
    )
    header = Header(
        item=item, tensors=(), objects=objects, tensor_bytes=tensor_bytes,
        blocks=bytes(count * DIGEST_BYTES), lent=tuple(lent), stretches=stretches,
    )  # fmt: skip
    return align_up(_LENGTH_BYTES + len(_json_of(header)), ALIGN_BYTES)


def encode_header(header: Header, *, region_bytes: int) -> bytes:
    """The header region, of exactly `region_bytes`; `Usage` if it does not fit or is unsound."""
    if region_bytes % ALIGN_BYTES or not 0 < region_bytes <= MAX_HEADER_BYTES:
        raise Usage(
            "cannot write a header",
            expected=f"a region of a multiple of {ALIGN_BYTES}, at most {MAX_HEADER_BYTES} bytes",
            found=f"{region_bytes} bytes",
        )
    problem = header_problem(header)
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
    entries: dict[str, object] = {METADATA: None}
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
    if header.lent:
        entries[HELD_NAME] = _RawEntry("U8", (header.held_bytes,), (0, header.held_bytes))
    own = [stored for stored in header.objects if stored.file == 0]
    for stored in own:
        size = stored.stop - stored.start
        entries[stored.name] = _RawEntry("U8", (size,), (stored.start, stored.stop))
    document = _Laststep(
        version=2 if header.lent else 1,
        item=header.item,
        tensor_bytes=header.tensor_bytes,
        blocks=base64.b64encode(header.blocks).decode("ascii"),
        objects={stored.name: stored.digest.hex() for stored in own},
        dtypes=dtypes,
        parts=header.parts or msgspec.UNSET,
        lent=header.lent or msgspec.UNSET,
        stretches=header.stretches if header.lent else msgspec.UNSET,
        borrowed={
            stored.name: (stored.file, stored.start, stored.stop, stored.digest.hex())
            for stored in header.objects
            if stored.file
        }
        or msgspec.UNSET,
    )
    try:
        entries[METADATA] = _Metadata(laststep=msgspec.json.encode(document).decode())
        return msgspec.json.encode(entries)
    except UnicodeEncodeError as error:
        raise Usage("cannot write a header", found=f"a name that is no Unicode: {error}") from None


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
    document = _document(parsed.pop(METADATA, None), where)
    digests = {name: _digest(text, name, where) for name, text in document.objects.items()}
    entries = _entries(parsed, where)
    blocks = _blocks(document.blocks, where)
    lent = () if document.lent is msgspec.UNSET else document.lent
    borrows = document.version > 1
    if borrows != bool(lent) or borrows != (document.stretches is not msgspec.UNSET):
        raise _corrupt(where, f"version {document.version} with {len(lent)} lent files")
    held = entries.pop(HELD_NAME, None) if borrows else None
    tensors, objects = _sorted_out(entries, digests, document.dtypes, where)
    header = Header(
        item=document.item,
        tensors=tensors,
        objects=objects + _borrowed(document, where),
        tensor_bytes=document.tensor_bytes,
        blocks=blocks,
        parts={} if document.parts is msgspec.UNSET else document.parts,
        lent=lent,
        stretches=() if document.stretches is msgspec.UNSET
        else tuple(map(Stretch._make, document.stretches)),
    )  # fmt: skip
    problem = header_problem(header)
    if problem is not None:
        raise _corrupt(where, problem)
    size = header.held_bytes
    if borrows and held != _RawEntry("U8", (size,), (0, size)):
        raise _corrupt(where, f"{held} for {size} bytes of blocks of its own")
    _check_end(objects[-1].stop if objects else header.held_bytes, data_bytes, where)
    return header


def _borrowed(document: _Laststep, where: str) -> tuple[ObjectEntry, ...]:
    """The objects that lie in lent files."""
    borrowed = {} if document.borrowed is msgspec.UNSET else document.borrowed
    if any(file < 1 or start > stop for file, start, stop, _ in borrowed.values()):
        raise _corrupt(where, "an object that is borrowed of no file, or ends before it begins")
    return tuple(
        ObjectEntry(name=name, start=start, stop=stop, digest=_digest(text, name, where), file=file)
        for name, (file, start, stop, text) in borrowed.items()
    )


def decode_plain(
    region: bytes | memoryview, *, data_bytes: int, where: str
) -> tuple[TensorEntry, ...]:
    """The tensors of any safetensors file, in the order of their bytes."""
    parsed = _parse(region, where)
    try:
        msgspec.convert(parsed.pop(METADATA, None), dict[str, str] | None)
    except msgspec.ValidationError as error:
        raise _corrupt(where, f"metadata that is no map of strings: {error}") from None
    entries = _entries(parsed, where)
    tensors = [_tensor(name, entry, where) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    problem = tensor_problem(tensors, data_bytes)
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
