"""The events of a Checkpointer, as typed values for subscribers.

The log and the progress bar are subscribers; the library never configures a log handler. A
subscriber is called on the thread where the event occurs and MUST return quickly. An exception in a
subscriber is logged and otherwise ignored, because a display must never cost a checkpoint. Only
exceptions that end the user's own thread (Ctrl-C, `sys.exit()`) propagate there.
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
    """Emitted before the first save: the needs of every save, and the available space."""

    state_bytes: int
    host_memory_bytes: int
    free_disk_bytes: int | None
    needed_disk_bytes: int
    kept_checkpoints: int | None
    """The maximum number that the retention rules keep; None if unlimited."""
    estimated_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted:
    """A save has begun: its state is described and will be captured."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHolds:
    """A tier has received a checkpoint: work up to this step survives the loss of all nearer
    tiers."""

    step: int
    tier: str
    seconds: float
    """Time since the call of save()."""
    items: tuple[str, ...] | None = None
    """The items that the tier stores, and that alone are safe there; None means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLags:
    """Replicating a checkpoint to a tier failed; it will be retried."""

    step: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAtRisk:
    """Emitted with each commit, for each replica: the work that is lost if all nearer tiers are
    lost."""

    tier: str
    step: int | None
    """The newest step that the replica has received from this job instance; None if none yet."""
    seconds: float
    """Time since that step was saved, or since the start."""
    items: tuple[str, ...] | None = None
    """The items that the replica stores; None means all. Other items are lost with the nearer
    tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state is copied completely; training can change it freely."""

    step: int
    size_bytes: int
    seconds: float
    """Time since the call of save()."""
    blocked_s: float
    """Time for which training was held up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Progress of a flush: bytes that are written so far or were already stored."""

    step: int
    done_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """All files of this rank are on stable storage; the commit follows."""

    step: int
    size_bytes: int
    """The size of the state, including bytes that did not have to be written."""
    written_bytes: int
    shared_bytes: int
    """Bytes reused from files of earlier checkpoints instead of being written again."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The checkpoint is committed: it is visible and can be restored."""

    step: int
    folder: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A save failed, for this reason."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped:
    """A save was skipped because earlier saves were in the way (`on_busy="skip"`)."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint was restored."""

    step: int
    folder: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A restore skipped a newer checkpoint, for this reason."""

    step: int
    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Retention deleted a checkpoint."""

    step: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiffer:
    """Tensors that all ranks should hold alike differ between ranks. Emitted on rank 0."""

    step: int
    tensors: tuple[str, ...]
    """Full names of the differing tensors, of those ranks that answered in time."""
    ranks: tuple[int, ...]
    """The first few ranks whose tensors differ from the stored ones."""
    more_ranks: int
    stored: int
    """The rank whose tensors are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMissing:
    """No checkpoint has the metric of `Keep(best=…)`, so all are kept. Emitted once."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSeen:
    """This rank knows that the job will be preempted. Emitted at its next step."""

    cause: str
    """`SIGTERM`, `the file PATH`, or the cause seen by another rank: `rank 3: SIGTERM`."""
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionEnded:
    """The outcome of the last save of a preempted job."""

    step: int
    """The step at which the job stopped."""
    committed: bool
    """True if that step was committed on the primary within the grace period."""
    tiers: tuple[str, ...]
    """The tiers that hold the step now, nearest first; `shm://` is the memory of this machine. Only
    rank 0 knows about replicas."""
    cause: str
    came_s: float
    """The time at which this rank learned of the preemption (Unix time)."""
    grace_s: float
    seconds: float
    """Time from then until this event."""
    problem: str
    """The reason why the step is not committed; empty if it is."""
    at_risk: str
    """The work that is lost, or will be if this machine is lost, in words; empty if none."""


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
    """Calls every subscriber with every event, in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add a subscriber; return a function that removes it."""
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for subscriber in self._subscribers:
            with threads.outlasting(log, "a subscriber failed on %s", type(event).__name__):
                subscriber(event)
