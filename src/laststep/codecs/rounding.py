"""Round fp32 numbers in place, so that they can be stored in fewer bytes.

Each function takes numbers and the byte at which they begin in their file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import float32, uint32
    from numpy.typing import NDArray

_TILE = 64 << 10
"""Numbers that are rounded at a time, so that the working set stays in a core's cache."""
_INFINITE = 0x7F800000
_GROUP = 64
"""Number of values that share a scale."""
_GROUP_BYTES = 4 * _GROUP
_LEVELS = 127
_TOO_LARGE = 2.0**127
"""Larger numbers may be rounded to infinity."""


def to_bf16(data: memoryview, at: int) -> None:  # noqa: ARG001 (numbers are rounded one by one)
    """Round to the nearest bfloat16, ties to even, but never to infinity."""
    numbers: NDArray[uint32] = np.frombuffer(data, "<u4")
    for first in range(0, len(numbers), _TILE):
        bits = numbers[first : first + _TILE]
        size = bits & 0x7FFFFFFF
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += 0x7FFF
        rounded &= 0xFFFF0000
        # The largest finite number in place of infinity.
        rounded[(size < _INFINITE) & (rounded & 0x7FFFFFFF == _INFINITE)] -= 0x10000
        rounded[size > _INFINITE] = 0xFFFF0000  # NaN
        bits[:] = rounded


def to_int8(data: memoryview, at: int) -> None:
    """Round numbers, in groups of 64 by position in the file, to multiples of a power of two, with
    7 bits. Groups with NaN or nearly infinite numbers are left unchanged."""
    numbers: NDArray[float32] = np.frombuffer(data, np.float32)
    head = min(-at % _GROUP_BYTES // 4, len(numbers))
    whole = (len(numbers) - head) // _GROUP * _GROUP
    _quantize(numbers[:head].reshape(1, -1))
    _quantize(numbers[head : head + whole].reshape(-1, _GROUP))
    _quantize(numbers[head + whole :].reshape(1, -1))


def _quantize(groups: NDArray[float32]) -> None:
    if not groups.size:
        return
    largest = np.abs(groups).max(axis=1)
    ok = (largest > 0) & (largest < _TOO_LARGE)
    # The smallest power of two whose 127-fold reaches the largest number, but at least 2**-149,
    # the smallest positive float32.
    fractions, exponents = np.frexp(np.where(ok, largest, 1).astype(np.float64) / _LEVELS)
    exponents -= fractions == 0.5
    scales = np.ldexp(np.float64(1), np.maximum(exponents, -149))[:, None]
    with np.errstate(invalid="ignore"):  # from groups that are left unchanged
        rounded = np.rint(groups / scales)
        rounded *= scales
    groups[ok] = rounded[ok]


ROUNDERS: dict[str, Callable[[memoryview, int], None]] = {"bf16": to_bf16, "int8": to_int8}
