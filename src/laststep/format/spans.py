"""Sets of ranks as a few spans: consecutive ranks, or every N-th.

Pure arithmetic. A set is never expanded into a list of its ranks, so that "every 8th of 131,072"
takes three numbers to store and a few operations to query.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Span(NamedTuple):
    """`length` ranks starting at `first`, each `stride` above the previous one."""

    first: int
    length: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """One above the last rank."""
        return self.first + (self.length - 1) * self.stride + 1

    def below(self, rank: int) -> int:
        """Return the number of its ranks below `rank`."""
        return min(max(-(-(rank - self.first) // self.stride), 0), self.length)


def spans_of(ranks: Iterable[int]) -> tuple[Span, ...]:
    """Convert ranks, given in ascending order, to a few spans."""
    spans = _runs(ranks)
    # Many equal spans at equal distances become one span per position in them. The result may be
    # regular again, like the dimensions of a mesh. Terminates, since the number of spans falls.
    while len(fewer := _transposed(spans)) < len(spans):
        spans = fewer
    return tuple(spans)


def _runs(ranks: Iterable[int]) -> list[Span]:
    """Return the runs of consecutive ranks."""
    runs: list[Span] = []
    first = stop = -1
    for rank in ranks:
        if rank != stop:
            if stop >= 0:
                runs.append(Span(first, stop - first))
            first = rank
        stop = rank + 1
    if stop >= 0:
        runs.append(Span(first, stop - first))
    return runs


def _transposed(spans: Sequence[Span]) -> list[Span]:
    transposed: list[Span] = []
    at = 0
    while at < len(spans):
        (first, length, stride), many = spans[at], _alike(spans, at)
        if length < many:
            period = spans[at + 1].first - first
            transposed += [Span(first + n * stride, many, period) for n in range(length)]
        else:
            transposed += spans[at : at + many]
        at += many
    return transposed


def _alike(spans: Sequence[Span], at: int) -> int:
    """Count the spans from `at` on that have equal length and stride and start at equal
    distances."""
    last = at
    while (
        last + 1 < len(spans)
        and spans[last + 1][1:] == spans[at][1:]
        and spans[last + 1].first - spans[last].first == spans[at + 1].first - spans[at].first
    ):
        last += 1
    return last - at + 1


def cover_once(spans: Iterable[Span], ranks: int) -> bool:
    """Return True if every rank below `ranks` is in exactly one span and there are no other
    ranks."""
    seen = bytearray(ranks)
    for span in spans:
        if span.first < 0 or span.length < 1 or span.stride < 1 or span.stop > ranks:
            return False
        place = slice(span.first, span.stop, span.stride)
        if any(seen[place]):
            return False
        seen[place] = b"\1" * span.length
    return all(seen)


class RanksOf(Sequence[int]):
    """The ranks of some spans in ascending order, computed on demand."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """The spans MUST be disjoint."""
        self._spans = tuple(spans)
        self._stop = max((span.stop for span in spans), default=0)

    def __len__(self) -> int:
        return sum(span.length for span in self._spans)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._below(rank + 1) > self._below(rank)

    def index(self, rank: int, start: int = 0, stop: int | None = None) -> int:
        """Return the position of a rank in ascending order. Raise `ValueError` if it is not in the
        set."""
        at = self._below(rank)
        if rank not in self or at < start or (stop is not None and at >= stop):
            raise ValueError(f"rank {rank} is not in this group")
        return at

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        wanted = at + len(self) if at < 0 else at
        if not 0 <= wanted < len(self):
            raise IndexError(f"there are only {len(self)} ranks, so no rank {at}")
        # The lowest rank up to which there are `wanted + 1` ranks of the set.
        return bisect.bisect_left(range(self._stop), wanted + 1, key=lambda r: self._below(r + 1))

    def __iter__(self) -> Iterator[int]:
        if len(self._spans) == 1:
            (span,) = self._spans
            return iter(range(span.first, span.stop, span.stride))
        merged = [r for span in self._spans for r in range(span.first, span.stop, span.stride)]
        return iter(sorted(merged))

    def _below(self, rank: int) -> int:
        return sum(span.below(rank) for span in self._spans)
