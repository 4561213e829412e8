"""The tensors of one stored item, read a piece at a time through the catalog.

Knows nothing of files, nor of what the pieces are for. Every byte is verified by the catalog as it
is read. A piece is as many rows as fit into `PIECE_BYTES`, and at least one row, so a tensor whose
rows are larger than that takes the memory of a row.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.state.tensors import open_view
from laststep.state.tree import TensorSpec
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from laststep.browse import Checkpoint
    from laststep.state.provider import Shape, View

PIECE_BYTES = 16 << 20


class ItemTensors:
    """The tree of an item and its tensors, by the names that the tree uses."""

    def __init__(self, checkpoint: Checkpoint, item: str) -> None:
        """`NotFoundError` where the checkpoint has no such item."""
        self._checkpoint = checkpoint
        self._item = checkpoint.content().item(item)
        self.item = item
        self.where = checkpoint.folder
        self.tree = self._item.tree

    def source_of(self, name: str) -> str:
        """The first name of the same tensor: its own, unless it is tied."""
        return self._item.ties.get(name, name)

    def spec(self, name: str) -> TensorSpec:
        """Its dtype and shape."""
        view = self._item.view_of(name)
        if view is not None:
            return TensorSpec(view.dtype, view.shape)
        stored = self._checkpoint.tensor(f"{self.item}/{name}")
        return TensorSpec(stored.dtype, tuple(stored.shape))

    def pieces(
        self, name: str, *, limit_bytes: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Its rows in order, each piece with the number of its first row; one piece at least."""
        spec = self.spec(name)
        if not spec.shape:
            yield 0, self._rows(name, None)
            return
        row_bytes = size_bytes(spec.dtype, spec.shape[1:])
        count = max((limit_bytes or PIECE_BYTES) // max(row_bytes, 1), 1)
        for start in range(0, max(spec.shape[0], 1), count):
            yield start, self._rows(name, range(start, min(start + count, spec.shape[0])))

    def whole(self, name: str) -> torch.Tensor:
        """All of it at once."""
        [(_, tensor)] = self.pieces(name, limit_bytes=sys.maxsize)
        return tensor

    def _rows(self, name: str, rows: range | None) -> torch.Tensor:
        view = self._item.view_of(name)
        if view is not None:
            return self._window(view, rows)
        stored = self._checkpoint.tensor(f"{self.item}/{name}")
        return stored[()] if rows is None else stored[rows.start : rows.stop]

    def _window(self, view: View, rows: range | None) -> torch.Tensor:
        """Rows of a tensor that shares bytes, out of the stretch of its base that they lie in."""
        shape: Shape = () if rows is None else (len(rows), *view.shape[1:])
        size = DTYPES[view.dtype].size_bytes
        start = view.offset_bytes
        if rows is not None:
            start += rows.start * view.stride[0] * size
        reach = sum((n - 1) * step for n, step in zip(shape, view.stride, strict=True))
        stop = start + (0 if 0 in shape else (reach + 1) * size)
        base = self._checkpoint.tensor(f"{self.item}/{view.base}")[start:stop]
        # Cloned, so that the window begins where memory is aligned.
        return open_view(base.clone(), replace(view, shape=shape, offset_bytes=0)).contiguous()


def size_bytes(dtype: str, shape: Shape) -> int:
    """The bytes of a dense tensor."""
    return math.prod(shape) * DTYPES[dtype].size_bytes
