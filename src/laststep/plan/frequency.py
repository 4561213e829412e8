"""How often to save: the interval that loses least, reckoned from plain numbers.

Pure. A save costs training some seconds, and a failure loses what came after the last save that
survives it. With a cost C of a save, a mean time M between failures and an interval I, the share of
the time that is lost is C/I + (I/2 + L)/M, where L is how long a save takes until it counts. That
is least at sqrt(2·C·M), whatever L is (Young, Daly). Two bounds stand above it: saves must not pile
up, and must not cost more than a set share of training.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.terms import duration_text
from laststep.watching import human

if TYPE_CHECKING:
    from collections.abc import Sequence

APART = 2.0
"""Saves begin at least so many times their latency apart. Once would do for the typical save; half
of them take longer, and between two of them steps are to be seen that no save disturbs."""
PRIOR_S = 24 * 3600.0
PRIOR_RANK_S = 10_000 * 3600.0
"""What is believed of a job before anything is known: one failure in a day, or in 10,000 hours of
ranks if that is less. The report on Llama 3 has 50,000 hours of GPUs for each unexpected end (419
of them in 54 days on 16,384): few jobs are looked after like that one, so it is a fifth. Small jobs
end by their owners, queues and reboots long before."""


class Bound(enum.StrEnum):
    """What an interval follows from."""

    LEAST = "least"
    LATENCY = "latency"
    SHARE = "share"


_WHY = {
    Bound.LEAST: "that loses least",
    Bound.LATENCY: "oftener would let saves pile up",
    Bound.SHARE: "oftener would cost more than the share of training that saves may cost",
}


class TierCost(NamedTuple):
    """A place that saves go to, as numbers; of several, nearer ones come first."""

    cost_s: float
    """What a save to it costs training, on top of one to the nearer tiers."""
    latency_s: float
    """How long after its capture a save to it counts."""
    mtbf_s: float
    """The mean time between failures that it survives, and no nearer one does."""


class Interval(NamedTuple):
    """How long after the begin of a save to a tier the next one begins, and why."""

    seconds: float
    bound: Bound


def intervals(tiers: Sequence[TierCost], most_share: float) -> tuple[Interval, ...]:
    """The intervals that lose least, one for each tier; farther tiers never get more saves than
    nearer ones, since each of their saves is one to the nearer ones too."""
    floors = list(itertools.accumulate((APART * tier.latency_s for tier in tiers), max))

    def share(factor: float, floors: Sequence[float] = floors) -> float:
        return cost_share(tiers, [seconds for seconds, _ in _best(tiers, floors, factor)])

    # Where saves cost too much in all, the intervals that lose least are these, all stretched by
    # one factor: the bound is a higher price of a save, and the root of a price is a factor.
    least, most = 1.0, 1.0
    if share(1.0) > most_share:  # floors only make it less
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
    """sqrt(2·C·M) of each tier, stretched, and not below its floor; and whether it is the floor. A
    tier that would be saved to more often than a nearer one, whose failures it survives too, shares
    one interval with that: of their costs and rates together."""

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
    """The share of training that saves at such intervals cost."""
    pairs = zip(tiers, seconds, strict=True)
    return sum(tier.cost_s / one if tier.cost_s else 0.0 for tier, one in pairs)


def lost_share(tiers: Sequence[TierCost], seconds: Sequence[float]) -> float:
    """The share of the time that saves at such intervals and failures lose together."""
    pairs = zip(tiers, seconds, strict=True)
    failing = sum((one / 2 + tier.latency_s) / tier.mtbf_s for tier, one in pairs)
    return cost_share(tiers, seconds) + failing


def believed_mtbf_s(failures: int, uptime_s: float, ranks: int) -> float:
    """The mean time between failures of a job that has failed so often in so much time. What was
    believed before counts as one failure (a Gamma prior of shape 1): without any history it is all,
    after ten failures a tenth."""
    prior_s = min(PRIOR_S, PRIOR_RANK_S / ranks)
    return (prior_s + uptime_s) / (1 + failures)


def mid(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoning:
    """Why saves are so far apart: what was measured, what follows, and in one sentence (`str`)."""

    interval_s: float
    bound: Bound
    """Which of the rules gave the interval."""
    cost_s: float
    """What a save costs training: what it holds up, and what it slows down."""
    latency_s: float
    """From `save()` until the save is committed."""
    mtbf_s: float
    """The mean time between failures."""
    mtbf_from: str
    """Where that comes from, in words."""
    lost_share: float
    """The share of the time that saves and failures are expected to lose."""
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
