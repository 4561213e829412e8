"""Copies that write exactly what was planned, or fail before they write anything.

Every copy of tensors into a slot, a buffer or a restored tensor uses these functions, or is bounded
by a byte count fixed at planning. torch's own copies resize the target, broadcast or convert
instead of failing.
"""

from __future__ import annotations

import operator
import os
from typing import Final

import torch

from laststep.errors import TornCaptureError

_FORM: Final = operator.attrgetter("shape", "dtype")
_DTYPE: Final = operator.attrgetter("dtype")


def copy_each(
    into: list[torch.Tensor], parts: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each part into its place, which has the same shape and dtype."""
    places, forms = list(map(_FORM, into)), list(map(_FORM, parts))
    if places != forms:
        pairs = zip(places, forms, strict=True)
        raise changed(*next(pair for pair in pairs if pair[0] != pair[1]))
    with torch.no_grad():
        torch._foreach_copy_(into, parts, non_blocking=non_blocking)


def join(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy flat parts one after another into a flat target of exactly their total size. If the
    target is in a slot, the parts MUST be our own views, whose sizes nobody changes; for live
    tensors into a private buffer, a change is detected."""
    room, found = into.numel(), sum(map(torch.Tensor.numel, parts))
    if found != room or set(map(_DTYPE, parts)) != {into.dtype}:
        dtypes = {str(part.dtype) for part in parts}
        raise changed((room, into.dtype), (found, "/".join(sorted(dtypes))))
    with torch.no_grad():
        torch.cat(parts, out=into)
    if into.numel() != room:  # another thread was quicker, and it was resized
        raise changed((room, into.dtype), (into.numel(), into.dtype))


def changed(expected: tuple[object, object], found: tuple[object, object]) -> TornCaptureError:
    """Return the error for a tensor that changed after its copy was planned."""
    return TornCaptureError(
        "a tensor was replaced or resized while it was copied",
        expected=f"{expected[0]} elements of {expected[1]}",
        found=f"{found[0]} of {found[1]}",
        remedy="let no other thread change the state while it is saved or restored",
    )


def _renew_thread_pool() -> None:
    """Let torch replace its thread pool, whose threads a forked child does not have.

    torch would do so at the next use of the pool, but without a lock: of several threads that come
    at once, some fail with "Invalid thread pool!".
    """
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_renew_thread_pool)
