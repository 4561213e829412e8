"""The blocks that a file holds which does not hold all of an image in its place.

Either as they are, each at a multiple of the block size, or encoded, one behind the other. Blocks
may come in any order, and from several threads at once. Nothing is written, nor a file made, before
the first block or object comes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from laststep.codecs.digests import DIGEST_BYTES
from laststep.flush.files import Appender, write_aligned
from laststep.format.coding import CodedBlock
from laststep.format.header import object_entries
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.flush.files import Objects
    from laststep.flush.lending import Anchor
    from laststep.format.coding import CodedBy
    from laststep.format.header import ObjectEntry
    from laststep.storage.store import FileWriting


class HeldBlocks(Protocol):
    """Blocks on their way into a file."""

    def hold(self, first: int, data: memoryview, sums: bytes) -> None:
        """Write blocks that follow each other in the image from that one on; their digests."""

    def numbers(self) -> list[int]:
        """The blocks of the image that are held, in the order that the header has them."""

    def finish(self, objects: Objects) -> tuple[FileWriting, tuple[ObjectEntry, ...]]:
        """Write what is left, and objects behind it: all but the header. Where objects lie."""


class PlainBlocks:
    """Blocks as they are."""

    def __init__(self, opened: Callable[[], FileWriting], region_bytes: int) -> None:
        self._opened = opened
        self._region = region_bytes
        self._lock = threading.Lock()
        self._writer: FileWriting | None = None
        self._slots: dict[int, int] = {}
        self._tail: tuple[int, bytes] | None = None
        """The last block of the image, if it is short and held here: it goes behind all others."""

    def hold(self, first: int, data: memoryview, sums: bytes) -> None:
        count = len(sums) // DIGEST_BYTES
        if len(data) % BLOCK_BYTES:
            count -= 1
            data, tail = data[: count * BLOCK_BYTES], data[count * BLOCK_BYTES :]
            self._tail = (first + count, bytes(tail))
        if not data:
            return
        with self._lock:
            slot = len(self._slots)
            self._slots |= {first + number: slot + number for number in range(count)}
            writer = self._open()
        writer.write_at(self._region + slot * BLOCK_BYTES, data)

    def _open(self) -> FileWriting:
        if self._writer is None:
            self._writer = self._opened()
        return self._writer

    def numbers(self) -> list[int]:
        whole = sorted(self._slots, key=self._slots.__getitem__)
        return whole if self._tail is None else [*whole, self._tail[0]]

    def finish(self, objects: Objects) -> tuple[FileWriting, tuple[ObjectEntry, ...]]:
        tail = b"" if self._tail is None else self._tail[1]
        whole = len(self._slots) * BLOCK_BYTES
        writer = self._open()
        if tail or objects:
            behind = tail + b"".join(data for _, data in objects)
            write_aligned(writer, self._region + whole, behind)
        return writer, object_entries(objects, whole + len(tail))


class BlockCoder(Protocol):
    """What makes blocks shorter."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """All that may be used."""

    def encode(
        self, number: int, data: memoryview, digest: bytes, anchor: Anchor | None
    ) -> tuple[bytes | memoryview, CodedBy]:
        """A block as it is to be stored, and how that was made; `anchor` is what it may be coded
        against."""


class EncodedBlocks:
    """Blocks that a coder makes shorter where it can."""

    def __init__(
        self,
        opened: Callable[[], FileWriting],
        region_bytes: int,
        coder: BlockCoder,
        anchor_of: Callable[[int], Anchor | None],
    ) -> None:
        """`anchor_of` gives the block that one of the image may be coded against."""
        self._opened = opened
        self._region = region_bytes
        self._coder = coder
        self._anchor_of = anchor_of
        self._lock = threading.Lock()
        self._writer: FileWriting | None = None
        self._appender: Appender | None = None
        self._blocks: dict[int, CodedBlock] = {}

    def hold(self, first: int, data: memoryview, sums: bytes) -> None:
        for number in range(first, first + len(sums) // DIGEST_BYTES):
            at = (number - first) * BLOCK_BYTES
            sum_at = (number - first) * DIGEST_BYTES
            block, anchor = data[at : at + BLOCK_BYTES], self._anchor_of(number)
            stored, way = self._coder.encode(
                number, block, sums[sum_at : sum_at + DIGEST_BYTES], anchor
            )
            start = self._append(stored)
            place = anchor.place if anchor is not None and way.anchored else None
            with self._lock:
                self._blocks[number] = CodedBlock(start, len(stored), way, place)

    def _append(self, stored: bytes | memoryview) -> int:
        with self._lock:
            if self._appender is None:
                self._writer = self._opened()
                self._appender = Appender(self._writer, self._region)
            appender = self._appender
        return appender.append(stored)

    def numbers(self) -> list[int]:
        return sorted(self._blocks)

    def coded(self) -> dict[int, CodedBlock]:
        """How each is coded, by its number in the image; anchors in the numbers of the lender."""
        return self._blocks

    def finish(self, objects: Objects) -> tuple[FileWriting, tuple[ObjectEntry, ...]]:
        at = max((block.stop for block in self._blocks.values()), default=0)
        self._append(b"".join(data for _, data in objects))
        assert self._appender is not None  # noqa: S101 (just used)
        assert self._writer is not None  # noqa: S101 (as above)
        self._appender.finish()
        return self._writer, object_entries(objects, at)
