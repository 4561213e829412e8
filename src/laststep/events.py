"""The events of a Checkpointer, as typed values for subscribers; the log and the progress bar.

A subscriber is called on the thread where the event occurs and MUST return quickly. Its exceptions
are only logged, because a display must never cost a checkpoint; those that end the user's own
thread (Ctrl-C, `sys.exit()`) propagate there. The library never configures a log handler.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from rich.filesize import decimal

from laststep.constants import listed
from laststep.process import system, threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import TaskID

__all__ = [
    "Captured",
    "Committed",
    "Durable",
    "Event",
    "PassedOver",
    "PreemptionEnded",
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
    "Written",
]

log = logging.getLogger("laststep")


class Event(msgspec.Struct, frozen=True):
    """Base class of all events."""


class Preflight(Event, frozen=True):
    """Emitted at the first save: the needs of every save, and the available space. In a job of
    several ranks, emitted on rank 0 once the first save is committed."""

    state_bytes: int
    """The size of a checkpoint, of all ranks together."""
    host_memory_bytes: int
    """The limit for one rank."""
    free_disk_bytes: int | None
    """The free space before that save."""
    needed_disk_bytes: int
    kept_checkpoints: int | None
    """The maximum number that the retention rules keep; None if unlimited."""
    ranks: int = 1


class SaveStarted(Event, frozen=True):
    step: int
    size_bytes: int


class TierHolds(Event, frozen=True):
    """A tier has a checkpoint: work up to this step survives the loss of all nearer tiers."""

    step: int
    tier: str
    seconds: float
    """Time since the call of save()."""
    items: tuple[str, ...] | None = None
    """The items that the tier stores; None means all."""


class TierLags(Event, frozen=True):
    """Replicating a checkpoint to a tier failed; it will be retried."""

    step: int
    tier: str
    reason: str


class Captured(Event, frozen=True):
    """The state is copied completely; training can change it freely."""

    step: int
    size_bytes: int
    seconds: float
    """Time since the call of save()."""
    blocked_s: float
    """Time for which training was held up."""


class Written(Event, frozen=True):
    """Progress of a flush: bytes that are written so far or were already stored."""

    step: int
    done_bytes: int
    size_bytes: int


class Durable(Event, frozen=True):
    """All files of this rank are on stable storage; the commit follows."""

    step: int
    size_bytes: int
    """The size of the state, including bytes that did not have to be written."""
    written_bytes: int
    shared_bytes: int
    """Bytes reused from files of earlier checkpoints instead of being written again."""
    seconds: float


class Committed(Event, frozen=True):
    """The checkpoint is committed: it is visible and can be restored."""

    step: int
    folder: str
    size_bytes: int
    seconds: float


class SaveFailed(Event, frozen=True):
    step: int
    reason: str


class SaveSkipped(Event, frozen=True):
    """A save was skipped: earlier saves were in the way (`on_busy="skip"`), or saving is off."""

    step: int
    reason: str


class Restored(Event, frozen=True):
    step: int
    folder: str
    size_bytes: int
    seconds: float


class PassedOver(Event, frozen=True):
    """A restore skipped a newer checkpoint, for this reason."""

    step: int
    folder: str
    reason: str


class Pruned(Event, frozen=True):
    step: int
    folder: str


class ReplicasDiffer(Event, frozen=True):
    """Tensors that all ranks should hold alike differ between ranks. Emitted on rank 0."""

    step: int
    tensors: tuple[str, ...]
    """Full names of the differing tensors; empty if one of the ranks did not answer in time."""
    ranks: tuple[int, int]
    """Two ranks that differ, the lower first; the lowest of all holders stores the tensors."""


class PreemptionEnded(Event, frozen=True):
    """The outcome of the last save of a preempted job."""

    step: int
    """The step at which the job stopped."""
    committed: bool
    """True if that step was committed on the primary within the grace period."""
    tiers: tuple[str, ...]
    """The tiers that hold the step now, nearest first; `shm://` is the memory of this machine. Only
    rank 0 knows about replicas."""
    cause: str
    """`SIGTERM`, or the cause seen by another rank: `rank 3: SIGTERM`."""
    grace_s: float
    seconds: float
    """Time since this rank learned of the preemption."""
    problem: str
    """The reason why the step is not committed; empty if it is."""


Subscriber = Callable[[Event], None]


class Bus:
    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers = (*self._subscribers, subscriber)

    def emit(self, event: Event) -> None:
        for subscriber in self._subscribers:
            with threads.outlasting(log, "a subscriber failed on %s", type(event).__name__):
                subscriber(event)


human = functools.partial(decimal, precision=2)
"""Format a number of bytes for people, in decimal units, as disks are sold."""


def watch(bus: Bus, subscribers: Sequence[Subscriber], *, progress: bool | None) -> None:
    """Subscribe the log, the user's subscribers and, by default on a terminal, the progress bar."""
    for subscriber in (log_event, *subscribers):
        bus.subscribe(subscriber)
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    if progress:
        bus.subscribe(ProgressBar())


def log_event(event: Event) -> None:  # noqa: C901 (a case per kind)
    """Log one line per change of state, with step, bytes and seconds."""
    level = logging.INFO
    match event:
        case Preflight():
            level, text = _preflight_line(event)
        case SaveStarted():
            text = f"step {event.step}: saving {human(event.size_bytes)}"
        case Captured():
            text = (
                f"step {event.step}: captured {human(event.size_bytes)} in {event.seconds:.3f} s, "
                f"training was held for {event.blocked_s:.4f} s"
            )
        case Durable():
            rate = human(int(event.written_bytes / max(event.seconds, 1e-9)))
            shared = f", {human(event.shared_bytes)} shared" if event.shared_bytes else ""
            text = (
                f"step {event.step}: durable after {event.seconds:.3f} s: "
                f"{human(event.written_bytes)} written ({rate}/s){shared}"
            )
        case Committed():
            text = f"step {event.step}: committed as {event.folder} after {event.seconds:.3f} s"
        case SaveFailed():
            level, text = logging.ERROR, f"step {event.step}: the save failed: {event.reason}"
        case SaveSkipped():
            level, text = logging.WARNING, f"step {event.step}: not saved: {event.reason}"
        case TierHolds():
            what = "it" if event.items is None else f"{', '.join(event.items)} of it"
            text = f"step {event.step}: {event.tier} has {what} after {event.seconds:.3f} s"
        case TierLags():
            level = logging.WARNING
            text = f"step {event.step}: {event.tier} does not have it yet: {event.reason}"
        case Restored():
            text = (
                f"restored step {event.step} from {event.folder}: {human(event.size_bytes)} read "
                f"in {event.seconds:.3f} s"
            )
        case PassedOver():
            level = system.shared_warning()
            text = f"skipped step {event.step} ({event.folder}): {event.reason}"
        case Pruned():
            text = f"pruned step {event.step} ({event.folder})"
        case ReplicasDiffer():
            level = logging.WARNING
            text = (
                f"step {event.step}: {listed(event.tensors) or 'tensors'} differ between rank "
                f"{event.ranks[0]} and rank {event.ranks[1]}: replicas have diverged"
            )
        case PreemptionEnded():
            level = system.shared_warning() if event.committed else logging.ERROR
            after = f"{event.seconds:.1f} s after {event.cause}, of {event.grace_s:g} s"
            outcome = "committed" if event.committed else f"not committed ({event.problem})"
            held = listed(event.tiers) or "no tier"
            text = f"the job ends, {after}: step {event.step} is {outcome}; it is at {held}"
        case _:
            return
    log.log(level, "%s", text)


def _preflight_line(event: Preflight) -> tuple[int, str]:
    """Return the level and the text of the line; a warning if the disk is too small."""
    level, free = logging.INFO, "unknown"
    if event.free_disk_bytes is not None:
        free = human(event.free_disk_bytes)
        if event.free_disk_bytes < event.needed_disk_bytes:
            level, free = logging.WARNING, f"only {free}"
    needed, kept = human(event.needed_disk_bytes), event.kept_checkpoints
    room = f"{needed} and more as the run grows" if kept is None else f"{needed} for {kept}"
    cap, of_ranks = human(event.host_memory_bytes), ""
    memory = f"{human(min(event.state_bytes, event.host_memory_bytes))}, at most {cap}"
    if event.ranks > 1:
        of_ranks, memory = f" from {event.ranks} ranks", f"at most {cap} per rank"
    return level, (
        f"every save: {human(event.state_bytes)}{of_ranks}; host memory: {memory}; "
        f"disk space: {room}, free: {free}"
    )


class ProgressBar:
    """A rich progress bar on stderr while a save is flushed."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._tasks: dict[int, TaskID] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case SaveStarted():
                self._progress.start()
                self._tasks[event.step] = self._progress.add_task(
                    f"saving step {event.step}", total=max(event.size_bytes, 1)
                )
            case Written() if event.step in self._tasks:
                self._progress.update(self._tasks[event.step], completed=event.done_bytes)
            case Committed() | SaveFailed() if event.step in self._tasks:
                self._progress.remove_task(self._tasks.pop(event.step))
                if not self._tasks:
                    self._progress.stop()
            case _:
                pass
