"""Read blocks that are encoded: decode them, verify the result, say what is wrong.

A digest covers what a block decodes to, so damage to encoded bytes shows as one of what they stand
for. What cannot be decoded reads as something that the digest is not of. A base that is damaged is
named in place of the block that was encoded against it, and so is a master (`read.derived`).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.codecs.blocks.registry import codec_named
from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, block_digests, digest, digest_text
from laststep.errors import CorruptError, StorageError
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.read.blocks import Damage, damage_of
from laststep.read.derived import Kept
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.format.index import BlockRef
    from laststep.read.files import DataFile
    from laststep.storage.store import FileReading

_GAP_BYTES = 64 << 10
"""Blocks that lie no farther from each other are read in one go."""
_of_thread = threading.local()


class EncodedExtent:
    """Encoded blocks of one file that follow each other in a layout; to be read as an `Extent`."""

    what: None = None

    def __init__(
        self,
        file: DataFile,
        refs: Sequence[BlockRef],
        digests: bytes,
        first: int,
        *,
        as_base: bool = False,
        reader: FileReading | None = None,
    ) -> None:
        """`first` is the number of the first block in the layout. A base is read while blocks that
        need it are decoded. `reader` reads the file instead of its own."""
        self._file = file
        self._refs = refs
        self._digests = digests
        self._first = first
        self._as_base = as_base
        self._there = file.open_file(refs[0].file)
        self._reader = reader or self._there.reader
        self.size_bytes = sum(map(self._size_of, range(len(refs))))
        self.stored_bytes = sum(ref.size_bytes for ref in refs)

    def read(self, into: memoryview) -> list[Damage]:
        """As that of an `Extent`."""
        try:
            return self.verify(into, self.fill(into))
        except StorageError as error:
            start = min(ref.offset for ref in self._refs)
            stop = max(ref.offset + ref.size_bytes for ref in self._refs)
            damage = damage_of(error, file=self._there.name, what="data", start=start, stop=stop)
            at = self._first * BLOCK_BYTES
            return [replace(damage, data=(at, at + self.size_bytes))]

    def fill(self, into: memoryview) -> int:
        """Read and decode, without a look at the digests."""
        derived: list[tuple[int, bytes]] = []
        for numbers in self._neighbours():
            begin, last = self._refs[numbers[0]], self._refs[numbers[-1]]
            stored, got = self._stored(begin.offset, last.offset + last.size_bytes)
            for number in numbers:
                ref = self._refs[number]
                at, size = number * BLOCK_BYTES, self._size_of(number)
                low = ref.offset - begin.offset
                high, decoded = low + ref.size_bytes, None
                is_derived = self._file.index.is_derived(ref)
                if is_derived and high <= got:
                    derived.append((number, bytes(stored[low:high])))
                elif high <= got:
                    with contextlib.suppress(CorruptError):
                        decoded = self._decoded(number, stored[low:high], size)
                into[at : at + size] = self._other(number, size) if decoded is None else decoded
        self._derive(derived, into)
        return self.size_bytes

    def _derive(self, derived: list[tuple[int, bytes]], into: memoryview) -> None:
        """Put in the blocks that need masters, last: reading those uses this thread's memory."""
        masters, kept = self._file.masters, Kept()
        for number, stored in derived:
            at, size = number * BLOCK_BYTES, self._size_of(number)
            with contextlib.suppress(CorruptError):
                assert masters is not None  # noqa: S101 (the index was checked)
                into[at : at + size] = masters.block(self._first + number, stored, size, kept)

    def verify(self, image: memoryview, got: int) -> list[Damage]:
        """What is wrong with what was filled in, also after a second look."""
        return self._wrong(image, got) and self._wrong(image, self.fill(image))

    def _neighbours(self) -> Iterator[range]:
        """Blocks that are read in one go."""
        begin = 0
        for number in range(1, len(self._refs) + 1):
            if number < len(self._refs):
                ref, before = self._refs[number], self._refs[number - 1]
                ends = before.offset + before.size_bytes
                near = ends <= ref.offset <= ends + _GAP_BYTES
                if near and ref.offset + ref.size_bytes - self._refs[begin].offset <= CHUNK_BYTES:
                    continue
            yield range(begin, number)
            begin = number

    def _stored(self, start: int, stop: int) -> tuple[memoryview, int]:
        """Encoded bytes, in memory of this thread that is used again, and how many there were."""
        low = start // ALIGN_BYTES * ALIGN_BYTES
        view = _buffer(as_base=self._as_base)[: align_up(stop - low, ALIGN_BYTES)]
        got = self._reader.read_into(low, view)
        return view[start - low : stop - low], max(0, min(low + got, stop) - start)

    def _decoded(self, number: int, stored: memoryview, size: int) -> bytes | memoryview:
        ref = self._refs[number]
        encoding = self._file.index.encoding(ref.encoding)
        if encoding is None:
            return stored
        before: memoryview | None = None
        if ref.base is not None:
            before = memoryview(bytearray(size))
            try:  # what is wrong with it shows in what is decoded
                self._file.base(self._first + number).fill(before)
            except StorageError as error:
                if not error.device_failed:
                    raise
        return codec_named(encoding.codec).decode(stored, size, encoding.element_bytes, before)

    def _other(self, number: int, size: int) -> bytes:
        """Bytes that are not those of a block, for one that cannot be decoded."""
        zeros = bytes(size)
        return b"\xff" * size if digest(zeros) == self._digest(number) else zeros

    def _digest(self, number: int) -> bytes:
        return self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def _size_of(self, number: int) -> int:
        """The bytes that a block has in the layout."""
        return self._file.layout.block_size(self._first + number)

    def _wrong(self, image: memoryview, got: int) -> list[Damage]:
        if block_digests(image[:got]) == self._digests:
            return []
        wrong = []
        for number in range(len(self._refs)):
            at, size = number * BLOCK_BYTES, self._size_of(number)
            part = image[at : at + size]
            if digest(part) != self._digest(number):
                wrong += self._wrong_others(number, size) or [self._damage(number, part)]
        return wrong

    def _wrong_others(self, number: int, size: int) -> list[Damage]:
        """What is wrong with the blocks that this one needs."""
        ref, masters = self._refs[number], self._file.masters
        if self._file.index.is_derived(ref) and masters is not None:
            return masters.damage(self._first + number, size)
        if ref.base is None:
            return []
        return self._file.base(self._first + number).read(memoryview(bytearray(size)))

    def _damage(self, number: int, part: memoryview) -> Damage:
        ref, what = self._refs[number], f"block {self._first + number}"
        start, stop = ref.offset, ref.offset + ref.size_bytes
        error = CorruptError(
            "stored bytes have changed",
            where=f"{self._there.where}, {what} (bytes {start}-{stop})",
            expected=f"{DIGEST_NAME}:{self._digest(number).hex()}",
            found=digest_text(part),
            remedy=DAMAGE_REMEDY,
        )
        at = (self._first + number) * BLOCK_BYTES
        damage = damage_of(error, file=self._there.name, what=what, start=start, stop=stop)
        return replace(damage, data=(at, at + len(part)))


def _buffer(*, as_base: bool) -> memoryview:
    """Memory of this thread, for encoded blocks and for those of a base. Page-aligned, so that a
    direct read lands in it uncopied."""
    kept: dict[bool, memoryview] = _of_thread.__dict__.setdefault("buffers", {})
    if as_base not in kept:
        # A run of blocks, and what it takes to begin and end at whole pages.
        size = (BLOCK_BYTES if as_base else CHUNK_BYTES + BLOCK_BYTES) + 2 * ALIGN_BYTES
        kept[as_base] = memoryview(mmap.mmap(-1, size))
    return kept[as_base]
