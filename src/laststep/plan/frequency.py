"""Compute the save interval that loses the least time, from plain numbers.

Pure. A save costs training some seconds, and a failure loses everything after the last save that
survives it. With a cost C of a save, a mean time M between failures and an interval I, the fraction
of time lost is C/I + (I/2 + L)/M, where L is the time until a save counts. The minimum is at
sqrt(2·C·M), whatever L is (Young, Daly). The interval is raised if saves would otherwise create a
backlog or cost more than a given fraction of training.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.constants import duration_text
from laststep.events import human

if TYPE_CHECKING:
    from collections.abc import Sequence

APART = 2.0
"""The least number of latencies between the starts of two saves. One would suffice for the median
save, but half of the saves take longer, and some undisturbed steps must remain between two
saves."""
PRIOR_S = 24 * 3600.0
PRIOR_RANK_S = 10_000 * 3600.0
"""Prior: one failure per day or, if that is more frequent, per 10,000 rank hours. The Llama 3
report has 50,000 GPU hours per unexpected interruption (419 in 54 days on 16,384 GPUs); few jobs
are operated as carefully, so this is a fifth of that. Small jobs are ended by their owners, queues
and reboots long before that."""


class Bound(enum.StrEnum):
    """The rule that determined an interval."""

    LEAST = "least"
    LATENCY = "latency"
    SHARE = "share"


_WHY = {
    Bound.LEAST: "that loses least",
    Bound.LATENCY: "saving more often would create a backlog",
    Bound.SHARE: "saving more often would exceed the share of training time allowed for saves",
}


class TierCost(NamedTuple):
    """The measured cost of a tier. Sequences of these start with the nearest tier."""

    cost_s: float
    """Training time that a save to it costs, beyond a save to the nearer tiers."""
    latency_s: float
    """Time from the capture until a save to it counts."""
    mtbf_s: float
    """Mean time between failures that this tier survives and no nearer one does."""


class Interval(NamedTuple):
    """The time from the start of one save to a tier to the start of the next, and the rule that set
    it."""

    seconds: float
    bound: Bound


def intervals(tiers: Sequence[TierCost], most_share: float) -> tuple[Interval, ...]:
    """Return the interval per tier that loses least. Farther tiers never get more saves than nearer
    ones, since each of their saves is also one to the nearer tiers."""
    floors = list(itertools.accumulate((APART * tier.latency_s for tier in tiers), max))

    def share(factor: float, floors: Sequence[float] = floors) -> float:
        return cost_share(tiers, [seconds for seconds, _ in _best(tiers, floors, factor)])

    # If saves cost too much in total, the optimum is to stretch all intervals by one factor: the
    # bound acts like a higher cost of a save, which enters the interval as a square root.
    least, most = 1.0, 1.0
    if share(1.0) > most_share:  # floors only reduce it
        most = max(share(1.0, [0.0] * len(tiers)) / most_share, 1.0)
    while most - least > 1e-9 * most:
        middle = (least + most) / 2
        if share(middle) > most_share:
            least = middle
        else:
            most = middle
    why = Bound.SHARE if most > 1.0 else Bound.LEAST
    found = _best(tiers, floors, most)
    return tuple(Interval(one, Bound.LATENCY if is_floor else why) for one, is_floor in found)


def _best(
    tiers: Sequence[TierCost], floors: Sequence[float], factor: float
) -> list[tuple[float, bool]]:
    """Return sqrt(2·C·M) per tier, times `factor` and at least its floor, and True if the floor
    applies. A tier that would be saved to more often than a nearer one is merged with it into one
    interval, computed from the sum of their costs and failure rates."""

    def interval(cost_s: float, rate: float, floor_s: float) -> float:
        return max(factor * _optimum(cost_s, rate), floor_s)

    pools: list[tuple[float, float, float, int]] = []
    for tier, floor_s in zip(tiers, floors, strict=True):
        cost_s, rate, count = tier.cost_s, 1 / tier.mtbf_s, 1
        while pools and interval(*pools[-1][:3]) >= interval(cost_s, rate, floor_s):
            before = pools.pop()
            cost_s, rate, count = cost_s + before[0], rate + before[1], count + before[3]
        pools.append((cost_s, rate, floor_s, count))
    return [
        (interval(cost_s, rate, floor_s), floor_s > factor * _optimum(cost_s, rate))
        for cost_s, rate, floor_s, count in pools
        for _ in range(count)
    ]


def _optimum(cost_s: float, rate: float) -> float:
    return math.sqrt(2 * cost_s / rate) if rate else math.inf


def cost_share(tiers: Sequence[TierCost], seconds: Sequence[float]) -> float:
    """Return the fraction of training time that saves at these intervals cost."""
    pairs = zip(tiers, seconds, strict=True)
    return sum(tier.cost_s / one if tier.cost_s else 0.0 for tier, one in pairs)


def lost_share(tiers: Sequence[TierCost], seconds: Sequence[float]) -> float:
    """Return the fraction of time that saves at these intervals and failures lose together."""
    pairs = zip(tiers, seconds, strict=True)
    failing = sum((one / 2 + tier.latency_s) / tier.mtbf_s for tier, one in pairs)
    return cost_share(tiers, seconds) + failing


def believed_mtbf_s(failures: int, uptime_s: float, ranks: int) -> float:
    """Return the estimated mean time between failures of a job with this history. The prior counts
    as one failure (a Gamma prior of shape 1): without history it decides alone, and after ten
    failures it has about a tenth of the weight."""
    prior_s = min(PRIOR_S, PRIOR_RANK_S / ranks)
    return (prior_s + uptime_s) / (1 + failures)


def mid(values: Sequence[float]) -> float:
    """Return the median; 0 for an empty sequence."""
    return statistics.median(values) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalEstimate:
    """The save interval and the measurements that it is computed from; `str` gives a one-sentence
    summary."""

    interval_s: float
    bound: Bound
    """The rule that determined the interval."""
    cost_s: float
    """Training time that a save costs: the stall, and slower iterations."""
    latency_s: float
    """Time from `save()` to the commit."""
    mtbf_s: float
    """The mean time between failures."""
    mtbf_from: str
    """The source of `mtbf_s`, in words."""
    lost_share: float
    """The fraction of time that saves and failures are expected to lose."""
    step_s: float
    size_bytes: int
    bytes_per_s: float

    def __str__(self) -> str:
        return (
            f"a save every {duration_text(self.interval_s)}: it costs training "
            f"{duration_text(self.cost_s)} and is committed after {duration_text(self.latency_s)} "
            f"({human(self.size_bytes)}, {human(int(self.bytes_per_s))}/s), a failure is expected "
            f"every {duration_text(self.mtbf_s)} ({self.mtbf_from}); {_WHY[self.bound]}, and "
            f"{self.lost_share:.2%} of the time is lost in all"
        )
