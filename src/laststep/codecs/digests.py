"""Digests that detect accidental corruption: xxh3-128 of a buffer, and of each of its blocks.

Knows nothing of the source of the bytes. All functions release the GIL while they hash large
buffers, and may be called from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    from laststep.errors import LaststepError

DIGEST_NAME = "xxh3-128"
DIGEST_BYTES = 16


digest = xxhash.xxh3_128_digest
"""Returns the 16-byte digest of its argument, which MUST be contiguous."""


def digest_text(data: bytes | bytearray | memoryview) -> str:
    """Return the digest as manifests state it: its name, a colon and 32 lower-case hex digits."""
    return f"{DIGEST_NAME}:{digest(data).hex()}"


def without_digests(error: LaststepError) -> LaststepError:
    """Return the error for readers who have no use for digests."""
    fields = {"expected": error.expected, "found": error.found}
    prefix = f"{DIGEST_NAME}:"
    return error.amended(
        **{name: None for name, text in fields.items() if (text or "").startswith(prefix)}
    )


def block_digests(data: memoryview) -> bytes:
    """Return the concatenated digests of the blocks of `data`; the last block may be short."""
    digests = bytearray()
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    for start in range(0, flat.nbytes, BLOCK_BYTES):
        digests += digest(flat[start : start + BLOCK_BYTES])
    return bytes(digests)
