"""Compute the save interval that loses the least time, from plain numbers.

Pure. A save costs training some seconds, and a failure loses everything after the last save that
survives it. With a cost C of a save, a mean time M between failures and an interval I, the fraction
of time lost is C/I + (I/2 + L)/M, where L is the time until a save counts. The minimum is at
sqrt(2·C·M), whatever L is (Young, Daly). The interval is raised if saves would otherwise create a
backlog or cost more than a given fraction of training.
"""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.constants import duration_text

if TYPE_CHECKING:
    from collections.abc import Sequence

APART = 2.0
"""The least number of latencies between the starts of two saves: half of the saves take longer than
the median, and some undisturbed steps must remain between two."""
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


def best_interval(
    cost_s: float, latency_s: float, mtbf_s: float, most_share: float
) -> tuple[float, Bound]:
    bounds = {
        Bound.LEAST: math.sqrt(2 * cost_s * mtbf_s),
        Bound.LATENCY: APART * latency_s,
        Bound.SHARE: cost_s / most_share,
    }
    bound = max(bounds, key=bounds.__getitem__)
    return bounds[bound], bound


def lost_share(interval_s: float, cost_s: float, latency_s: float, mtbf_s: float) -> float:
    """Return the fraction of time that saves at this interval and failures lose together."""
    saving = cost_s / interval_s if cost_s else 0.0
    return saving + (interval_s / 2 + latency_s) / mtbf_s


def believed_mtbf_s(failures: int, uptime_s: float, ranks: int) -> float:
    """Return the estimated mean time between failures of a job with this history. The prior counts
    as one failure (a Gamma prior of shape 1): without history it decides alone, and after ten
    failures it has about a tenth of the weight."""
    prior_s = min(PRIOR_S, PRIOR_RANK_S / ranks)
    return (prior_s + uptime_s) / (1 + failures)


def mid(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalEstimate:
    """The save interval and the measurements that it is computed from; `str` summarises it."""

    interval_s: float
    bound: Bound
    cost_s: float
    """Training time that a save costs: the stall, and slower iterations."""
    latency_s: float
    """Time from `save()` to the commit."""
    mtbf_s: float
    mtbf_from: str
    """The source of `mtbf_s`, in words."""
    lost_share: float
    """The fraction of time that saves and failures are expected to lose."""
    step_s: float

    def __str__(self) -> str:
        return (
            f"a save every {duration_text(self.interval_s)}: it costs training "
            f"{duration_text(self.cost_s)} and is committed after {duration_text(self.latency_s)}"
            f", a failure is expected every {duration_text(self.mtbf_s)} ({self.mtbf_from}); "
            f"{_WHY[self.bound]}, and {self.lost_share:.2%} of the time is lost in all"
        )
