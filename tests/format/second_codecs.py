"""The codecs of blocks, written from docs/format.md for `second_reader`."""

from __future__ import annotations

import struct

import zstandard


def unpacked(stored: bytes, size: int) -> bytes:
    """Bytes that are stored as they are, or fewer as a frame of zstandard."""
    found = stored
    if len(stored) != size:
        found = zstandard.ZstdDecompressor().decompress(stored)
    assert len(found) == size
    return found


def elements(data: bytes, count: int, width: int) -> tuple[bytes, bytes]:
    """So many elements, stored as planes, and what lies behind these."""
    found, at = bytearray(count * width), 4 * width
    for place, size in enumerate(struct.unpack(f"<{width}I", data[:at])):
        found[place::width] = unpacked(data[at : at + size], count)
        at += size
    return bytes(found), data[at:]


def sums(before: bytes, folded: bytes, width: int) -> bytes:
    """Elements of a base, with folded differences added to them."""
    found = b""
    for at in range(0, len(folded), width):
        one = int.from_bytes(folded[at : at + width], "little")
        old = int.from_bytes(before[at : at + width], "little")
        new = old + (-(one + 1) // 2 if one % 2 else one // 2)
        found += (new % (1 << 8 * width)).to_bytes(width, "little")
    return found


def decode(codec: str, data: bytes, size: int, width: int, before: bytes) -> bytes:
    if codec == "raw":
        return data
    if codec == "planes":
        found, tail = elements(data, size // width, width)
        return found + tail
    width = min(width, 8)
    if codec == "subtract":
        folded, tail = elements(data, size // width, width)
        return sums(before, folded, width) + tail
    assert codec == "patches"
    count, gap_bytes, stored = struct.unpack("<III", data[:12])
    folded, tail = elements(data[12 + stored :], count, width)
    patched, at, gap, shift, nth = bytearray(before[: size // width * width]), 0, 0, 0, 0
    for byte in unpacked(data[12 : 12 + stored], gap_bytes):
        gap += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            here, one = slice((at + gap) * width, (at + gap + 1) * width), nth * width
            patched[here] = sums(bytes(patched[here]), folded[one : one + width], width)
            at, gap, shift, nth = at + gap + 1, 0, 0, nth + 1
    assert nth == count
    return bytes(patched) + tail
