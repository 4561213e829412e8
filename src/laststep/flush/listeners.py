"""Events of the flusher's pipeline, and the listeners to them.

Optional features are listeners: the memory tier (`memory_tier`), replication, retention, the
liveness lock and the disk check. A feature that is not configured has no listener. Listeners are
called in a fixed order, on the thread where the event happens. An exception from a listener is
logged and never fails a save.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import instances
from laststep.catalog.attempt import Attempt
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import RunWriter
from laststep.constants import CHUNK_BYTES
from laststep.errors import AbortedError, LaststepError
from laststep.flush.protocol import (
    Begin,
    CaptureDone,
    Continue,
    Decide,
    DiskNeed,
    Freed,
    News,
    ToTrainer,
    Unchanged,
)
from laststep.flush.writer import SaveWriter
from laststep.memory.pool import Filled
from laststep.process.threads import WorkerPool
from laststep.storage.locks import FileLock
from laststep.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.catalog.attempt import AttemptName
    from laststep.flush.protocol import Orders

log = logging.getLogger(__name__)

_FREED_TOGETHER = 8
_PROBE_BYTES = 32 << 20


class FlusherSave(msgspec.Struct):
    """A save in the flusher. The flusher's lock guards the fields that several threads change."""

    begin: Begin
    began_s: float
    writer: SaveWriter | None = None
    attempt: Attempt | None = None
    """Set no later than `writer`."""
    error: LaststepError | OSError | None = None
    """The reason why it could not be opened, or was given up."""
    pending: int = 0
    """Number of chunks that have arrived and are not written."""
    is_open: bool = False
    """Set once its files are open or `error` is set."""
    captured: CaptureDone | None = None
    is_whole: bool = False
    """Set once all of it has arrived and the listeners have been notified."""
    decision: Decide | None = None
    """The common decision of all ranks."""
    early: list[Filled] = []
    """Chunks that arrived before its files were open."""
    base: int = 0
    """Number of the save whose blocks it reuses."""
    unchanged: Unchanged | None = None
    """The trainer's question about unchanged chunks, if it arrived before its files were open."""
    is_finishing: bool = False
    reported_s: float = 0.0
    opened_s: float = 0.0


class SlotHolds:
    """Reference counts of slots; a slot with no holders is returned to the trainer."""

    def __init__(self, send: Callable[[Freed], None]) -> None:
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
        self._send(Freed(slots=freed))


class Listener:
    """Receiver of the pipeline's events. The last one of a save is `committed` or `failed`."""

    def started(self) -> None:
        """The flusher is running and has received nothing yet."""

    def continued(self, continues: Continue) -> None:
        """Saves from now on continue this checkpoint, or none."""

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
    """Copies committed checkpoints to the replicas of a run."""

    def __init__(self, store: Store, orders: Orders, send: Callable[[ToTrainer], None]) -> None:
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
        """Copy the last checkpoint of a job, to all replicas."""
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
    """Reports, with the first save, the disk space and time that each save will need. Measures the
    time with a small file, unless the state is smaller than a chunk or space is short."""

    store: Store
    kept: int | None
    """Number of checkpoints that are kept, if it is bounded."""
    workers: WorkerPool
    send: Callable[[ToTrainer], None]
    _is_told: bool = False
    _to_measure: DiskNeed | None = None

    def begun(self, save: FlusherSave) -> None:
        if self._is_told:
            return
        self._is_told = True
        free_bytes = None
        with contextlib.suppress(LaststepError):  # then the free space is unknown
            free_bytes = self.store.free_bytes()
        state_bytes = sum(map(attrgetter("tensor_bytes"), save.begin.files))
        need = DiskNeed(
            state_bytes=state_bytes,
            free_disk_bytes=free_bytes,
            needed_disk_bytes=state_bytes * ((self.kept or 1) + 1),
            kept_checkpoints=self.kept,
        )
        is_roomy = free_bytes is None or free_bytes > need.needed_disk_bytes + 2 * _PROBE_BYTES
        if state_bytes < CHUNK_BYTES or not is_roomy:
            self.send(need)
        else:
            self._to_measure = need

    def captured(self, save: FlusherSave) -> None:
        need, self._to_measure = self._to_measure, None
        if need is not None:  # by now the run's folder exists, and no capture waits for a thread
            self.workers.put(self._measure, need)

    def _measure(self, need: DiskNeed) -> None:
        """Report the need with the time, extrapolated from writing and syncing a small file."""
        size_bytes = min(need.state_bytes // CHUNK_BYTES * CHUNK_BYTES, _PROBE_BYTES)
        name = f"probe.tmp-{os.urandom(4).hex()}"
        try:
            writer = self.store.open_writer(name, expected_bytes=size_bytes)
            try:
                began_s = time.perf_counter()
                with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
                    for offset in range(0, size_bytes, CHUNK_BYTES):
                        writer.write_at(offset, view)
                writer.finish(size_bytes)
                seconds = (time.perf_counter() - began_s) * need.state_bytes / size_bytes
                need = msgspec.structs.replace(need, estimated_s=seconds)
            finally:
                writer.close()
                self.store.delete(name)
        except LaststepError as error:
            log.debug("the disk could not be measured: %s", error)
        self.send(need)


class Retention(Listener, msgspec.Struct, eq=False):
    """Deletes checkpoints that are not to be kept, after each commit; overwritten ones are deleted
    under any rule. A failure costs disk space, never the checkpoint just committed."""

    run_writer: RunWriter
    keep: Keep | None
    in_use: Callable[[], frozenset[str]]
    send: Callable[[ToTrainer], None]
    _continues: Continue | None = None

    def continued(self, continues: Continue) -> None:
        self._continues = continues

    def committed(self, save: FlusherSave) -> None:
        if save.begin.role == "member" or (self.keep is None and not save.begin.overwrite):
            return
        assert save.attempt is not None  # noqa: S101 (it is committed)
        run, term, continues = self.run_writer.run, save.attempt.name.term, self._continues

        def check() -> None:
            run.check_newest(term)  # a successor with a newer term decides instead
            if self._continues is not continues:
                raise AbortedError("the run has since continued from another checkpoint")

        def tell(gone: str) -> None:
            self.send(News(kind="removed", step=steps[gone], folder=gone))

        try:
            # Without a rule everything is kept except overwritten checkpoints.
            plan = plan_prune(
                run,
                self.keep or Keep(),
                resumed_from=None if continues is None else continues.resumed_from,
                in_use=self.in_use(),
            )
            if self.keep is not None and self.keep.metric is not None:
                self.send(News(kind="ranked", reason=plan.lacking or ""))
            steps = {verdict.folder: verdict.step for verdict in plan.verdicts}
            plan.execute(before=check, each=tell)
        except (LaststepError, OSError) as error:
            log.warning("retention failed: %s", error)
