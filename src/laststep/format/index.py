"""The index: everything that one rank wrote for a checkpoint, and the location of each block.

A block is up to 1 MiB of the tensors of one layout, with its digest. A *run* gives the location of
consecutive blocks: file, offset and encoding. An encoded block may need a *base*, which is an
earlier block that has no base itself, or *masters* (`format.deriving`); so decoding takes at most
one step. Plain values are stored in the index itself.

The file consists of the digest of the payload and the payload, a msgpack array. The manifest
repeats the digest. `decode` checks everything that a reader relies on; it raises only
`CorruptError`, and `UsageError` for a later format. Does not know stores.
"""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, digest
from laststep.constants import BLOCK_BYTES, FORMAT_VERSION
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
RAW = 0
"""Number of the encoding of blocks that are stored raw."""
MAX_FILES = 4096
"""Limit for readers; writers stay well below it."""
_ENCODING_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ELEMENT_BYTES = (1, 2, 4, 8, 16)
_DATA_SUFFIXES = (".safetensors", ".pack")


class Encoding(NamedTuple):
    """Encoding of blocks: the codec, and the element size passed to it."""

    codec: str
    element_bytes: int


class StoredFile(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A file with blocks, in the folder of the checkpoint."""

    name: str
    size_bytes: Count
    origin: str = ""
    """Folder of the checkpoint that it was written for; "" for this one."""
    sharers: Count = 0
    """Number of earlier checkpoints in a row that have shared it."""

    @property
    def own_name(self) -> str:
        """The name that it was written under."""
        stem, _, suffix = self.name.rpartition(".")
        return f"{stem.partition('~')[0]}.{suffix}"

    def shared_name(self, term: int, attempt: int) -> str:
        """Return its name in the folders of checkpoints that share it: its own name with the
        attempt that wrote it."""
        stem, _, suffix = self.own_name.rpartition(".")
        return f"{stem}~{term}-{attempt}.{suffix}"


class BlockRef(NamedTuple):
    """Location and encoding of one block."""

    file: int
    offset: int
    size_bytes: int
    encoding: int = RAW
    base: BaseRef | None = None

    def renumbered(self, numbers: Mapping[int, int]) -> BlockRef:
        """Return the same block in an index with other file numbers."""
        base = self.base
        if base is not None:
            base = base._replace(block=base.block.renumbered(numbers))
        return self._replace(file=numbers[self.file], base=base)


class BaseRef(NamedTuple):
    """The block that another one is encoded against."""

    block: BlockRef
    digest: bytes


class BlockRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks of a layout that are stored back to back in one file."""

    blocks: Count
    file: Count
    offset: Count
    encoding: Count = RAW
    sizes: bytes = b""
    """Stored size of each block, as 4-byte little-endian integers; empty if the blocks are raw."""
    bases: tuple[BlockRun, ...] = ()
    """Runs of the bases, with the same number of blocks; empty if there are none."""
    base_digests: bytes = b""


class StoredLayout(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A layout, with the digests and locations of its blocks."""

    layout: FileLayout
    digests: bytes
    runs: tuple[BlockRun, ...]
    lossy: dict[str, str] = {}
    """Rounded tensors, with the rounding of each."""
    derived: dict[str, Master] = {}
    """Tensors that may be stored as the rounding of a master, with the master of each."""

    def digest(self, number: int) -> bytes:
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def refs(self) -> list[BlockRef]:
        """Return the reference of each block."""
        return list(refs_of(self.runs, self.layout))


class Index(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Everything that one rank wrote."""

    format: int = FORMAT_VERSION
    rank: Count = 0
    files: tuple[StoredFile, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    """Numbered from 1."""
    layouts: tuple[StoredLayout, ...] = ()
    values: dict[str, bytes] = {}
    """Plain values, as typed JSON, by name."""

    @property
    def size_bytes(self) -> int:
        """Size of all its data files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def shared_bytes(self) -> int:
        """Size of the files that were written for earlier checkpoints."""
        return sum(file.size_bytes for file in self.files if file.origin)

    @property
    def lossy(self) -> tuple[str, ...]:
        """The roundings applied to any tensor."""
        return tuple(sorted({how for stored in self.layouts for how in stored.lossy.values()}))

    def encoding(self, number: int) -> Encoding | None:
        """Return the encoding with that number; None for raw."""
        return None if number == RAW else self.encodings[number - 1]

    def is_derived(self, block: BlockRef) -> bool:
        """Return True if a block is derived from master tensors."""
        return self.encoding(block.encoding) == ROUNDED

    def layout(self, name: str) -> StoredLayout | None:
        return next((stored for stored in self.layouts if stored.layout.name == name), None)


def refs_of(runs: Iterable[BlockRun], layout: FileLayout) -> Iterator[BlockRef]:
    """Yield the reference of each block of a layout, in order."""
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
    """Join consecutive blocks into as few runs as possible."""
    cuts = [0]
    for number, (before, ref) in enumerate(pairwise(refs), 1):
        if not _continues(before, ref):
            cuts.append(number)
    cuts.append(len(refs))
    return tuple(_run(refs[a:b]) for a, b in pairwise(cuts) if a < b)


def in_place(layout: FileLayout, file: int) -> tuple[BlockRun, ...]:
    """Return the runs of a layout whose blocks are all in their place in a plain data file."""
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
    """Return the bytes of an index file. Raise `UsageError` if they could not be read back."""
    try:
        payload = _encode(index)
    except UnicodeEncodeError as error:
        raise UsageError(
            "cannot write an index", found=f"a name that is not valid Unicode: {error}"
        ) from None
    problem = _problem(index)
    if problem is not None:
        raise UsageError("cannot write an index", found=problem)
    return digest(payload) + payload


def digest_of(data: bytes) -> bytes:
    """Return the digest recorded in an index file."""
    return data[:DIGEST_BYTES]


def check(data: bytes | memoryview, *, where: str, expected: bytes | None = None) -> None:
    """Raise `CorruptError` if an index file has changed. `expected` is its digest from the
    manifest; None if the manifest is lost, when only the file's own digest is checked."""
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
    """Return the index in a file; see `check`."""
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
    """Return a description of the first problem that could mislead a reader, or None."""
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
    if not stored.derived:
        return "a derived block without masters" if derives else None
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
            return "a base for a block that cannot have one"
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
    """Yield the blocks whose bounds have to be checked: all encoded ones with their bases, and the
    last of each raw run."""
    number = 0
    for run in runs:
        number += run.blocks
        if run.encoding == RAW:
            # Raw blocks all have the full length, except the last.
            offset = run.offset + (run.blocks - 1) * BLOCK_BYTES
            yield BlockRef(run.file, offset, layout.block_size(number - 1))
    if any(run.encoding != RAW for run in runs):
        refs = [ref for ref in refs_of(runs, layout) if ref.encoding != RAW]
        yield from refs
        yield from (ref.base.block for ref in refs if ref.base is not None)


def _master_problem(stored: StoredLayout, index: Index) -> str | None:
    """Return why a master cannot be used, or None: each MUST be stored underived, in fp32, with the
    same shape."""
    own = {entry.name: entry for entry in stored.layout.tensors}
    files = {file for file, _ in stored.derived.values()}
    there = {one.layout.name: one for one in index.layouts if one.layout.name in files}
    derives = {
        file
        for file, one in there.items()
        if any(index.encoding(run.encoding) == ROUNDED for run in one.runs)
    }
    # Looked up by name, because there may be 100,000 pairs.
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
            return f"{tensor[:100]!r}, which is itself derived, as a master"
    return None


def _within(stored: StoredLayout, start: int, stop: int) -> Iterator[BlockRef]:
    """Yield the first block of each run that overlaps bytes [start, stop)."""
    first, last, at = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES), 0
    for run in stored.runs if start < stop else ():
        if at < last and first < at + run.blocks:
            yield BlockRef(run.file, run.offset, 0, run.encoding)
        at += run.blocks


def written_of(index: Index, data: bytes) -> WrittenIndexes:
    """Return the summary that a rank reports about its index, whose encoded bytes are `data`."""
    return WrittenIndexes(
        indexes=digest_of(data),
        files=len(index.files),
        size_bytes=index.size_bytes,
        shared_bytes=index.shared_bytes,
        lossy=index.lossy,
    )


def plain_index(index: Index) -> Index:
    """Return an index of the same contents, with every layout in place in a plain data file."""
    layouts = [stored.layout for stored in index.layouts]
    return msgspec.structs.replace(
        index,
        files=tuple(StoredFile(name=one.name, size_bytes=one.size_bytes) for one in layouts),
        encodings=(),
        layouts=tuple(
            msgspec.structs.replace(stored, runs=in_place(stored.layout, number))
            for number, stored in enumerate(index.layouts)
        ),
    )
