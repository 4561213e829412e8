"""Decide which of the ranks that hold the same bytes writes which of them.

Pure; every rank computes it from the descriptions alone, as does a loading job. The bytes that a
set of ranks holds alike form one range, in the order of the tensors, and are cut into as many equal
pieces as there are ranks, or fewer if they would be small; each rank writes one piece. Cuts are
moved to whole rows, so that what is written is boxes. Every byte of a tensor is written by exactly
one rank, whatever the layouts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.boxes import Box
from laststep.state.layouts import copies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.state.layouts import Layout, MeshRange

MIN_ASSIGNMENT_BYTES = 8 << 20
"""A rank writes at least this much of what it shares with others, unless there is less."""


class Spread(NamedTuple):
    """A tensor of the job and its layouts, in the same order on all ranks."""

    itemsize: int
    layouts: tuple[Layout, ...]


class Assignment(NamedTuple):
    """A box of a tensor that a rank writes, and the box that the rank holds around it."""

    tensor: int
    box: Box
    held: Box


class RangeBox(NamedTuple):
    """A box that all ranks of a replicated range hold."""

    tensor: int
    held: Box
    size_bytes: int

    @property
    def dim(self) -> int | None:
        """Return the dimension along which it may be cut: the first with more than one index."""
        return next((dim for dim, size in enumerate(self.held.shape) if size > 1), None)


@dataclass(frozen=True, slots=True)
class ReplicatedRange:
    """Bytes that several ranks hold alike, cut into one piece per writer."""

    copies: tuple[MeshRange, ...]
    entries: tuple[RangeBox, ...]
    starts: tuple[int, ...] = field(repr=False)
    """The byte of the range at which each entry begins, and the end of the range."""

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    @property
    def holders(self) -> int:
        return sum(holders.size for holders in self.copies)

    @property
    def pieces(self) -> int:
        return min(self.holders, max(1, self.size_bytes // MIN_ASSIGNMENT_BYTES))

    def piece_of(self, rank: int) -> int | None:
        """Return the piece that a holder writes, or None."""
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
        place = (piece + self.entries[0].tensor) % self.holders
        for holders in self.copies:
            if place < holders.size:
                return holders.rank(place)
            place -= holders.size
        raise IndexError(piece)

    def range_of(self, piece: int) -> tuple[int, int]:
        total, pieces = self.size_bytes, self.pieces
        return piece * total // pieces, (piece + 1) * total // pieces

    def assignments(self, piece: int) -> list[Assignment]:
        low, high = self.range_of(piece)
        first = max(bisect.bisect_right(self.starts, low) - 1, 0)
        assignments = []
        for number in range(first, len(self.entries)):
            start = self.starts[number]
            if start >= high:
                break
            entry = self.entries[number]
            box = _rows(entry, low - start, high - start)
            if box is not None:
                assignments.append(Assignment(entry.tensor, box, entry.held))
        return assignments

    def pieces_with(self, number: int, wanted: Box) -> range:
        """Return the pieces that hold some of `wanted`, a box inside that entry."""
        entry, start = self.entries[number], self.starts[number]
        first, last = start, start
        dim = entry.dim
        if dim is not None:
            row_bytes = entry.size_bytes // entry.held.shape[dim]
            first += (wanted.start[dim] - entry.held.start[dim]) * row_bytes
            last += (wanted.stop[dim] - 1 - entry.held.start[dim]) * row_bytes
        return range(self._piece_at(first), self._piece_at(last) + 1)

    def _piece_at(self, byte: int) -> int:
        """Return the piece of the rows that begin at this byte."""
        return ((byte + 1) * self.pieces - 1) // max(self.size_bytes, 1)


def ranges_of(rank: int, tensors: Sequence[Spread]) -> list[ReplicatedRange]:
    """Return the replicated ranges of everything that a rank holds."""
    shared_ranges: dict[tuple[MeshRange, ...], list[RangeBox]] = {}
    # By identity, because many tensors share a layout: the boxes held, their elements, and the
    # ranks that hold the same.
    parts: dict[int, tuple[tuple[Box, ...], tuple[int, ...], tuple[MeshRange, ...]]] = {}
    for number, (itemsize, layouts) in enumerate(tensors):
        writing = writing_layouts(layouts)
        for layout in writing:
            part = parts.get(id(layout))
            if part is None:
                part = parts[id(layout)] = _part(rank, layout)
            held, volumes, copies = part
            if held:
                if len(writing) > 1:
                    copies = tuple(filter(None, (copies_of(other, held) for other in writing)))
                shared_ranges.setdefault(copies, []).extend(
                    RangeBox(number, box, volume * itemsize)
                    for box, volume in zip(held, volumes, strict=True)
                )
                break
    return [
        ReplicatedRange(
            copies,
            tuple(entries),
            tuple(itertools.accumulate((entry.size_bytes for entry in entries), initial=0)),
        )
        for copies, entries in shared_ranges.items()
    ]


def _part(
    rank: int, layout: Layout
) -> tuple[tuple[Box, ...], tuple[int, ...], tuple[MeshRange, ...]]:
    at = layout.mesh.coordinate(rank)
    if at is None:
        return (), (), ()
    held = layout.held(rank)
    return held, tuple(box.volume for box in held), (layout.mesh.along(at, layout.cutting),)


def assignments_of(rank: int, tensors: Sequence[Spread]) -> list[Assignment]:
    """Return everything that a rank writes, in the order of the tensors."""
    assignments: list[Assignment] = []
    for shared_range in ranges_of(rank, tensors):
        piece = shared_range.piece_of(rank)
        if piece is not None:
            assignments += shared_range.assignments(piece)
    return sorted(assignments, key=lambda assignment: assignment.tensor)


def writing_layouts(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Return the layouts whose ranks write: those that cut the tensor as the first one does."""
    if len(layouts) == 1:
        return layouts
    cuts = layouts[0].cuts()
    return tuple(layout for layout in layouts if layout.cuts() == cuts)


def _rows(entry: RangeBox, low: int, high: int) -> Box | None:
    """Return the whole rows that begin at bytes [low, high) of a held box."""
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


def size_of(assignment: Assignment, tensors: Sequence[Spread]) -> int:
    return math.prod(assignment.box.shape) * tensors[assignment.tensor].itemsize
