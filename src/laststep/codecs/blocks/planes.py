"""Byte planes: byte 0 of all elements, byte 1 of all elements, …, each packed separately.

In floats of training state the exponent byte takes few values and the mantissa bytes almost all
values. Separated, the exponent plane shrinks to a third, and the others are stored unchanged.

Layout: the stored size of each plane as a 32-bit little-endian number; the planes; the tail. A
plane is packed if its stored size is less than the number of elements, and not packed if it is
equal. zstandard packs: training state has hardly any repetitions, so it is configured to spend
little time on finding them; the gain comes from its Huffman coder. It releases the GIL.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import numpy as np

from laststep.codecs.blocks.codec import BlockCodec, broken, check_declared, joined, takes
from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    import zstandard
    from numpy import uint8, unsignedinteger
    from numpy.typing import NDArray

    from laststep.codecs.blocks.codec import Part

    Elements = NDArray[unsignedinteger]

_of_thread = threading.local()
"""Working memory and contexts of zstandard, which no two threads may use at once."""
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


def scratch(use: str, count: int, width: int = 1) -> Elements:
    """Return this thread's array for `use`: `count` unsigned integers of `width` bytes, at most one
    block, with undefined content. No view of it may outlive the call of a codec.

    A new array of a megabyte for each block may be allocated page by page and returned to the
    system: with 250 page faults for each of two arrays, splitting a block into planes took six
    times as long.
    """
    kept: dict[str, NDArray[uint8]] = _of_thread.__dict__.setdefault("arrays", {})
    if use not in kept:
        kept[use] = np.empty(BLOCK_BYTES, np.uint8)
    return kept[use][: count * width].view(f"<u{width}")


def pack(data: Part) -> Part:
    """Return a zstandard frame, or `data` itself if the frame is not shorter."""
    frame = _compressor().compress(data)
    return frame if len(frame) < len(data) else data


def unpack(stored: memoryview, size_bytes: int) -> Part:
    """Return the `size_bytes` that were packed. A frame is always shorter; `size_bytes` bytes are
    not packed and returned unchanged."""
    if len(stored) == size_bytes:
        return stored
    import zstandard

    try:
        # Decompression allocates the size that the frame declares: check that first.
        content_bytes = zstandard.frame_content_size(stored)
        if content_bytes != size_bytes:
            raise broken(f"a frame of {size_bytes} bytes", f"one of {content_bytes}")
        content = _decompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise broken("a frame of zstandard", str(error)) from None
    if len(content) != size_bytes:
        raise broken(f"a frame of {size_bytes} bytes", f"one of {len(content)}")
    return content


def _compressor() -> zstandard.ZstdCompressor:
    try:
        mine: zstandard.ZstdCompressor = _of_thread.compressor
    except AttributeError:
        import zstandard

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
        mine = _of_thread.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return mine


def _decompressor() -> zstandard.ZstdDecompressor:
    try:
        mine: zstandard.ZstdDecompressor = _of_thread.decompressor
    except AttributeError:
        import zstandard

        mine = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        _of_thread.decompressor = mine
    return mine
