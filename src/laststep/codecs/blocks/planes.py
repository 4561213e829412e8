"""Byte planes: byte 0 of all elements, byte 1 of all elements, …, each packed separately.

In floats of training state the exponent byte takes few values and the mantissa bytes almost all
values. Separated, the exponent plane shrinks to a third, and the others are stored unchanged.

Layout: the stored size of each plane as a 32-bit little-endian number; the planes; the tail. A
plane is packed if its stored size is less than the number of elements, and not packed if it is
equal.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from laststep.codecs.blocks.codec import BlockCodec, broken, check_declared, joined, takes
from laststep.codecs.blocks.entropy import pack, unpack
from laststep.codecs.blocks.scratch import scratch

if TYPE_CHECKING:
    from laststep.codecs.blocks.codec import Part
    from laststep.codecs.blocks.scratch import Elements

_BY_ARITHMETIC = (1, 2, 4)
"""Element sizes whose planes are made by shifts and casts, for which numpy has vector instructions.
Splitting and merging run at 16 and 11 GB/s for 2 bytes, and at 6 and 4 GB/s for 4 bytes; strided
copies reach 3.4 GB/s for any size. For 8 bytes shifts reach only 2.8 and 1.8 GB/s."""


class Planes:
    """Encodes the byte planes of the elements."""

    name = "planes"
    lossless = True
    needs = "zstandard"

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        if not takes(data.nbytes, element_bytes):
            return None
        elements, tail = elements_of(data, element_bytes)
        return joined([*packed_planes(elements, element_bytes), tail], below_bytes=data.nbytes)

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        check_declared(size_bytes, element_bytes)
        count, tail_bytes = divmod(size_bytes, element_bytes)
        elements, tail = unpacked_planes(data, count, element_bytes)
        return with_tail(elements, tail, tail_bytes)


CODEC: BlockCodec = Planes()


def elements_of(data: memoryview, element_bytes: int) -> tuple[Elements, memoryview]:
    """Return the bytes of all whole elements, and the tail."""
    whole = data.nbytes - data.nbytes % element_bytes
    flat = data.cast("B") if data.nbytes else data
    return np.frombuffer(flat[:whole], np.uint8), flat[whole:]


def with_tail(elements: Elements, tail: memoryview, tail_bytes: int) -> bytes:
    """Return the whole block. Raise `CorruptError` if the tail is not exactly `tail_bytes` long."""
    if len(tail) != tail_bytes:
        raise broken(f"{tail_bytes} bytes behind all else", f"{len(tail)}")
    return elements.tobytes() + tail if tail_bytes else elements.tobytes()


def packed_planes(elements: Elements, element_bytes: int) -> list[Part]:
    """Return the sizes of the planes, followed by each plane."""
    planes: list[Part] = [pack(plane.data) for plane in _split(elements, element_bytes)]
    return [struct.pack(f"<{element_bytes}I", *map(len, planes)), *planes]


def unpacked_planes(
    stored: memoryview, count: int, element_bytes: int
) -> tuple[Elements, memoryview]:
    """Return the bytes of `count` elements, and the stored bytes after their planes."""
    at = 4 * element_bytes
    if len(stored) < at:
        raise broken(f"sizes of {element_bytes} planes", f"{len(stored)} bytes")
    sizes = struct.unpack_from(f"<{element_bytes}I", stored)
    if max(sizes) > count or at + sum(sizes) > len(stored):
        raise broken(f"planes of at most {count} bytes in {len(stored)}", f"planes of {sizes}")
    planes = []
    for size in sizes:
        plane = unpack(stored[at : at + size], count)
        planes.append(np.frombuffer(plane, np.uint8))
        at += size
    return _merge(planes, count, element_bytes), stored[at:]


def _split(elements: Elements, element_bytes: int) -> Elements:
    """Return an array with one row for each plane."""
    if element_bytes == 1:
        return elements.reshape(1, -1)
    planes = scratch("planes", len(elements)).reshape(element_bytes, -1)
    if element_bytes not in _BY_ARITHMETIC:
        np.copyto(planes, elements.reshape(-1, element_bytes).T)
        return planes
    whole = elements.view(f"<u{element_bytes}")
    shifted = scratch("shifted", len(whole), element_bytes)
    np.copyto(planes[0], whole, casting="unsafe")
    for place in range(1, element_bytes):
        np.right_shift(whole, 8 * place, out=shifted)
        np.copyto(planes[place], shifted, casting="unsafe")
    return planes


def _merge(planes: list[Elements], count: int, element_bytes: int) -> Elements:
    if element_bytes not in _BY_ARITHMETIC:
        merged = scratch("merged", count * element_bytes)
        for place, plane in enumerate(planes):
            merged[place::element_bytes] = plane
        return merged
    whole = scratch("merged", count, element_bytes)
    np.copyto(whole, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(whole, 8, out=whole)
        np.bitwise_or(whole, plane, out=whole)
    return whole.view(np.uint8)
