"""Read blocks that are encoded: decode them, verify what comes out, say what is wrong.

A digest covers what a block decodes to, so damage to encoded bytes shows as one of what they stand
for. What cannot be decoded reads as something that the digest is not of. An anchor that is damaged
is named in place of the block that was coded against it, and so is a master (`read.derived`).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.codecs.blocks.registry import codec_named
from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, block_digests, digest, digest_text
from laststep.errors import Corrupt, StorageFailed
from laststep.format.deriving import ROUNDED
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.read.blocks import Damage, damage_of
from laststep.read.derived import Kept
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.format.coding import CodedBlock
    from laststep.read.blocks import Extent
    from laststep.read.files import HeldFile

_GAP_BYTES = 64 << 10
"""Blocks that lie no farther from each other are read in one go."""
_of_thread = threading.local()


class CodedExtent:
    """Blocks of one file that follow each other in the image; to be read as an `Extent` is."""

    what: None = None

    def __init__(
        self,
        file: HeldFile,
        blocks: list[CodedBlock],
        *,
        first: int,
        image_first: int,
        end: int,
        as_anchor: bool = False,
    ) -> None:
        """`first` is the number of the first of them in the file, `image_first` that in the image,
        which has `end` bytes; an anchor is read while blocks that need it are decoded."""
        self._file = file
        self._as_base = as_anchor
        self._blocks = blocks
        self._first = first
        self._image_first = image_first
        self._end = end
        self._digests = file.header.blocks[
            first * DIGEST_BYTES : (first + len(blocks)) * DIGEST_BYTES
        ]
        image_at = image_first * BLOCK_BYTES
        self.size_bytes = min(image_at + len(blocks) * BLOCK_BYTES, end) - image_at
        self.stored_bytes = sum(block.size_bytes for block in blocks)

    def read(self, into: memoryview) -> list[Damage]:
        """As that of an `Extent`."""
        try:
            return self.verify(into, self.fill(into))
        except StorageFailed as error:
            start = min(self._place(block) for block in self._blocks)
            stop = max(self._place(block) for block in self._blocks)
            damage = damage_of(
                error, file=self._file.record.name, what="data", start=start[0], stop=stop[1]
            )
            at = self._image_first * BLOCK_BYTES
            return [replace(damage, data=(at, at + self.size_bytes))]

    def fill(self, into: memoryview) -> int:
        """Read and decode, without a look at the digests."""
        derived: list[tuple[int, bytes]] = []
        for numbers in self._runs():
            first, last = self._blocks[numbers[0]], self._blocks[numbers[-1]]
            stored, got = self._stored(first.start, last.stop)
            for number in numbers:
                block = self._blocks[number]
                at, size = number * BLOCK_BYTES, self._size_of(number)
                low, high = block.start - first.start, block.stop - first.start
                if block.way == ROUNDED and high <= got:
                    derived.append((number, bytes(stored[low:high])))
                decoded: bytes | memoryview | None = None
                if high <= got and block.way != ROUNDED:
                    with contextlib.suppress(Corrupt):
                        decoded = self._decoded(number, stored[low:high], size)
                into[at : at + size] = self._other(number, size) if decoded is None else decoded
        self._derive(derived, into)
        return self.size_bytes

    def _derive(self, derived: list[tuple[int, bytes]], into: memoryview) -> None:
        """Put in the blocks that need masters, last: reading those uses this thread's memory."""
        masters, kept = self._file.masters, Kept()
        for number, stored in derived:
            at, size = number * BLOCK_BYTES, self._size_of(number)
            with contextlib.suppress(Corrupt):
                assert masters is not None  # noqa: S101 (checked when the file was opened)
                block = masters.block(self._image_first + number, stored, size, kept)
                into[at : at + size] = block

    def verify(self, image: memoryview, got: int) -> list[Damage]:
        """What is wrong with what was filled in, also after a second look."""
        return self._wrong(image, got) and self._wrong(image, self.fill(image))

    def _runs(self) -> Iterator[range]:
        """Blocks that are read in one go."""
        begin = 0
        for number in range(1, len(self._blocks) + 1):
            if number < len(self._blocks):
                block, before = self._blocks[number], self._blocks[number - 1]
                near = before.stop <= block.start <= before.stop + _GAP_BYTES
                if near and block.stop - self._blocks[begin].start <= CHUNK_BYTES:
                    continue
            yield range(begin, number)
            begin = number

    def _stored(self, start: int, stop: int) -> tuple[memoryview, int]:
        """Encoded bytes, in memory of this thread that is used again, and how many there were."""
        start, stop = start + self._file.record.header_bytes, stop + self._file.record.header_bytes
        low = start // ALIGN_BYTES * ALIGN_BYTES
        view = _buffer(as_anchor=self._as_base)[: align_up(stop - low, ALIGN_BYTES)]
        got = self._file.reader.read_into(low, view)
        return view[start - low : stop - low], max(0, min(low + got, stop) - start)

    def _decoded(self, number: int, stored: memoryview, size: int) -> bytes | memoryview:
        block = self._blocks[number]
        if block.way.codec == "raw" and len(stored) == size:
            return stored
        before: memoryview | None = None
        if block.anchor is not None:
            before = memoryview(bytearray(size))
            try:  # what is wrong with it shows in what is decoded
                self._anchor(number).fill(before)
            except StorageFailed as error:
                if not error.device_failed:
                    raise
        codec = codec_named(block.way.codec)
        return codec.decode(stored, size, block.way.element_bytes, before)

    def _other(self, number: int, size: int) -> bytes:
        """Bytes that are not those of a block, for one that cannot be decoded."""
        zeros = bytes(size)
        return b"\xff" * size if digest(zeros) == self._digest(number) else zeros

    def _digest(self, number: int) -> bytes:
        return self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def _anchor(self, number: int) -> Extent | CodedExtent:
        anchor = self._blocks[number].anchor
        assert anchor is not None  # noqa: S101 (the caller knows it)
        lender = self._file.lenders[self._file.header.lent[anchor.file - 1]]
        at = self._image_first + number
        return lender.blocks(anchor.block, 1, at, self._end, as_anchor=True)

    def _size_of(self, number: int) -> int:
        """The bytes that a block has in the image."""
        at = (self._image_first + number) * BLOCK_BYTES
        return min(BLOCK_BYTES, self._end - at)

    def _wrong(self, image: memoryview, got: int) -> list[Damage]:
        if block_digests(image[:got]) == self._digests:
            return []
        wrong = []
        for number in range(len(self._blocks)):
            at, size = number * BLOCK_BYTES, self._size_of(number)
            part = image[at : at + size]
            if digest(part) != self._digest(number):
                wrong += self._wrong_others(number, size) or [self._damage(number, part)]
        return wrong

    def _wrong_others(self, number: int, size: int) -> list[Damage]:
        """What is wrong with the blocks that this one needs."""
        if self._blocks[number].way == ROUNDED and self._file.masters is not None:
            return self._file.masters.damage(self._image_first + number, size)
        if self._blocks[number].anchor is None:
            return []
        return self._anchor(number).read(memoryview(bytearray(size)))

    def _damage(self, number: int, part: memoryview) -> Damage:
        what = f"block {self._first + number}"
        start, stop = self._place(self._blocks[number])
        error = Corrupt(
            "stored bytes have changed", where=f"{self._file.where}, {what} (bytes {start}-{stop})",
            expected=f"{DIGEST_NAME}:{self._digest(number).hex()}", found=digest_text(part),
            remedy=DAMAGE_REMEDY,
        )  # fmt: skip
        at = (self._image_first + number) * BLOCK_BYTES
        damage = damage_of(error, file=self._file.record.name, what=what, start=start, stop=stop)
        return replace(damage, data=(at, at + len(part)))

    def _place(self, block: CodedBlock) -> tuple[int, int]:
        at = self._file.record.header_bytes
        return at + block.start, at + block.stop


def _buffer(*, as_anchor: bool) -> memoryview:
    """Memory of this thread, for encoded blocks and for those of an anchor. Page-aligned, so that a
    direct read lands in it uncopied."""
    kept: dict[bool, memoryview] = _of_thread.__dict__.setdefault("buffers", {})
    if as_anchor not in kept:
        # A run of blocks, and what it takes to begin and end at whole pages.
        size = (BLOCK_BYTES if as_anchor else CHUNK_BYTES + BLOCK_BYTES) + 2 * ALIGN_BYTES
        kept[as_anchor] = memoryview(mmap.mmap(-1, size))
    return kept[as_anchor]
