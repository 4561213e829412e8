"""Sets of ranks as spans: nothing lost, few where they repeat, and asked by arithmetic."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.format.spans import RanksOf, Span, cover_once, spans_of

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
    found = RanksOf(spans)
    assert list(found) == given_ranks
    assert len(found) == len(given_ranks)
    assert [found[at] for at in range(len(found))] == given_ranks
    assert found[1:4] == tuple(given_ranks[1:4])
    assert [found.index(rank) for rank in given_ranks] == list(range(len(given_ranks)))
    assert {rank for rank in range(-1, 1300) if rank in found} == set(given_ranks)
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
        ([r for r in range(131072) if r // 8 % 16 == 3], 8),
        ([r for r in range(131072) if r % 64 < 8 and r // 65536 == 0], 8),
        ([r for r in range(131072) if r % 8 == 1 and r // 8 % 64 < 4], 4),
    ],
)
def test_what_repeats_takes_few_spans(given_ranks: list[int], most: int) -> None:
    spans = spans_of(given_ranks)
    assert len(spans) <= most
    assert list(RanksOf(spans)) == list(given_ranks)


def test_a_rank_that_is_none_of_them_has_no_place() -> None:
    found = RanksOf([Span(4, 3, 2), Span(5, 1)])
    assert list(found) == [4, 5, 6, 8]
    for wrong in (3, 7, 9, -1):
        with pytest.raises(ValueError, match=f"rank {wrong}"):
            found.index(wrong)
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            found[wrong]
    assert found[-1] == 8
    assert "5" not in found


@pytest.mark.parametrize(
    "spans", [[Span(0, 0)], [Span(-1, 5)], [Span(0, 2, 0)], [Span(0, 5)], [Span(0, 2), Span(1, 3)]]
)
def test_unsound_spans_cover_nothing(spans: list[Span]) -> None:
    assert not cover_once(spans, 4)
