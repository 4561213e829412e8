"""The interval between saves: what it loses, held against simulated failures and a search."""

from __future__ import annotations

import math
import random

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
    believed_mtbf_s,
    best_interval,
    lost_share,
)

NO_BOUND = 1 - 1e-9
COSTS = st.tuples(st.floats(1e-4, 10.0), st.floats(0.0, 300.0), st.floats(3600.0, 1e7))
"""Cost of a save, latency, mean time between failures."""

Costs = tuple[float, float, float]


def lost_in_a_run(every_s: float, costs: Costs, failures: int) -> float:
    """The share of the time that a run loses which fails at random, and goes on each time from the
    newest save that counted by then."""
    cost_s, latency_s, mtbf_s = costs
    dice = random.Random(1)
    elapsed = lost = 0.0
    at = held = 0.0
    """What was trained so far, and what the newest save holds of it."""
    due_s = every_s
    for _ in range(failures):
        life_s = dice.expovariate(1 / mtbf_s)
        begun = math.floor((life_s - due_s) / every_s) + 1 if life_s >= due_s else 0
        lost += begun * cost_s
        counted = life_s - latency_s - due_s
        if counted >= 0:
            held = at + due_s + math.floor(counted / every_s) * every_s
        due_s += begun * every_s - life_s
        elapsed += life_s
        lost += at + life_s - held
        at = held
    return lost / elapsed


@pytest.mark.parametrize(
    "costs",
    [
        (0.1, 4.0, 6 * 3600.0),
        pytest.param((0.005, 2.0, 24 * 3600.0), marks=pytest.mark.long),
        pytest.param((20.0, 60.0, 6 * 3600.0), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_other_interval_loses_less_in_a_run_that_fails_at_random(costs: Costs) -> None:
    found, bound = best_interval(*costs, NO_BOUND)
    assert bound is Bound.LEAST
    lost = lost_in_a_run(found, costs, 8_000)
    assert lost == pytest.approx(lost_share(found, *costs), rel=0.05)
    factors = (0.25, 0.5, 0.7, 0.85, 1.15, 1.4, 2.0, 4.0)
    others = [lost_in_a_run(found * factor, costs, 8_000) for factor in factors]
    assert lost <= min(others) * 1.02
    assert lost < max(others) / 1.05  # they do differ


@given(COSTS, st.floats(1e-4, 0.5), st.floats(-1.5, 1.5))
def test_no_interval_within_the_bounds_loses_less(
    costs: Costs, most_share: float, move: float
) -> None:
    cost_s, latency_s, _ = costs
    found, _ = best_interval(*costs, most_share)
    other = max(found * math.exp(move), APART * latency_s, cost_s / most_share)
    assert lost_share(found, *costs) <= lost_share(other, *costs) * (1 + 1e-6)


@given(COSTS, st.floats(1e-4, 0.5))
def test_the_bounds_hold(costs: Costs, most_share: float) -> None:
    cost_s, latency_s, mtbf_s = costs
    found, bound = best_interval(*costs, most_share)
    wanted = {
        Bound.LEAST: math.sqrt(2 * cost_s * mtbf_s),
        Bound.LATENCY: APART * latency_s,
        Bound.SHARE: cost_s / most_share,
    }
    assert found == wanted[bound] == max(wanted.values())


def test_a_save_that_costs_nothing_is_bound_by_its_latency_alone() -> None:
    assert best_interval(0.0, 3.0, 3600.0, 0.01) == (APART * 3.0, Bound.LATENCY)
    assert best_interval(0.0, 0.0, 3600.0, 0.01) == (0.0, Bound.LEAST)


def test_where_nothing_fails_nothing_is_saved() -> None:
    assert best_interval(1.0, 1.0, math.inf, 0.01)[0] == math.inf


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
        )
    )
    assert names(text, "65.7 s", "100 ms", "4.2 s", "6 h", "given", "0.32%")
