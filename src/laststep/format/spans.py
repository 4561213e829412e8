"""Sets of ranks as a few spans: consecutive ranks, or every N-th.

"Every 8th of 131,072" takes three numbers to store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Span(NamedTuple):
    """`length` ranks starting at `first`, each `stride` above the previous one."""

    first: int
    length: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """One above the last rank."""
        return self.first + (self.length - 1) * self.stride + 1


def spans_of(ranks: Iterable[int]) -> tuple[Span, ...]:
    """Convert ranks, given in ascending order, to a few spans."""
    starts: list[int] = []
    stops: list[int] = []
    for rank in ranks:
        if stops and rank == stops[-1]:
            stops[-1] = rank + 1
        else:
            starts.append(rank)
            stops.append(rank + 1)
    spans = [Span(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
    # Many equal spans at equal distances become one span per position in them. The result may be
    # regular again, like the dimensions of a mesh. Terminates, since the number of spans falls.
    while len(fewer := _transposed(spans)) < len(spans):
        spans = fewer
    return tuple(spans)


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


def ranks_of(spans: Iterable[Span]) -> list[int]:
    """Return the ranks of disjoint spans, in ascending order."""
    return sorted(r for span in spans for r in range(span.first, span.stop, span.stride))
