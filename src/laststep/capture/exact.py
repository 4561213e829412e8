"""Copies that write just what they were meant to write, or fail before they write anything.

Every copy of tensors into a slot, a buffer or a restored tensor goes through here, or is bounded by
a number of bytes that was fixed when it was planned. torch's own copies would rather resize the
target, repeat a single element or convert numbers than fail.
"""

from __future__ import annotations

import operator
from typing import Final

import torch

from laststep.errors import TornCaptureError

_FORM: Final = operator.attrgetter("shape", "dtype")
_DTYPE: Final = operator.attrgetter("dtype")


def copy_each(
    into: list[torch.Tensor], parts: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each part into its place, which has its shape and its dtype."""
    places, forms = list(map(_FORM, into)), list(map(_FORM, parts))
    if places != forms:
        pairs = zip(places, forms, strict=True)
        raise changed(*next(pair for pair in pairs if pair[0] != pair[1]))
    with torch.no_grad():
        torch._foreach_copy_(into, parts, non_blocking=non_blocking)


def join(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy flat parts one behind the other into a flat place, which has room for just all of them.
    In a slot the parts MUST be views of our own, whose sizes nobody else changes; where they are
    live tensors and the place is in a buffer of this save alone, a change is noticed."""
    room, found = into.numel(), sum(map(torch.Tensor.numel, parts))
    if found != room or set(map(_DTYPE, parts)) != {into.dtype}:
        dtypes = {str(part.dtype) for part in parts}
        raise changed((room, into.dtype), (found, "/".join(sorted(dtypes))))
    with torch.no_grad():
        torch.cat(parts, out=into)
    if into.numel() != room:  # another thread was quicker, and it was resized
        raise changed((room, into.dtype), (into.numel(), into.dtype))


def changed(expected: tuple[object, object], found: tuple[object, object]) -> TornCaptureError:
    """The error for a tensor that is not what it was when its copy was planned."""
    return TornCaptureError(
        "a tensor was replaced or resized while it was copied",
        expected=f"{expected[0]} elements of {expected[1]}",
        found=f"{found[0]} of {found[1]}",
        remedy="let no other thread change the state while it is saved or restored",
    )
