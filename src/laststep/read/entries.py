"""What the entries of a data file are, in the words of a user: tensors of an item, or parts.

Pure. A tensor that several ranks held lies in parts, in files of theirs; its own name, dtype and
shape stand beside each part.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.boxes import Box, whole
from laststep.state.stored_items import TensorSpec

if TYPE_CHECKING:
    from laststep.format.layout import FileLayout
    from laststep.format.safetensors import TensorEntry


class StoredBox(NamedTuple):
    """What one entry holds: a box of a tensor of an item, mostly all of it."""

    item: str
    tensor: str
    spec: TensorSpec
    """Of the whole tensor."""
    box: Box

    @property
    def name(self) -> str:
        """The full name of the tensor."""
        return f"{self.item}/{self.tensor}"

    @property
    def text(self) -> str:
        """The tensor and, of a part, which: as one would index it."""
        if self.box == whole(self.spec.shape):
            return self.name
        return f"{self.name}[{box_text(self.box)}]"


def stored_in(layout: FileLayout, entry: TensorEntry) -> StoredBox:
    """Return which box of which tensor an entry holds; names in a file of one item do not repeat
    the item's name."""
    item, name = layout.item, entry.name
    if item is None:
        item, _, name = entry.name.partition("/")
    part = layout.parts.get(entry.name)
    if part is None:
        return StoredBox(item, name, TensorSpec(entry.dtype, entry.shape), whole(entry.shape))
    stop = tuple(map(operator.add, part.start, entry.shape))
    return StoredBox(item, part.tensor, TensorSpec(entry.dtype, part.shape), Box(part.start, stop))


def box_text(box: Box) -> str:
    """A box as an index: `0:320, 0:300`."""
    return ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
