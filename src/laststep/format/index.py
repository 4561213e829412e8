"""The index: everything that one rank wrote for a checkpoint, and the location of each block.

A block is up to 1 MiB of the tensors of one layout, with its digest. A *run* gives the location of
consecutive blocks: file, offset and encoding. An encoded block may need a *base*, which is an
earlier block that has no base itself; so decoding takes at most one step. Plain values are stored
in the index itself.

The file consists of the digest of the payload and the payload, a msgpack array. The manifest
repeats the digest. `decode` checks everything that a reader relies on.
"""

from __future__ import annotations

import itertools
import re
import struct
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, digest
from laststep.constants import BLOCK_BYTES, FORMAT_VERSION
from laststep.errors import CorruptError, UsageError
from laststep.format.layout import FileLayout
from laststep.format.manifest import (
    Count,
    WrittenIndexes,
    is_file_name,
    is_plain_name,
    refuse_later,
)
from laststep.process.threads import ready

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

RAW = 0
"""Number of the encoding of blocks that are stored raw."""
MAX_FILES = 4096
"""Limit for readers; writers stay well below it."""
_ENCODING_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ELEMENT_BYTES = (1, 2, 4, 8, 16)
_DATA_SUFFIXES = (".safetensors", ".pack")
FLAT_RANKS = 256
"""In larger jobs, files are stored in subfolders, each for some ranks. A rank has about three
files, and no folder should have more than about 1,024 entries."""
_RANKS_PER_FOLDER, _FOLDERS = 128, 1024


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
        """Return its name where checkpoints share it: with the attempt that wrote it."""
        stem, _, suffix = self.own_name.rpartition(".")
        return f"{stem}~{term}-{attempt}.{suffix}"


class BlockRef(NamedTuple):
    """Location and encoding of one block."""

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

    def renumbered(self, numbers: Mapping[int, int]) -> BlockRun:
        """Return the same blocks in an index with other file numbers."""
        return msgspec.structs.replace(
            self, file=numbers[self.file], bases=renumbered(self.bases, numbers)
        )


def renumbered(runs: Iterable[BlockRun], numbers: Mapping[int, int]) -> tuple[BlockRun, ...]:
    """Return runs of blocks in an index with other file numbers."""
    return tuple(map(BlockRun.renumbered, runs, itertools.repeat(numbers)))


class StoredLayout(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A layout, with the digests and locations of its blocks."""

    layout: FileLayout
    digests: bytes
    runs: tuple[BlockRun, ...]
    lossy: dict[str, str] = {}
    """Rounded tensors, with the rounding of each."""

    def digest(self, number: int) -> bytes:
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def refs(self) -> list[BlockRef]:
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
        return sum(map(attrgetter("size_bytes"), self.files))

    def encoding(self, number: int) -> Encoding | None:
        """Return the encoding with that number; None for raw."""
        return None if number == RAW else self.encodings[number - 1]

    def layout(self, name: str) -> StoredLayout | None:
        return next((stored for stored in self.layouts if stored.layout.name == name), None)


def refs_of(runs: Iterable[BlockRun], layout: FileLayout, first: int = 0) -> Iterator[BlockRef]:
    """Yield the reference of each block of a layout, in order, starting with block `first`."""
    number = first
    for run in runs:
        bases = list(refs_of(run.bases, layout, number))
        digests, begin, at = run.base_digests, number, run.offset
        for size in _sizes(run, layout, number):
            base = None
            if bases:
                place = (number - begin) * DIGEST_BYTES
                base = BaseRef(bases[number - begin], digests[place : place + DIGEST_BYTES])
            yield BlockRef(run.file, at, size, run.encoding, base)
            at, number = at + size, number + 1


def _sizes(run: BlockRun, layout: FileLayout, first: int) -> Sequence[int]:
    """Return the stored sizes of the blocks of a run that starts with block `first`."""
    if run.encoding == RAW:
        return [layout.block_size(number) for number in range(first, first + run.blocks)]
    return struct.unpack(f"<{run.blocks}I", run.sizes)


def runs_of(refs: Sequence[BlockRef]) -> tuple[BlockRun, ...]:
    """Join consecutive blocks into as few runs as possible."""
    cuts = [
        number
        for number, (before, ref) in enumerate(pairwise(refs), 1)
        if ref.file != before.file
        or ref.offset != before.offset + before.size_bytes
        or ref.encoding != before.encoding
        or (ref.base is None) != (before.base is None)
    ]
    return tuple(_run(refs[a:b]) for a, b in pairwise([0, *cuts, len(refs)]) if a < b)


def in_place(layout: FileLayout, file: int) -> tuple[BlockRun, ...]:
    """Return the runs of a layout whose blocks are all in their place in a plain data file."""
    count = layout.block_count
    return (BlockRun(count, file, layout.header_bytes),) if count else ()


def _run(refs: Sequence[BlockRef]) -> BlockRun:
    first = refs[0]
    sizes = [] if first.encoding == RAW else [ref.size_bytes for ref in refs]
    bases = [ref.base for ref in refs if ref.base is not None]
    return BlockRun(
        len(refs),
        first.file,
        first.offset,
        first.encoding,
        struct.pack(f"<{len(sizes)}I", *sizes),
        runs_of([base.block for base in bases]),
        b"".join(base.digest for base in bases),
    )


# --- bytes ------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ready(Index)).decode


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
        )


def decode(data: bytes | memoryview, *, where: str) -> Index:
    """Return the index in a file; its own digest is checked."""
    check(data, where=where)
    payload = data[DIGEST_BYTES:]
    try:
        version = msgspec.msgpack.decode(payload, type=ready(_FirstMember)).format
        refuse_later(version, what="index", where=where)
        index = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(where, str(error)) from None
    problem = _problem(index)
    if problem is not None:
        raise _corrupt(where, problem)
    return index


def _corrupt(where: str, found: str) -> CorruptError:
    return CorruptError("cannot read an index", where=where, found=found)


# --- soundness --------------------------------------------------------------------------------


def _problem(index: Index) -> str | None:
    """Return a description of the first problem that could mislead a reader, or None."""
    if index.format != FORMAT_VERSION:
        return f"format {index.format}"
    if len(index.files) > MAX_FILES:
        return "very many files"
    for name, size_bytes, origin, _ in map(msgspec.structs.astuple, index.files):
        is_data = is_file_name(name) and name.endswith(_DATA_SUFFIXES) and size_bytes
        if not is_data or (origin and not is_plain_name(origin)):
            return f"a file {name[:100]!r} of {size_bytes} bytes and of {origin[:100]!r}"
    for codec, element_bytes in index.encodings:
        if not _ENCODING_NAME.fullmatch(codec) or element_bytes not in _ELEMENT_BYTES:
            return f"the encoding {codec[:100]!r} with elements of {element_bytes} bytes"
    names = list(map(attrgetter("layout.name"), index.layouts))
    for many in (list(map(attrgetter("name"), index.files)), index.encodings, names):
        if len(set(many)) != len(many):
            return "a file, an encoding or a layout twice"
    for stored, name in zip(index.layouts, names, strict=True):
        layout, blocks = stored.layout, range(stored.layout.block_count)
        problem = None if is_file_name(name) else "no plain name"
        if len(stored.digests) != len(blocks) * DIGEST_BYTES:
            problem = f"{len(stored.digests)} bytes of digests for {len(blocks)} blocks"
        problem = problem or layout.problem()
        problem = problem or _run_problem(stored.runs, index, stored, blocks, is_base=False)
        if problem is not None:
            return f"{name[:100]!r}: {problem}"
    return None


def _run_problem(
    runs: Sequence[BlockRun], index: Index, stored: StoredLayout, due: range, *, is_base: bool
) -> str | None:
    """Check runs that are to hold the blocks `due`, or their bases."""
    number = due.start
    for run in runs:
        if not run.blocks or run.file >= len(index.files) or run.encoding > len(index.encodings):
            return f"{run.blocks} blocks in file {run.file}, in encoding {run.encoding}"
        if len(run.sizes) != (0 if run.encoding == RAW else 4 * run.blocks):
            return f"{len(run.sizes)} bytes of sizes for {run.blocks} blocks"
        if run.bases and (is_base or run.encoding == RAW):
            return "a base for a block that cannot have one"
        if run.encoding == RAW:  # all full, except the last of the layout
            stop = min((number + run.blocks) * BLOCK_BYTES, stored.layout.tensor_bytes)
            size_bytes = stop - number * BLOCK_BYTES
        else:
            sizes = _sizes(run, stored.layout, number)
            size_bytes = sum(sizes)
            if max(sizes) > BLOCK_BYTES:
                return f"a block of {max(sizes)} stored bytes"
        if run.offset + size_bytes > index.files[run.file].size_bytes:
            return f"blocks that end at byte {run.offset + size_bytes} of a shorter file"
        if len(run.base_digests) != (run.blocks * DIGEST_BYTES if run.bases else 0):
            return f"{len(run.base_digests)} bytes of digests of the bases of {run.blocks} blocks"
        if run.bases:
            blocks = range(number, number + run.blocks)
            problem = _run_problem(run.bases, index, stored, blocks, is_base=True)
            if problem is not None:
                return f"bases: {problem}"
        number += run.blocks
    if number != due.stop:
        return f"runs of {number - due.start} blocks where {len(due)} are due"
    return None


def written_of(index: Index, data: bytes) -> WrittenIndexes:
    """Return the summary that a rank reports about its index, whose encoded bytes are `data`."""
    lossy = set[str]().union(*map(dict.values, map(attrgetter("lossy"), index.layouts)))
    shared = filter(attrgetter("origin"), index.files)
    return WrittenIndexes(
        indexes=data[:DIGEST_BYTES],
        files=len(index.files),
        size_bytes=index.size_bytes,
        shared_bytes=sum(map(attrgetter("size_bytes"), shared)),
        lossy=tuple(sorted(lossy)),
    )


def plain_index(index: Index) -> Index:
    """Return an index of the same contents, with every layout in place in a plain data file."""
    layouts = [stored.layout for stored in index.layouts]
    return msgspec.structs.replace(
        index,
        files=tuple(
            StoredFile(name=layout.name, size_bytes=layout.size_bytes) for layout in layouts
        ),
        encodings=(),
        layouts=tuple(
            msgspec.structs.replace(stored, runs=in_place(stored.layout, number))
            for number, stored in enumerate(index.layouts)
        ),
    )


def folder_of(rank: int, ranks: int) -> str:
    """Return the subfolder of a checkpoint for a rank's files; "" for none."""
    if ranks <= FLAT_RANKS:
        return ""
    each = max(_RANKS_PER_FOLDER, -(-ranks // _FOLDERS))
    return f"r{rank - rank % each:05d}/"


def index_name(rank: int, ranks: int = 1) -> str:
    return f"{folder_of(rank, ranks)}index-r{rank:05d}"


def pack_name(rank: int, ranks: int = 1) -> str:
    return f"{folder_of(rank, ranks)}blocks-r{rank:05d}.pack"
