"""The codecs `planes`, `subtract` and `patches`, which store byte planes.

`planes`: byte 0 of all elements, byte 1 of all elements, …, each packed separately. In floats of
training state the exponent byte takes few values and the mantissa bytes almost all values.
Separated, the exponent plane shrinks to a third, and the others are stored unchanged. Layout: the
stored size of each plane as a 32-bit little-endian number; the planes; the tail. A plane is packed
if its stored size is less than the number of elements, and not packed if it is equal. zstandard
packs: training state has hardly any repetitions, so it is configured to spend little time on
finding them; the gain comes from its Huffman coder. It releases the GIL.

`subtract`: the planes of the differences from the earlier version of the block. Elements are
treated as unsigned integers and differences wrap around, so any bit pattern is restored, whatever
number it represents. A difference is *folded*, its sign moved into the lowest bit: the upper planes
of small differences are then zeros for either sign, not a mix of zeros and ones. For bf16 weights
that are one step apart, folding improves the compression ratio from 3.0 to 4.1. An element of 16
bytes is treated as two of 8, which suits complex numbers.

`patches`: only the elements that differ from the earlier version. Layout: three 32-bit
little-endian numbers (the number of elements that differ, the bytes of the gaps, the stored bytes
of the gaps); the gaps, packed; the folded differences of these elements in byte planes; the tail. A
gap is the number of equal elements before one that differs, with seven bits per byte, lowest first,
and the eighth bit set if more bytes follow. Differences are stored instead of values: at a low
learning rate most are one step up or down, and take about 1 bit instead of 11.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError

if TYPE_CHECKING:
    from numpy import int64, uint8, unsignedinteger
    from numpy.typing import NDArray

    from laststep.codecs.blocks import BlockCodec

    Part = bytes | memoryview
    Elements = NDArray[unsignedinteger]

_BY_ARITHMETIC = (1, 2, 4)
"""Element sizes whose planes are made by shifts and casts, for which numpy has vector instructions.
Splitting and merging run at 16 and 11 GB/s for 2 bytes, and at 6 and 4 GB/s for 4 bytes; strided
copies reach 3.4 GB/s for any size. For 8 bytes shifts reach only 2.8 and 1.8 GB/s."""
_WIDEST_BYTES = 8
_HEAD = struct.Struct("<III")
_GAP_BYTES = 3
"""The maximum size of a gap: a block has at most 2^20 elements, and three bytes carry 21 bits."""
ONE_IN = 4
"""Use patches if at most one element in ONE_IN differs: up to there they are smaller than the
result of `subtract`, and faster to encode and decode. Also limits the memory for indices."""


class Planes:
    name = "planes"

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        elements, tail = _elements_of(data, element_bytes)
        planes = _packed_planes(elements.view(np.uint8), element_bytes)
        return _joined([*planes, tail], data)

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        count, tail_bytes = divmod(size_bytes, element_bytes)
        elements, tail = _unpacked_planes(data, count, element_bytes)
        return _with_tail(elements, tail, tail_bytes)


class Subtract:
    name = "subtract"

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        if before is None or before.nbytes != data.nbytes:
            return None
        width = min(element_bytes, _WIDEST_BYTES)
        new, tail = _elements_of(data, width)
        old, _ = _elements_of(before, width)
        differences = np.subtract(new, old, out=_scratch("differences", len(new), width))
        planes = _packed_planes(_fold(differences).view(np.uint8), width)
        return _joined([*planes, tail], data)

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        width = min(element_bytes, _WIDEST_BYTES)
        old = _earlier(before, size_bytes, width)
        folded, tail = _unpacked_planes(data, len(old), width)
        new = _unfold(folded.view(f"<u{width}"))
        new += old
        return _with_tail(new, tail, size_bytes % width)


class Patches:
    name = "patches"

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        if before is None or before.nbytes != data.nbytes:
            return None
        width = min(element_bytes, _WIDEST_BYTES)
        new, tail = _elements_of(data, width)
        old, _ = _elements_of(before, width)
        differs = new != old
        if np.count_nonzero(differs) * ONE_IN > len(new):
            return None
        indices = np.flatnonzero(differs)
        gaps = _gaps_to_bytes(np.diff(indices, prepend=-1) - 1)
        stored = _pack(gaps.data)
        head = _HEAD.pack(len(indices), len(gaps), len(stored))
        planes = _packed_planes(_fold(new[indices] - old[indices]).view(np.uint8), width)
        return _joined([head, stored, *planes, tail], data)

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        width = min(element_bytes, _WIDEST_BYTES)
        old = _earlier(before, size_bytes, width)
        new = _scratch("new", len(old), width)
        np.copyto(new, old)
        if len(data) < _HEAD.size:
            raise _broken(f"a head of {_HEAD.size} bytes", f"{len(data)}")
        count, gap_bytes, stored_bytes = _HEAD.unpack_from(data)
        behind = _HEAD.size + stored_bytes
        if count * ONE_IN > len(new) or not count <= gap_bytes <= count * _GAP_BYTES:
            found = f"{count} in gaps of {gap_bytes} bytes"
            raise _broken(f"patches of {len(new)} elements", found)
        gaps = np.frombuffer(_unpack(data[_HEAD.size : behind], gap_bytes), np.uint8)
        indices = np.cumsum(_gaps_from_bytes(gaps, count) + 1) - 1
        if count and indices[-1] >= len(new):
            raise _broken(f"patches of {len(new)} elements", f"one at {indices[-1]}")
        folded, tail = _unpacked_planes(data[behind:], count, width)
        new[indices] += _unfold(folded.view(f"<u{width}"))
        return _with_tail(new, tail, size_bytes % width)


def _broken(expected: str, found: str) -> CorruptError:
    return CorruptError("cannot decode a block", expected=expected, found=found)


def _joined(parts: list[Part], block: memoryview) -> bytes | None:
    """Concatenate the parts; return None unless the result is shorter than the block."""
    return b"".join(parts) if sum(map(len, parts)) < block.nbytes else None


def _earlier(before: memoryview | None, size_bytes: int, width: int) -> Elements:
    """Return the earlier block's elements. Raise `CorruptError` unless it has `size_bytes`."""
    if before is None or before.nbytes != size_bytes:
        found = "none" if before is None else f"one of {before.nbytes}"
        raise _broken(f"an earlier block of {size_bytes} bytes", found)
    return _elements_of(before, width)[0]


def _elements_of(data: memoryview, width: int) -> tuple[Elements, memoryview]:
    """Return all whole elements and the tail. Elements above 8 bytes are returned as bytes."""
    whole = data.nbytes - data.nbytes % width
    flat = data.cast("B") if data.nbytes else data
    kind = f"<u{width}" if width <= _WIDEST_BYTES else "<u1"
    return np.frombuffer(flat[:whole], kind), flat[whole:]


def _with_tail(elements: Elements, tail: memoryview, tail_bytes: int) -> bytes:
    """Return the whole block. Raise `CorruptError` if the tail is not exactly `tail_bytes` long."""
    if len(tail) != tail_bytes:
        raise _broken(f"{tail_bytes} bytes behind all else", f"{len(tail)}")
    return elements.tobytes() + tail if tail_bytes else elements.tobytes()


def _packed_planes(elements: Elements, element_bytes: int) -> list[Part]:
    """Return the sizes of the planes, followed by each plane."""
    planes: list[Part] = [_pack(plane.data) for plane in _split(elements, element_bytes)]
    return [struct.pack(f"<{element_bytes}I", *map(len, planes)), *planes]


def _unpacked_planes(
    stored: memoryview, count: int, element_bytes: int
) -> tuple[Elements, memoryview]:
    """Return the bytes of `count` elements, and the stored bytes after their planes."""
    at = 4 * element_bytes
    if len(stored) < at:
        raise _broken(f"sizes of {element_bytes} planes", f"{len(stored)} bytes")
    sizes = struct.unpack_from(f"<{element_bytes}I", stored)
    if max(sizes) > count or at + sum(sizes) > len(stored):
        raise _broken(f"planes of at most {count} bytes in {len(stored)}", f"planes of {sizes}")
    planes = []
    for size in sizes:
        plane = _unpack(stored[at : at + size], count)
        planes.append(np.frombuffer(plane, np.uint8))
        at += size
    return _merge(planes, count, element_bytes), stored[at:]


def _split(elements: Elements, element_bytes: int) -> Elements:
    """Return an array with one row for each plane."""
    if element_bytes == 1:
        return elements.reshape(1, -1)
    planes = _scratch("planes", len(elements)).reshape(element_bytes, -1)
    if element_bytes not in _BY_ARITHMETIC:
        np.copyto(planes, elements.reshape(-1, element_bytes).T)
        return planes
    whole = elements.view(f"<u{element_bytes}")
    shifted = _scratch("shifted", len(whole), element_bytes)
    np.copyto(planes[0], whole, casting="unsafe")
    for place in range(1, element_bytes):
        np.right_shift(whole, 8 * place, out=shifted)
        np.copyto(planes[place], shifted, casting="unsafe")
    return planes


def _merge(planes: list[Elements], count: int, element_bytes: int) -> Elements:
    if element_bytes not in _BY_ARITHMETIC:
        merged = _scratch("merged", count * element_bytes)
        for place, plane in enumerate(planes):
            merged[place::element_bytes] = plane
        return merged
    whole = _scratch("merged", count, element_bytes)
    np.copyto(whole, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(whole, 8, out=whole)
        np.bitwise_or(whole, plane, out=whole)
    return whole.view(np.uint8)


def _scratch(use: str, count: int, width: int = 1) -> Elements:
    """Return this thread's array for `use`: `count` unsigned integers of `width` bytes, at most one
    block, with undefined content. No view of it may outlive the call of a codec.

    A new array of a megabyte for each block may be allocated page by page and returned to the
    system: with 250 page faults for each of two arrays, splitting a block into planes took six
    times as long.
    """
    kept = _of_thread.arrays
    if use not in kept:
        kept[use] = np.empty(BLOCK_BYTES, np.uint8)
    return kept[use][: count * width].view(f"<u{width}")


def _pack(data: Part) -> Part:
    """Return a zstandard frame, or `data` itself if the frame is not shorter."""
    frame = _of_thread.compressor.compress(data)
    return frame if len(frame) < len(data) else data


def _unpack(stored: memoryview, size_bytes: int) -> Part:
    """Unpack to `size_bytes`; data of that size is not packed, because a frame is shorter."""
    if len(stored) == size_bytes:
        return stored
    try:
        # Decompression allocates the size that the frame declares: check that first.
        content_bytes = zstandard.frame_content_size(stored)
        if content_bytes != size_bytes:
            raise _broken(f"a frame of {size_bytes} bytes", f"one of {content_bytes}")
        content = _of_thread.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _broken("a frame of zstandard", str(error)) from None
    if len(content) != size_bytes:
        raise _broken(f"a frame of {size_bytes} bytes", f"one of {len(content)}")
    return content


class _OfThread(threading.local):
    """Contexts of zstandard and working memory, which no two threads may use at once."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            compression_level=1,
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            min_match=7,
            target_length=0,  # any other value disables the Huffman coder in this strategy
            write_content_size=True,
            write_checksum=False,  # blocks have digests
            write_dict_id=False,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        self.arrays: dict[str, NDArray[uint8]] = {}


_of_thread = _OfThread()


def _fold(differences: Elements) -> Elements:
    """Map 0, -1, 1, -2, … to 0, 1, 2, 3, …, in place."""
    width = differences.itemsize
    signs = _scratch("signs", len(differences), width)
    np.right_shift(differences.view(f"<i{width}"), 8 * width - 1, out=signs.view(f"<i{width}"))
    np.left_shift(differences, 1, out=differences)
    np.bitwise_xor(differences, signs, out=differences)
    return differences


def _unfold(folded: Elements) -> Elements:
    """Undo `fold`, in place."""
    signs = _scratch("signs", len(folded), folded.itemsize)
    np.bitwise_and(folded, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(folded, 1, out=folded)
    np.bitwise_xor(folded, signs, out=folded)
    return folded


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
        raise _broken(f"{count} gaps of at most {_GAP_BYTES} bytes", f"{len(ends)} that end")
    starts = ends - sizes + 1
    gaps = np.zeros(count, np.int64)
    for place in range(_GAP_BYTES):
        here = sizes > place
        gaps[here] |= (stored[starts[here] + place].astype(np.int64) & 0x7F) << 7 * place
    return gaps


CODECS: dict[str, BlockCodec] = {codec.name: codec for codec in (Planes(), Subtract(), Patches())}
