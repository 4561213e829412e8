"""Digests that detect accidents: xxh3-128 of a buffer, and of each block of one.

Knows nothing of where the bytes come from. Both functions let go of the GIL while they hash large
buffers and may be called from any thread.
"""

from __future__ import annotations

import xxhash

from laststep.terms import BLOCK_BYTES

DIGEST_NAME = "xxh3-128"
DIGEST_BYTES = 16


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """The 16 bytes of the digest of `data`, which MUST be contiguous."""
    return xxhash.xxh3_128_digest(data)


def digest_text(data: bytes | bytearray | memoryview) -> str:
    """The digest as manifests write it: its name, a colon and 32 lower-case hex digits."""
    return f"{DIGEST_NAME}:{digest(data).hex()}"


def block_digests(data: memoryview) -> bytes:
    """The digests of the blocks of `data`, one after the other; the last block may be short."""
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    starts = range(0, flat.nbytes, BLOCK_BYTES)
    return b"".join(digest(flat[start : start + BLOCK_BYTES]) for start in starts)
