"""Grids of ranks, and sets of ranks on them that arithmetic gives, however many there are.

Pure; knows nothing of tensors, torch or processes.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.errors import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.state.boxes import Index


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

    def cut_down(self, axes: tuple[int, ...]) -> Mesh:
        """Only those that stand, along all other dimensions, where the lowest rank does."""
        sizes = tuple(size if axis in axes else 1 for axis, size in enumerate(self.sizes))
        if not self.listed:  # strides are positive: the lowest stands at the beginning
            return Mesh(self.names, sizes, self.strides, self.base)
        lowest = self.coordinate(min(self.listed)) or ()
        ways = [
            range(size) if axis in axes else (lowest[axis],) for axis, size in enumerate(self.sizes)
        ]
        return Mesh.of(self.names, sizes, [self.rank(at) for at in itertools.product(*ways)])

    def ranks(self) -> Iterator[int]:
        """All of them, in row-major order."""
        steps = [math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]
        if not self.listed and list(self.strides) == steps:
            return iter(range(self.base, self.base + math.prod(self.sizes)))
        return map(self.rank, itertools.product(*map(range, self.sizes)))


class Holders(NamedTuple):
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
            (place,) if axis in self.cutting else range(size)
            for axis, (place, size) in enumerate(zip(self.at, self.mesh.sizes, strict=True))
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

    def rank(self, place: int) -> int:
        """Who of them has that place."""
        at = list(self.at)
        for axis in reversed(range(len(at))):
            if axis not in self.cutting:
                place, at[axis] = divmod(place, self.mesh.sizes[axis])
        return self.mesh.rank(tuple(at))


class MeshRange(NamedTuple):
    """The ranks of a mesh that stand at low <= i < high along every dimension."""

    mesh: Mesh
    low: Index
    high: Index

    def ranks(self, cutting: tuple[int, ...] | None = None) -> Iterator[int]:
        """All of them; with `cutting`, the first of each place along these dimensions only."""
        return map(self.mesh.rank, self.places(cutting))

    def places(self, cutting: tuple[int, ...] | None = None) -> Iterator[Index]:
        """Where these stand."""
        free = [
            range(low, high if cutting is None or axis in cutting else low + 1)
            for axis, (low, high) in enumerate(zip(self.low, self.high, strict=True))
        ]
        return itertools.product(*free)
