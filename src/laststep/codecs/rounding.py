"""Round fp32 values to bf16 or fp16, bit for bit as torch does on a CPU.

Rounds to nearest, ties to even; values that are too large become infinite. For NaNs, torch gives
different bits on different devices: where the result of this module has other bits than the tensor,
a checkpoint stores the tensor's own bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_TILE = 64 << 10
"""Elements that are rounded at a time, so that the working set stays in a core's cache."""
_LEAST_FP16, _BEYOND_FP16 = np.uint32(0x38800000), np.uint32(0x47800000)
"""The bits of 2^-14 and 2^16: the normal numbers of fp16 are between them."""


def rounded(data: bytes | bytearray | memoryview, dtype: str) -> memoryview:
    """Convert fp32 elements to `dtype`, which is `bfloat16` or `float16`."""
    bits = np.frombuffer(data, "<u4")
    out = np.empty(len(bits), "<u2")
    step = _to_bf16 if dtype == "bfloat16" else _to_fp16
    for at in range(0, len(bits), _TILE):
        step(bits[at : at + _TILE], out[at : at + _TILE])
    return out.view(np.uint8).data


def _to_bf16(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    raised = bits >> 16
    raised &= 1
    raised += bits
    raised += 0x7FFF
    out[:] = raised.view("<u2")[1::2]
    nan = np.isnan(bits.view("<f4"))
    if nan.any():
        out[nan] = 0xFFFF


def _to_fp16(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """Use integer arithmetic, which is four times as fast as numpy's cast. Only values that are not
    normal numbers of fp16 are left to the cast."""
    size = bits & 0x7FFFFFFF
    odd = size - _LEAST_FP16 >= _BEYOND_FP16 - _LEAST_FP16
    raised = size >> 13
    raised &= 1
    raised += size
    raised += 0xFFF
    raised -= 112 << 23  # the difference of the two exponent biases
    raised >>= 13
    raised |= bits >> 16 & 0x8000
    out[:] = raised.view("<u2")[::2]
    if odd.any():
        out[odd] = _cast(bits[odd])


def _cast(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    values = bits.view("<f4")
    with np.errstate(over="ignore", under="ignore"):
        out = values.astype("<f2").view("<u2")
    nan = np.isnan(values)
    # A NaN keeps its sign and the upper bits of its fraction, and becomes quiet.
    out[nan] = (bits[nan] >> 16 & 0x8000) | 0x7E00 | (bits[nan] >> 13 & 0x3FF)
    return out
