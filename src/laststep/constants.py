"""Constants and small functions that all layers share.

Knows nothing of torch, files or processes. A dtype has torch's name (`bfloat16`), its size and, if
safetensors supports it, its safetensors code.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT_VERSION = 1
"""The version of all files in a run."""

BLOCK_BYTES = 1 << 20
"""The bytes that one digest covers. All that is read is verified, so reads are whole blocks."""

CHUNK_BYTES = 16 << 20
"""The size of a write request and of a slot of the pool; a whole number of blocks."""

ALIGN_BYTES = 4096
"""Offsets, sizes and addresses of direct I/O are multiples of this."""

MAX_HEADER_BYTES = 64 << 20
"""Maximum size of a data file's header, else it is split; safetensors refuses 100 MB."""

MEMORY = "shm://"
"""The URL of the shared-memory tier; its folder is derived from the run."""

MANIFEST_NAME = "manifest.json"
"""The file that commit and abort compete to create in a checkpoint's folder; never changed."""


UNITS_S = MappingProxyType({"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0})
DURATION = rf"(?=.*[1-9])[0-9]+(\.[0-9]+)? ?({'|'.join(UNITS_S)})"
"""A duration as a user writes it, such as `10 min`; never 0."""


def duration_s(text: str) -> float:
    """Convert a duration that matches `DURATION` to seconds."""
    number, unit = re.split(r" ?(?=[a-z])", text, maxsplit=1)
    return float(number) * UNITS_S[unit]


def duration_text(seconds: float) -> str:
    """Return a duration as readable text, with three significant digits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    unit = next((u for u in ("d", "h", "min") if seconds >= 2 * UNITS_S[u]), "s")
    return f"{float(f'{seconds / UNITS_S[unit]:.3g}'):g} {unit}"


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B(?:/s)?")


def bytes_per_s(text: str) -> float | None:
    """Parse a rate such as `200MB/s` or `1.5 GiB`; return None if it is invalid or 0."""
    match = _RATE.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary = match.groups()
    return (
        float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ") or None
    )


_ITEM_NAME = re.compile(r"(?!shared$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def is_item_name(name: object) -> bool:
    """Return True if an item may have this name, which becomes a file name."""
    return isinstance(name, str) and _ITEM_NAME.fullmatch(name) is not None


class DType(msgspec.Struct, frozen=True):
    """An element type: torch's name, bytes per element, safetensors' code (None: stored as U8)."""

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


ADAPTERS_RUN = "_laststep"
"""The run's folder in a Trainer's `output_dir`. Pushes to the hub skip names with `_` in front."""


def align_up(value: int, to: int) -> int:
    return -(-value // to) * to


def with_article(kind: type | str) -> str:
    """Return a class name or word with its article: `an int`."""
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def listed(found: Iterable[object], most: int = 4) -> str:
    shown = list(map(str, found))
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
