"""What happens, as typed values that anybody may subscribe to.

The log, the progress bar and the page are subscribers; the library itself never configures a
handler. A subscriber is called on the thread on which the event happened and MUST return quickly;
one that raises is logged and left alone, since nobody's display may cost a checkpoint. Only what is
to end the user's own thread (Ctrl-C, `sys.exit()`) goes on there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from laststep.process import threads

__all__ = [
    "Captured",
    "Committed",
    "Durable",
    "Event",
    "MetricMissing",
    "PassedOver",
    "PreemptionEnded",
    "PreemptionSeen",
    "Preflight",
    "Pruned",
    "ReplicasDiffer",
    "Restored",
    "SaveFailed",
    "SaveSkipped",
    "SaveStarted",
    "Subscriber",
    "TierHolds",
    "TierLags",
    "WorkAtRisk",
    "Written",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Before the first save: what every save will need, against what there is."""

    state_bytes: int
    host_memory_bytes: int
    free_disk_bytes: int | None
    needed_disk_bytes: int
    kept_checkpoints: int | None
    """How many the retention rules keep at most; None where they keep without bound."""
    estimated_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted:
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHolds:
    """A tier has a checkpoint: what came before it can no longer be lost with the tiers nearer."""

    step: int
    tier: str
    seconds: float
    """Since the call of save()."""
    items: tuple[str, ...] | None = None
    """Where it takes only some: these alone are safe there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLags:
    """A checkpoint could not be brought to a further tier; it is tried again."""

    step: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAtRisk:
    """With each commit, for each further tier: the work that is lost if everything nearer is."""

    tier: str
    step: int | None
    """The newest that it has got since the start; None: none yet."""
    seconds: float
    """Since that step was saved, or since the start."""
    items: tuple[str, ...] | None = None
    """Where it takes only some: the work in these. All others are lost with everything nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    step: int
    size_bytes: int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Progress of a flush: bytes that are written so far, or were found to be stored already."""

    step: int
    done_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    step: int
    size_bytes: int
    """Of the state, whatever of it had to be written."""
    written_bytes: int
    shared_bytes: int
    """Of files of earlier checkpoints that are not written again."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    step: int
    folder: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped:
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    step: int
    folder: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """Restore left a newer checkpoint alone, and why."""

    step: int
    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    step: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiffer:
    """Ranks do not hold the same though nothing else was meant; told on the first rank."""

    step: int
    tensors: tuple[str, ...]
    """Full names of what differs, as far as ranks have told in time."""
    ranks: tuple[int, ...]
    """The first few that have something else than what is stored."""
    more_ranks: int
    stored: int
    """The rank whose tensors are stored, all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMissing:
    """No checkpoint has the metric by which the best are to be kept, so all are; told once."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSeen:
    """This rank knows that the job is to end; told at its next step."""

    cause: str
    """`SIGTERM`, `the file PATH`, or what another rank has seen: `rank 3: SIGTERM`."""
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionEnded:
    """What became of the last save of a job that is to end."""

    step: int
    """The step at which it stopped."""
    committed: bool
    """Whether that is committed at the run's home, within the grace."""
    tiers: tuple[str, ...]
    """Which tiers hold it now, nearest first; `shm://` is this machine's memory. Of further tiers
    the first rank alone knows."""
    cause: str
    came_s: float
    """When this rank saw it, or heard of it, by the wall clock."""
    grace_s: float
    seconds: float
    """From then until now."""
    problem: str
    """Why it is not committed; empty where it is."""
    at_risk: str
    """What is lost, or will be if this machine is, in words; empty where nothing is."""


Event = (
    Preflight
    | SaveStarted
    | Captured
    | TierHolds
    | Written
    | Durable
    | Committed
    | SaveFailed
    | SaveSkipped
    | Restored
    | PassedOver
    | Pruned
    | ReplicasDiffer
    | MetricMissing
    | TierLags
    | WorkAtRisk
    | PreemptionSeen
    | PreemptionEnded
)
Subscriber = Callable[[Event], None]


class Bus:
    """Hands every event to every subscriber, in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add a subscriber; the returned function takes it off again."""
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for subscriber in self._subscribers:
            with threads.outlasting(log, "a subscriber failed on %s", type(event).__name__):
                subscriber(event)
