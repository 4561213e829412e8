"""Layouts: how a logical tensor is sharded over the ranks of a mesh, expressed as boxes.

Pure; knows nothing of torch, files or processes. A layout is equal on all ranks: a mesh of named
dimensions, and a placement of the tensor along each of them. Ranks with the same boxes hold copies
of the same bytes; a rank outside the mesh holds nothing. Regular meshes, and sets of ranks on them,
use arithmetic instead of lists of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.errors import UsageError
from laststep.state.boxes import Box, Index, boxes_of_range, counts, row_major, runs_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks with a name for each dimension. One step along a dimension adds its stride to
    the rank; in an irregular grid, to a position in `listed`, the ranks in row-major order."""

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
            raise UsageError(
                "a mesh does not fit together",
                expected="a name, a size and a stride for each dimension, and every rank once",
                found=f"names {self.names}, sizes {self.sizes}, strides {self.strides}",
            )

    @classmethod
    def of(cls, names: tuple[str, ...], sizes: Index, ranks: Sequence[int]) -> Mesh:
        """Return the mesh of these ranks, given in row-major order."""
        if len(ranks) != math.prod(sizes) or not ranks:
            raise UsageError(
                "a mesh does not fit together", expected=f"{sizes} ranks", found=str(len(ranks))
            )
        steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        strides = tuple(
            ranks[step] - ranks[0] if size > 1 else step
            for step, size in zip(steps, sizes, strict=True)
        )
        with contextlib.suppress(UsageError):  # raised for strides that do not nest
            regular = cls(names, sizes, strides, ranks[0])
            if list(regular.ranks()) == list(ranks):
                return regular
        return cls(names, sizes, tuple(steps), 0, tuple(ranks))

    def coordinate(self, rank: int) -> Index | None:
        """Return the coordinate of a rank, or None if it is not in the mesh."""
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
        number: int = self.base + sum(map(operator.mul, at, self.strides))
        return self.listed[number] if self.listed else number

    def along(self, at: Index, cutting: tuple[int, ...]) -> MeshRange:
        """Return the ranks with the coordinate `at` along `cutting`, and any along the others."""
        low = tuple(i if axis in cutting else 0 for axis, i in enumerate(at))
        high = tuple(at[axis] + 1 if axis in cutting else n for axis, n in enumerate(self.sizes))
        return MeshRange(self, low, high, cutting)

    def cut_down(self, axes: tuple[int, ...]) -> Mesh:
        """Return the mesh reduced to the lowest rank along all dimensions but `axes`."""
        sizes = tuple(size if axis in axes else 1 for axis, size in enumerate(self.sizes))
        if not self.listed:  # strides are positive: the lowest rank is at coordinate 0
            return Mesh(self.names, sizes, self.strides, self.base)
        lowest = self.coordinate(min(self.listed)) or ()
        ways = [
            range(size) if axis in axes else (lowest[axis],) for axis, size in enumerate(self.sizes)
        ]
        return Mesh.of(self.names, sizes, [self.rank(at) for at in itertools.product(*ways)])

    def ranks(self) -> Iterator[int]:
        steps = [math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]
        if not self.listed and list(self.strides) == steps:
            return iter(range(self.base, self.base + math.prod(self.sizes)))
        return map(self.rank, itertools.product(*map(range, self.sizes)))


class MeshRange(NamedTuple):
    """The ranks of a mesh with coordinates low <= i < high along every dimension."""

    mesh: Mesh
    low: Index
    high: Index
    cutting: tuple[int, ...] = ()
    """The dimensions that shard what these ranks hold. Ranges that differ only in these, as with
    dimensions of size 1, MUST stay apart: docs/layouts.md counts them as different lines."""

    @property
    def size(self) -> int:
        return math.prod(map(operator.sub, self.high, self.low))

    def ranks(self, cutting: tuple[int, ...] | None = None) -> Iterator[int]:
        """Iterate over all ranks in row-major order, or over the first at each `cutting` place."""
        return map(self.mesh.rank, self.places(cutting))

    def places(self, cutting: tuple[int, ...] | None = None) -> Iterator[Index]:
        free = [
            range(low, high if cutting is None or axis in cutting else low + 1)
            for axis, (low, high) in enumerate(zip(self.low, self.high, strict=True))
        ]
        return itertools.product(*free)

    def place(self, rank: int) -> int | None:
        """Return the position of a rank in `ranks`, or None if it is not one of them."""
        at = self.mesh.coordinate(rank)
        if at is None or not all(map(operator.le, self.low, at)):
            return None
        if not all(map(operator.lt, at, self.high)):
            return None
        sizes = map(operator.sub, self.high, self.low)
        return row_major(sizes, map(operator.sub, at, self.low))

    def rank(self, place: int) -> int:
        """Return the rank at a position: the inverse of `place`."""
        at = list(self.low)
        for axis in reversed(range(len(at))):
            place, offset = divmod(place, self.high[axis] - self.low[axis])
            at[axis] += offset
        return self.mesh.rank(tuple(at))


@dataclass(frozen=True, slots=True)
class Replicate:
    """A placement: all ranks along this mesh dimension hold the same elements."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A placement: ranks along this mesh dimension split a tensor dimension, as torch.chunk does.

    Of several mesh dimensions that shard the same tensor dimension, the leftmost shards first,
    unless those to the right have already split it into `after` shards, as TP has before FSDP2.
    """

    dim: int
    after: int = 1


Placement = Replicate | Shard


@dataclass(frozen=True, slots=True)
class Sharded:
    """The layout of a tensor with one placement for each dimension of a mesh."""

    shape: Index
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        dims = {place.dim for place in self.placements if isinstance(place, Shard)}
        if len(self.placements) != len(self.mesh.sizes) or not dims <= set(range(len(self.shape))):
            raise UsageError(
                "a layout does not fit together",
                expected="a placement per mesh dimension, shards along dimensions of the tensor",
                found=f"{self.placements} for shape {self.shape} on {self.mesh.sizes} ranks",
            )
        for dim in dims:
            self._order(dim)

    def held(self, rank: int) -> tuple[Box, ...]:
        """Return the box that a rank holds, as a tuple of one; empty if it holds nothing."""
        at = self.mesh.coordinate(rank)
        if at is None:
            return ()
        box = self.part_at(at)
        return (box,) if box.volume else ()

    def part_at(self, at: Index) -> Box:
        """Return the box at a coordinate, perhaps without elements."""
        start, stop = list(whole(self.shape).start), list(self.shape)
        for dim in range(len(self.shape)):
            for axis in self._order(dim):
                each, end = -(-(stop[dim] - start[dim]) // self.mesh.sizes[axis]), stop[dim]
                start[dim] = min(start[dim] + at[axis] * each, end)
                stop[dim] = min(start[dim] + each, end)
        return Box(tuple(start), tuple(stop))

    def cuts(self) -> object:
        """Return a key that is equal for layouts with the same boxes, whoever holds them."""
        sizes = self.mesh.sizes
        orders = [[sizes[axis] for axis in self._order(dim)] for dim in range(len(self.shape))]
        return self.shape, tuple(tuple(n for n in order if n > 1) for order in orders)

    @property
    def cutting(self) -> tuple[int, ...]:
        """The mesh dimensions that shard the tensor."""
        return tuple(i for i, place in enumerate(self.placements) if isinstance(place, Shard))

    def holders(self, box: Box) -> tuple[MeshRange, ...]:
        """Return exactly the ranks that hold an element of a box, as ranges that do not overlap."""
        if not box.volume or not math.prod(self.shape):
            return ()
        spans = [{axis: (0, size) for axis, size in enumerate(self.mesh.sizes)}]
        for dim, size in enumerate(self.shape):
            order = self._order(dim)
            if order:
                ways = _cut_ways(order, self.mesh.sizes, (0, size), (box.start[dim], box.stop[dim]))
                spans = [{**span, **way} for span in spans for way in ways]
        ends = [zip(*(span[axis] for axis in sorted(span)), strict=True) for span in spans]
        return tuple(MeshRange(self.mesh, low, high) for low, high in ends)

    def _order(self, dim: int) -> tuple[int, ...]:
        """Return the mesh dimensions that shard this tensor dimension, in the order of sharding."""
        return _cut_order(self.mesh.names, self.mesh.sizes, self.placements, dim)


@functools.lru_cache(maxsize=4096)
def _cut_order(
    names: tuple[str, ...], sizes: Index, placements: tuple[Placement, ...], dim: int
) -> tuple[int, ...]:
    cuts = [
        (place.after, axis)
        for axis, place in enumerate(placements)
        if isinstance(place, Shard) and place.dim == dim
    ]
    for after, axis in cuts:
        before = math.prod(sizes[other] for first, other in cuts if other > axis and first < after)
        if after != before:
            raise UsageError(
                "layout shards in an invalid order",
                where=f"dimension {dim} of the tensor, {names[axis]!r} of the mesh",
                expected=f"after {before} shards to the right",
                found=f"after {after}",
            )
    return tuple(axis for _, axis in sorted(cuts))


def _cut_ways(
    order: Sequence[int], sizes: Index, whole: tuple[int, int], part: tuple[int, int]
) -> list[dict[int, tuple[int, int]]]:
    """Return coordinate ranges, by mesh dimension, that hold some of `part`, a range in `whole`."""
    (axis, *rest), (start, stop) = order, whole
    each = -(-(stop - start) // sizes[axis])
    first, last = (part[0] - start) // each, (part[1] - 1 - start) // each
    if not rest:
        return [{axis: (first, last + 1)}]
    # The parts between the first and the last are covered completely and have equal sizes.
    groups = [(first, first + 1)]
    groups += [(first + 1, last)] if last > first + 1 else []
    groups += [(last, last + 1)] if last > first else []
    ways = []
    for low, high in groups:
        begin = start + low * each
        end = min(begin + each, stop)
        inner = max(part[0], begin), min(part[1], end)
        ways += [{axis: (low, high), **way} for way in _cut_ways(rest, sizes, (begin, end), inner)]
    return ways


@dataclass(frozen=True, slots=True)
class Flat:
    """The layout of a tensor that is flattened into a buffer, with the buffer sharded over a mesh.

    The tensor starts at element `offset` of a buffer of `total` elements, padding included, which
    is split into equal ranges over the ranks along `axes`: ZeRO and FSDP1. With `placements`, other
    mesh dimensions shard the tensor first, and each shard is flattened into a buffer of its own:
    Megatron's distributed optimizer with TP. Each of several equal `blocks` of rows, such as a
    fused gate and up projection, is sharded separately; a shard has its part of every block.
    """

    shape: Index
    mesh: Mesh
    axes: tuple[str, ...]
    offset: int
    total: int
    placements: tuple[Placement, ...] = ()
    blocks: int = 1
    _cut: Sharded = field(init=False, repr=False, compare=False)
    """The layout before flattening, with the blocks as a separate leading dimension."""
    _flattening: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The mesh dimensions whose ranks share a buffer."""
    _each: int = field(init=False, repr=False, compare=False)
    """The number of elements of a buffer per rank."""

    def __post_init__(self) -> None:
        flattening = tuple(i for i, name in enumerate(self.mesh.names) if name in self.axes)
        shape, ranks = self.shape, math.prod(self.mesh.sizes[axis] for axis in flattening)
        placements = self.placements or (Replicate(),) * len(self.mesh.sizes)
        in_blocks = self.blocks > 1 and shape != () and shape[0] % self.blocks == 0
        if in_blocks:
            shape = (self.blocks, shape[0] // self.blocks, *shape[1:])
            placements = tuple(
                Shard(place.dim + 1, place.after) if isinstance(place, Shard) else place
                for place in placements
            )
        object.__setattr__(self, "_cut", Sharded(shape, self.mesh, placements))
        object.__setattr__(self, "_flattening", flattening)
        object.__setattr__(self, "_each", self.total // ranks)
        largest = self._cut.part_at((0,) * len(self.mesh.sizes)).volume
        fits = self.offset >= 0 and self.offset + largest <= self.total and self.total % ranks == 0
        apart = not set(self._flattening) & set(self._cut.cutting)
        known = not set(self.axes) - set(self.mesh.names)
        if not (fits and apart and known and (in_blocks or self.blocks == 1)):
            raise UsageError(
                "a flat layout does not fit together",
                expected="a tensor inside a buffer that is sharded along other mesh dimensions",
                found=f"{largest} elements at {self.offset} of {self.total}, {ranks} ranks, {self}",
            )

    def range_of(self, rank: int) -> tuple[int, int] | None:
        """Return the range of elements that a rank holds, in row-major order within the tensor or
        its flattened shard; None if it holds none."""
        at = self.mesh.coordinate(rank)
        return None if at is None else self._range(at, self._cut.part_at(at))

    def held(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that a rank holds, in the order of the buffer."""
        at = self.mesh.coordinate(rank)
        if at is None:
            return ()
        part = self._cut.part_at(at)
        inside = boxes_of_range(part.shape, *(self._range(at, part) or (0, 0)))
        return tuple(box for range_box in inside for box in self._boxes(part, range_box))

    def _range(self, at: Index, part: Box) -> tuple[int, int] | None:
        sizes, places = ([of[axis] for axis in self._flattening] for of in (self.mesh.sizes, at))
        number = row_major(sizes, places)
        first = max(number * self._each - self.offset, 0)
        last = min((number + 1) * self._each - self.offset, part.volume)
        return (first, last) if first < last else None

    def cuts(self) -> object:
        """Return a key that is equal for layouts with the same boxes, whoever holds them."""
        return self.shape, self._cut.cuts(), self.offset, self._each

    @property
    def cutting(self) -> tuple[int, ...]:
        """The mesh dimensions that shard the tensor."""
        return tuple(sorted((*self._flattening, *self._cut.cutting)))

    def holders(self, box: Box) -> tuple[MeshRange, ...]:
        """Return exactly the ranks that hold an element of a box, as ranges that do not overlap."""
        if not box.volume:
            return ()
        ranges: dict[Index, set[int]] = {}
        for in_block in self._by_block(box):
            for span in self._cut.holders(in_block):
                for place in span.places(self._cut.cutting):
                    ranges.setdefault(place, set()).update(self._numbers(place, in_block))
        return tuple(
            self.mesh.along(self._standing(place, number), self.cutting)
            for place, numbers in ranges.items()
            for number in sorted(numbers)
        )

    def _numbers(self, place: Index, box: Box) -> Iterator[int]:
        """Yield the numbers of the buffer ranges at `place` that hold an element of a box."""
        part = self._cut.part_at(place)
        common = part.meet(box)
        for first, last in runs_of(part.shape, common.within(part)) if common else ():
            yield from range(
                (self.offset + first) // self._each, (self.offset + last - 1) // self._each + 1
            )

    def _standing(self, place: Index, number: int) -> Index:
        """Return the coordinate at `place` whose rank holds the buffer range with this number."""
        at = list(place)
        for axis in reversed(self._flattening):
            number, at[axis] = divmod(number, self.mesh.sizes[axis])
        return tuple(at)

    def _by_block(self, box: Box) -> list[Box]:
        """Split a box of the tensor into boxes of `_cut`, one for each block."""
        if self.blocks == 1:
            return [box]
        (start, *low), (stop, *high) = box
        rows = self.shape[0] // self.blocks
        return [
            Box((n, max(start - n * rows, 0), *low), (n + 1, min(stop - n * rows, rows), *high))
            for n in range(start // rows, -(-stop // rows))
        ]

    def _boxes(self, part: Box, inside: Box) -> Iterator[Box]:
        """Convert a box inside a shard of `_cut` into boxes of the tensor."""
        box = inside.moved(part.start)
        if self.blocks == 1:
            yield box
            return
        start, stop = box
        rows = self.shape[0] // self.blocks
        for at in range(start[0] * rows, stop[0] * rows, rows):
            yield Box((at + start[1], *start[2:]), (at + stop[1], *stop[2:]))


Layout = Sharded | Flat


def copies_of(layout: Layout, held: tuple[Box, ...]) -> MeshRange | None:
    """Return the ranks that hold exactly these boxes of a layout, or None if there are none."""
    if not held:
        return None
    element = Box(held[0].start, tuple(start + 1 for start in held[0].start))
    if whole(layout.shape).meet(element) != element:
        return None
    rank = next(layout.holders(element)[0].ranks())
    at = layout.mesh.coordinate(rank)
    return (
        None if at is None or layout.held(rank) != held else layout.mesh.along(at, layout.cutting)
    )


def held_whole(shape: Index, ranks: Sequence[int]) -> Layout:
    """Return the layout of a tensor that each of these ranks holds completely."""
    return Sharded(shape, Mesh.of(("rank",), (len(ranks),), ranks), (Replicate(),))


def of_one_replica(layout: Layout) -> Layout:
    """Return the layout reduced to one holder of each box, that of the lowest rank."""
    return replace(layout, mesh=layout.mesh.cut_down(layout.cutting))


def to_plain(layout: Layout) -> tuple[object, ...]:
    grid = layout.mesh
    mesh = (grid.names, grid.sizes, grid.strides, grid.base, grid.listed)
    cuts = tuple((p.dim, p.after) if isinstance(p, Shard) else () for p in layout.placements)
    if isinstance(layout, Flat):
        flat = "flat", layout.shape, mesh, layout.axes, layout.offset, layout.total
        return (*flat, cuts, layout.blocks) if cuts or layout.blocks > 1 else flat
    return "sharded", layout.shape, mesh, cuts


def from_plain(plain: Sequence[Any]) -> Layout:
    """Convert back. Raise `ValueError`, `TypeError` or `UsageError` if it is malformed."""
    kind, shape, (names, sizes, strides, base, listed), *rest = plain
    base = counts([base])[0]
    mesh = _mesh(tuple(map(str, names)), counts(sizes), counts(strides), base, counts(listed))
    if kind == "flat":
        axes, offset, total, *cut = rest
        cuts, blocks = cut or ((), 1)  # omitted if nothing shards the tensor first
        offset, total, blocks = counts((offset, total, blocks))
        return Flat(counts(shape), mesh, tuple(axes), offset, total, _placements(cuts), blocks)
    (cuts,) = rest
    return Sharded(counts(shape), mesh, _placements(cuts))


def _placements(cuts: Sequence[Sequence[Any]]) -> tuple[Placement, ...]:
    return tuple(Shard(*counts(cut)) if cut else Replicate() for cut in cuts)


_mesh = functools.lru_cache(maxsize=256)(Mesh)
"""Many layouts share a few meshes."""
