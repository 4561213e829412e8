"""An item as it is stored: its tree, its tensors' specs, what shares bytes; as an object and back.

Knows nothing of files or torch. The object is the item's tree in `shared.safetensors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from laststep.codecs import objects
from laststep.errors import Corrupt
from laststep.state.pieces import Collected, Shape, View
from laststep.state.tree import merge_trees, owners, tensor_names
from laststep.terms import DTYPES

MAX_BYTES = (1 << 63) - 1
"""The most that torch counts."""


class TensorSpec(NamedTuple):
    """What a stored tensor is."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """An item of a checkpoint."""

    name: str
    kind: str
    tree: object
    ties: dict[str, str]
    views: dict[str, View]
    tensors: dict[str, TensorSpec]
    """The tensors that have bytes of their own, by name."""

    def view_of(self, name: str) -> View | None:
        """The window that a name is, if it is one; a name may be tied to one that is."""
        return self.views.get(self.ties.get(name, name))

    def source_of(self, name: str) -> str:
        """The stored tensor whose bytes a name's bytes are."""
        view = self.view_of(name)
        return view.base if view is not None else self.ties.get(name, name)

    def window_of(self, name: str) -> tuple[str, View | None]:
        """Whose bytes they are, and which of them: names with the same are of one tensor."""
        return self.source_of(name), self.view_of(name)

    def spec_of(self, name: str) -> TensorSpec:
        view = self.view_of(name)
        if view is not None:
            return TensorSpec(view.dtype, view.shape)
        return self.tensors[self.ties.get(name, name)]

    def names(self) -> list[str]:
        """Every tensor of the tree."""
        return tensor_names(self.tree)


def encode_item(collected: Collected, kept: objects.EncodedDicts | None = None) -> bytes:
    """The tree and the sharing of an item as one object; `kept` from one save to the next spares
    the parts of a tree that these share."""
    views = {
        name: (view.base, view.dtype, view.shape, view.stride, view.offset_bytes)
        for name, view in collected.views.items()
    }
    return objects.encode({"tree": collected.tree, "ties": collected.ties, "views": views}, kept)


def decode_item(
    trees: list[tuple[bytes, str]], *, name: str, kind: str, tensors: dict[str, TensorSpec]
) -> StoredItem:
    """The item again, from its trees and where they lie: one, or several where ranks had different
    parts of it. `Corrupt` where they refer to tensors that are not there."""
    tree: object = None
    ties: dict[str, str] = {}
    views: dict[str, View] = {}
    for number, (data, where) in enumerate(trees):
        plain = objects.decode(data, where=where)
        if not isinstance(plain, dict) or set(plain) != {"tree", "ties", "views"}:
            raise Corrupt(
                "the tree of an item is malformed", where=where, expected="tree, ties and views"
            )
        tree = plain["tree"] if number == 0 else merge_trees(tree, plain["tree"])
        ties.update(_ties(plain["ties"], where))
        entries = _dict(plain["views"], where).items()
        views.update({key: _view(entry, where) for key, entry in entries})
    where = trees[0][1]
    try:
        owners(tree)
    except Corrupt as error:
        raise Corrupt(error.what, where=where, found=error.found) from None
    item = StoredItem(name=name, kind=kind, tree=tree, ties=ties, views=views, tensors=tensors)
    for leaf in item.names():
        source = item.source_of(leaf)
        if source not in tensors:
            raise Corrupt(
                "a tensor that the tree names is not stored", where=where, found=repr(source)
            )
        view = item.view_of(leaf)
        if view is not None and not _lies_in(view, tensors[source]):
            raise Corrupt("a view lies outside of its base", where=where, found=repr(view)[:200])
    return item


def _lies_in(view: View, base: TensorSpec) -> bool:
    if view.dtype not in DTYPES or base.dtype != "uint8" or len(base.shape) != 1:
        return False
    size = DTYPES[view.dtype].size_bytes
    # A step of 0 makes any number of elements of one; torch counts their bytes all the same.
    if math.prod(max(n, 1) for n in view.shape) * size > MAX_BYTES:
        return False
    reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    stop = view.offset_bytes + (0 if 0 in view.shape else (reach + 1) * size)
    fits = all(step * size <= MAX_BYTES for step in view.stride)
    return fits and view.offset_bytes % size == 0 and stop <= base.shape[0]


def _dict(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Corrupt("the tree of an item is malformed", where=where, expected="names")
    return value


def _ties(value: object, where: str) -> dict[str, str]:
    ties = _dict(value, where)
    if not all(isinstance(target, str) for target in ties.values()):
        raise Corrupt("the ties of an item are malformed", where=where)
    return ties  # type: ignore[return-value]


def _view(entry: object, where: str) -> View:
    match entry:
        case (str(base), str(dtype), tuple(shape), tuple(stride), int(offset)):
            if len(shape) == len(stride) and all(
                type(n) is int and n >= 0 for n in (*shape, *stride, offset)
            ):
                return View(base=base, dtype=dtype, shape=shape, stride=stride, offset_bytes=offset)
    raise Corrupt("a view of an item is malformed", where=where, found=repr(entry)[:80])
