"""Sets of ranks as spans: nothing lost, and few where they repeat."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.format.manifest import Span, cover_once, ranks_of, spans_of

ranks = st.sets(st.integers(0, 300), max_size=60).map(sorted)


@st.composite
def patterns(draw: st.DrawFn) -> list[int]:
    """Sets as layouts make them: some coordinates of a mesh, in any order of its dimensions."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    kept = [draw(st.sets(st.integers(0, size - 1), min_size=1)) for size in sizes]
    found = []
    for rank in range(math.prod(sizes)):
        rest, inside = rank, True
        for size, some in zip(sizes, kept, strict=True):
            inside = inside and rest % size in some
            rest //= size
        if inside:
            found.append(rank)
    return found


@given(ranks | patterns())
def test_the_ranks_of_the_spans_are_those_that_were_given(given_ranks: list[int]) -> None:
    spans = spans_of(given_ranks)
    assert ranks_of(spans) == given_ranks
    assert len(spans) <= len(given_ranks)


@given(patterns())
def test_spans_and_the_others_cover_all_ranks_once(given_ranks: list[int]) -> None:
    count = given_ranks[-1] + 3
    others = [rank for rank in range(count) if rank not in given_ranks]
    both = [*spans_of(given_ranks), *spans_of(others)]
    random.shuffle(both)
    assert cover_once(both, count)
    assert not cover_once(both[1:], count)
    assert not cover_once([*both, both[0]], count)
    assert not cover_once(both, count - 1)


@pytest.mark.parametrize(
    ("given_ranks", "most"),
    [
        (range(131072), 1),
        (range(3, 131072, 8), 1),
        ([r for r in range(131072) if r // 8 % 16 == 3], 1024),
        ([r for r in range(131072) if r % 64 < 8 and r // 65536 == 0], 1024),
        ([r for r in range(131072) if r % 8 == 1 and r // 8 % 64 < 4], 256),
    ],
)
def test_what_repeats_takes_few_spans(given_ranks: list[int], most: int) -> None:
    spans = spans_of(given_ranks)
    assert len(spans) <= most
    assert ranks_of(spans) == list(given_ranks)


@pytest.mark.parametrize(
    "spans", [[Span(0, 0)], [Span(-1, 5)], [Span(0, 2, 0)], [Span(0, 5)], [Span(0, 2), Span(1, 3)]]
)
def test_unsound_spans_cover_nothing(spans: list[Span]) -> None:
    assert not cover_once(spans, 4)
