"""How a logical tensor is spread over the ranks of a mesh, lowered to boxes of its index space.

Pure; knows nothing of torch, files or processes. A layout is symbolic and the same on every rank:
a mesh of named dimensions and what each of them does to the tensor. What one rank holds comes out
as boxes: a shard is one box, a range of the flattened tensor a few. Ranks that a layout gives the
same boxes hold copies of the same bytes; a rank that is not in the mesh holds nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.errors import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Index = tuple[int, ...]


class Box(NamedTuple):
    """The indices i of a tensor with start <= i < stop in every dimension."""

    start: Index
    stop: Index

    @property
    def shape(self) -> Index:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """How many elements; one for a tensor without dimensions."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Box(start, stop)

    def within(self, outer: Box) -> Box:
        """The same indices, counted from where `outer`, which MUST contain them, starts."""
        return Box(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)),
            tuple(a - b for a, b in zip(self.stop, outer.start, strict=True)),
        )


def whole(shape: Index) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def boxes_of_range(shape: Index, first: int, last: int) -> tuple[Box, ...]:
    """Elements [first, last) in row-major order as boxes, in that order: 2n - 1 of them at most."""
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
    full = last // row  # the first row that is not there whole
    if full > low:
        rest = whole(shape[1:])
        parts.append(Box((low, *rest.start), (full, *rest.stop)))
    if last > full * row:
        parts += _in_row(full, shape, 0, last - full * row)
    return tuple(parts)


def _in_row(row: int, shape: Index, first: int, last: int) -> tuple[Box, ...]:
    inner = boxes_of_range(shape[1:], first, last)
    return tuple(Box((row, *box.start), (row + 1, *box.stop)) for box in inner)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks with a name for each dimension.

    Rank and coordinate follow from each other by arithmetic, whatever the number of ranks: one more
    along a dimension is a rank larger by its stride. A grid that is not so regular is numbered by
    its places instead, and `listed` says whose they are.
    """

    names: tuple[str, ...]
    sizes: Index
    strides: Index
    base: int = 0
    listed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        nested, reach = True, 1
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            nested = nested and size >= 1 and (stride >= reach or size == 1)
            reach = max(reach, stride * size)
        count = math.prod(self.sizes)
        listed = len(set(self.listed)) in (0, count) and len(self.listed) in (0, count)
        if not nested or not listed or len(self.names) != len(self.sizes):
            raise Usage(
                "a mesh does not fit together",
                expected="a name, a size and a stride for each dimension, and every rank once",
                found=f"names {self.names}, sizes {self.sizes}, strides {self.strides}",
            )

    @classmethod
    def of(cls, names: tuple[str, ...], sizes: Index, ranks: Sequence[int]) -> Mesh:
        """The mesh of these ranks, in row-major order."""
        if len(ranks) != math.prod(sizes) or not ranks:
            raise Usage(
                "a mesh does not fit together",
                expected=f"{math.prod(sizes)} ranks", found=str(len(ranks)),
            )  # fmt: skip
        steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        strides = tuple(
            ranks[step] - ranks[0] if size > 1 else step
            for step, size in zip(steps, sizes, strict=True)
        )
        if min(strides, default=1) > 0:
            try:
                regular = cls(names, sizes, strides, ranks[0])
            except Usage:
                pass
            else:
                if list(regular.ranks()) == list(ranks):
                    return regular
        return cls(names, sizes, tuple(steps), 0, tuple(ranks))

    def coordinate(self, rank: int) -> Index | None:
        """Where a rank stands; None where it does not belong to the mesh."""
        left = rank - self.base
        if self.listed:
            if rank not in self.listed:
                return None
            left = self.listed.index(rank)
        at = [0] * len(self.sizes)
        for stride, axis in sorted(((s, i) for i, s in enumerate(self.strides)), reverse=True):
            if self.sizes[axis] > 1:
                at[axis], left = divmod(left, stride)
                if not 0 <= at[axis] < self.sizes[axis]:
                    return None
        return tuple(at) if left == 0 else None

    def rank(self, at: Index) -> int:
        """Who stands there."""
        number: int = self.base + sum(map(operator.mul, at, self.strides))
        return self.listed[number] if self.listed else number

    def ranks(self) -> Iterator[int]:
        """All of them, in row-major order."""
        return map(self.rank, itertools.product(*map(range, self.sizes)))


class Copies(NamedTuple):
    """The ranks of a mesh that hold the same bytes: those that stand at `at` along `cutting`."""

    mesh: Mesh
    at: Index
    """0 along the other dimensions, so that equal copies compare equal."""
    cutting: tuple[int, ...]

    @property
    def size(self) -> int:
        sizes = enumerate(self.mesh.sizes)
        return math.prod(size for axis, size in sizes if axis not in self.cutting)

    def ranks(self) -> Iterator[int]:
        """All of them, in row-major order of the mesh."""
        free = [
            (one,) if axis in self.cutting else range(size)
            for axis, (one, size) in enumerate(zip(self.at, self.mesh.sizes, strict=True))
        ]
        return map(self.mesh.rank, itertools.product(*free))

    def place(self, rank: int) -> int | None:
        """Which of them a rank is, counted from 0; None where it is none of them."""
        at = self.mesh.coordinate(rank)
        if at is None or any(at[axis] != self.at[axis] for axis in self.cutting):
            return None
        number = 0
        for axis, size in enumerate(self.mesh.sizes):
            if axis not in self.cutting:
                number = number * size + at[axis]
        return number


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this dimension of the mesh holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranks along this dimension of the mesh share a dimension of the tensor, as torch.chunk cuts.

    Where several cut the same dimension, those to the left cut first, unless they say that they
    come `after` cuts to the right of them into so many parts: FSDP2 cuts what TP has cut.
    """

    dim: int
    after: int = 1


Placement = Replicate | Shard


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor of this shape under one placement for each dimension of a mesh."""

    shape: Index
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.sizes):
            raise Usage(
                "a layout does not fit its mesh",
                expected=f"{len(self.mesh.sizes)} placements",
                found=f"{len(self.placements)}",
            )
        for dim in {place.dim for place in self.placements if isinstance(place, Shard)}:
            if not 0 <= dim < len(self.shape):
                raise Usage(
                    "a layout cuts a dimension that the tensor does not have",
                    expected=f"0 to {len(self.shape) - 1}",
                    found=str(dim),
                )
            self._order(dim)

    def held(self, rank: int) -> tuple[Box, ...]:
        """What a rank holds: one box, or nothing."""
        at = self.mesh.coordinate(rank)
        if at is None:
            return ()
        start, stop = list(whole(self.shape).start), list(self.shape)
        for dim in range(len(self.shape)):
            for axis in self._order(dim):
                size = stop[dim] - start[dim]
                each = -(-size // self.mesh.sizes[axis])
                end = stop[dim]
                start[dim] = min(start[dim] + at[axis] * each, end)
                stop[dim] = min(start[dim] + each, end)
        box = Box(tuple(start), tuple(stop))
        return (box,) if box.volume else ()

    def cuts(self) -> object:
        """Equal for layouts that cut a tensor into the same boxes, whoever holds them."""
        sizes = self.mesh.sizes
        orders = [[sizes[axis] for axis in self._order(dim)] for dim in range(len(self.shape))]
        return self.shape, tuple(tuple(n for n in order if n > 1) for order in orders)

    def copies(self, held: tuple[Box, ...]) -> Copies | None:
        """Where on the mesh just these boxes are held; None where nowhere."""
        if len(held) != 1 or len(held[0].start) != len(self.shape):
            return None
        at = [0] * len(self.mesh.sizes)
        for dim in range(len(self.shape)):
            start, stop = 0, self.shape[dim]
            for axis in self._order(dim):
                each = -(-(stop - start) // self.mesh.sizes[axis])
                at[axis] = (held[0].start[dim] - start) // each if each else 0
                start = min(start + at[axis] * each, stop)
                stop = min(start + each, stop)
        if not all(one < size for one, size in zip(at, self.mesh.sizes, strict=True)):
            return None
        if self.held(self.mesh.rank(tuple(at))) != held:
            return None
        places = enumerate(self.placements)
        return Copies(self.mesh, tuple(at), tuple(i for i, p in places if isinstance(p, Shard)))

    def _order(self, dim: int) -> list[int]:
        """The dimensions of the mesh that cut this one of the tensor, in the order of the cuts."""
        cuts = [
            (place.after, axis)
            for axis, place in enumerate(self.placements)
            if isinstance(place, Shard) and place.dim == dim
        ]
        for after, axis in cuts:
            before = math.prod(
                self.mesh.sizes[other] for first, other in cuts if other > axis and first < after
            )
            if after != before:
                raise Usage(
                    "a layout cuts in an order that is none",
                    where=f"dimension {dim} of the tensor, {self.mesh.names[axis]!r} of the mesh",
                    expected=f"after {before} parts to the right",
                    found=f"after {after}",
                )
        return [axis for _, axis in sorted(cuts)]


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor that was flattened into a buffer, which ranks along some dimensions of a mesh share.

    The tensor starts at element `offset` of a buffer of `total` elements, padding included, which
    is cut into equal ranges over the ranks of `axes`, in the order of the mesh: ZeRO and FSDP1.
    """

    shape: Index
    mesh: Mesh
    axes: tuple[str, ...]
    offset: int
    total: int

    def __post_init__(self) -> None:
        ranks = math.prod(self._sizes())
        fits = self.offset >= 0 and self.offset + math.prod(self.shape) <= self.total
        if not fits or self.total % ranks or set(self.axes) - set(self.mesh.names):
            raise Usage(
                "a flat layout does not fit together",
                expected="a tensor within a buffer of equal ranges",
                found=f"{math.prod(self.shape)} elements at {self.offset} of {self.total}, "
                f"{ranks} ranks along {', '.join(self.axes)}",
            )

    def range_of(self, rank: int) -> tuple[int, int] | None:
        """The elements of the tensor, in row-major order, that a rank holds; None for none."""
        at = self.mesh.coordinate(rank)
        if at is None:
            return None
        number = 0
        for name, size, one in zip(self.mesh.names, self.mesh.sizes, at, strict=True):
            if name in self.axes:
                number = number * size + one
        each = self.total // math.prod(self._sizes())
        first = max(number * each - self.offset, 0)
        last = min((number + 1) * each - self.offset, math.prod(self.shape))
        return (first, last) if first < last else None

    def held(self, rank: int) -> tuple[Box, ...]:
        """What a rank holds, in the order in which it lies in its range."""
        found = self.range_of(rank)
        return () if found is None else boxes_of_range(self.shape, *found)

    def cuts(self) -> object:
        """Equal for layouts that cut a tensor into the same boxes, whoever holds them."""
        return self.shape, self.offset, self.total // math.prod(self._sizes())

    def copies(self, held: tuple[Box, ...]) -> Copies | None:
        """Where on the mesh just these boxes are held; None where nowhere."""
        if not held or len(held[0].start) != len(self.shape):
            return None
        first = 0
        for size, one in zip(self.shape, held[0].start, strict=True):
            first = first * size + one
        number = (self.offset + first) // (self.total // math.prod(self._sizes()))
        at = [0] * len(self.mesh.sizes)
        cutting = [i for i, name in enumerate(self.mesh.names) if name in self.axes]
        for axis in reversed(cutting):
            number, at[axis] = divmod(number, self.mesh.sizes[axis])
        if number or self.held(self.mesh.rank(tuple(at))) != held:
            return None
        return Copies(self.mesh, tuple(at), tuple(cutting))

    def _sizes(self) -> list[int]:
        pairs = zip(self.mesh.names, self.mesh.sizes, strict=True)
        return [size for name, size in pairs if name in self.axes]


Layout = Sharded | Flat

_Plain = tuple[object, ...]


def to_plain(layout: Layout) -> _Plain:
    """A layout as nested tuples of numbers and strings, for a table and its digest."""
    mesh = (layout.mesh.names, layout.mesh.sizes, layout.mesh.strides, layout.mesh.base,
            layout.mesh.listed)  # fmt: skip
    if isinstance(layout, Flat):
        return "flat", layout.shape, mesh, layout.axes, layout.offset, layout.total
    cuts = tuple((p.dim, p.after) if isinstance(p, Shard) else () for p in layout.placements)
    return "sharded", layout.shape, mesh, cuts


def from_plain(plain: Sequence[Any]) -> Layout:
    """The layout again; raises what Python raises on something else."""
    kind, shape, (names, sizes, strides, base, listed), *rest = plain
    mesh = Mesh(tuple(names), tuple(sizes), tuple(strides), base, tuple(listed))
    if kind == "flat":
        axes, offset, total = rest
        return Flat(tuple(shape), mesh, tuple(axes), offset, total)
    (cuts,) = rest
    return Sharded(tuple(shape), mesh, tuple(Shard(*cut) if cut else Replicate() for cut in cuts))


def covers_once(shape: Index, boxes: Sequence[Box]) -> bool:
    """Whether every element of a tensor lies in exactly one of the boxes."""
    if sum(box.volume for box in boxes) != math.prod(shape):
        return False
    # Equal volume and no overlap: nothing can be missing. Sorted by their first dimension, a box
    # is only compared with those that begin before it ends.
    if not shape or math.prod(shape) == 0:
        return True
    ordered = sorted((box for box in boxes if box.volume), key=lambda box: box.start)
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.start[0] >= box.stop[0]:
                break
            if box.meet(other) is not None:
                return False
    return all(whole(shape).meet(box) == box for box in ordered)
