"""Check that tensors fill the data area of a safetensors file, in order and without gaps. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.safetensors import TensorEntry

METADATA = "__metadata__"
MAX_OFFSET = (1 << 63) - 1


def tensor_problem(tensors: Sequence[TensorEntry], tensor_bytes: int) -> str | None:
    """Why these tensors do not fill the range from 0 to `tensor_bytes`, in words, or None."""
    at = 0
    for tensor in tensors:
        if tensor.start != at or tensor.stop < at:
            place = f"[{tensor.start}, {tensor.stop})"
            return f"{tensor.name!r} at {place} where byte {at} is next"
        at = tensor.stop
        if not _fits(tensor):
            return (
                f"{at - tensor.start} bytes for {tensor.name!r}, a {tensor.dtype} of shape "
                f"{list(tensor.shape)}"
            )
    if at != tensor_bytes:
        return f"tensors that end at byte {at} of a tensor area of {tensor_bytes}"
    return None


def _fits(tensor: TensorEntry) -> bool:
    """Whether dtype and shape come to the bytes that the entry has."""
    shape, dtype = tensor.shape, DTYPES.get(tensor.dtype)
    if dtype is None or math.prod(shape) * dtype.size_bytes != tensor.stop - tensor.start:
        return False
    if tensor.start != tensor.stop:
        return min(shape, default=0) >= 0 and tensor.stop <= MAX_OFFSET
    # An empty tensor may have huge sides, but safetensors and torch multiply them up to the zero.
    leading = 1
    for side in shape:
        leading *= side
        if not 0 <= side <= MAX_OFFSET or leading * dtype.size_bytes > MAX_OFFSET:
            return False
    return True
