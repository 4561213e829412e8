"""Copy many tensors into one buffer, or out of it, with few calls.

Knows nothing of files. On a GPU a multi-tensor copy is one kernel for hundreds of tensors; on the
host it is one call that runs outside the GIL. Copies are of bits: element types that the multi-tensor
kernels do not take are viewed as integers of their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laststep.engine.copy.layout import Group
from laststep.state.tensors import TORCH_DTYPES

_AS_INTEGERS: dict[torch.dtype, torch.dtype] = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[
        dtype.itemsize
    ]
    for name, dtype in TORCH_DTYPES.items()
    if name.startswith(("float8", "float4", "complex", "uint", "bool"))
}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in row-major order as one dimension; a copy only if they do not lie so."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as a type that every copy kernel takes."""
    plain = _AS_INTEGERS.get(tensor.dtype)
    return tensor if plain is None else tensor.view(plain)


def windows(buffer: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """The places of a group's spans in a buffer of bytes, typed."""
    dtype = TORCH_DTYPES[group.dtype]
    copied_as = _AS_INTEGERS.get(dtype, dtype)
    scale = dtype.itemsize // copied_as.itemsize
    typed = buffer[group.start : group.stop].view(copied_as)
    if len(group.spans) == 1:
        return [typed]
    return list(typed.split([(span.last - span.first) * scale for span in group.spans]))


def elements(source: torch.Tensor, group: Group, index: int) -> torch.Tensor:
    """The elements of one span, flat and as copied."""
    span = group.spans[index]
    whole = flat(source)
    return bits(whole if span.whole else whole[span.first : span.last])


def gather(
    buffer: torch.Tensor, groups: Sequence[Group], sources: Sequence[torch.Tensor]
) -> None:
    """Fill a buffer of bytes from the pieces that its groups name, on the current stream."""
    into: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for group in groups:
        places = windows(buffer, group)
        dsts, srcs = into.setdefault(places[0].dtype, ([], []))
        dsts += places
        srcs += [elements(sources[s.piece], group, i) for i, s in enumerate(group.spans)]
    with torch.no_grad():
        for dsts, srcs in into.values():
            torch._foreach_copy_(dsts, srcs, non_blocking=True)


def scatter(
    buffer: torch.Tensor, groups: Sequence[Group], targets: Sequence[torch.Tensor]
) -> None:
    """The way back: fill pieces from a buffer of bytes; targets MUST be contiguous."""
    into: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for group in groups:
        places = windows(buffer, group)
        dsts, srcs = into.setdefault(places[0].dtype, ([], []))
        srcs += places
        dsts += [elements(targets[s.piece], group, i) for i, s in enumerate(group.spans)]
    with torch.no_grad():
        for dsts, srcs in into.values():
            torch._foreach_copy_(dsts, srcs, non_blocking=True)
