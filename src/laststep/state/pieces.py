"""The values that describe state on its way to and from a checkpoint.

Knows nothing of torch: live tensors are opaque here. Pieces are named tuples, not dataclasses,
because a save of 100,000 tensors makes as many of them while training waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from laststep.state.layouts import Layout

Shape = tuple[int, ...]


class BoxPart(NamedTuple):
    """What a piece is that is not a whole tensor but a box of one."""

    tensor: str
    shape: Shape
    start: Shape


class Piece(NamedTuple):
    """A tensor of an item, described; plans are cached under pieces, so they hold no memory."""

    name: str
    dtype: str
    shape: Shape
    size_bytes: int
    device: str
    contiguous: bool
    volatile: bool
    """Whether a forward pass may change it (BatchNorm's statistics): then it is never lazy."""
    part: BoxPart | None = None
    trained: bool = False
    """Whether an optimizer may change it: what is frozen lies together, apart from the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor that shares bytes with others: a strided window into a stored base piece."""

    base: str
    dtype: str
    shape: Shape
    stride: Shape
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """An item's state taken apart: its tree, its pieces, and which names share bytes."""

    tree: object
    pieces: tuple[Piece, ...]
    sources: tuple[torch.Tensor, ...]
    """The live tensor of each piece (possibly strided); nobody here looks into it."""
    ties: dict[str, str] = field(default_factory=dict)
    """A name whose tensor is the same memory as the piece named by the value."""
    views: dict[str, View] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every tensor by its name, those that share bytes included; opaque like `sources`."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """How those lie that this rank holds a part of; `tensors` and `sources` have that part."""
    owners: dict[str, object] = field(default_factory=dict)
    """The live object of each of those, to be handed over when its part has been restored."""
