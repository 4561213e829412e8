"""Block codecs: encode the bytes of one block to fewer bytes, and decode them.

A block is at most 1 MiB. Its elements have 1, 2, 4, 8 or 16 bytes; a rest that is shorter than an
element is the *tail*. Codecs are pure and know nothing of files. They are imported at their first
use, because they need numpy and zstandard.
"""

from __future__ import annotations

from typing import Protocol

from laststep.errors import UsageError


class BlockCodec(Protocol):
    """Encodes one block and decodes it again. Callable from several threads at once."""

    name: str
    """The name in files. Neither it nor the result of `decode` ever changes."""

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        """Return fewer bytes from which `decode` restores `data`; None if encoding does not pay.
        `before` is the block as last saved, if known."""

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        """Return exactly `size_bytes`, given the same arguments as `encode`. Raise `CorruptError`
        for any other `data` or `before`. Uses no more memory than a few times `size_bytes` and
        `data`, whatever they contain."""


def codec_named(name: str) -> BlockCodec:
    """Return the codec with this name; raise `UsageError` if it is unknown or needs zstandard."""
    try:
        from laststep.codecs.planes import CODECS
    except ImportError as error:
        raise UsageError(
            f"the codec {name!r} needs zstandard, which cannot be imported",
            found=str(error),
            remedy="pip install 'laststep[compress]'",
        ) from error
    if name not in CODECS:
        raise UsageError(
            f"unknown codec {name!r}",
            expected=f"one of {', '.join(sorted(CODECS))}",
            remedy="upgrade laststep: a later version may have written this",
        )
    return CODECS[name]
