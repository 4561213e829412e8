"""Where the blocks of an image lie that one file does not hold alone.

Pure. A file that *borrows* holds only blocks that differ from those of an earlier checkpoint; the
others lie in files of that one, which are linked into its folder: those are *lent*. The image is
put together from stretches of blocks, in order. Of the files, number 0 is the one that borrows, and
the others are the lent ones by their place in its list.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.digests import DIGEST_BYTES
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_LENT = 64
"""More than any writer lets a file draw on; a reader refuses more."""


class BlockPlace(NamedTuple):
    """Where a block lies: the number of the file, and of the block among those that it holds."""

    file: int
    block: int


class Stretch(NamedTuple):
    """Blocks of an image that lie one after the other in one file."""

    blocks: int
    file: int
    first: int
    """The first of them there, by the order of the blocks that the file holds."""


def stretches_of(places: Iterable[BlockPlace]) -> tuple[Stretch, ...]:
    """The places of all blocks of an image, as few stretches."""
    stretches: list[Stretch] = []
    for file, block in places:
        if stretches:
            count, last_file, first = stretches[-1]
            if file == last_file and block == first + count:
                stretches[-1] = Stretch(count + 1, file, first)
                continue
        stretches.append(Stretch(1, file, block))
    return tuple(stretches)


def places_of(stretches: Iterable[Stretch]) -> Iterator[BlockPlace]:
    """The place of each block of an image, in order."""
    for count, file, first in stretches:
        for block in range(first, first + count):
            yield BlockPlace(file, block)


class BlockMap:
    """The stretches of an image, to be asked for some of its blocks."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._starts = list(accumulate((s.blocks for s in stretches), initial=0))

    def cut(self, first: int, last: int) -> Iterator[tuple[int, Stretch]]:
        """The stretches that blocks [first, last) of the image lie in, cut to these, each with the
        number of its first block in the image."""
        at = bisect_right(self._starts, first) - 1
        while first < last:
            blocks, file, start = self._stretches[at]
            skipped = first - self._starts[at]
            count = min(blocks - skipped, last - first)
            yield first, Stretch(count, file, start + skipped)
            first, at = first + count, at + 1


def held_bytes(stretches: Sequence[Stretch], image_bytes: int, digests: bytes) -> int:
    """What the blocks take that the file itself holds, of which these are the digests: the last one
    of the image may be short, and lies behind the others."""
    whole = len(digests) // DIGEST_BYTES * BLOCK_BYTES
    short = -image_bytes % BLOCK_BYTES
    return whole - short if stretches and stretches[-1].file == 0 else whole


def problem(
    stretches: Sequence[Stretch], *, image_bytes: int, held: int, lent: Sequence[str]
) -> str | None:
    """Why these are not the blocks of an image, of which the file itself holds so many, or None."""
    if not lent or len(lent) > MAX_LENT or len(set(lent)) != len(lent):
        return f"blocks borrowed of {len(lent)} files, or of one twice"
    if any(s.blocks < 1 or s.file > len(lent) for s in stretches):
        return "a stretch of no blocks, or of no file"
    count = sum(stretch.blocks for stretch in stretches)
    if count != -(-image_bytes // BLOCK_BYTES):
        return f"stretches of {count} blocks for an image of {image_bytes} bytes"
    own = [stretch for stretch in stretches if stretch.file == 0]
    if sum(stretch.blocks for stretch in own) != held:
        return f"other than the {held} blocks of its own"
    at = 0
    for first, blocks in sorted((stretch.first, stretch.blocks) for stretch in own):
        if first != at:
            return "a block of its own that is used twice, or never"
        at += blocks
    if image_bytes % BLOCK_BYTES and stretches[-1].file == 0:
        last = stretches[-1].first + stretches[-1].blocks
        if last != held:
            return f"a short block that is number {last - 1} of {held}"
    return None
