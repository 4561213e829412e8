"""Patches: only the elements that differ from the earlier version of the block.

Layout: three 32-bit little-endian numbers (the number of elements that differ, the bytes of the
gaps, the stored bytes of the gaps); the gaps, packed; the folded differences of these elements in
byte planes; the tail. A gap is the number of equal elements before one that differs, with seven
bits per byte, lowest first, and the eighth bit set if more bytes follow. Differences are stored
instead of values: at a low learning rate most are one step up or down, and take about 1 bit instead
of 11.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from laststep.codecs.blocks.codec import BlockCodec, broken, joined
from laststep.codecs.blocks.planes import (
    pack,
    packed_planes,
    scratch,
    unpack,
    unpacked_planes,
    with_tail,
)
from laststep.codecs.blocks.subtract import (
    WIDEST_BYTES,
    checked_before,
    comparable,
    fold,
    integers_of,
    unfold,
)

if TYPE_CHECKING:
    from numpy import int64, uint8
    from numpy.typing import NDArray

_HEAD = struct.Struct("<III")
_GAP_BYTES = 3
"""The maximum size of a gap: a block has at most 2^20 elements, and three bytes carry 21 bits."""
ONE_IN = 4
"""Use patches if at most one element in ONE_IN differs: up to there they are smaller than the
result of `subtract`, and faster to encode and decode. Also limits the memory for indices."""


class Patches:
    """Encodes gaps and differences of the elements that differ."""

    name = "patches"
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
        differs = new != old
        if np.count_nonzero(differs) * ONE_IN > len(new):
            return None
        indices = np.flatnonzero(differs)
        gaps = _gaps_to_bytes(np.diff(indices, prepend=-1) - 1)
        stored = pack(gaps.data)
        head = _HEAD.pack(len(indices), len(gaps), len(stored))
        folded = fold(new[indices] - old[indices]).view(np.uint8)
        return joined([head, stored, *packed_planes(folded, width), tail], below_bytes=data.nbytes)

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        old = checked_before(before, size_bytes, element_bytes)
        width = min(element_bytes, WIDEST_BYTES)
        earlier, _ = integers_of(old, width)
        new = scratch("new", len(earlier), width)
        np.copyto(new, earlier)
        if len(data) < _HEAD.size:
            raise broken(f"a head of {_HEAD.size} bytes", f"{len(data)}")
        count, gap_bytes, stored_bytes = _HEAD.unpack_from(data)
        behind = _HEAD.size + stored_bytes
        if count * ONE_IN > len(new) or not count <= gap_bytes <= count * _GAP_BYTES:
            found = f"{count} in gaps of {gap_bytes} bytes"
            raise broken(f"patches of {len(new)} elements", found)
        gaps = np.frombuffer(unpack(data[_HEAD.size : behind], gap_bytes), np.uint8)
        indices = np.cumsum(_gaps_from_bytes(gaps, count) + 1) - 1
        if count and indices[-1] >= len(new):
            raise broken(f"patches of {len(new)} elements", f"one at {indices[-1]}")
        folded, tail = unpacked_planes(data[behind:], count, width)
        new[indices] += unfold(folded.view(f"<u{width}"))
        return with_tail(new.view(np.uint8), tail, size_bytes % width)


CODEC: BlockCodec = Patches()


def _gaps_to_bytes(gaps: NDArray[int64]) -> NDArray[uint8]:
    if gaps.max(initial=0) < 0x80:
        return gaps.astype(np.uint8)
    sizes = 1 + (gaps >= 1 << 7) + (gaps >= 1 << 14)
    ends = np.cumsum(sizes)
    out = np.empty(ends[-1], np.uint8)
    starts = ends - sizes
    for place in range(_GAP_BYTES):
        here = sizes > place
        more = sizes[here] > place + 1
        out[starts[here] + place] = (gaps[here] >> 7 * place) & 0x7F | more << 7
    return out


def _gaps_from_bytes(stored: NDArray[uint8], count: int) -> NDArray[int64]:
    ends = np.flatnonzero(stored < 0x80)
    if len(ends) == count == len(stored):
        return stored.astype(np.int64)
    sizes = np.diff(ends, prepend=-1)
    if len(ends) != count or ends[-1] + 1 != len(stored) or sizes.max() > _GAP_BYTES:
        raise broken(f"{count} gaps of at most {_GAP_BYTES} bytes", f"{len(ends)} that end")
    starts = ends - sizes + 1
    gaps = np.zeros(count, np.int64)
    for place in range(_GAP_BYTES):
        here = sizes > place
        gaps[here] |= (stored[starts[here] + place].astype(np.int64) & 0x7F) << 7 * place
    return gaps
