"""Read blocks of a checkpoint: fetch, decode and verify them, and report damage.

`BlockReader` is the only reader of stored tensors. It reads the blocks that an index refers to: raw
blocks directly, encoded blocks through their codec, and the bases that those need, through itself.
Adjacent blocks are fetched together. A file is opened on first use.

This is the only place where stored data are compared with their digests. A block that does not
match is read a second time, bypassing every cache of the file's reader, before it counts as
damaged. Damage is a value: one bad block does not hide another. A digest covers the decoded block;
a damaged base is reported instead of the block that needs it. Does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import operator
import threading
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, block_digests, digest, digest_text
from laststep.constants import ALIGN_BYTES, BLOCK_BYTES, CHUNK_BYTES, align_up
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError, UsageError
from laststep.format.index import RAW, BlockRef
from laststep.storage.store import InPlace, PrefersCached

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from laststep.format.index import Index, StoredFile, StoredLayout
    from laststep.format.layout import FileLayout
    from laststep.storage.store import FileReading

_GAP_BYTES = 64 << 10
"""Maximum gap between blocks that are fetched together."""
MANY_LAYOUTS = 256
"""With more layouts, files are closed once read: a process may be limited to 1,024 open files."""
_of_thread = threading.local()
_FILE = operator.attrgetter("file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One difference from what was written: its location, and the error that describes it.

    `start` and `stop` are bytes that the file has; for its missing end ("size") both are the end of
    the file. `touches` names the tensors that are, or should be, there: with the box if only part
    of a tensor is there (`model/w[0:320, 0:300]`), and with the rank for per-rank items.
    """

    file: str
    what: str
    start: int
    stop: int
    touches: tuple[str, ...] = ()
    error: LaststepError = field(compare=False)
    data: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    """Affected bytes of the layout's tensors, as opposed to their location in a file."""

    @property
    def expected(self) -> str:
        return self.error.expected or "what was written"

    @property
    def found(self) -> str:
        return self.error.found or "something else"


def damage_of(
    error: LaststepError,
    *,
    file: str,
    what: str,
    start: int = 0,
    stop: int = 0,
    data: tuple[int, int] = (0, 0),
) -> Damage:
    """Convert an error to a value. Raise it if the store cannot be reached or denies access."""
    if isinstance(error, StorageError) and not error.device_failed:
        raise error
    error = error.with_traceback(None)  # a traceback would keep buffers alive
    return Damage(file=file, what=what, start=start, stop=stop, error=error, data=data)


def refuse(damage: Iterable[Damage]) -> None:
    for first in damage:
        raise first.error


# --- files --------------------------------------------------------------------------------------


class FileSource(Protocol):
    """A store, or a snapshot in shared memory."""

    @property
    def url(self) -> str: ...

    def open_reader(self, name: str) -> FileReading: ...


class OpenFile(NamedTuple):
    """An open data file; has damage if it is missing or has the wrong size."""

    file: StoredFile
    reader: FileReading
    where: str
    damage: tuple[Damage, ...]

    @property
    def is_missing(self) -> bool:
        return isinstance(self.reader, _NoFile)


class _NoFile:
    alignment_bytes = 1
    size_bytes = 0

    def read_into(self, offset: int, into: memoryview) -> int:
        return 0

    def close(self) -> None:
        pass


class BlockReader:
    """Reads the data that one rank wrote for a checkpoint. Close it when done."""

    def __init__(self, store: FileSource, folder: str, index: Index) -> None:
        self.index = index
        self.where = f"{store.url}/{folder}"
        self.layouts = [LayoutBlocks(self, stored) for stored in index.layouts]
        self._store, self._folder = store, folder
        self._files: dict[int, OpenFile] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def file(self, number: int) -> OpenFile:
        opened = self._files.get(number)
        if opened is None:
            with self._lock:
                if self._is_closed:
                    raise UsageError("the checkpoint has been closed", where=self.where)
                opened = self._files.get(number)
                if opened is None:
                    opened = self._files[number] = self._open(self.index.files[number])
        return opened

    def files(self) -> list[OpenFile]:
        return [self.file(number) for number in range(len(self.index.files))]

    def sound(self) -> Self:
        """Open all files; raise `CorruptError` if one is missing or has the wrong size."""
        try:
            refuse(damage for file in self.files() for damage in file.damage)
        except BaseException:
            self.close()
            raise
        return self

    def release(self) -> None:
        """Close the files; they are reopened on the next use."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.reader.close()

    def close(self) -> None:
        self._is_closed = True
        self.release()

    def _open(self, file: StoredFile) -> OpenFile:
        where, path = f"{self.where}/{file.name}", f"{self._folder}/{file.name}"
        due = f"{file.size_bytes} bytes"
        try:
            reader = self._store.open_reader(path)
        except NotFoundError:
            error = CorruptError(
                "a data file is missing", where=where, expected=due, found="no such file"
            ).lacking(path)
            missing = damage_of(error, file=file.name, what="missing file")
            return OpenFile(file, _NoFile(), where, (missing,))
        found_bytes = reader.size_bytes
        if found_bytes == file.size_bytes:
            return OpenFile(file, reader, where, ())
        what = f"a data file is too {'short' if found_bytes < file.size_bytes else 'long'}"
        error = CorruptError(what, where=where, expected=due, found=f"{found_bytes} bytes")
        start = min(found_bytes, file.size_bytes)
        wrong_size = damage_of(error, file=file.name, what="size", start=start, stop=found_bytes)
        return OpenFile(file, reader, where, (wrong_size,))


def close_files(layouts: Iterable[LayoutBlocks]) -> None:
    for layout in layouts:
        layout.reader.close()


# --- blocks -------------------------------------------------------------------------------------


class LayoutBlocks:
    """One layout of a checkpoint: its tensors and its blocks, in whichever files they are."""

    def __init__(self, reader: BlockReader, stored: StoredLayout) -> None:
        self.reader = reader
        self.stored = stored
        self.layout: FileLayout = stored.layout
        self.where = f"{reader.where}/{self.layout.name}"
        self._starts = [0]
        """Number of the first block of each run, followed by the number of blocks."""
        for run in stored.runs:
            self._starts.append(self._starts[-1] + run.blocks)
        self._is_sound = False

    def open(self) -> None:
        """Open its files. Raise `CorruptError` if one is missing or has the wrong size."""
        if not self._is_sound:
            for file in self.files():
                refuse(file.damage)
            self._is_sound = True

    def files(self) -> list[OpenFile]:
        """Open the files that hold its blocks and their bases."""
        numbers = set(map(_FILE, self.stored.runs))
        for run in self.stored.runs:
            numbers.update(map(_FILE, run.bases))
        return list(map(self.reader.file, sorted(numbers)))

    @property
    def in_memory(self) -> bool:
        """True if all its files are in memory, so that reads never wait."""
        for file in self.files():
            if not isinstance(file.reader, InPlace) or not file.reader.at_hand:
                return False
        return True

    def prefer_cached(self) -> bool:
        """Allow reads from the system's page cache. Return False if a reader cannot."""
        readers = [file.reader for file in self.files()]
        known = [reader for reader in readers if isinstance(reader, PrefersCached)]
        for reader in known:
            reader.prefer_cached()
        return len(known) == len(readers)

    @cached_property
    def refs(self) -> list[BlockRef]:
        return self.stored.refs()

    def blocks(self, start: int, stop: int) -> Extent:
        """Return the whole blocks that hold bytes [start, stop) of its tensors."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        digests = self.stored.digests[first * DIGEST_BYTES : last * DIGEST_BYTES]
        return Extent(self, first, list(self._pieces(first, last)), digests)

    def _pieces(self, first: int, last: int) -> Iterator[StoredPiece]:
        """Yield a piece per encoded block and per run of contiguous raw blocks."""
        begin, at = first, bisect_right(self._starts, first) - 1
        while first < last:
            run, stop = self.stored.runs[at], min(self._starts[at + 1], last)
            place = (first - begin) * BLOCK_BYTES
            if run.encoding == RAW:
                offset = run.offset + (first - self._starts[at]) * BLOCK_BYTES
                end = min(stop * BLOCK_BYTES, self.layout.tensor_bytes)
                size = end - first * BLOCK_BYTES
                yield StoredPiece(place, size, BlockRef(run.file, offset, size))
            else:
                for number in range(first, stop):
                    at_byte = (number - begin) * BLOCK_BYTES
                    yield StoredPiece(at_byte, self.layout.block_size(number), self.refs[number])
            first, at = stop, at + 1

    def base(self, number: int) -> Extent | None:
        """Return the block that block `number` is encoded against, if any."""
        base = self.refs[number].base
        if base is None:
            return None
        piece = StoredPiece(0, self.layout.block_size(number), base.block)
        return Extent(self, number, [piece], base.digest)


class StoredPiece(NamedTuple):
    """Stored bytes that are decoded together: one block, or contiguous raw blocks."""

    at: int
    """Offset in the extent."""
    size_bytes: int
    """Decoded size."""
    ref: BlockRef

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield, for each block, its bytes [start, stop) in the extent and in the file."""
        if self.ref.encoding != RAW:
            end = self.ref.offset + self.ref.size_bytes
            yield self.at, self.at + self.size_bytes, self.ref.offset, end
            return
        for begin in range(0, self.size_bytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, self.size_bytes - begin)
            at, offset = self.at + begin, self.ref.offset + begin
            yield at, at + size, offset, offset + size


class Extent:
    """Consecutive blocks of a layout that are read together, in whichever files they are."""

    __slots__ = ("_digests", "_layout", "_reader", "first", "pieces", "size_bytes")

    def __init__(
        self, layout: LayoutBlocks, first: int, pieces: Sequence[StoredPiece], digests: bytes
    ) -> None:
        """`first` is the number of the first block in the layout."""
        self._layout, self._reader = layout, layout.reader
        self._digests = digests
        self.first = first
        self.pieces = pieces
        self.size_bytes = pieces[-1].at + pieces[-1].size_bytes if pieces else 0

    def stored(self) -> tuple[int, int]:
        """Return the number of its bytes, and of started blocks, that the files contain."""
        sizes: list[int] = []
        for piece in self.pieces:
            end = self._reader.file(piece.ref.file).reader.size_bytes
            sizes += [min(b, end) - a for _, _, a, b in piece.blocks() if a < end]
        return sum(sizes), len(sizes)

    def read(self, into: memoryview) -> list[Damage]:
        """Fill `into`, which may be larger, and return the damage found; a failing device is."""
        return self.verify(into, self.fill(into))

    def fill(self, into: memoryview) -> list[Damage]:
        """Read and decode without checking digests. Return the parts that could not be read."""
        lost: list[Damage] = []
        for group in self._neighbours():
            lost += self._fetch(group, into)
        return lost

    def verify(self, image: memoryview, lost: list[Damage]) -> list[Damage]:
        """Check filled bytes; return the damage that remains after a second read."""
        if not lost and self.is_right(image):
            return []
        return self._wrong(image, lost) and self._wrong(image, self.fill(image))

    def in_place(self) -> memoryview | None:
        """Return its unverified bytes in the reader's memory if they are contiguous there."""
        if len(self.pieces) != 1 or self.pieces[0].ref.encoding != RAW:
            return None
        ref = self.pieces[0].ref
        reader = self._reader.file(ref.file).reader
        if not isinstance(reader, InPlace) or ref.offset + ref.size_bytes > reader.size_bytes:
            return None
        return reader.in_place(ref.offset, ref.size_bytes)

    def is_right(self, image: memoryview) -> bool:
        return block_digests(image[: self.size_bytes]) == self._digests

    def verify_stored(self, stored: memoryview, reader: FileReading) -> list[Damage]:
        """Check the only piece as stored; return the damage that remains after a second read."""
        (piece,) = self.pieces
        wrong = self._wrong(memoryview(self._decoded(piece, stored)), [])
        if wrong and reader.read_into(piece.ref.offset, stored) == len(stored):
            wrong = self._wrong(memoryview(self._decoded(piece, stored)), [])
        return wrong

    def _neighbours(self) -> Iterator[Sequence[StoredPiece]]:
        """Group the pieces that are fetched in one read."""
        begin = 0
        for number in range(1, len(self.pieces) + 1):
            if number < len(self.pieces):
                ref, before = self.pieces[number].ref, self.pieces[number - 1].ref
                ends = before.offset + before.size_bytes
                near = ref.file == before.file and ends <= ref.offset <= ends + _GAP_BYTES
                first = self.pieces[begin].ref.offset
                if near and ref.offset + ref.size_bytes - first <= CHUNK_BYTES:
                    continue
            yield self.pieces[begin:number]
            begin = number

    def _fetch(self, group: Sequence[StoredPiece], into: memoryview) -> list[Damage]:
        """Read and decode a group of pieces; return the parts that could not be read."""
        file, start = self._reader.file(group[0].ref.file), group[0].ref.offset
        stop = group[-1].ref.offset + group[-1].ref.size_bytes
        try:
            if len(group) == 1 and group[0].ref.encoding == RAW:
                at = group[0].at
                # Extend to whole pages if there is room: direct reads of these need no copy.
                view = into[at : at + align_up(stop - start, ALIGN_BYTES)]
                end = start + file.reader.read_into(start, view)
                return [] if end >= stop else self._missing(group, file, end)
            with _scratch() as scratch:
                low = start // ALIGN_BYTES * ALIGN_BYTES
                end = low + file.reader.read_into(low, scratch[: align_up(stop - low, ALIGN_BYTES)])
                for piece in group:
                    begin = piece.ref.offset - low
                    stored = scratch[begin : begin + piece.ref.size_bytes]
                    view = into[piece.at : piece.at + piece.size_bytes]
                    view[:] = self._decoded(piece, stored)
            return [] if end >= stop else self._missing(group, file, end)
        except StorageError as error:
            end = max(start, min(stop, file.reader.size_bytes))
            data = self._data(group[0].at, group[-1].at + group[-1].size_bytes)
            return [
                damage_of(error, file=file.file.name, what="data", start=start, stop=end, data=data)
            ]

    def _missing(self, group: Sequence[StoredPiece], file: OpenFile, end: int) -> list[Damage]:
        """Return the damage of the blocks that are partly or entirely past the end of the file."""
        lost = [block for piece in group for block in piece.blocks() if block[3] > end]
        at, _, start, stop = lost[0]
        data = self._data(at, lost[-1][1])
        if file.is_missing:
            return [replace(file.damage[0], data=data)]
        error = CorruptError(
            "a data file is too short",
            where=file.where,
            expected=f"at least {stop} bytes",
            found=f"{end} bytes",
        )
        what = f"block {data[0] // BLOCK_BYTES}"
        stop = max(start, end)
        return [damage_of(error, file=file.file.name, what=what, start=start, stop=stop, data=data)]

    def _data(self, start: int, stop: int) -> tuple[int, int]:
        at = self.first * BLOCK_BYTES
        return at + start, at + stop

    def _decoded(self, piece: StoredPiece, stored: memoryview) -> bytes | memoryview:
        """Decode a piece. If that fails, return bytes that do not match its digest."""
        if piece.ref.encoding == RAW:
            return stored
        from laststep.codecs.blocks import codec_named  # late: plain checkpoints need none

        number, ref = self.first + piece.at // BLOCK_BYTES, piece.ref
        try:
            encoding, before = self._reader.index.encoding(ref.encoding), None
            assert encoding is not None  # noqa: S101 (it is not raw)
            base = None if ref.base is None else self._layout.base(number)
            if base is not None:
                before = memoryview(bytearray(piece.size_bytes))
                base.fill(before)  # damage to it shows in the decoded block
            codec = codec_named(encoding.codec)
            return codec.decode(stored, piece.size_bytes, encoding.element_bytes, before)
        except CorruptError:
            zeros = bytes(piece.size_bytes)
            is_zeros = digest(zeros) == self._digest(piece.at // BLOCK_BYTES)
            return b"\xff" * piece.size_bytes if is_zeros else zeros

    def _digest(self, number: int) -> bytes:
        return self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def _wrong(self, image: memoryview, lost: list[Damage]) -> list[Damage]:
        wrong = list(lost)
        for piece in self.pieces:
            for at, image_stop, start, stop in piece.blocks():
                data = self._data(at, image_stop)
                if any(a <= data[0] < b for a, b in (damage.data for damage in lost)):
                    continue
                part, expected = image[at:image_stop], self._digest(at // BLOCK_BYTES)
                if digest(part) == expected:
                    continue
                number = data[0] // BLOCK_BYTES
                base = None if piece.ref.base is None else self._layout.base(number)
                causes = base.read(memoryview(bytearray(base.size_bytes))) if base else []
                file = self._reader.file(piece.ref.file)
                changed = _changed(file, f"block {number}", (start, stop), expected, part, data)
                wrong += causes or [changed]
        return wrong


def _changed(
    file: OpenFile,
    what: str,
    place: tuple[int, int],
    expected: bytes,
    found: memoryview,
    data: tuple[int, int] = (0, 0),
) -> Damage:
    start, stop = place
    error = CorruptError(
        "stored bytes have changed",
        where=f"{file.where}, {what} (bytes {start}-{stop})",
        expected=f"{DIGEST_NAME}:{expected.hex()}",
        found=digest_text(found),
    )
    return damage_of(error, file=file.file.name, what=what, start=start, stop=stop, data=data)


@contextlib.contextmanager
def _scratch() -> Iterator[memoryview]:
    """Lend this thread's buffer for encoded blocks, page-aligned so that direct reads need no copy.
    Nested calls get another one: decoding may read a base."""
    free: list[memoryview] = _of_thread.__dict__.setdefault("free", [])
    # A group of blocks, extended to whole pages at both ends.
    size = CHUNK_BYTES + BLOCK_BYTES + 2 * ALIGN_BYTES
    buffer = free.pop() if free else memoryview(mmap.mmap(-1, size))
    try:
        yield buffer
    finally:
        free.append(buffer)


# --- files as stored -----------------------------------------------------------------------------


class Header(NamedTuple):
    """The header of a plain data file. Readers of this library do not need it."""

    file: OpenFile
    content: bytes

    def read(self) -> list[Damage]:
        """Read the header and return the damage that remains after a second read."""
        stored = memoryview(bytearray(len(self.content)))
        look = functools.partial(self.verify_stored, stored, self.file.reader)
        return look() and look()

    def verify_stored(self, stored: memoryview, reader: FileReading) -> list[Damage]:
        stop = min(len(self.content), self.file.reader.size_bytes)
        try:
            if stored != self.content and reader.read_into(0, stored) < len(stored):
                stored[:] = bytes(len(stored))
        except StorageError as error:
            return [damage_of(error, file=self.file.file.name, what="header", start=0, stop=stop)]
        if stored == self.content:
            return []
        return [_changed(self.file, "header", (0, stop), digest(self.content), stored)]


class StoredRange(NamedTuple):
    """Bytes [start, stop) of a data file that are verified together."""

    start: int
    stop: int
    content: Extent | Header


@dataclass(frozen=True, slots=True)
class FileRanges:
    """A data file as stored, and all ranges of it that can be verified."""

    file: StoredFile
    reader: FileReading
    where: str
    header_bytes: int
    """Size of the header of a plain data file; chunks start behind it."""
    ranges: dict[tuple[int, int], StoredRange] = field(default_factory=dict)
    """Ranges by (start, stop), so that a block that is used twice is verified once."""

    def is_covered(self) -> bool:
        at = 0
        for start, stop in sorted(self.ranges):
            if start > at:
                return False
            at = max(at, stop)
        return at == self.file.size_bytes


def headers(reader: BlockReader) -> Iterator[tuple[int, Header]]:
    """Yield the header of each plain data file of an index, with the number of the file."""
    by_name = {layout.layout.name: layout.layout for layout in reader.layouts}
    for number, file in enumerate(reader.index.files):
        layout = by_name.get(file.own_name)
        if layout is not None:
            yield number, Header(reader.file(number), layout.header())


def file_ranges(reader: BlockReader) -> list[FileRanges]:
    """Return the files of an index and the ranges to verify; bytes in between are not needed."""
    heads = dict(headers(reader))
    found = []
    for number, (file, opened, where, _) in enumerate(reader.files()):
        header_bytes = len(heads[number].content) if number in heads else 0
        found.append(FileRanges(file, opened, where, header_bytes))
        if number in heads:
            whole = StoredRange(0, header_bytes, heads[number])
            found[number].ranges[0, header_bytes] = whole
    for layout in reader.layouts:
        for number in range(layout.layout.block_count):
            at = number * BLOCK_BYTES
            for extent in filter(None, (layout.blocks(at, at + 1), layout.base(number))):
                ref = extent.pieces[0].ref
                stop = ref.offset + ref.size_bytes
                part = StoredRange(ref.offset, stop, extent)
                found[ref.file].ranges[ref.offset, stop] = part
    return found
