"""Differences from the earlier version of the block, element by element, in byte planes.

Elements are treated as unsigned integers and differences wrap around, so any bit pattern is
restored, whatever number it represents. A difference is *folded*, its sign moved into the lowest
bit: the upper planes of small differences are then zeros for either sign, not a mix of zeros and
ones. For bf16 weights that are one step apart, folding improves the compression ratio from 3.0 to
4.1. An element of 16 bytes is treated as two of 8, which suits complex numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from laststep.codecs.blocks.codec import BlockCodec, broken, check_declared, joined, takes
from laststep.codecs.blocks.planes import (
    elements_of,
    packed_planes,
    scratch,
    unpacked_planes,
    with_tail,
)

if TYPE_CHECKING:
    from laststep.codecs.blocks.planes import Elements

WIDEST_BYTES = 8


class Subtract:
    """Encodes the byte planes of folded differences."""

    name = "subtract"
    lossless = True
    needs = "zstandard"

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        if before is None or not comparable(data, before, element_bytes):
            return None
        width = min(element_bytes, WIDEST_BYTES)
        new, tail = integers_of(data, width)
        old, _ = integers_of(before, width)
        differences = np.subtract(new, old, out=scratch("differences", len(new), width))
        folded = fold(differences).view(np.uint8)
        return joined([*packed_planes(folded, width), tail], below_bytes=data.nbytes)

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        old = checked_before(before, size_bytes, element_bytes)
        width = min(element_bytes, WIDEST_BYTES)
        count, tail_bytes = divmod(size_bytes, width)
        folded, tail = unpacked_planes(data, count, width)
        new = unfold(folded.view(f"<u{width}"))
        new += integers_of(old, width)[0]
        return with_tail(new.view(np.uint8), tail, tail_bytes)


CODEC: BlockCodec = Subtract()


def comparable(data: memoryview, before: memoryview, element_bytes: int) -> bool:
    """Return True if a block can be encoded by its differences from `before`."""
    return takes(data.nbytes, element_bytes) and data.nbytes == before.nbytes


def checked_before(before: memoryview | None, size_bytes: int, element_bytes: int) -> memoryview:
    """Return `before`. Raise `CorruptError` if it is missing or not `size_bytes` long."""
    check_declared(size_bytes, element_bytes)
    if before is None or before.nbytes != size_bytes:
        found = "none" if before is None else f"one of {before.nbytes}"
        raise broken(f"an earlier block of {size_bytes} bytes", found)
    return before


def integers_of(data: memoryview, width: int) -> tuple[Elements, memoryview]:
    """Return all whole elements as unsigned integers, and the tail."""
    elements, tail = elements_of(data, width)
    return elements.view(f"<u{width}"), tail


def fold(differences: Elements) -> Elements:
    """Map 0, -1, 1, -2, … to 0, 1, 2, 3, …, in place."""
    width = differences.itemsize
    signs = scratch("signs", len(differences), width)
    np.right_shift(differences.view(f"<i{width}"), 8 * width - 1, out=signs.view(f"<i{width}"))
    np.left_shift(differences, 1, out=differences)
    np.bitwise_xor(differences, signs, out=differences)
    return differences


def unfold(folded: Elements) -> Elements:
    """Undo `fold`, in place."""
    signs = scratch("signs", len(folded), folded.itemsize)
    np.bitwise_and(folded, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(folded, 1, out=folded)
    np.bitwise_xor(folded, signs, out=folded)
    return folded
