"""How the blocks that a file holds are encoded: where each lies, its length, and by which codec.

Pure. A file whose blocks are *coded* has them as bytes of any length, one after the other, gaps
allowed; without a coding, each block lies at its own multiple of the block size. A block may be
coded against an earlier one, its *anchor*, which lies in a lent file and is not coded so itself: to
decode a block takes one other block at the most.
"""

from __future__ import annotations

import base64
import re
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.format.borrowing import BlockPlace, Stretch, places_of, stretches_of
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

CODEC_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ELEMENT_BYTES = (1, 2, 4, 8, 16)
_MAX_WAYS = 256
_MAX_START = (1 << 63) - 1


class CodedBy(NamedTuple):
    """How a block is encoded: the codec's name, the size of the elements that it was told, and
    whether it was given an anchor."""

    codec: str
    element_bytes: int
    anchored: bool


RAW = CodedBy("raw", 1, anchored=False)


class CodedBlock(NamedTuple):
    """One block that a file holds: where its encoded bytes lie in the data, and how they are to be
    decoded."""

    start: int
    size_bytes: int
    way: CodedBy
    anchor: BlockPlace | None = None
    """In the numbers of the file: 0 is itself, which has no anchor; 1 the first that is lent."""

    @property
    def stop(self) -> int:
        return self.start + self.size_bytes


class CodingDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A coding as the header's JSON has it; tables are base64, of integers in little-endian order,
    one for each block that is held."""

    ways: tuple[tuple[str, int, bool], ...]
    way: str
    """The number of its way, a byte for each block."""
    starts: str
    """8 bytes for each."""
    sizes: str
    """4 bytes for each."""
    anchors: tuple[tuple[int, int, int], ...] = ()
    """Stretches, of the blocks that have an anchor, in order."""


def encode(blocks: Sequence[CodedBlock]) -> CodingDocument:
    """The tables of these blocks."""
    ways = {way: number for number, way in enumerate(dict.fromkeys(b.way for b in blocks))}
    count = len(blocks)
    return CodingDocument(
        ways=tuple(ways),
        way=_text(bytes(ways[block.way] for block in blocks)),
        starts=_text(struct.pack(f"<{count}Q", *(block.start for block in blocks))),
        sizes=_text(struct.pack(f"<{count}I", *(block.size_bytes for block in blocks))),
        anchors=stretches_of(block.anchor for block in blocks if block.anchor is not None),
    )


def decode(document: CodingDocument, *, held: int, lent: int) -> tuple[CodedBlock, ...]:
    """The blocks of a file that holds so many, and to which so many files are lent. `ValueError`,
    in words, for what cannot be."""
    ways = tuple(map(CodedBy._make, document.ways))
    numbers = _table(document.way, held, "B")
    starts = _table(document.starts, held, "Q")
    sizes = _table(document.sizes, held, "I")
    if len(ways) > _MAX_WAYS or max(numbers, default=-1) >= len(ways):
        raise ValueError(f"a block coded in way {max(numbers, default=0)} of {len(ways)}")
    for way in ways:
        if CODEC_NAME.fullmatch(way.codec) is None or way.element_bytes not in _ELEMENT_BYTES:
            codec = way.codec[:100]
            raise ValueError(f"blocks coded by {codec!r}, in elements of {way.element_bytes}")
    due = sum(ways[number].anchored for number in numbers)
    stretches = tuple(map(Stretch._make, document.anchors))
    if sum(stretch.blocks for stretch in stretches) != due:
        raise ValueError(f"other than {due} anchors")
    if any(s.blocks < 1 or s.first < 0 or not 1 <= s.file <= lent for s in stretches):
        raise ValueError("an anchor in no file that is lent")
    anchors = places_of(stretches)
    blocks = tuple(
        CodedBlock(start, size, ways[number], next(anchors) if ways[number].anchored else None)
        for number, start, size in zip(numbers, starts, sizes, strict=True)
    )
    problem = overlap(blocks)
    if problem is not None:
        raise ValueError(problem)
    return blocks


def overlap(blocks: Sequence[CodedBlock]) -> str | None:
    """Why these cannot lie in one file, in words, or None."""
    at = 0
    for block in sorted(blocks, key=lambda block: (block.start, block.stop)):
        if block.start < at or block.stop > _MAX_START or block.size_bytes > BLOCK_BYTES:
            return f"{block.size_bytes} bytes of a block at {block.start}, where {at} is free"
        at = block.stop
    return None


def held_bytes(blocks: Sequence[CodedBlock]) -> int:
    """The bytes in front of the objects."""
    return max((block.stop for block in blocks), default=0)


def _text(table: bytes) -> str:
    return base64.b64encode(table).decode("ascii")


def _table(text: str, count: int, kind: str) -> tuple[int, ...]:
    table = struct.Struct(f"<{count}{kind}")
    # Looked at before it is decoded: a long one costs nothing then.
    if len(text) != -(-table.size // 3) * 4:
        raise ValueError(f"a table of {len(text)} characters for {count} blocks")
    try:
        return table.unpack(base64.b64decode(text, validate=True))
    except (ValueError, struct.error):
        raise ValueError("a table that is no base64") from None
