"""Subscribers that show the progress of a run: the log, and a progress bar for terminals.

They only read events; no other module depends on their output.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING

from rich.filesize import decimal

from laststep import events
from laststep.constants import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import TaskID

    from laststep.events import Bus, Event, Subscriber

log = logging.getLogger("laststep")

human = functools.partial(decimal, precision=2)
"""Format a number of bytes for people, in decimal units, as disks are sold."""


def watch(bus: Bus, subscribers: Sequence[Subscriber], *, progress: bool | None) -> None:
    """Subscribe the log and the user's subscribers, and the progress bar if it is requested or,
    with None, if stderr is a terminal."""
    for subscriber in (log_event, *subscribers):
        bus.subscribe(subscriber)
    if somebody_watches() if progress is None else progress:
        bus.subscribe(ProgressBar())


def log_event(event: Event) -> None:
    """Log one line per change of state, with step, bytes and seconds."""
    match event:
        case events.Preflight():
            _log_preflight(event)
        case events.SaveStarted():
            log.info("step %d: saving %s", event.step, human(event.size_bytes))
        case events.Captured():
            size = human(event.size_bytes)
            log.info(
                "step %d: captured %s in %.3f s, training was held for %.4f s",
                event.step,
                size,
                event.seconds,
                event.blocked_s,
            )
        case events.Durable():
            rate = human(int(event.written_bytes / max(event.seconds, 1e-9)))
            shared = f", {human(event.shared_bytes)} shared" if event.shared_bytes else ""
            log.info(
                "step %d: durable after %.3f s: %s written (%s/s)%s",
                event.step,
                event.seconds,
                human(event.written_bytes),
                rate,
                shared,
            )
        case events.Committed():
            log.info(
                "step %d: committed as %s after %.3f s", event.step, event.folder, event.seconds
            )
        case events.SaveFailed():
            log.error("step %d: the save failed: %s", event.step, event.reason)
        case events.SaveSkipped():
            log.warning("step %d: not saved: %s", event.step, event.reason)
        case events.Restored():
            log.info(
                "restored step %d from %s: %s read in %.3f s",
                event.step,
                event.folder,
                human(event.size_bytes),
                event.seconds,
            )
        case events.PassedOver():
            log.warning("skipped step %d (%s): %s", event.step, event.folder, event.reason)
        case events.Pruned():
            log.info("pruned step %d (%s)", event.step, event.folder)
        case events.ReplicasDiffer():
            _log_differing(event)
        case events.MetricMissing():
            log.warning("%s; until one has it, all are kept", event.reason)
        case _:
            _log_rarer(event)


def _log_rarer(event: Event) -> None:
    """Log the events of tiers and preemptions."""
    match event:
        case events.TierHolds():
            what = "it" if event.items is None else f"{', '.join(event.items)} of it"
            log.info("step %d: %s has %s after %.3f s", event.step, event.tier, what, event.seconds)
        case events.TierLags():
            log.warning(
                "step %d: %s does not have it yet: %s", event.step, event.tier, event.reason
            )
        case events.PreemptionSeen() | events.PreemptionEnded():
            _log_preempted(event)
        case _:
            pass


def _log_differing(event: events.ReplicasDiffer) -> None:
    tensors = listed(event.tensors)
    ranks = ", ".join(f"rank {rank}" for rank in event.ranks)
    log.warning(
        ("step %d: %s differ on %s from rank %d, whose copy is stored: replicas have diverged"),
        event.step,
        tensors or "tensors",
        ranks + (f" and {event.more_ranks} more" if event.more_ranks else ""),
        event.stored,
    )


def _log_preempted(event: events.PreemptionSeen | events.PreemptionEnded) -> None:
    if isinstance(event, events.PreemptionSeen):
        log.warning("the job will be preempted: %s, within %g s", event.cause, event.grace_s)
        return
    after = f"{event.seconds:.1f} s after {event.cause}, of {event.grace_s:g} s"
    held = listed(event.tiers)
    if event.committed:
        log.warning(
            "the job ends: step %d is committed, %s; it is at %s; nothing is lost",
            event.step,
            after,
            held,
        )
    else:
        log.error(
            "the job ends: step %d is not committed, %s: %s; it is at %s; at risk: %s",
            event.step,
            after,
            event.problem,
            held or "no tier",
            event.at_risk,
        )


def _log_preflight(event: events.Preflight) -> None:
    kept, needed = event.kept_checkpoints, human(event.needed_disk_bytes)
    free = "free room unknown"
    if event.free_disk_bytes is not None:
        free = f"{human(event.free_disk_bytes)} free"
    grows = "stored bytes grow with the run"
    room = grows if kept is None else f"{needed} needed to keep {kept}"
    seconds = "" if event.estimated_s is None else f"; about {event.estimated_s:.1f} s"
    log.info(
        "every save: %s; host memory up to %s; disk: %s, %s%s",
        human(event.state_bytes),
        human(event.host_memory_bytes),
        free,
        room,
        seconds,
    )
    if event.free_disk_bytes is not None and event.free_disk_bytes < event.needed_disk_bytes:
        count = "one checkpoint" if kept in (None, 1) else f"{kept} checkpoints"
        log.warning(
            "the disk is short: %s, %s needed for %s and one on its way", free, needed, count
        )


class ProgressBar:
    """A rich progress bar on stderr while a save is flushed."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[int, TaskID] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case events.SaveStarted():
                if not self._tasks:
                    self._progress.start()
                self._tasks[event.step] = self._progress.add_task(
                    "", total=max(event.size_bytes, 1), step=event.step, state="capturing"
                )
            case events.Written():
                if event.step in self._tasks:
                    self._progress.update(
                        self._tasks[event.step], completed=event.done_bytes, state="flushing"
                    )
            case events.Committed() | events.SaveFailed():
                task = self._tasks.pop(event.step, None)
                if task is not None:
                    self._progress.remove_task(task)
                if not self._tasks:
                    self._progress.stop()
            case _:
                pass


def somebody_watches() -> bool:
    """Return True if stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()
