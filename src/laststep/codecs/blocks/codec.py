"""What a codec of blocks is, and what all of them share: its bounds and its one error.

A block is at most 1 MiB. Its elements have 1, 2, 4, 8 or 16 bytes; what is left at its end and is
shorter than an element belongs to no element and is stored as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from laststep.errors import CorruptError
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = bytes | memoryview

__all__ = ["BlockCodec"]

ELEMENT_BYTES = (1, 2, 4, 8, 16)


class BlockCodec(Protocol):
    """Encodes one block and decodes it again. MUST be pure, and callable from several threads at
    once; SHOULD let go of the GIL where it takes long. `laststep.testing.codecs` has its tests."""

    @property
    def name(self) -> str:
        """What files call it: up to 32 lower-case letters, digits and dashes. Never changes, and
        neither does what it decodes."""

    @property
    def lossless(self) -> bool:
        """Whether what is decoded is always, bit for bit, what was encoded."""

    @property
    def needs(self) -> str | None:
        """The module that it cannot work without, where that is no dependency of laststep."""

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        """The bytes that `decode` makes `data` of, no more than `data` has; None: it does not pay,
        or is not for such data. `before` is what the block was when it was last saved, as far as
        that is known."""

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        """Exactly `size_bytes`, given what `encode` was given; `CorruptError` for anything else
        that arrives. MUST NOT take more memory than a few times `size_bytes` and `data`, whatever
        either says."""


def takes(size_bytes: int, element_bytes: int) -> bool:
    """Whether there can be such a block."""
    return 0 <= size_bytes <= BLOCK_BYTES and element_bytes in ELEMENT_BYTES


def check_declared(size_bytes: int, element_bytes: int) -> None:
    """`CorruptError` for a block that there cannot be."""
    if not takes(size_bytes, element_bytes):
        raise broken(
            f"at most {BLOCK_BYTES} bytes in elements of {ELEMENT_BYTES} bytes",
            f"{size_bytes} bytes in elements of {element_bytes}",
        )


def joined(parts: Sequence[Part], *, below_bytes: int) -> bytes | None:
    """The parts one after the other; None unless they are shorter than the block is."""
    return b"".join(parts) if sum(map(len, parts)) < below_bytes else None


def broken(expected: str, found: str) -> CorruptError:
    """The error of every codec."""
    return CorruptError("cannot decode a block", expected=expected, found=found)
