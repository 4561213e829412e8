"""The interval between saves: what it loses, held against simulated failures and a search."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import names
from laststep.plan.frequency import (
    APART,
    PRIOR_RANK_S,
    PRIOR_S,
    Bound,
    IntervalEstimate,
    TierCost,
    believed_mtbf_s,
    cost_share,
    intervals,
    lost_share,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_BOUND = 1 - 1e-9
TIERS = st.lists(
    st.builds(
        TierCost,
        cost_s=st.floats(1e-4, 10.0),
        latency_s=st.floats(0.0, 300.0),
        mtbf_s=st.floats(3600.0, 1e7),
    ),
    min_size=1,
    max_size=3,
)


def lost_in_a_run(tiers: Sequence[TierCost], every_s: Sequence[float], failures: int) -> float:
    """The share of the time that a run loses which fails at random, and goes on each time from the
    newest save that counted by then, of a tier that survives such a failure."""
    dice = random.Random(1)
    rates = [1 / tier.mtbf_s for tier in tiers]
    elapsed = lost = 0.0
    at = 0.0
    """What was trained so far; saves hold that."""
    held = [0.0] * len(tiers)
    due_s = list(every_s)
    for _ in range(failures):
        life_s = dice.expovariate(sum(rates))
        nearest = dice.choices(range(len(tiers)), rates)[0]
        for n, (tier, one) in enumerate(zip(tiers, every_s, strict=True)):
            begun = math.floor((life_s - due_s[n]) / one) + 1 if life_s >= due_s[n] else 0
            lost += begun * tier.cost_s
            counted = life_s - tier.latency_s - due_s[n]
            if counted >= 0:
                held[n] = at + due_s[n] + math.floor(counted / one) * one
            due_s[n] += begun * one - life_s
        elapsed += life_s
        best = max(held[nearest:])
        lost += at + life_s - best
        at = best
        held[:nearest] = [0.0] * nearest
    return lost / elapsed


@pytest.mark.parametrize(
    "tiers",
    [
        [TierCost(0.1, 4.0, 6 * 3600.0)],
        pytest.param([TierCost(0.005, 2.0, 24 * 3600.0)], marks=pytest.mark.long),
        pytest.param([TierCost(20.0, 60.0, 6 * 3600.0)], marks=pytest.mark.long),
        [TierCost(0.05, 0.5, 3600.0), TierCost(2.0, 30.0, 24 * 3600.0)],
        pytest.param(
            [
                TierCost(0.05, 0.5, 3600.0),
                TierCost(0.5, 5.0, 8 * 3600.0),
                TierCost(5.0, 60.0, 72 * 3600.0),
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_no_other_interval_loses_less_in_a_run_that_fails_at_random(tiers: list[TierCost]) -> None:
    found = [one.seconds for one in intervals(tiers, NO_BOUND)]
    assert [one.bound for one in intervals(tiers, NO_BOUND)] == [Bound.LEAST] * len(tiers)
    lost = lost_in_a_run(tiers, found, 8_000)
    assert lost == pytest.approx(lost_share(tiers, found), rel=0.05)
    others = [
        lost_in_a_run(
            tiers, [one * (factor if n == at else 1.0) for n, one in enumerate(found)], 8_000
        )
        for at in range(len(tiers))
        for factor in (0.25, 0.5, 0.7, 0.85, 1.15, 1.4, 2.0, 4.0)
    ]
    assert lost <= min(others) * 1.02
    assert lost < max(others) / 1.05  # they do differ


@given(TIERS, st.floats(1e-4, 0.5), st.lists(st.floats(-1.5, 1.5), min_size=3, max_size=3))
def test_no_intervals_within_the_bounds_lose_less(
    tiers: list[TierCost], most_share: float, moves: list[float]
) -> None:
    found = [one.seconds for one in intervals(tiers, most_share)]
    other = [one * math.exp(move) for one, move in zip(found, moves, strict=False)]
    apart = [APART * tier.latency_s for tier in tiers]
    for n in range(len(tiers)):  # brought within the bounds that all intervals have
        other[n] = max(other[n], *apart[: n + 1], *other[:n])
    if cost_share(tiers, other) <= most_share:
        assert lost_share(tiers, found) <= lost_share(tiers, other) * (1 + 1e-6)


@given(TIERS, st.floats(1e-4, 0.5))
def test_the_bounds_hold(tiers: list[TierCost], most_share: float) -> None:
    found = intervals(tiers, most_share)
    seconds = [one.seconds for one in found]
    assert cost_share(tiers, seconds) <= most_share * (1 + 1e-6)
    assert seconds == sorted(seconds)
    for one, tier in zip(found, tiers, strict=True):
        assert one.seconds >= APART * tier.latency_s
    if len(tiers) == 1:
        (one,), (tier,) = found, tiers
        least = math.sqrt(2 * tier.cost_s * tier.mtbf_s)
        wanted = {
            Bound.LEAST: least,
            Bound.LATENCY: APART * tier.latency_s,
            Bound.SHARE: tier.cost_s / most_share,
        }
        assert one.seconds == pytest.approx(max(wanted.values()))
        assert one.seconds == pytest.approx(wanted[one.bound])


def test_a_far_tier_that_fails_often_takes_the_nearer_one_along() -> None:
    near, far = TierCost(1.0, 1.0, 1e6), TierCost(1.0, 1.0, 1e4)
    found = [one.seconds for one in intervals([near, far], NO_BOUND)]
    assert found == pytest.approx([math.sqrt(2 * 2.0 / (1e-6 + 1e-4))] * 2)


def test_a_save_that_costs_nothing_is_bound_by_its_latency_alone() -> None:
    assert intervals([TierCost(0.0, 3.0, 3600.0)], 0.01) == ((APART * 3.0, Bound.LATENCY),)
    assert intervals([TierCost(0.0, 0.0, 3600.0)], 0.01) == ((0.0, Bound.LEAST),)


def test_where_nothing_fails_nothing_is_saved() -> None:
    assert intervals([TierCost(1.0, 1.0, math.inf)], 0.01)[0].seconds == math.inf


def test_a_prior_belief_counts_as_one_failure() -> None:
    assert believed_mtbf_s(0, 0.0, ranks=1) == PRIOR_S
    assert believed_mtbf_s(0, 0.0, ranks=20_000) == PRIOR_RANK_S / 20_000 == 1800.0
    assert believed_mtbf_s(1, 2 * 3600.0, ranks=8) == 13 * 3600.0


@given(st.integers(0, 100), st.floats(0, 1e8), st.integers(1, 200_000))
def test_more_failures_and_more_ranks_are_never_believed_to_be_safer(
    failures: int, uptime_s: float, ranks: int
) -> None:
    now = believed_mtbf_s(failures, uptime_s, ranks)
    assert believed_mtbf_s(failures + 1, uptime_s, ranks) < now
    assert believed_mtbf_s(failures, uptime_s, ranks + 1) <= now
    assert believed_mtbf_s(failures, uptime_s + 60.0, ranks) > now


def test_what_was_believed_gives_way_to_what_is_seen() -> None:
    assert believed_mtbf_s(200, 200 * 3600.0, ranks=8) == pytest.approx(3600.0, rel=0.15)


def test_a_reckoning_says_all_of_it_in_one_sentence() -> None:
    text = str(
        IntervalEstimate(
            interval_s=65.7,
            bound=Bound.LEAST,
            cost_s=0.1,
            latency_s=4.2,
            mtbf_s=21600.0,
            mtbf_from="given",
            lost_share=0.0032,
            step_s=0.1,
            size_bytes=7_280_000_000,
            bytes_per_s=1.9e9,
        )
    )
    assert names(text, "65.7 s", "100 ms", "4.2 s", "7.28 GB", "1.90 GB/s", "6 h", "given", "0.32%")
