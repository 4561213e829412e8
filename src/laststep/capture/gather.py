"""Copy many tensors into one buffer, or out of it, with few calls.

Knows nothing of files. On a GPU a multi-tensor copy is one kernel for hundreds of tensors; on the
host it is one call that runs outside the GIL. Copies are of bits: element types that the
multi-tensor kernels do not take are viewed as integers of their size, and never of more or fewer
bytes than their place has (`exact`).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

import torch

from laststep.capture.exact import changed, copy_each, join
from laststep.capture.kernels import CopyTable, Kernels, kernels_on
from laststep.capture.layout import ElementRange, StagingGroup
from laststep.state.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.capture.sources import Tensors

_FORM: Final = operator.attrgetter("shape", "dtype")
_WHOLE: Final = operator.attrgetter("whole")
_LOOKS: Final[tuple[Callable[[torch.Tensor], object], ...]] = (
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    operator.attrgetter("nbytes"),
)
"""What a table of addresses is made from, but for the plan: more than addresses, since other
strides or sizes at the same place are other bytes."""
_AS_INTEGERS: dict[torch.dtype, torch.dtype] = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[
        dtype.itemsize
    ]
    for name, dtype in TORCH_DTYPES.items()
    if name.startswith(("float8", "float4", "complex", "uint", "bool"))
}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in row-major order as one dimension; copies only if they are not
    contiguous."""
    if not tensor.is_contiguous():
        return tensor.contiguous().view(-1)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes, in the same memory."""
    # as_strided, not view: a contiguous tensor of one element may have any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as a type that every copy kernel takes."""
    plain = _AS_INTEGERS.get(tensor.dtype)
    if plain is None:
        return tensor
    if plain.itemsize != tensor.dtype.itemsize:  # and a lone element may have any stride
        return torch.view_as_real(tensor).view(-1).view(plain)
    return tensor.view(plain)


def strided_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of any strides as a type that every copy kernel takes; complex types, which all
    take, stay."""
    plain = _AS_INTEGERS.get(tensor.dtype, tensor.dtype)
    return tensor.view(plain) if plain.itemsize == tensor.dtype.itemsize else tensor


def windows(buffer: torch.Tensor, group: StagingGroup) -> list[torch.Tensor]:
    """The places of a group's spans in a buffer of bytes, typed."""
    dtype = TORCH_DTYPES[group.dtype]
    copied_as = _AS_INTEGERS.get(dtype, dtype)
    scale = dtype.itemsize // copied_as.itemsize
    typed = buffer[group.start : group.stop].view(copied_as)
    if len(group.spans) == 1:
        return [typed]
    return list(typed.split([(span.last - span.first) * scale for span in group.spans]))


def elements(source: torch.Tensor, span: ElementRange) -> torch.Tensor:
    """The elements of one span, flat and as copied."""
    whole = flat(source)
    return bits(whole if span.whole else whole[span.first : span.last])


def _elements_of_all(group: StagingGroup, sources: Tensors) -> list[torch.Tensor]:
    """Return the elements of each span, without a call per span for the common case of whole, plain
    tensors."""
    tensors = [sources[span.piece] for span in group.spans]
    if (
        TORCH_DTYPES[group.dtype] in _AS_INTEGERS
        or not all(map(_WHOLE, group.spans))
        or not all(map(torch.Tensor.is_contiguous, tensors))
    ):
        return list(map(elements, tensors, group.spans))
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]


def gather(buffer: torch.Tensor, groups: Sequence[StagingGroup], sources: Tensors) -> None:
    """Fill a buffer of bytes from the pieces that its groups name, on the current stream."""
    into: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for group in groups:
            if group.device == "cpu" and _gather_scalars(buffer, group, sources):
                continue
            parts = _elements_of_all(group, sources)
            if group.device == "cpu" and len(parts) > 1:
                # One call that knows nothing of the single places beats one view for each.
                join(buffer[group.start : group.stop].view(parts[0].dtype), parts)
                continue
            places = windows(buffer, group)
            dsts, srcs = into.setdefault(places[0].dtype, ([], []))
            dsts += places
            srcs += parts
        for dsts, srcs in into.values():
            copy_each(dsts, srcs, non_blocking=True)


def _gather_scalars(buffer: torch.Tensor, group: StagingGroup, sources: Tensors) -> bool:
    """Gather zero-dimensional tensors, such as an optimizer's step counts (one per parameter),
    without a view of each. Return False if there are others among them."""
    dtype = TORCH_DTYPES[group.dtype]
    tensors = [sources[span.piece] for span in group.spans]
    # The first one that has a dimension ends the look at dimensions.
    if dtype in _AS_INTEGERS or any(map(torch.Tensor.dim, tensors)):
        return False
    if set(map(_FORM, tensors)) != {(torch.Size(), dtype)}:
        return False
    # Into memory of its own first: whatever becomes of a tensor meanwhile, only bytes that are
    # just as many as planned get into the buffer.
    copy_each([buffer[group.start : group.stop].view(dtype)], [torch.stack(tensors)])
    return True


class Gatherer:
    """Gathers the same pieces repeatedly; with kernels, by one of them over an address table,
    without a call per tensor on the training thread."""

    def __init__(self, groups: Sequence[StagingGroup]) -> None:
        self._groups = groups
        self._pieces = [span.piece for group in groups for span in group.spans]
        self._made_from: tuple[list[object], ...] = ()
        self._copies: CopyTable | None = None
        self._strided: list[StagingGroup] = []

    def run(
        self,
        buffer: torch.Tensor,
        sources: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Fill the buffer on the current stream; `stream` is a side stream for uploads."""
        if stream is None or not self.prepare(sources, stream):
            gather(buffer, self._groups, sources)
            return
        if self._copies is not None:
            self._copies.run(buffer)
        if self._strided:
            gather(buffer, self._strided, sources)

    def prepare(self, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> bool:
        """Build the address table unless it exists and is valid; return False if there are no
        kernels."""
        kernels = kernels_on(stream.device)
        if kernels is None:
            return False
        pieces = [sources[piece] for piece in self._pieces]
        found = tuple(list(map(look, pieces)) for look in _LOOKS)
        if found != self._made_from:
            self._made_from = ()
            self._tabulate(kernels, sources, stream)
            self._made_from = found
        return True

    def run_again(self, buffer: torch.Tensor) -> None:
        """Gather once more from the addresses of the last time; their memory MUST still be held."""
        if self._copies is not None:
            self._copies.run(buffer)

    def can_run_again(self) -> bool:
        """Return whether an address table is all that is needed."""
        return self._copies is not None and not self._strided

    def _tabulate(
        self, kernels: Kernels, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        rows: list[tuple[int, int, int]] = []
        self._strided = []
        for group in self._groups:
            size = TORCH_DTYPES[group.dtype].itemsize
            at = group.start
            for span in group.spans:
                length = (span.last - span.first) * size
                tensor = sources[span.piece]
                if span.last * size > tensor.nbytes:
                    raise changed((span.last, group.dtype), (tensor.numel(), tensor.dtype))
                if tensor.is_contiguous():
                    rows.append((tensor.data_ptr() + span.first * size, at, length))
                else:
                    one = StagingGroup(
                        dtype=group.dtype,
                        device=group.device,
                        start=at,
                        stop=at + length,
                        spans=(span,),
                    )
                    self._strided.append(one)
                at += length
        self._copies = CopyTable(kernels, rows, stream) if rows else None
