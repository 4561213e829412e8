"""Decide which of the ranks that hold the same bytes writes which of them.

Pure, and computed by every rank for itself, from descriptions alone: nobody collects plans. The
copies that a set of ranks holds in common are thought of as one line of bytes, in the order of the
tensors, and cut into as many equal pieces as there are ranks, or fewer where they would be small;
each rank writes one piece. Cuts are moved to whole rows, so what is written is boxes. Every byte of
a tensor is written by exactly one rank, whatever the layouts.

A checkpoint keeps the descriptions, so who loads it finds by the same arithmetic who wrote what.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.boxes import Box
from laststep.state.layouts import Holders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.state.layouts import Layout

MIN_SHARE_BYTES = 8 << 20
"""Ranks write no less than this of what they hold in common, unless there is no more."""


class Spread(NamedTuple):
    """A tensor of the job, and how the ranks hold it: a layout for each class of ranks that does,
    in the same order everywhere."""

    itemsize: int
    layouts: tuple[Layout, ...]


class Share(NamedTuple):
    """Bytes that a rank writes: a box of a tensor, within the box of it that the rank holds."""

    tensor: int
    box: Box
    held: Box


class LineBox(NamedTuple):
    """A box that all ranks of a line hold."""

    tensor: int
    held: Box
    size_bytes: int

    @property
    def dim(self) -> int | None:
        """The dimension along which it may be cut: the first that has more than one index."""
        for dim, (start, stop) in enumerate(zip(*self.held, strict=True)):
            if stop - start > 1:
                return dim
        return None


@dataclass(frozen=True, slots=True)
class Line:
    """What some ranks hold in common, cut into pieces, one for each writer."""

    copies: tuple[Holders, ...]
    entries: tuple[LineBox, ...]
    starts: tuple[int, ...] = field(repr=False)
    """The byte of the line at which each entry begins, and its end."""

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    @property
    def holders(self) -> int:
        """How many hold it."""
        return sum(holders.size for holders in self.copies)

    @property
    def pieces(self) -> int:
        return min(self.holders, max(1, self.size_bytes // MIN_SHARE_BYTES))

    def piece_of(self, rank: int) -> int | None:
        """Which piece a rank of it writes; None where it writes none."""
        before = 0
        for holders in self.copies:
            place = holders.place(rank)
            if place is not None:
                # Other lines begin with other tensors: where few write, these are not always the
                # same ranks.
                piece = (before + place - self.entries[0].tensor) % self.holders
                return piece if piece < self.pieces else None
            before += holders.size
        return None

    def writer(self, piece: int) -> int:
        """The rank that writes a piece."""
        place = (piece + self.entries[0].tensor) % self.holders
        for holders in self.copies:
            if place < holders.size:
                return holders.rank(place)
            place -= holders.size
        raise IndexError(piece)

    def range_of(self, piece: int) -> tuple[int, int]:
        """The bytes of a piece; rows that begin in them are its own."""
        total, pieces = self.size_bytes, self.pieces
        return piece * total // pieces, (piece + 1) * total // pieces

    def shares(self, piece: int) -> list[Share]:
        """What is written with a piece."""
        low, high = self.range_of(piece)
        first = max(bisect.bisect_right(self.starts, low) - 1, 0)
        shares = []
        for number in range(first, len(self.entries)):
            start = self.starts[number]
            if start >= high:
                break
            entry = self.entries[number]
            box = _rows(entry, low - start, high - start)
            if box is not None:
                shares.append(Share(entry.tensor, box, entry.held))
        return shares

    def pieces_with(self, number: int, wanted: Box) -> range:
        """The pieces that hold something of a box, which is part of that entry's."""
        entry, start = self.entries[number], self.starts[number]
        first, last = start, start
        dim = entry.dim
        if dim is not None:
            row_bytes = entry.size_bytes // entry.held.shape[dim]
            first += (wanted.start[dim] - entry.held.start[dim]) * row_bytes
            last += (wanted.stop[dim] - 1 - entry.held.start[dim]) * row_bytes
        return range(self._piece_at(first), self._piece_at(last) + 1)

    def _piece_at(self, byte: int) -> int:
        """The piece to which rows that begin there belong."""
        return ((byte + 1) * self.pieces - 1) // max(self.size_bytes, 1)


class _HeldBoxes(NamedTuple):
    """What a rank holds under a layout: the ranks that hold the same, its boxes, their elements."""

    copies: tuple[Holders, ...]
    held: tuple[Box, ...]
    volumes: tuple[int, ...]


def lines_of(rank: int, tensors: Sequence[Spread]) -> list[Line]:
    """All that a rank holds together with others, or alone."""
    lines: dict[tuple[Holders, ...], list[LineBox]] = {}
    parts: dict[int, _HeldBoxes] = {}
    for number, (itemsize, layouts) in enumerate(tensors):
        writing = writing_layouts(layouts)
        for layout in writing:
            # By identity: many tensors share a layout.
            part = parts.get(id(layout))
            if part is None:
                part = parts[id(layout)] = _part(rank, layout)
            copies, held, volumes = part
            if held:
                if len(writing) > 1:
                    copies = tuple(filter(None, (other.copies(held) for other in writing)))
                lines.setdefault(copies, []).extend(
                    LineBox(number, box, volume * itemsize)
                    for box, volume in zip(held, volumes, strict=True)
                )
                break
    return [
        Line(
            copies,
            tuple(line),
            tuple(itertools.accumulate((entry.size_bytes for entry in line), initial=0)),
        )
        for copies, line in lines.items()
    ]


def _part(rank: int, layout: Layout) -> _HeldBoxes:
    at = layout.mesh.coordinate(rank)
    if at is None:
        return _HeldBoxes((), (), ())
    cutting, held = layout.cutting, layout.held(rank)
    place = tuple(step if axis in cutting else 0 for axis, step in enumerate(at))
    copies = (Holders(layout.mesh, place, cutting),)
    return _HeldBoxes(copies, held, tuple(box.volume for box in held))


def shares_of(rank: int, tensors: Sequence[Spread]) -> list[Share]:
    """All that a rank writes, in the order of the tensors."""
    shares: list[Share] = []
    for line in lines_of(rank, tensors):
        piece = line.piece_of(rank)
        if piece is not None:
            shares += line.shares(piece)
    return sorted(shares, key=lambda share: share.tensor)


def writing_layouts(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts whose ranks take part in writing: all that cut the tensor as the first does. One
    that cuts it otherwise holds the same bytes in other boxes, and leaves them to the others."""
    if len(layouts) == 1:
        return layouts
    cuts = layouts[0].cuts()
    return tuple(layout for layout in layouts if layout.cuts() == cuts)


def _rows(entry: LineBox, low: int, high: int) -> Box | None:
    """The whole rows that begin at bytes [low, high) of a held box."""
    if low <= 0 < entry.size_bytes <= high:
        return entry.held
    shape, dim = entry.held.shape, entry.dim
    if dim is None:
        return entry.held if low <= 0 < high else None
    row_bytes = entry.size_bytes // shape[dim]
    first = min(max(-(-low // row_bytes), 0), shape[dim])
    last = min(max(-(-high // row_bytes), 0), shape[dim])
    if first >= last:
        return None
    start, stop = list(entry.held.start), list(entry.held.stop)
    start[dim], stop[dim] = start[dim] + first, start[dim] + last
    return Box(tuple(start), tuple(stop))


def size_of(share: Share, tensors: Sequence[Spread]) -> int:
    """Bytes of a share."""
    return math.prod(share.box.shape) * tensors[share.tensor].itemsize
