"""The checks that others run on their codecs find what is wrong with one."""

from __future__ import annotations

import random
import threading

import pytest

from expect import raises
from laststep.codecs.blocks.codec import Raw
from laststep.errors import CorruptError
from laststep.testing.codecs import check_codec


class Reversed(Raw):
    """A codec as somebody might write it, and right."""

    name = "reversed"

    def encode(self, data, element_bytes, before):
        return bytes(data)[::-1]

    def decode(self, data, size_bytes, element_bytes, before):
        return super().decode(data, size_bytes, element_bytes, before)[::-1]


def test_a_codec_that_is_right_passes() -> None:
    check_codec(Reversed())


class Forgetful(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        return Raw.decode(self, data, size_bytes, element_bytes, before)


class Lossy(Forgetful):
    lossless = False


class Longer(Reversed):
    def encode(self, data, element_bytes, before):
        return b"x" + bytes(data)


class Never(Reversed):
    def encode(self, data, element_bytes, before):
        return None


class Random(Reversed):
    def encode(self, data, element_bytes, before):
        return bytes(data) if random.random() < 0.5 else None


class Views(Reversed):
    def encode(self, data, element_bytes, before):
        return data


class NoTail(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        whole = super().decode(data, size_bytes, element_bytes, before)
        return whole[: size_bytes - size_bytes % element_bytes]


class Trusting(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        return bytes(data)[::-1]


class Padding(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        padded = bytes(data[:size_bytes]).ljust(min(max(0, size_bytes), 1 << 20), b"x")
        return super().decode(memoryview(padded), size_bytes, element_bytes, before)


class Crashing(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        if len(data) != size_bytes:
            raise ValueError("too bad")
        return bytes(data)[::-1]


class Greedy(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        bytearray(min(max(0, size_bytes), 1 << 26))
        return super().decode(data, size_bytes, element_bytes, before)


class OfOneThread(Reversed):
    def __init__(self):
        self._mine = threading.get_ident()

    def encode(self, data, element_bytes, before):
        if threading.get_ident() != self._mine:
            return None
        return super().encode(data, element_bytes, before)


class Sloppy(Reversed):
    def decode(self, data, size_bytes, element_bytes, before):
        if len(data) < size_bytes or size_bytes < 0:
            raise CorruptError("too short")
        return bytes(data[len(data) - size_bytes :])[::-1]


@pytest.mark.parametrize(
    ("codec", "found"),
    [
        (Forgetful, "random"),
        (Longer, "zeros"),
        (Never, ""),
        (Random, "elements of 1"),
        (Views, "<class 'memoryview'>"),
        (NoTail, ""),
        (Trusting, ""),
        (Padding, "Corrupt"),
        (Crashing, "ValueError"),
        (Greedy, ""),
        (OfOneThread, ""),
        (Sloppy, "Corrupt"),
    ],
)
def test_a_codec_that_is_wrong_is_found_out(codec: type[Raw], found: str) -> None:
    with raises(AssertionError, found):
        check_codec(codec())


def test_a_codec_that_is_not_lossless_may_give_back_other_bytes() -> None:
    check_codec(Lossy())
