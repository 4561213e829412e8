"""The constants and the small vocabulary that every layer shares.

Knows nothing of torch, files or processes. A dtype is named as torch names it (`bfloat16`), with
its size and, where safetensors knows it, its safetensors code.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT_VERSION = 1
"""Of everything that lies in a run."""

BLOCK_BYTES = 1 << 20
"""What one digest covers. Every byte that is used is verified, so reads are whole blocks."""

CHUNK_BYTES = 16 << 20
"""What one write request carries and one slot of the pool holds; a whole number of blocks."""

ALIGN_BYTES = 4096
"""Offsets, sizes and addresses of direct I/O are multiples of this."""

MAX_HEADER_BYTES = 64 << 20
"""A data file whose header would grow past this is split (safetensors refuses 100 MB)."""

MEMORY = "shm://"
"""How the tier in shared memory is named, whose folder follows from the run."""

MANIFEST_NAME = "manifest.json"
"""The create-only name for which commit and abort compete, in a checkpoint's folder."""


UNITS_S = MappingProxyType({"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0})
DURATION = rf"(?=.*[1-9])[0-9]+(\.[0-9]+)? ?({'|'.join(UNITS_S)})"
"""A duration as a user writes it, such as `10 min`; never 0."""


def duration_s(text: str) -> float:
    """The seconds of a duration that is written so."""
    number, unit = re.split(r" ?(?=[a-z])", text, maxsplit=1)
    return float(number) * UNITS_S[unit]


def duration_text(seconds: float) -> str:
    """A duration for a person, to three digits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    unit = next((u for u in ("d", "h", "min") if seconds >= 2 * UNITS_S[u]), "s")
    return f"{float(f'{seconds / UNITS_S[unit]:.3g}'):g} {unit}"


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?)(i?)B(?:/s)?")


def bytes_per_s(text: str) -> float | None:
    """The rate that a user writes as `200MB/s` or `1.5 GiB`; None for what is none, or 0."""
    match = _RATE.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary = match.groups()
    return float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " ") or None


_ITEM_NAME = re.compile(r"(?!shared$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def is_item_name(name: object) -> bool:
    """Whether an item may have this name, which becomes a file's."""
    return isinstance(name, str) and _ITEM_NAME.fullmatch(name) is not None


class DType(msgspec.Struct, frozen=True):
    """One element type: torch's name, bytes per element, safetensors' code (None: stored as U8)."""

    name: str
    size_bytes: int
    code: str | None


DTYPES = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("bool", 1, "BOOL"),
            DType("uint8", 1, "U8"),
            DType("int8", 1, "I8"),
            DType("uint16", 2, "U16"),
            DType("int16", 2, "I16"),
            DType("uint32", 4, "U32"),
            DType("int32", 4, "I32"),
            DType("uint64", 8, "U64"),
            DType("int64", 8, "I64"),
            DType("float16", 2, "F16"),
            DType("bfloat16", 2, "BF16"),
            DType("float32", 4, "F32"),
            DType("float64", 8, "F64"),
            DType("float8_e4m3fn", 1, "F8_E4M3"),
            DType("float8_e5m2", 1, "F8_E5M2"),
            DType("float8_e8m0fnu", 1, "F8_E8M0"),
            DType("float8_e4m3fnuz", 1, None),
            DType("float8_e5m2fnuz", 1, None),
            DType("float4_e2m1fn_x2", 1, None),
            DType("complex32", 4, None),
            DType("complex64", 8, "C64"),
            DType("complex128", 16, None),
        )
    }
)


def align_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to


def with_article(kind: type | str) -> str:
    """A class or a word with its article: `an int`."""
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def listed(found: Iterable[object], most: int = 4) -> str:
    """The first few, and how many more there are."""
    shown = list(map(str, found))
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
