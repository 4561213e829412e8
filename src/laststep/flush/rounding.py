"""Tensors that are stored with fewer bits, because the user asked for it.

Their numbers are rounded in the slot, before anything is digested: what is stored, verified and
restored is the rounded number, exactly. It keeps its dtype, and a codec makes nothing of the bits
that are zero. numpy is imported by those who round only.
"""

from __future__ import annotations

from bisect import bisect_right
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy import float32, uint16
    from numpy.typing import NDArray

    from laststep.format.layout import FileLayout

_DTYPE = "float32"
_GROUP = 64
"""So many numbers share a scale."""
_GROUP_BYTES = 4 * _GROUP
_LEVELS = 127
_INFINITE = 0x7F80
"""The exponent of infinity, in the upper half of a number."""
_TOO_LARGE = 2.0**127
"""What is larger may be rounded to infinity."""


class RoundedRange(NamedTuple):
    """Bytes of an image that are rounded."""

    start: int
    stop: int
    how: str


class Rounding:
    """What is rounded in one file."""

    def __init__(self, layout: FileLayout, lossy: Mapping[str, str]) -> None:
        """`lossy` says how, by patterns of `item/tensor`; the first that fits holds. A scalar is
        no tensor to be rounded: optimizers count their steps in such."""
        self.names: dict[str, str] = {}
        self.patterns: set[str] = set()
        """Those that name something here."""
        self._ranges: list[RoundedRange] = []
        for entry in layout.tensors if lossy else ():
            item, name = layout.item, entry.name
            if item is None:
                item, _, name = entry.name.partition("/")
            part = layout.parts.get(entry.name)
            full = f"{item}/{name if part is None else part.tensor}"
            pattern = next((pattern for pattern in lossy if _fits(full, pattern)), None)
            is_scalar = not (entry.shape if part is None else part.shape)
            if pattern is None or entry.dtype != _DTYPE or is_scalar or entry.start == entry.stop:
                continue
            self.patterns.add(pattern)
            self.names[entry.name] = lossy[pattern]
            self._ranges.append(RoundedRange(entry.start, entry.stop, lossy[pattern]))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def apply(self, start: int, data: memoryview) -> None:
        """Round what of `data`, which lies at `start` of the image, is to be."""
        first = bisect_right(self._ranges, start, key=lambda a_range: a_range.stop)
        for a_range in self._ranges[first:]:
            if a_range.start >= start + len(data):
                break
            low, high = max(a_range.start, start), min(a_range.stop, start + len(data))
            ROUNDED[a_range.how](data[low - start : high - start], low)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern names a tensor, or the item that it is of."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[0], pattern)


def to_bf16(data: memoryview, at: int) -> None:  # noqa: ARG001 (each number by itself)
    """Each number to the nearest that bfloat16 has, to the even one of two; none to infinity."""
    import numpy as np

    from laststep.codecs.rounding import rounded

    halves: NDArray[uint16] = np.frombuffer(data, "<u2")
    upper = np.array(np.frombuffer(rounded(data, "bfloat16"), "<u2"))
    was_finite = (halves[1::2] & 0x7F80) != _INFINITE
    upper[((upper & 0x7FFF) == _INFINITE) & was_finite] -= 1  # the largest number there is
    halves[1::2] = upper
    halves[::2] = 0


def to_int8(data: memoryview, at: int) -> None:
    """Numbers in groups of 64, by their place in the image, to one of 255 multiples of a power of
    two, which is chosen for the largest of them. Groups with what is no number, or nearly infinite,
    are left alone."""
    import numpy as np

    numbers: NDArray[float32] = np.frombuffer(data, np.float32)
    head = min(-at % _GROUP_BYTES // 4, len(numbers))
    whole = (len(numbers) - head) // _GROUP * _GROUP
    _quantize(numbers[:head].reshape(1, -1))
    _quantize(numbers[head : head + whole].reshape(-1, _GROUP))
    _quantize(numbers[head + whole :].reshape(1, -1))


def _quantize(groups: NDArray[float32]) -> None:
    import numpy as np

    if not groups.size:
        return
    largest = np.abs(groups).max(axis=1)
    ok = (largest > 0) & (largest < _TOO_LARGE)
    # The least power of two of which 127 reach the largest number; the smallest that floats have.
    fractions, exponents = np.frexp(np.where(ok, largest, 1).astype(np.float64) / _LEVELS)
    exponents -= fractions == 0.5
    scales = np.ldexp(np.float64(1), np.maximum(exponents, -149))[:, None]
    with np.errstate(invalid="ignore"):  # of groups that are left alone
        rounded = np.rint(groups / scales)
        rounded *= scales
    groups[ok] = rounded[ok]


ROUNDED: dict[str, Callable[[memoryview, int], None]] = {"bf16": to_bf16, "int8": to_int8}
"""What can be asked for."""
