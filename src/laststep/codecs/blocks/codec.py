"""The interface of block codecs, the parts that all of them share (limits and the one error), and
the codec `raw`.

A block is at most 1 MiB. Its elements have 1, 2, 4, 8 or 16 bytes. Bytes at its end that are
shorter than an element are the tail, which is stored unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = bytes | memoryview

__all__ = ["BlockCodec"]

ELEMENT_BYTES = (1, 2, 4, 8, 16)


class BlockCodec(Protocol):
    """Encodes one block and decodes it again. MUST be pure and callable from several threads at
    once; SHOULD release the GIL during long operations. `laststep.testing.codecs` has conformance
    tests."""

    @property
    def name(self) -> str:
        """The name in files: up to 32 lower-case letters, digits and dashes. Neither the name nor
        the result of `decode` ever changes."""

    @property
    def lossless(self) -> bool:
        """True if decoding always returns the encoded bytes, bit for bit."""

    @property
    def needs(self) -> str | None:
        """The module that the codec requires, if it is not a dependency of laststep."""

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        """Return bytes from which `decode` restores `data`, no more than `data` has; None if
        encoding does not pay or the codec does not support such data. `before` is the block as last
        saved, if known."""

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        """Return exactly `size_bytes`, given the same arguments as `encode`. Raise `CorruptError`
        for any other input. MUST NOT use more memory than a few times `size_bytes` and `data`,
        whatever they contain."""


def takes(size_bytes: int, element_bytes: int) -> bool:
    """Return True if a block of this size and element size is valid."""
    return 0 <= size_bytes <= BLOCK_BYTES and element_bytes in ELEMENT_BYTES


def check_declared(size_bytes: int, element_bytes: int) -> None:
    """Raise `CorruptError` if a block of this size and element size is invalid."""
    if not takes(size_bytes, element_bytes):
        raise broken(
            f"at most {BLOCK_BYTES} bytes in elements of {ELEMENT_BYTES} bytes",
            f"{size_bytes} bytes in elements of {element_bytes}",
        )


def joined(parts: Sequence[Part], *, below_bytes: int) -> bytes | None:
    """Concatenate the parts; return None unless the result is shorter than the block."""
    return b"".join(parts) if sum(map(len, parts)) < below_bytes else None


def broken(expected: str, found: str) -> CorruptError:
    """Return the error that every codec raises."""
    return CorruptError("cannot decode a block", expected=expected, found=found)


class Raw:
    name = "raw"
    lossless = True
    needs = None

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        return bytes(data) if takes(data.nbytes, element_bytes) else None

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        check_declared(size_bytes, element_bytes)
        if data.nbytes != size_bytes:
            raise broken(f"{size_bytes} bytes", f"{data.nbytes}")
        return bytes(data)


CODECS: dict[str, BlockCodec] = {"raw": Raw()}
