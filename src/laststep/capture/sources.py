"""What is copied after the planning, held as it was at `save()`.

A live tensor is a name for memory, which anybody can point elsewhere (`.data = …`, `set_`).
A source is a view of our own: its sizes stay, and its storage lives. What can still happen is that
its storage is freed or moved (`untyped_storage().resize_`), which shows, and that somebody writes
into it, which only the bytes tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from laststep.capture.exact import changed
from laststep.state.tensors import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from laststep.state.pieces import Piece


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
    held = tensor.detach()
    if (
        held.nbytes != piece.size_bytes
        or DTYPE_NAMES.get(held.dtype) != piece.dtype
        or held.is_contiguous() != piece.contiguous
    ):
        raise changed((piece.shape, piece.dtype), (tuple(held.shape), held.dtype))
    return LiveTensor(held, held.data_ptr(), held.untyped_storage().nbytes())


class Views:
    """Sources as tensors."""

    def __init__(self, sources: Mapping[int, LiveTensor]) -> None:
        self._sources = sources

    def __getitem__(self, piece: int, /) -> torch.Tensor:
        return self._sources[piece].tensor
