"""The codecs of blocks, decoded the plain way: shares no code with laststep.

What it needs to know:

- A block has elements of a width of 1, 2, 4, 8 or 16 bytes; what is left at its end and is shorter
  than one is its *tail*. `raw`: the bytes themselves.
- *Planes* of n elements: for each place in an element the number of bytes that are stored, in 32
  bits; then for each place the bytes of all elements there. n bytes are these as they are, fewer
  are a frame of zstandard.
- `planes`: the planes of all elements, the tail.
- A *folded* difference: 0, -1, 1, -2, … as 0, 1, 2, 3, …. Elements count as unsigned integers and
  differences wrap around; an element of 16 bytes is two of 8.
- `subtract`: planes of the folded differences to the base, element by element, the tail.
- `patches`: three numbers of 32 bits (how many elements differ, the bytes of their gaps, how many
  of these are stored); the gaps, a frame if fewer are stored; planes of the folded differences of
  the elements that differ; the tail. A gap is how many elements in front of one that differs do
  not, in seven bits a byte, the lowest first, with the eighth bit set where more follow.

- Rounding of fp32 to bf16 or fp16 (`rounded`) is to the nearest, ties to even.

All numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard


def packed(stored: bytes, size: int) -> bytes:
    found = stored
    if len(stored) != size:
        found = zstandard.ZstdDecompressor().decompress(stored)
    assert len(found) == size
    return found


def planes_of(data: bytes, count: int, width: int) -> tuple[bytes, bytes]:
    """The bytes of so many elements, and what lies behind their planes."""
    sizes = struct.unpack(f"<{width}I", data[: 4 * width])
    found, at = bytearray(count * width), 4 * width
    for place, size in enumerate(sizes):
        found[place::width] = packed(data[at : at + size], count)
        at += size
    return bytes(found), data[at:]


def integers(data: bytes, width: int) -> list[int]:
    whole = range(0, len(data) // width * width, width)
    return [int.from_bytes(data[at : at + width], "little") for at in whole]


def unfolded(number: int) -> int:
    return -(number + 1) // 2 if number % 2 else number // 2


def bytes_of(numbers: list[int], width: int) -> bytes:
    return b"".join((one % (1 << 8 * width)).to_bytes(width, "little") for one in numbers)


def raw(data: bytes, size: int, width: int, before: bytes) -> bytes:
    return data


def planes(data: bytes, size: int, width: int, before: bytes) -> bytes:
    found, tail = planes_of(data, size // width, width)
    return found + tail


def subtract(data: bytes, size: int, width: int, before: bytes) -> bytes:
    width = min(width, 8)
    folded, tail = planes_of(data, size // width, width)
    pairs = zip(integers(before, width), integers(folded, width), strict=True)
    return bytes_of([old + unfolded(one) for old, one in pairs], width) + tail


def patches(data: bytes, size: int, width: int, before: bytes) -> bytes:
    width = min(width, 8)
    count, gap_bytes, stored = struct.unpack("<III", data[:12])
    gaps = packed(data[12 : 12 + stored], gap_bytes)
    folded, tail = planes_of(data[12 + stored :], count, width)
    found, at, more, shift = bytearray(before[: size // width * width]), 0, 0, 0
    differences = iter(integers(folded, width))
    for byte in gaps:
        more += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            here = (at + more) * width
            old = int.from_bytes(found[here : here + width], "little")
            found[here : here + width] = bytes_of([old + unfolded(next(differences))], width)
            at, more, shift = at + more + 1, 0, 0
    assert next(differences, None) is None
    return bytes(found) + tail


def rounded(data: bytes, dtype: str) -> bytes:
    """Elements of fp32 as bf16 or fp16. A NaN is FFFF in bf16; in fp16 it keeps its sign and the
    upper bits of its fraction, and is quiet."""
    bits = np.frombuffer(data, "<u4")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype == "bfloat16":
        wide = bits.astype("u8")
        found = np.where(nan, 0xFFFF, (wide + 0x7FFF + (wide >> 16 & 1)) >> 16)
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            cast = bits.view("<f4").astype("<f2").view("<u2")
        found = np.where(nan, bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF, cast)
    return found.astype("<u2").tobytes()


def put_together(
    stored: bytes, at: int, end: int, tensors: list[Any], derived: Any, master: Any
) -> bytes:
    """Bytes [at, end) of the tensors of a file, a block that lacks what is the rounding of masters.
    It is stored as one bit for each tensor of `derived` that it has bytes of, and what is left."""
    pieces = []
    for name, dtype, _, start, stop in tensors:
        low, high = max(start, at), min(stop, end)
        if name in derived and low < high:
            pieces.append((low, high, start, dtype, derived[name]))
    size = -(-len(pieces) // 8)
    bits, rest, block = int.from_bytes(stored[:size], "little"), stored[size:], b""
    for number, (low, high, start, dtype, (file, tensor)) in enumerate(pieces):
        if bits >> number & 1:
            gap = low - at - len(block)
            block, rest = block + rest[:gap], rest[gap:]
            block += rounded(master(file, tensor)[2 * (low - start) : 2 * (high - start)], dtype)
    assert bits >> len(pieces) == 0
    return block + rest


DECODE = {"raw": raw, "rounded": raw, "planes": planes, "subtract": subtract, "patches": patches}
