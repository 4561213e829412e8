"""Digests: known values, and blocks that cover a buffer."""

from __future__ import annotations

import array

import pytest

from laststep.codecs.digests import block_digests, digest, digest_text
from laststep.constants import BLOCK_BYTES


def test_the_digest_of_nothing_is_the_published_one() -> None:
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest_text(b"") == "xxh3-128:99aa06d3014798d86001c324468d497f"


def test_a_view_and_its_bytes_have_the_same_digest() -> None:
    assert digest(memoryview(b"abc")) == digest(b"abc")


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_every_block_has_its_own_digest(size: int) -> None:
    data = bytes(size)
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, size, BLOCK_BYTES)]
    assert block_digests(memoryview(data)) == b"".join(map(digest, blocks))


def test_blocks_are_counted_in_bytes_whatever_the_view_holds() -> None:
    numbers = array.array("d", [1.0, 2.0])
    assert block_digests(memoryview(numbers)) == digest(numbers.tobytes())
