"""What the entries of a data file are, in the words of a user: tensors of an item, parts of these,
trees.

Pure. A tensor that several ranks held lies in parts, in files of theirs; its own name, dtype and
shape stand beside each part.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

from laststep.plan.files import TABLE_NAME, TREE_NAME
from laststep.state.boxes import Box, whole
from laststep.state.stored_items import TensorSpec

if TYPE_CHECKING:
    from laststep.format.header import Header
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


def stored_in(header: Header, entry: TensorEntry) -> StoredBox:
    """What an entry of a file is; names in a file of one item do not repeat the item's name."""
    item, name = header.item, entry.name
    if item is None:
        item, _, name = entry.name.partition("/")
    part = header.parts.get(entry.name)
    if part is None:
        return StoredBox(item, name, TensorSpec(entry.dtype, entry.shape), whole(entry.shape))
    stop = tuple(map(operator.add, part.start, entry.shape))
    return StoredBox(item, part.tensor, TensorSpec(entry.dtype, part.shape), Box(part.start, stop))


def item_of_object(name: str) -> str | None:
    """The item whose tree an object is."""
    item, _, last = name.rpartition("/")
    return item if last == TREE_NAME and item else None


def object_text(name: str) -> str:
    """An object in words."""
    if name == TABLE_NAME:
        return "the table of what ranks hold"
    item = item_of_object(name)
    return name if item is None else f"the tree of {item}"


def box_text(box: Box) -> str:
    """A box as an index: `0:320, 0:300`."""
    return ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
