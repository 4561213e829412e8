"""Events of the flusher's pipeline, and the listeners to them.

Optional features are listeners: the memory tier (`memory_tier`), replication, retention, the
liveness lock and the disk check. A feature that is not configured has no listener. Listeners are
called in a fixed order, on the thread where the event happens. An exception from a listener is
logged and never fails a save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import instances
from laststep.catalog.attempt import Attempt
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import RunWriter
from laststep.errors import AbortedError, LaststepError
from laststep.flush import protocol
from laststep.flush.writer import SaveWriter
from laststep.storage.locks import FileLock
from laststep.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.catalog.attempt import AttemptName
    from laststep.memory.pool import Filled

log = logging.getLogger(__name__)

_FREED_TOGETHER = 8
_MOST_UNRANKED = 10
"""Commits without a best-k rule's metric before that is logged: at first it is normal."""


class FlusherSave(msgspec.Struct):
    """A save in the flusher. The flusher's lock guards the fields that several threads change."""

    begin: protocol.Begin
    writer: SaveWriter | None = None
    attempt: Attempt | None = None
    """Set no later than `writer`."""
    error: LaststepError | OSError | None = None
    """The reason why it could not be opened, or was given up."""
    pending: int = 0
    """Number of chunks that have arrived and are not written."""
    is_open: bool = False
    """Set once its files are open or `error` is set."""
    captured: protocol.CaptureDone | None = None
    is_whole: bool = False
    """Set once all of it has arrived and the listeners have been notified."""
    decision: protocol.Decide | None = None
    """The common decision of all ranks."""
    early: list[protocol.Chunks | protocol.Unchanged] = []
    """Messages that arrived before its files were open."""
    base: int = 0
    """Number of the save whose blocks it reuses."""
    is_finishing: bool = False
    reported_s: float = 0.0


class SlotHolds:
    """Reference counts of slots; a slot with no holders is returned to the trainer."""

    def __init__(self, send: Callable[[protocol.Freed], None]) -> None:
        self._send = send
        self._holds: Counter[int] = Counter()
        self._freed: list[int] = []
        self._lock = threading.Lock()

    def hold(self, slots: Iterable[int]) -> None:
        with self._lock:
            self._holds.update(slots)

    def release(self, slots: Iterable[int], *, more_comes: bool = False) -> None:
        """Drop one hold on each slot. Free slots are reported in batches, since each message takes
        the trainer's GIL, but at once unless `more_comes`: the trainer may be waiting."""
        with self._lock:
            for slot in slots:
                self._holds[slot] -= 1
                if not self._holds[slot]:
                    del self._holds[slot]
                    self._freed.append(slot)
            if not self._freed or (more_comes and len(self._freed) < _FREED_TOGETHER):
                return
            freed, self._freed = self._freed, []
        self._send(protocol.Freed(slots=freed))


class Listener:
    """Receiver of the pipeline's events. The last one of a save is `committed` or `failed`."""

    def started(self) -> None:
        """The flusher is running and has received nothing yet."""

    def begun(self, save: FlusherSave) -> None:
        """A save was announced; its attempt may not be known yet."""

    def opened(self, save: FlusherSave) -> None:
        """Its attempt is known, or it has failed; it may be captured already."""

    def chunk(self, save: FlusherSave, chunk: Filled, digests: bytes) -> None:
        """A chunk is digested; it is written after this event."""

    def captured(self, save: FlusherSave) -> None:
        """All of a save has arrived."""

    def committed(self, save: FlusherSave) -> None:
        """The save is committed, and the trainer has been notified."""

    def failed(self, save: FlusherSave) -> None:
        """The save will not be committed by this rank, and the trainer has been notified."""

    def ending(self) -> None:
        """The trainer is gone; complete saves are being finished."""

    def close(self, at_once: bool) -> None:  # noqa: FBT001 (events pass positional arguments)
        """No more events follow. `at_once`: do not start or wait for remaining background work."""


class LivenessLock(Listener, msgspec.Struct, eq=False):
    """Holds the lock that marks pending saves while the trainer or the flusher lives."""

    lock: FileLock
    name: str
    store: Store
    trainer_is_dead: Callable[[], bool]

    def committed(self, save: FlusherSave) -> None:
        with contextlib.suppress(LaststepError):  # the marker ends with this process at the latest
            self.lock.clear(save.begin.save)

    failed = committed

    def close(self, at_once: bool) -> None:  # noqa: FBT001 (as in Listener)
        """Release the lock; a living trainer holds it too."""
        if self.trainer_is_dead():
            instances.forget(self.store, self.name, self.lock)
        else:
            self.lock.close()


class ReplicationListener(Listener):
    def __init__(
        self, store: Store, orders: protocol.Orders, send: Callable[[protocol.ToTrainer], None]
    ) -> None:
        from laststep.tiers.replicating import Replicator  # late: every start waits

        self._replicators = [
            Replicator(store, order, send, orders.rank, orders.ranks) for order in orders.replicas
        ]
        for replicator in self._replicators:
            replicator.start()

    def committed(self, save: FlusherSave) -> None:
        assert save.attempt is not None  # noqa: S101 (it is committed)
        for replicator in self._replicators:
            replicator.committed(save.attempt.name)

    def bring_last(self, at: AttemptName) -> None:
        for replicator in self._replicators:
            replicator.committed(at, is_last=True)

    def needed(self) -> frozenset[str]:
        """Return the folders at the primary that are still to be copied."""
        return frozenset().union(*[replicator.needed() for replicator in self._replicators])

    def close(self, at_once: bool) -> None:  # noqa: FBT001 (as in Listener)
        for replicator in self._replicators:
            replicator.ask_to_end(at_once=at_once)
        for replicator in self._replicators:
            replicator.join()


class DiskCheck(Listener, msgspec.Struct, eq=False):
    """Reports once the disk space that saves need: at the first save, or, in a job of several
    ranks, by rank 0 after the first commit, when it knows how much all ranks have written."""

    store: Store
    kept: int | None
    """Number of checkpoints that are kept, if it is bounded."""
    send: Callable[[protocol.ToTrainer], None]
    _is_told: bool = False
    _free_bytes: int | None = None
    """Free space before the save; None if unknown."""

    def begun(self, save: FlusherSave) -> None:
        if self._is_told or save.begin.role == "member":
            return
        with contextlib.suppress(LaststepError):  # then the free space is unknown
            self._free_bytes = self.store.free_bytes()
        if save.begin.role == "alone":
            self._tell(sum(map(attrgetter("tensor_bytes"), save.begin.files)), 1)

    def committed(self, save: FlusherSave) -> None:
        if not self._is_told and save.begin.role == "first" and save.decision is not None:
            self._tell(sum(item.size_bytes for item in save.decision.items), save.decision.ranks)

    def _tell(self, state_bytes: int, ranks: int) -> None:
        self._is_told = True
        self.send(
            protocol.DiskNeed(
                state_bytes=state_bytes,
                free_disk_bytes=self._free_bytes,
                needed_disk_bytes=state_bytes * ((self.kept or 1) + 1),
                kept_checkpoints=self.kept,
                ranks=ranks,
            )
        )


class Retention(Listener, msgspec.Struct, eq=False):
    """Deletes checkpoints that are not to be kept, after each commit; overwritten ones are deleted
    under any rule. A failure costs disk space, never the checkpoint just committed."""

    run_writer: RunWriter
    keep: Keep | None
    in_use: Callable[[], frozenset[str]]
    send: Callable[[protocol.ToTrainer], None]
    _unranked: int = 0
    """Number of commits in a row after which no checkpoint had the metric of a best-k rule."""
    _lacking: str | None = None

    def committed(self, save: FlusherSave) -> None:
        if save.begin.role == "member" or (self.keep is None and not save.begin.overwrite):
            return
        assert save.attempt is not None  # noqa: S101 (it is committed)
        run, term = self.run_writer.run, save.attempt.name.term

        def check() -> None:
            run.check_newest(term)  # a successor with a newer term decides instead
            if self.run_writer.term != term:
                raise AbortedError("the run has since continued from another checkpoint")

        def tell(gone: str) -> None:
            self.send(protocol.News(kind="removed", step=steps[gone], folder=gone))

        try:
            # Without a rule everything is kept except overwritten checkpoints.
            plan = plan_prune(
                run,
                self.keep or Keep(),
                resumed_from=self.run_writer.resumed_from,
                in_use=self.in_use(),
            )
            self._lacking = plan.lacking
            self._unranked = 0 if plan.lacking is None else self._unranked + 1
            if self._unranked == _MOST_UNRANKED:
                self._warn()
            steps = {verdict.folder: verdict.step for verdict in plan.verdicts}
            plan.execute(before=check, each=tell)
        except (LaststepError, OSError) as error:
            log.warning("retention failed: %s", error)

    def close(self, at_once: bool) -> None:  # noqa: FBT001 (as in Listener)
        if self._unranked < _MOST_UNRANKED:
            self._warn()

    def _warn(self) -> None:
        if self._lacking is not None:
            log.warning(
                "%s; nothing is deleted until one has it, and the disk fills up", self._lacking
            )
