"""Tensors that are copied after planning, held as they were at `save()`.

A live tensor is a name for memory that anybody can redirect (`.data = …`, `set_`). A source is a
view of our own: its sizes stay fixed and its storage stays alive. Its storage can still be freed or
moved (`untyped_storage().resize_`), which is detected, and written to, which only the bytes show.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from laststep.capture.exact import changed
from laststep.state.tensors import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.state.provider import Piece

_NBYTES: Final = operator.attrgetter("nbytes")
_DTYPE: Final = operator.attrgetter("dtype")
_SIZE_BYTES: Final = operator.attrgetter("size_bytes")
_CONTIGUOUS: Final = operator.attrgetter("contiguous")


class Tensors(Protocol):
    """Tensors by the numbers of their pieces."""

    def __getitem__(self, piece: int, /) -> torch.Tensor: ...


class LiveTensor(NamedTuple):
    """A piece's tensor, as it was at `save()`."""

    tensor: torch.Tensor
    address: int
    storage_bytes: int

    def in_place(self) -> bool:
        """Return whether its memory has the same address and size as at `save()`."""
        return (
            self.tensor.data_ptr() == self.address
            and self.tensor.untyped_storage().nbytes() == self.storage_bytes
        )


def hold(tensor: torch.Tensor, piece: Piece) -> LiveTensor:
    """Hold a live tensor, which MUST be what the piece was planned as."""
    held = hold_all([tensor], [piece])
    if held is None:
        raise changed((piece.shape, piece.dtype), (tuple(tensor.shape), tensor.dtype))
    return held[0]


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


class Views:
    """Sources as tensors."""

    def __init__(self, sources: Mapping[int, LiveTensor]) -> None:
        self._sources = sources

    def __getitem__(self, piece: int, /) -> torch.Tensor:
        return self._sources[piece].tensor
