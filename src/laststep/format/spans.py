"""Sets of ranks as a few spans: runs of consecutive ranks, or every so many.

Pure arithmetic: nothing here lists the ranks of a set, so that "every 8th of 131,072" costs three
numbers to write, and a few operations to ask.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Span(NamedTuple):
    """So many ranks from the first on, each `stride` above the one before."""

    first: int
    length: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """One above the last."""
        return self.first + (self.length - 1) * self.stride + 1

    def below(self, rank: int) -> int:
        """How many of it are below a rank."""
        return min(max(-(-(rank - self.first) // self.stride), 0), self.length)


def spans_of(ranks: Iterable[int]) -> tuple[Span, ...]:
    """A set of ranks, given in ascending order, in few spans."""
    spans = _runs(ranks)
    # Of many alike at one distance, take those of the same place in each together; these again may
    # be alike, as the sides of a mesh are. Ends, since there are fewer each time.
    while len(fewer := _transposed(spans)) < len(spans):
        spans = fewer
    return tuple(spans)


def _runs(ranks: Iterable[int]) -> list[Span]:
    """Runs of consecutive ranks."""
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
    """How many from there on differ only in where they begin, each by the same distance."""
    last = at
    while (
        last + 1 < len(spans)
        and spans[last + 1][1:] == spans[at][1:]
        and spans[last + 1].first - spans[last].first == spans[at + 1].first - spans[at].first
    ):
        last += 1
    return last - at + 1


def cover_once(spans: Iterable[Span], ranks: int) -> bool:
    """Whether every rank below that number is in exactly one of the spans, and no other rank is."""
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
    """The ranks of some spans in ascending order, worked out when they are asked for."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """The spans MUST have no rank in common."""
        self._spans = tuple(spans)
        self._stop = max((span.stop for span in spans), default=0)

    def __len__(self) -> int:
        return sum(span.length for span in self._spans)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._below(rank + 1) > self._below(rank)

    def index(self, rank: int, start: int = 0, stop: int | None = None) -> int:
        """Which of them a rank is, in ascending order; `ValueError` where it is none."""
        at = self._below(rank)
        if rank not in self or at < start or (stop is not None and at >= stop):
            raise ValueError(f"rank {rank} is none of these")
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
            raise IndexError(f"there are {len(self)} ranks, and no number {at}")
        # The lowest rank with so many up to it.
        return bisect.bisect_left(range(self._stop), wanted + 1, key=lambda r: self._below(r + 1))

    def __iter__(self) -> Iterator[int]:
        if len(self._spans) == 1:
            (span,) = self._spans
            return iter(range(span.first, span.stop, span.stride))
        merged = [r for span in self._spans for r in range(span.first, span.stop, span.stride)]
        return iter(sorted(merged))

    def _below(self, rank: int) -> int:
        return sum(span.below(rank) for span in self._spans)
