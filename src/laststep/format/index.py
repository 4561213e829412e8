"""The index: everything that one rank wrote for a checkpoint, and where each block of it lies.

A block is up to 1 MiB of the tensors of one layout, with its digest. A *run* says where some blocks
lie that follow each other: in which file, at which offset, and how they are encoded. An encoded
block may need a *base*, an earlier block that is not encoded against another one, or *masters*
(`format.deriving`); so decoding takes one step at most. Plain values lie in the index itself.

The file is the digest of the payload and the payload, a msgpack array. The manifest repeats the
digest. `decode` checks everything that a reader relies on, and raises only `CorruptError`, and
`UsageError` for a later format. Knows nothing of stores."""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, digest
from laststep.errors import CorruptError, UsageError
from laststep.format import deriving
from laststep.format.deriving import ROUNDED, Master
from laststep.format.layout import FileLayout
from laststep.format.manifest import (
    DAMAGE_REMEDY,
    WrittenIndexes,
    is_file_name,
    is_plain_name,
    refuse_later,
)
from laststep.terms import BLOCK_BYTES, FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
RAW = 0
"""The number of the encoding of blocks that are stored as they are."""
MAX_FILES = 4096
"""More than any writer lets an index draw on."""
_ENCODING_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ELEMENT_BYTES = (1, 2, 4, 8, 16)
_DATA_SUFFIXES = (".safetensors", ".pack")


class Encoding(NamedTuple):
    """How blocks are encoded: the codec, and the size of the elements that it was told."""

    codec: str
    element_bytes: int


class StoredFile(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A file with blocks, in the folder of the checkpoint."""

    name: str
    size_bytes: Count
    origin: str = ""
    """The folder of the checkpoint that it was written for; "": this one."""
    sharers: Count = 0
    """How many checkpoints, one after the other, have shared it before this one."""

    @property
    def own_name(self) -> str:
        """The name that it was written under."""
        stem, _, suffix = self.name.rpartition(".")
        return f"{stem.partition('~')[0]}.{suffix}"

    def shared_name(self, epoch: int, attempt: int) -> str:
        """Its name in the folders of checkpoints that share it: its own, and the attempt that wrote
        it."""
        stem, _, suffix = self.own_name.rpartition(".")
        return f"{stem}~{epoch}-{attempt}.{suffix}"


class BlockRef(NamedTuple):
    """Where one block lies, and how it is stored."""

    file: int
    offset: int
    size_bytes: int
    encoding: int = RAW
    base: BaseRef | None = None


class BaseRef(NamedTuple):
    """The block that another one is encoded against."""

    block: BlockRef
    digest: bytes


class BlockRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks of a layout that follow each other, and lie one behind the other in one file."""

    blocks: Count
    file: Count
    offset: Count
    encoding: Count = RAW
    sizes: bytes = b""
    """The stored size of each block, 4 bytes in little-endian order; empty: as long as it is."""
    bases: tuple[BlockRun, ...] = ()
    """The runs of their bases, which are as many blocks; empty: they need none."""
    base_digests: bytes = b""


class StoredLayout(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A layout, the digests of its blocks, and where these lie."""

    layout: FileLayout
    digests: bytes
    runs: tuple[BlockRun, ...]
    lossy: dict[str, str] = {}
    """The entries that were rounded, and how."""
    derived: dict[str, Master] = {}
    """The entries that may be stored as the rounding of another tensor, and that one."""

    def digest(self, number: int) -> bytes:
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def refs(self) -> list[BlockRef]:
        """Where each block lies."""
        return list(refs_of(self.runs, self.layout))


class Index(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """All that one rank wrote."""

    format: int = FORMAT_VERSION
    rank: Count = 0
    files: tuple[StoredFile, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    """By their numbers, from 1 on."""
    layouts: tuple[StoredLayout, ...] = ()
    values: dict[str, bytes] = {}
    """Plain values, as typed JSON, by name."""

    @property
    def size_bytes(self) -> int:
        """Of all its data files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def shared_bytes(self) -> int:
        """Of the files that were written for earlier checkpoints."""
        return sum(file.size_bytes for file in self.files if file.origin)

    @property
    def lossy(self) -> tuple[str, ...]:
        """The ways in which tensors were rounded."""
        return tuple(sorted({how for stored in self.layouts for how in stored.lossy.values()}))

    def encoding(self, number: int) -> Encoding | None:
        """How blocks of that encoding are stored; None: as they are."""
        return None if number == RAW else self.encodings[number - 1]

    def is_derived(self, block: BlockRef) -> bool:
        """Return whether a block is put together from master tensors."""
        return self.encoding(block.encoding) == ROUNDED

    def layout(self, name: str) -> StoredLayout | None:
        return next((stored for stored in self.layouts if stored.layout.name == name), None)


def refs_of(runs: Iterable[BlockRun], layout: FileLayout) -> Iterator[BlockRef]:
    """The reference of each block of a layout, in order."""
    number = 0
    for run in runs:
        sizes = struct.unpack(f"<{len(run.sizes) // 4}I", run.sizes)
        bases = _bases(run, layout, number)
        at = run.offset
        for nth in range(run.blocks):
            size = sizes[nth] if sizes else layout.block_size(number)
            yield BlockRef(run.file, at, size, run.encoding, bases[nth] if bases else None)
            at, number = at + size, number + 1


def _bases(run: BlockRun, layout: FileLayout, first: int) -> list[BaseRef]:
    found: list[BaseRef] = []
    for base in run.bases:
        sizes = struct.unpack(f"<{len(base.sizes) // 4}I", base.sizes)
        at = base.offset
        for nth in range(base.blocks):
            number = len(found)
            size = sizes[nth] if sizes else layout.block_size(first + number)
            there = run.base_digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            found.append(BaseRef(BlockRef(base.file, at, size, base.encoding), there))
            at += size
    return found


def runs_of(refs: Sequence[BlockRef]) -> tuple[BlockRun, ...]:
    """Blocks that follow each other, as few runs."""
    cuts = [0]
    for number, (before, ref) in enumerate(pairwise(refs), 1):
        if not _continues(before, ref):
            cuts.append(number)
    cuts.append(len(refs))
    return tuple(_run(refs[a:b]) for a, b in pairwise(cuts) if a < b)


def in_place(layout: FileLayout, file: int) -> tuple[BlockRun, ...]:
    """The blocks of a layout that all lie in their place in a plain data file."""
    count = layout.block_count
    return (BlockRun(count, file, layout.header_bytes),) if count else ()


def _continues(before: BlockRef, ref: BlockRef) -> bool:
    return (
        ref.file == before.file
        and ref.offset == before.offset + before.size_bytes
        and ref.encoding == before.encoding
        and (ref.base is None) == (before.base is None)
    )


def _run(refs: Sequence[BlockRef]) -> BlockRun:
    first = refs[0]
    bases = [ref.base for ref in refs if ref.base is not None]
    return BlockRun(
        len(refs),
        first.file,
        first.offset,
        first.encoding,
        b"" if first.encoding == RAW else _packed(ref.size_bytes for ref in refs),
        runs_of([base.block for base in bases]),
        b"".join(base.digest for base in bases),
    )


def _packed(sizes: Iterable[int]) -> bytes:
    listed = tuple(sizes)
    return struct.pack(f"<{len(listed)}I", *listed)


# --- bytes ------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Index).decode


class _FirstMember(msgspec.Struct, frozen=True, array_like=True):
    format: int


def encode(index: Index) -> bytes:
    """The bytes of an index file; `UsageError` if they could not be read back."""
    try:
        payload = _encode(index)
    except UnicodeEncodeError as error:
        raise UsageError(
            "cannot write an index", found=f"a name that is no Unicode: {error}"
        ) from None
    problem = _problem(index)
    if problem is not None:
        raise UsageError("cannot write an index", found=problem)
    return digest(payload) + payload


def digest_of(data: bytes) -> bytes:
    """The digest that an index file says it has."""
    return data[:DIGEST_BYTES]


def check(data: bytes | memoryview, *, where: str, expected: bytes | None = None) -> None:
    """Raise `CorruptError` if an index file is not what was written. `expected` is its digest as
    the manifest says it; None: the manifest is lost, and the file has to speak for itself."""
    said, found = bytes(data[:DIGEST_BYTES]), digest(memoryview(data)[DIGEST_BYTES:])
    if found != said or (expected is not None and found != expected):
        raise CorruptError(
            "cannot read an index: it has been changed",
            where=where,
            expected=f"{DIGEST_NAME}:{(expected or said).hex()}",
            found=f"{DIGEST_NAME}:{found.hex()}",
            remedy=DAMAGE_REMEDY,
        )


def decode(data: bytes | memoryview, *, where: str, expected: bytes | None = None) -> Index:
    """The index in a file; see `check`."""
    check(data, where=where, expected=expected)
    payload = data[DIGEST_BYTES:]
    try:
        version = msgspec.msgpack.decode(payload, type=_FirstMember).format
        refuse_later(version, what="index", where=where)
        index = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(where, str(error)) from None
    problem = _problem(index)
    if problem is not None:
        raise _corrupt(where, problem)
    return index


def _corrupt(where: str, found: str) -> CorruptError:
    return CorruptError("cannot read an index", where=where, found=found, remedy=DAMAGE_REMEDY)


# --- soundness --------------------------------------------------------------------------------


def _problem(index: Index) -> str | None:
    """The first thing that a reader could stumble over, in words, or None."""
    if index.format != FORMAT_VERSION:
        return f"format {index.format}"
    names = [file.name for file in index.files]
    if len(set(names)) != len(names) or len(names) > MAX_FILES:
        return "a file twice, or very many files"
    for file in index.files:
        if not file.name.endswith(_DATA_SUFFIXES) or not is_file_name(file.name):
            return f"a file named {file.name[:100]!r}"
        if not file.size_bytes:
            return f"a file {file.name!r} without a byte"
        if file.origin and not is_plain_name(file.origin):
            return f"a file of {file.origin[:100]!r}"
    if len(set(index.encodings)) != len(index.encodings):
        return "an encoding twice"
    for codec, element_bytes in index.encodings:
        if not _ENCODING_NAME.fullmatch(codec) or element_bytes not in _ELEMENT_BYTES:
            return f"the encoding {codec[:100]!r} with elements of {element_bytes} bytes"
    names = [stored.layout.name for stored in index.layouts]
    if len(set(names)) != len(names) or not all(map(is_file_name, names)):
        return "a layout twice, or without a plain name"
    for stored in index.layouts:
        problem = stored.layout.problem() or _stored_problem(stored, index)
        if problem is not None:
            return f"{stored.layout.name[:100]!r}: {problem}"
    return None


def _stored_problem(stored: StoredLayout, index: Index) -> str | None:
    count = stored.layout.block_count
    if len(stored.digests) != count * DIGEST_BYTES:
        return f"{len(stored.digests)} bytes of digests for {count} blocks"
    problem = _run_problem(stored.runs, index, count, bases_allowed=True)
    if problem is not None:
        return problem
    derives = False
    for ref in _ends(stored.runs, stored.layout):
        derives = derives or index.is_derived(ref)
        if ref.offset + ref.size_bytes > index.files[ref.file].size_bytes:
            return f"a block that ends at byte {ref.offset + ref.size_bytes} of a shorter file"
        if ref.size_bytes > BLOCK_BYTES:
            return f"a block of {ref.size_bytes} stored bytes"
    if derives and not stored.derived:
        return "a derived block without masters"
    return deriving.problem(stored.layout.tensors, stored.derived) or _master_problem(stored, index)


def _run_problem(
    runs: Sequence[BlockRun], index: Index, count: int, *, bases_allowed: bool
) -> str | None:
    if sum(run.blocks for run in runs) != count or not all(run.blocks for run in runs):
        return f"runs of {sum(run.blocks for run in runs)} blocks where {count} are due"
    for run in runs:
        if run.file >= len(index.files) or run.encoding > len(index.encodings):
            return f"blocks in file {run.file}, in encoding {run.encoding}"
        if len(run.sizes) != (0 if run.encoding == RAW else 4 * run.blocks):
            return f"{len(run.sizes)} bytes of sizes for {run.blocks} blocks"
        if run.bases and (not bases_allowed or index.encoding(run.encoding) in (None, ROUNDED)):
            return "a base where none can be"
        due = run.blocks if run.bases else 0
        if len(run.base_digests) != due * DIGEST_BYTES:
            return f"{len(run.base_digests)} bytes of digests of {due} bases"
        problem = _run_problem(run.bases, index, due, bases_allowed=False)
        if problem is not None:
            return f"bases: {problem}"
        if any(index.encoding(base.encoding) == ROUNDED for base in run.bases):
            return "a derived block as a base"
    return None


def _ends(runs: Sequence[BlockRun], layout: FileLayout) -> Iterator[BlockRef]:
    """The blocks of which the bounds are checked: all that are encoded, the last of others."""
    number = 0
    for run in runs:
        number += run.blocks
        if run.encoding == RAW:
            # Blocks that are stored as they are have all the full length, but for the last.
            offset = run.offset + (run.blocks - 1) * BLOCK_BYTES
            yield BlockRef(run.file, offset, layout.block_size(number - 1))
    if any(run.encoding != RAW for run in runs):
        refs = [ref for ref in refs_of(runs, layout) if ref.encoding != RAW]
        yield from refs
        yield from (ref.base.block for ref in refs if ref.base is not None)


def _master_problem(stored: StoredLayout, index: Index) -> str | None:
    """Why masters cannot be used: each MUST be stored by itself, in fp32, in the same shape."""
    if not stored.derived:
        return None
    own = {entry.name: entry for entry in stored.layout.tensors}
    files = {file for file, _ in stored.derived.values()}
    there = {one.layout.name: one for one in index.layouts if one.layout.name in files}
    derives = {
        file
        for file, one in there.items()
        if any(index.encoding(run.encoding) == ROUNDED for run in one.runs)
    }
    # By name: there may be 100,000 pairs.
    entries = {(file, entry.name): entry for file in there for entry in there[file].layout.tensors}
    for name, (file, tensor) in stored.derived.items():
        master = entries.get((file, tensor))
        if master is None:
            return f"{tensor[:100]!r} of {file[:100]!r}, which is not there"
        if master.dtype != deriving.MASTER_DTYPE or master.shape != own[name].shape:
            return f"{master.dtype} {list(master.shape)} as the master of {name!r}"
        if file in derives and any(
            index.is_derived(ref) for ref in _within(there[file], master.start, master.stop)
        ):
            return f"{tensor[:100]!r}, which is derived itself, as a master"
    return None


def _within(stored: StoredLayout, start: int, stop: int) -> Iterator[BlockRef]:
    """The first block of each run that has something of bytes [start, stop)."""
    first, last, at = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES), 0
    for run in stored.runs if start < stop else ():
        if at < last and first < at + run.blocks:
            yield BlockRef(run.file, run.offset, 0, run.encoding)
        at += run.blocks


def written_of(index: Index, data: bytes) -> WrittenIndexes:
    """What a rank reports of its index, of which these are the bytes."""
    return WrittenIndexes(
        indexes=digest_of(data),
        files=len(index.files),
        size_bytes=index.size_bytes,
        shared_bytes=index.shared_bytes,
        lossy=index.lossy,
    )


def whole_index(
    rank: int,
    layouts: Sequence[FileLayout],
    digests: Sequence[bytes],
    values: Mapping[str, bytes],
    lossy: Sequence[dict[str, str]],
) -> Index:
    """The index of a save that has every layout in place."""
    files = tuple(StoredFile(name=one.name, size_bytes=one.size_bytes) for one in layouts)
    stored = tuple(
        StoredLayout(layout=layout, digests=sums, runs=in_place(layout, n), lossy=rounded)
        for n, (layout, sums, rounded) in enumerate(zip(layouts, digests, lossy, strict=True))
    )
    return Index(rank=rank, files=files, layouts=stored, values=dict(values))
