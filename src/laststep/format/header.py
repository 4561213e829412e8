"""The header of a data file: what lies where in it, as safetensors JSON and back.

Knows nothing of how bytes get there, what tensors mean or how files are named. A header region is
8 bytes of length, the JSON, and spaces up to a multiple of 4,096; offsets count from its end. What
`encode_header` gives is accepted by the safetensors library; what `decode_header` gives covers the
data exactly, in order, without holes, so a reader need check nothing again. `decode_*` raise only
`Corrupt`, and `Usage` for a file that needs something newer or other than this library. A file that
borrows blocks (`format.borrowing`) or has them coded (`format.coding`) has those that it holds as
one entry of bytes, and no tensors. Some of its tensors may follow from others (`format.deriving`).
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from laststep.codecs import strict
from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.errors import Usage
from laststep.format import borrowing, coding
from laststep.format.borrowing import BlockPlace, Stretch
from laststep.format.coding import CodedBlock, CodedBy, CodingDocument
from laststep.format.deriving import Master
from laststep.format.safetensors import (
    LENGTH_BYTES,
    RawEntry,
    Size,
    TensorEntry,
    corrupt,
    entries_of,
    parse,
    tensor_of,
)
from laststep.format.soundness import (
    MAX_OFFSET,
    METADATA,
    block_count,
    header_problem,
)
from laststep.format.versions import refuse_later
from laststep.terms import ALIGN_BYTES, DTYPES, MAX_HEADER_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HELD_NAME = "~6blocks"
"""The entry of a file that borrows, or has its blocks coded: those that it holds itself."""


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
    coded: tuple[CodedBlock, ...] | None = None
    """How the blocks that the file holds are encoded; None: not at all."""
    lossy: dict[str, str] = {}
    """Entries of the image that were rounded, and how."""
    derived: dict[str, Master] = {}
    """The tensors that follow from others, where blocks are coded so, and those others."""

    @property
    def is_packed(self) -> bool:
        """Whether the data are blocks that are not simply the tensor area."""
        return bool(self.lent) or self.coded is not None

    @property
    def version(self) -> Literal[1, 2, 3]:
        """The lowest format in which this can be said."""
        if self.coded is not None or self.lossy:
            return 3
        return 2 if self.lent else 1

    @property
    def held_bytes(self) -> int:
        """The bytes in front of the objects: the tensor area, or the blocks of it that are here."""
        if self.coded is not None:
            return coding.held_bytes(self.coded)
        if not self.lent:
            return self.tensor_bytes
        return borrowing.held_bytes(self.stretches, self.tensor_bytes, self.blocks)


class _Laststep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document under `laststep` in the metadata."""

    version: Literal[1, 2, 3] = 1
    item: str | None
    digest: Literal["xxh3-128"] = "xxh3-128"
    block_bytes: Literal[1048576] = 1048576
    tensor_bytes: Size
    blocks: str
    objects: dict[str, str]
    dtypes: dict[str, tuple[str, tuple[Size, ...]]]
    codec: Literal["raw"] = "raw"
    parts: dict[str, PartEntry] | msgspec.UnsetType = msgspec.UNSET
    lent: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    stretches: tuple[tuple[Size, Size, Size], ...] | msgspec.UnsetType = msgspec.UNSET
    borrowed: dict[str, tuple[Size, Size, Size, str]] | msgspec.UnsetType = msgspec.UNSET
    """Objects of lent files: the number of the file, where it lies there, its digest."""
    coding: CodingDocument | msgspec.UnsetType = msgspec.UNSET
    tensors: tuple[tuple[str, str, tuple[Size, ...]], ...] | msgspec.UnsetType = msgspec.UNSET
    """Of a file that holds a whole image of coded blocks: name, dtype and shape, in order."""
    lossy: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    derived: dict[str, Master] | msgspec.UnsetType = msgspec.UNSET
    """Tensors that follow from others: the file, and the name of the tensor in it."""


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
    region_bytes = shortest_region(header)
    if region_bytes > MAX_HEADER_BYTES:
        raise Usage(
            "cannot lay out a data file",
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{region_bytes} bytes for {len(tensors)} tensors",
            remedy="split the item over several files",
        )
    return region_bytes


def reserve_packed_bytes(header: Header, *, codecs: Sequence[str] = ()) -> int:
    """The same for a file that borrows of those which `header` names, or has blocks coded by some
    of these codecs, whichever of its blocks it holds; objects may lie in any file."""
    count, widest, lent = block_count(header.tensor_bytes), MAX_OFFSET, len(header.lent)
    objects = tuple(
        ObjectEntry(name=name, start=widest, stop=widest, digest=bytes(DIGEST_BYTES), file=file)
        for name in {entry.name for entry in header.objects}
        for file in ((0, lent) if lent else (0,))
    )
    ways = [CodedBy(codec, 16, anchored) for codec in codecs for anchored in (False, True)]
    ways = [way._replace(element_bytes=size) for way in ways for size in (1, 2, 4, 8, 16)]
    # No two of these anchors follow each other, and no way is left out.
    coded = tuple(
        CodedBlock(widest, 0, ways[number % len(ways)], BlockPlace(lent, widest))
        for number in range(max(count, len(ways)) if ways else 0)
    )
    largest = msgspec.structs.replace(
        header, objects=objects, blocks=bytes(count * DIGEST_BYTES),
        stretches=(Stretch(count, lent, count),) * count if lent else (),
        coded=coded if codecs else None,
    )  # fmt: skip
    return shortest_region(largest)


def object_entries(objects: Sequence[tuple[str, bytes]], start: int) -> tuple[ObjectEntry, ...]:
    """Where objects lie that come one after the other from `start` on."""
    entries = []
    for name, data in objects:
        stop = start + len(data)
        entries.append(ObjectEntry(name=name, start=start, stop=stop, digest=digest(data)))
        start = stop
    return tuple(entries)


def shortest_region(header: Header) -> int:
    """The bytes of the shortest region that such a header fits into."""
    return align_up(LENGTH_BYTES + len(_json_of(header)), ALIGN_BYTES)


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
    if LENGTH_BYTES + len(text) > region_bytes:
        raise Usage(
            "cannot write a header",
            expected=f"at most the {region_bytes} bytes that were reserved",
            found=f"{LENGTH_BYTES + len(text)} bytes",
        )
    length = region_bytes - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def _json_of(header: Header) -> bytes:
    entries: dict[str, object] = {METADATA: None}
    dtypes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dtype, shape, start, stop in header.tensors:
        known = DTYPES.get(dtype)
        if known is None:
            raise Usage("cannot write a header", where=name, found=f"unknown dtype {dtype!r}")
        if header.is_packed:
            continue
        if known.code is None:
            dtypes[name] = (dtype, shape)
            entries[name] = RawEntry("U8", (stop - start,), (start, stop))
        else:
            entries[name] = RawEntry(known.code, shape, (start, stop))
    if header.is_packed:
        entries[HELD_NAME] = RawEntry("U8", (header.held_bytes,), (0, header.held_bytes))
    own = [stored for stored in header.objects if stored.file == 0]
    for stored in own:
        size = stored.stop - stored.start
        entries[stored.name] = RawEntry("U8", (size,), (stored.start, stored.stop))
    document = _Laststep(
        version=header.version,
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
        coding=msgspec.UNSET if header.coded is None else coding.encode(header.coded),
        tensors=msgspec.UNSET if header.coded is None or header.lent
        else tuple((name, dtype, shape) for name, dtype, shape, _, _ in header.tensors),
        lossy=header.lossy or msgspec.UNSET,
        derived=header.derived or msgspec.UNSET,
    )  # fmt: skip
    try:
        entries[METADATA] = _Metadata(laststep=msgspec.json.encode(document).decode())
        return msgspec.json.encode(entries)
    except UnicodeEncodeError as error:
        raise Usage("cannot write a header", found=f"a name that is no Unicode: {error}") from None


# --- decoding ---------------------------------------------------------------------------------


def decode_header(region: bytes | memoryview, *, data_bytes: int, where: str) -> Header:
    """The header of a file of ours that has `data_bytes` behind its header region."""
    if len(region) % ALIGN_BYTES:
        raise corrupt(where, f"a region of {len(region)} bytes, no multiple of {ALIGN_BYTES}")
    parsed = parse(region, where)
    document = _document(parsed.pop(METADATA, None), where)
    digests = {name: _digest(text, name, where) for name, text in document.objects.items()}
    entries = entries_of(parsed, where)
    blocks = _blocks(document.blocks, where)
    lent = () if document.lent is msgspec.UNSET else document.lent
    coded = _coded(document, len(blocks) // DIGEST_BYTES, len(lent), where)
    held = entries.pop(HELD_NAME, None) if lent or coded is not None else None
    tensors, objects = _sorted_out(entries, digests, document.dtypes, where)
    if document.tensors is not msgspec.UNSET:
        if tensors:
            raise corrupt(where, "tensors beside those of coded blocks")
        tensors = _in_order(document.tensors, where)
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
        coded=coded,
        lossy={} if document.lossy is msgspec.UNSET else document.lossy,
        derived={} if document.derived is msgspec.UNSET else document.derived,
    )  # fmt: skip
    _check_kind(document, header, where)
    problem = header_problem(header)
    if problem is not None:
        raise corrupt(where, problem)
    size = header.held_bytes
    if header.is_packed and held != RawEntry("U8", (size,), (0, size)):
        raise corrupt(where, f"{held} for {size} bytes of blocks of its own")
    _check_end(objects[-1].stop if objects else header.held_bytes, data_bytes, where)
    return header


def _check_kind(document: _Laststep, header: Header, where: str) -> None:
    """A document says just what its version can, and needs."""
    lends, whole = bool(header.lent), header.coded is not None and not header.lent
    if (
        document.version != header.version
        or lends != (document.stretches is not msgspec.UNSET)
        or whole != (document.tensors is not msgspec.UNSET)
    ):
        raise corrupt(where, f"version {document.version} with {len(header.lent)} lent files")


def _coded(document: _Laststep, held: int, lent: int, where: str) -> tuple[CodedBlock, ...] | None:
    if document.coding is msgspec.UNSET:
        return None
    try:
        return coding.decode(document.coding, held=held, lent=lent)
    except ValueError as error:
        raise corrupt(where, str(error)) from None


def _in_order(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], where: str
) -> tuple[TensorEntry, ...]:
    """Tensors that lie one after the other in an image."""
    entries, at = [], 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPES:
            raise corrupt(where, f"the unknown dtype {dtype[:100]!r} for {name!r}")
        size = math.prod(shape) * DTYPES[dtype].size_bytes
        entries.append(TensorEntry(name, dtype, shape, at, at + size))
        at += size
    return tuple(entries)


def _borrowed(document: _Laststep, where: str) -> tuple[ObjectEntry, ...]:
    """The objects that lie in lent files."""
    borrowed = {} if document.borrowed is msgspec.UNSET else document.borrowed
    if any(file < 1 or start > stop for file, start, stop, _ in borrowed.values()):
        raise corrupt(where, "an object that is borrowed of no file, or ends before it begins")
    return tuple(
        ObjectEntry(name=name, start=start, stop=stop, digest=_digest(text, name, where), file=file)
        for name, (file, start, stop, text) in borrowed.items()
    )


def _document(metadata: object, where: str) -> _Laststep:
    try:
        text = msgspec.convert(metadata, _Metadata).laststep
    except msgspec.ValidationError as error:
        raise corrupt(where, f"metadata not of laststep: {error}") from None
    document = strict.parse(text.encode(), where=where)
    if isinstance(document, dict):
        writer = document.get("laststep")
        refuse_later(document.get("version"), what="data file", where=where, writer=writer)
    try:
        return msgspec.convert(document, _Laststep)
    except msgspec.ValidationError as error:
        raise corrupt(where, f"unsound metadata: {error}") from None


def _digest(text: str, name: str, where: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != DIGEST_BYTES or value.hex() != text:
        raise corrupt(where, f"{text[:100]!r} as the digest of {name!r}")
    return value


def _blocks(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise corrupt(where, "block digests that are no base64") from None


def _sorted_out(
    entries: dict[str, RawEntry],
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
            raise corrupt(where, f"the tensor {name!r} behind an object")
        if name in dtypes:
            described += 1
            dtype, shape = dtypes[name]
            tensor = TensorEntry(
                name=name, dtype=dtype, shape=shape, start=tensor.start, stop=tensor.stop
            )
        tensors.append(tensor)
    if len(objects) != len(digests):
        raise corrupt(where, "a digest of an object that is not there")
    if described != len(dtypes):
        raise corrupt(where, "a dtype of a tensor that is not there")
    return tuple(tensors), tuple(objects)


def _own_tensor(name: str, entry: RawEntry, where: str) -> TensorEntry:
    try:
        return tensor_of(name, entry, where)
    except Usage as error:  # we never write such a dtype
        raise corrupt(where, error.found or error.what) from None


def _check_bytes(tensor: TensorEntry, where: str) -> None:
    """An object, and a tensor with a dtype of its own, MUST be stored as a row of bytes."""
    if tensor.dtype != "uint8" or tensor.shape != (tensor.stop - tensor.start,):
        shape = list(tensor.shape)
        raise corrupt(where, f"{tensor.name!r} as {tensor.dtype} {shape}, not as a row of bytes")


def _check_end(stop: int, data_bytes: int, where: str) -> None:
    if stop != data_bytes:
        raise corrupt(where, f"{data_bytes} bytes of data where entries end at byte {stop}")
