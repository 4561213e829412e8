"""Round fp32 values to bf16 or fp16, bit for bit as torch does on a CPU.

To the nearest, ties to even; what is too large becomes infinite. Of a NaN torch makes other bits on
other devices: what is rounded here to other bits than a checkpoint has is stored in it as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_TILE = 64 << 10
"""Elements that are rounded at a time: all that it takes stays in a core's cache."""
_LEAST_FP16, _BEYOND_FP16 = np.uint32(0x38800000), np.uint32(0x47800000)
"""The bits of 2^-14 and 2^16: between them lie the normal numbers of fp16."""


def rounded(data: bytes | bytearray | memoryview, dtype: str) -> memoryview:
    """Elements of fp32 as those of `dtype`, which is `bfloat16` or `float16`."""
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
    """By arithmetic of integers, which is four times as fast as the cast of numpy; that is left the
    values which are not normal numbers of fp16."""
    size = bits & 0x7FFFFFFF
    odd = size - _LEAST_FP16 >= _BEYOND_FP16 - _LEAST_FP16
    raised = size >> 13
    raised &= 1
    raised += size
    raised += 0xFFF
    raised -= 112 << 23  # what the exponents of the two are apart
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
    # Of a NaN, sign and the upper bits of the fraction stay, and it is quiet.
    out[nan] = (bits[nan] >> 16 & 0x8000) | 0x7E00 | (bits[nan] >> 13 & 0x3FF)
    return out
