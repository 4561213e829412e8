"""What is copied after the planning, held as it was at `save()`.

A live tensor is a name for memory, which anybody can point elsewhere (`.data = …`, `set_`).
A source is a view of our own: its sizes stay, and its storage lives. What can still happen is that
its storage is freed or moved (`untyped_storage().resize_`), which shows, and that somebody writes
into it, which only the bytes tell.
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
        """Whether its memory is still where it was, and as large."""
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
    """The same of many, each question asked of all; None if one is not what was planned. What is
    asked is our view, which nobody changes afterwards."""
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
