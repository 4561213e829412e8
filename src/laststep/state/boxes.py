"""Boxes of a tensor's index space, ranges of its elements in row-major order, and overlaps of
ranges in memory. Pure geometry; knows nothing of ranks, torch or files."""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


Index = tuple[int, ...]


class Box(NamedTuple):
    """The indices i of a tensor with start <= i < stop in every dimension."""

    start: Index
    stop: Index

    @property
    def shape(self) -> Index:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        """The number of elements; 1 for a tensor without dimensions."""
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def text(self) -> str:
        """The box in index notation: `0:320, 0:300`."""
        return ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))

    def meet(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(operator.lt, start, stop)) else None

    def within(self, outer: Box) -> Box:
        """Return the box relative to the start of `outer`, which MUST contain it."""
        return Box(
            tuple(map(operator.sub, self.start, outer.start)),
            tuple(map(operator.sub, self.stop, outer.start)),
        )

    def moved(self, by: Index) -> Box:
        """Return the box shifted by an offset; with `outer.start` the inverse of `within`."""
        return Box(
            tuple(map(operator.add, self.start, by)), tuple(map(operator.add, self.stop, by))
        )


def whole(shape: Index) -> Box:
    return Box((0,) * len(shape), shape)


def row_major(shape: Iterable[int], index: Iterable[int]) -> int:
    """Return the position of an element in row-major order."""
    at = 0
    for size, coordinate in zip(shape, index, strict=True):
        at = at * size + coordinate
    return at


def boxes_of_range(shape: Index, first: int, last: int) -> tuple[Box, ...]:
    """Convert elements [first, last) in row-major order to at most 2n - 1 boxes, in that order."""
    if first >= last:
        return ()
    if not shape:
        return (Box((), ()),)
    row = math.prod(shape[1:])
    low, high = first // row, (last - 1) // row
    if low == high:
        return _in_row(low, shape, first - low * row, last - low * row)
    parts: list[Box] = []
    if first > low * row:
        parts += _in_row(low, shape, first - low * row, row)
        low += 1
    full = last // row  # the first row that is not complete
    if full > low:
        rest = whole(shape[1:])
        parts.append(Box((low, *rest.start), (full, *rest.stop)))
    if last > full * row:
        parts += _in_row(full, shape, 0, last - full * row)
    return tuple(parts)


def _in_row(row: int, shape: Index, first: int, last: int) -> tuple[Box, ...]:
    inner = boxes_of_range(shape[1:], first, last)
    return tuple(Box((row, *box.start), (row + 1, *box.stop)) for box in inner)


def runs_of(shape: Index, box: Box) -> Iterator[tuple[int, int]]:
    """Convert a box to ranges [first, last) of elements in row-major order."""
    inner = len(shape)  # dimensions from here on are complete: one run
    while inner and (box.start[inner - 1], box.stop[inner - 1]) == (0, shape[inner - 1]):
        inner -= 1
    run = math.prod(shape[inner:])
    if not inner:
        yield 0, run
        return
    lead = [range(a, b) for a, b in zip(box.start[: inner - 1], box.stop[: inner - 1], strict=True)]
    for index in itertools.product(*lead):
        at = row_major(shape[:inner], (*index, box.start[inner - 1]))
        yield at * run, (at + box.stop[inner - 1] - box.start[inner - 1]) * run


def covers_once(shape: Index, boxes: Sequence[Box]) -> bool:
    """Return True if every element of a tensor is in exactly one of the boxes."""
    if sum(box.volume for box in boxes) != math.prod(shape):
        return False
    # Equal volume and no overlap mean that nothing is missing. Boxes are sorted by the dimension
    # with the most cuts, so a box is only compared with the few that start before it stops.
    if not shape or math.prod(shape) == 0:
        return True
    cuts = [len(set(starts)) for starts in zip(*(box.start for box in boxes), strict=True)]
    dim = cuts.index(max(cuts))
    ordered = sorted((box for box in boxes if box.volume), key=lambda box: box.start[dim])
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.start[dim] >= box.stop[dim]:
                break
            if box.meet(other) is not None:
                return False
    return all(whole(shape).meet(box) == box for box in ordered)


def counts(values: Sequence[Any]) -> Index:
    """Return the values as a tuple. Raise `ValueError` unless all are integers >= 0."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"no counts: {values!r}")
    return tuple(values)


class MemoryRange(NamedTuple):
    """The bytes of a tensor: address of its storage, bytes in it, and exact window."""

    name: str
    storage: int
    start: int
    stop: int
    window: tuple[object, ...]
    """dtype, shape, stride and offset: equal windows of one storage are the same tensor."""


def find_ties(extents: list[MemoryRange]) -> dict[str, str]:
    """Return name → first name with exactly the same window, if that is another one."""
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for extent in extents:
        if extent.start == extent.stop:
            continue
        known = first.setdefault((extent.storage, extent.window), extent.name)
        if known != extent.name:
            ties[extent.name] = known
    return ties


def find_overlaps(extents: list[MemoryRange]) -> list[list[MemoryRange]]:
    """Return the groups of windows of a storage that overlap, sorted by their starts."""
    groups: list[list[MemoryRange]] = []
    storage, stop = -1, -1
    # In the order of names, which is the same on all ranks and at each save, unlike addresses.
    order = {name: n for n, name in enumerate(dict.fromkeys(e.storage for e in extents))}
    for extent in sorted(extents, key=lambda e: (order[e.storage], e.start, e.stop)):
        if extent.start == extent.stop:
            continue
        if extent.storage != storage or extent.start >= stop:
            groups.append([])
            storage, stop = extent.storage, -1
        groups[-1].append(extent)
        stop = max(stop, extent.stop)
    return [group for group in groups if len(group) > 1]
