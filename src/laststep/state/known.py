"""Walk a state whose tensors are probably the ones of the last save, and notice if they are not.

Between two saves a training run keeps its tensors and changes its numbers. So the second walk only
checks, tensor by tensor and in order, that each is the same object with the same memory under the
same path, and copies the plain values around them. At the first difference it gives up, and the
state is taken apart anew. Holds no tensor's memory; imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.objects import Tagged
from laststep.state.tree import OWNED, PLAIN, Owned, Path

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    import torch

    from laststep.codecs.objects import TensorRef


class Known(NamedTuple):
    """A tensor as the last save met it."""

    tensor: weakref.ref[torch.Tensor]
    parent: Path
    """The path of its container; tensors of one container share this very tuple."""
    key: object
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    ref: TensorRef
    is_piece: bool
    """False for a tensor that is tied to an earlier one."""
    local: weakref.ref[torch.Tensor] | None = None
    """Of a DTensor, the part that this rank holds: the rest is told of that."""


class _Different(Exception):
    """The state is not the known one; it never leaves this module."""


class _Walk:
    """One walk; `sources` collects the tensors of the pieces, in order."""

    def __init__(self, known: Sequence[Known]) -> None:
        self._known = known
        self._next = 0
        self.sources: list[torch.Tensor] = []

    def all_met(self) -> bool:
        return self._next == len(self._known)

    def container(self, node: object, path: Path) -> object:
        kind = type(node)
        if kind is Owned:
            if type(node.state) not in _CONTAINERS:  # type: ignore[attr-defined]
                raise _Different
            return Tagged(OWNED, [node.owner, self.container(node.state, path)])  # type: ignore[attr-defined]
        if kind is dict or kind is OrderedDict:
            copied = {} if kind is dict else OrderedDict()
            known, parent = self._known, None
            for key, inner in node.items():  # type: ignore[attr-defined]
                if type(inner) in PLAIN:
                    copied[key] = inner
                elif type(inner) in _CONTAINERS:
                    copied[key] = self.container(inner, (*path, key))
                else:
                    # Spelled out here: this runs once per tensor while training waits.
                    if self._next == len(known):
                        raise _Different
                    one = known[self._next]
                    if one.parent is not parent:
                        if one.parent != path:
                            raise _Different
                        parent = one.parent
                    leaf = one.tensor()
                    if leaf is None or leaf is not inner:
                        raise _Different
                    tensor = leaf if one.local is None else _local_of(leaf, one.local)
                    if (
                        one.key != key
                        or one.address != tensor.data_ptr()
                        or one.shape != tensor.shape
                        or one.stride != tensor.stride()
                        or one.dtype is not tensor.dtype
                    ):
                        raise _Different
                    self._next += 1
                    if one.is_piece:
                        self.sources.append(tensor)
                    copied[key] = one.ref
            return copied
        pairs = dict(enumerate(node))  # type: ignore[arg-type, var-annotated]
        entries = list(self.container(pairs, path).values())  # type: ignore[attr-defined]
        return entries if kind is list else tuple(entries)


def _local_of(leaf: torch.Tensor, known: weakref.ref[torch.Tensor]) -> torch.Tensor:
    """The part of a DTensor that this rank holds, if it is the known one."""
    local: torch.Tensor = leaf._local_tensor  # type: ignore[attr-defined]
    if local is not known():
        raise _Different
    return local


_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, Owned})


def walk_known(
    value: object, known: Sequence[Known]
) -> tuple[object, tuple[torch.Tensor, ...]] | None:
    """(tree, tensors of the pieces) if the tensors of `value` are exactly the known ones."""
    if type(value) not in _CONTAINERS:
        return None
    walk = _Walk(known)
    try:
        tree = walk.container(value, ())
    except (_Different, RecursionError):
        return None
    return (tree, tuple(walk.sources)) if walk.all_met() else None
