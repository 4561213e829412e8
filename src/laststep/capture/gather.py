"""Copy tensors of the state: many into one buffer with few calls, exactly as planned or not at all.

torch's own copies resize the target, broadcast or convert instead of failing. So every copy into a
slot, a buffer or a restored tensor goes through these functions, or is bounded by a byte count
fixed at planning. Copies are of bits: on a GPU one kernel for hundreds of tensors, on the host one
call outside the GIL.
"""

from __future__ import annotations

import ctypes
import operator
import os
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from laststep.capture.kernels import CopyTable, Kernels, kernels_on
from laststep.constants import DTYPES
from laststep.errors import TornCaptureError
from laststep.state.boxes import boxes_of_range
from laststep.state.tensors import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.capture.layout import ElementRange, StagingGroup
    from laststep.state.tree import Piece

_FORM: Final = operator.attrgetter("shape", "dtype")
_DTYPE: Final = operator.attrgetter("dtype")
_NBYTES: Final = operator.attrgetter("nbytes")
_WHOLE: Final = operator.attrgetter("whole")
_SIZE_BYTES: Final = operator.attrgetter("size_bytes")
_CONTIGUOUS: Final = operator.attrgetter("contiguous")
_LOOKS: Final[tuple[Callable[[torch.Tensor], object], ...]] = (
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    _NBYTES,
)
"""Forms that a table of addresses depends on: other strides or sizes are other bytes."""
_AS_INTEGERS: Final[dict[torch.dtype, torch.dtype]] = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for name, dtype in TORCH_DTYPES.items()
    if name.startswith(("float8", "float4", "complex", "uint", "bool")) and dtype.itemsize <= 8
}
"""Element types that the multi-tensor kernels do not take, and what they are copied as."""
_LARGE_BYTES = 256 << 10


class LiveTensor(NamedTuple):
    """A view of our own of a piece's tensor that is copied after planning, as it was at `save()`.

    The live tensor is a name for memory that anybody can redirect (`.data = …`, `set_`). The sizes
    of this view stay fixed and its storage stays alive. The storage can still be freed or moved
    (`untyped_storage().resize_`), which is detected, and written to, which only the bytes show.
    """

    tensor: torch.Tensor
    address: int
    storage_bytes: int

    def in_place(self) -> bool:
        """Return whether its memory has the same address and size as at `save()`."""
        return (
            self.tensor.data_ptr() == self.address
            and self.tensor.untyped_storage().nbytes() == self.storage_bytes
        )


def hold_all(tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[LiveTensor] | None:
    """Hold many tensors, with one query for all; return None if any is not what was planned. The
    query reads our view, which nobody changes afterwards."""
    held = list(map(torch.Tensor.detach, tensors))
    if (
        list(map(_NBYTES, held)) != list(map(_SIZE_BYTES, pieces))
        or list(map(DTYPE_NAMES.get, map(_DTYPE, held))) != list(map(_DTYPE, pieces))
        or list(map(torch.Tensor.is_contiguous, held)) != list(map(_CONTIGUOUS, pieces))
    ):
        return None
    addresses = map(torch.Tensor.data_ptr, held)
    storages = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, held))
    return list(map(LiveTensor._make, zip(held, addresses, storages, strict=True)))


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
    return TornCaptureError(
        "a tensor was replaced or resized while it was copied",
        expected=f"{expected[0]} elements of {expected[1]}",
        found=f"{found[0]} of {found[1]}",
        remedy="let no other thread change the state while it is saved or restored",
    )


def _renew_thread_pool() -> None:
    """Let torch replace its thread pool, whose threads a forked child does not have. At the next
    use it would do so without a lock, and some of several threads fail: "Invalid thread pool!"."""
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_renew_thread_pool)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in row-major order; copies only if they are not contiguous."""
    if not tensor.is_contiguous():
        return tensor.contiguous().view(-1)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as flat bytes, in the same memory."""
    # as_strided, not view: a contiguous tensor of one element may have any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of any strides as a type that every copy kernel takes."""
    plain = _AS_INTEGERS.get(tensor.dtype)
    return tensor if plain is None else tensor.view(plain)


def gather(
    buffer: torch.Tensor,
    groups: Sequence[StagingGroup],
    sources: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
) -> None:
    """Fill a buffer of bytes from the pieces that its groups name, on the current stream."""
    into: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for group in groups:
            dtype = TORCH_DTYPES[group.dtype]
            tensors = [sources[span.piece] for span in group.spans]
            place = buffer[group.start : group.stop].view(_AS_INTEGERS.get(dtype, dtype))
            if group.device == "cpu" and _are_scalars(tensors, dtype):
                # Into memory of its own first: whatever becomes of a tensor meanwhile, only bytes
                # that are just as many as planned get into the buffer.
                copy_each([place], [torch.stack(tensors)])
                continue
            parts = _elements_of_all(group.spans, tensors)
            if group.device == "cpu" and len(parts) > 1:
                # One call that knows nothing of the single places beats one view for each.
                join(place, parts)
                continue
            dsts, srcs = into.setdefault(place.dtype, ([], []))
            dsts += place.split([span.last - span.first for span in group.spans])
            srcs += parts
        for dsts, srcs in into.values():
            copy_each(dsts, srcs, non_blocking=True)


def _are_scalars(tensors: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether these are zero-dimensional, such as an optimizer's step counts."""
    # The first one that has a dimension ends the look at dimensions.
    if dtype in _AS_INTEGERS or any(map(torch.Tensor.dim, tensors)):
        return False
    return set(map(_FORM, tensors)) == {(torch.Size(), dtype)}


def _elements_of_all(
    spans: tuple[ElementRange, ...], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    if all(map(_WHOLE, spans)) and all(map(torch.Tensor.is_contiguous, tensors)):
        parts = [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
    else:
        parts = [
            flat(tensor) if span.whole else flat(tensor)[span.first : span.last]
            for tensor, span in zip(tensors, spans, strict=True)
        ]
    return parts if parts[0].dtype not in _AS_INTEGERS else list(map(bits, parts))


def fill(
    target: torch.Tensor, groups: Sequence[StagingGroup], sources: Mapping[int, torch.Tensor]
) -> None:
    """Fill a host buffer from host pieces, which MUST have their planned sizes. Large ones are
    copied by address, outside the GIL, strided ones without a contiguous copy, which no memory cap
    would count."""
    for group in groups:
        if group.stop > target.nbytes:
            raise changed((group.stop, "bytes"), (target.nbytes, "bytes"))
        size, at = DTYPES[group.dtype].size_bytes, group.start
        alone = [
            (span.last - span.first) * size >= _LARGE_BYTES
            or not sources[span.piece].is_contiguous()
            for span in group.spans
        ]
        members = zip(alone, group.spans, strict=True)
        for is_alone, run in groupby(members, operator.itemgetter(0)):
            spans = tuple(span for _, span in run)
            stop = at + size * sum(span.last - span.first for span in spans)
            if not is_alone:
                gather(target, [replace(group, start=at, stop=stop, spans=spans)], sources)
                at = stop
                continue
            for span in spans:
                source, length = sources[span.piece], (span.last - span.first) * size
                if source.is_contiguous():
                    start = source.data_ptr() + span.first * size
                    ctypes.memmove(target.data_ptr() + at, start, length)
                else:
                    _fill_strided(target[at : at + length], source, span)
                at += length


def _fill_strided(target: torch.Tensor, source: torch.Tensor, span: ElementRange) -> None:
    source = bits(source.detach())
    typed = target.view(source.dtype)
    for box in boxes_of_range(tuple(source.shape), span.first, span.last):
        place, typed = typed[: box.volume], typed[box.volume :]
        indices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        copy_each([place.view(box.shape)], [source[indices]])


class Gatherer:
    """Gathers the same pieces repeatedly, by one kernel over an address table where possible."""

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
        self.run_again(buffer)
        if self._strided:
            gather(buffer, self._strided, sources)

    def prepare(self, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> bool:
        """Build the address table unless it is valid; return False if there are no kernels."""
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
        """Gather from the addresses of the last time; their memory MUST still be held."""
        if self._copies is not None:
            self._copies.run(buffer)

    def can_run_again(self) -> bool:
        return self._copies is not None and not self._strided

    def _tabulate(
        self, kernels: Kernels, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        rows: list[tuple[int, int, int]] = []
        self._strided = []
        for group in self._groups:
            size, at = TORCH_DTYPES[group.dtype].itemsize, group.start
            for span in group.spans:
                length = (span.last - span.first) * size
                tensor = sources[span.piece]
                if span.last * size > tensor.nbytes:
                    raise changed((span.last, group.dtype), (tensor.numel(), tensor.dtype))
                if tensor.is_contiguous():
                    rows.append((tensor.data_ptr() + span.first * size, at, length))
                else:
                    strided = replace(group, start=at, stop=at + length, spans=(span,))
                    self._strided.append(strided)
                at += length
        self._copies = CopyTable(kernels, rows, stream) if rows else None
