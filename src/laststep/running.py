"""The running parts of a Checkpointer: memory, capture thread, flusher, and saves in progress.

This module does not know the Checkpointer, which may disappear first: dropped without close(), or
at the end of the program. Saves that have begun are then finished and all resources released.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from laststep.capture.capture import Capturer
from laststep.catalog.instances import Start
from laststep.catalog.lineage import AttemptName
from laststep.commit import thread as teaming
from laststep.constants import CHUNK_BYTES, MEMORY
from laststep.errors import AbortedError, LaststepError, StorageError
from laststep.flush import launch as starting
from laststep.flush.client import Client
from laststep.flush.protocol import Continue, Orders
from laststep.flush.saves import SaveState
from laststep.memory import segments
from laststep.memory.pool import Pool
from laststep.process import signals, system, threads
from laststep.ranks.rank import ranks_on_this_node
from laststep.saving.context import memory_for
from laststep.settings import WAIT_FOR_OTHERS_S, FlushIn
from laststep.storage.registry import import_path, local_path, real_place
from laststep.storage.shared_memory import BASE
from laststep.tiers.replicating import ReplicaOrder
from laststep.tiers.snapshots import records_in

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from laststep.catalog.lineage import Seen
    from laststep.commit.thread import CommitThread
    from laststep.flush.launch import Helper
    from laststep.flush.saves import SaveHandle, Saves
    from laststep.memory.segments import Segment
    from laststep.ranks.rank import Rank
    from laststep.saving.context import RunContext
    from laststep.settings import Settings
    from laststep.tiers.tier import Arranged


log = logging.getLogger(__name__)

_START_S = 10.0
"""Longest time that a restore waits for the flusher to start, on a busy machine."""
_LEAVE_S = 1.0
"""Longest wait for copies whose result is no longer needed."""


def pool_in(
    base: str | None, cap_bytes: int, *, pinned: bool, run: str, rank: Rank
) -> tuple[Pool, Segment | None]:
    """Create the memory for saves: private to this process and its flusher or, with `base`, a
    segment of shared memory there that outlives both."""
    if base is None:
        return Pool(cap_bytes, pinned=pinned), None
    if pinned:
        segments.refuse_disks(base)
    size = max(cap_bytes // CHUNK_BYTES, 1) * CHUNK_BYTES
    segment, fd = segments.make(base, run, rank=rank.number, ranks=rank.ranks, size_bytes=size)
    try:
        return Pool(size, pinned=pinned, fd=fd), segment
    except BaseException:
        segment.remove()
        raise


def place_of(url: str) -> str:
    """Return a tier's path or URL in a form that every process can open, whatever its working
    directory."""
    return local_path(url) or url


def replica_orders(tiers: Arranged) -> tuple[ReplicaOrder, ...]:
    """Return the description of the replicas for a flusher."""
    return tuple(
        ReplicaOrder(
            url=place_of(tier.url),
            opener=import_path(tier.url),
            every=tier.every,
            keep=tier.keep,
            bytes_per_s=tier.limit_bytes_per_s,
            items=tier.items,
        )
        for tier in tiers.replicas
    )


def client_of(context: RunContext, pool: Pool, segment: Segment | None) -> Client:
    """Return the client of the flusher of a new job instance. The flusher is not started yet."""
    start, settings, rank = Start(context.store), context.settings, context.rank
    run, replicas = context.store.url, replica_orders(context.tiers)
    orders = Orders(
        writers=settings.writers,
        keep=context.tiers.keep,
        compression=settings.compression,
        lossy=settings.lossy or {},
        segment=None if segment is None else segment.folder,
        rank=rank.number,
        ranks=rank.ranks,
        replicas=replicas,
    )

    def launch(end: socket.socket) -> Helper:
        if settings.flush is FlushIn.THREAD:
            return starting.start_thread(
                end, pool.memory(), run=run, trainer=start.writer, orders=orders
            )
        return starting.start_process(
            end,
            run=run,
            trainer=start.writer,
            pool_fd=pool.fd,
            pool_bytes=pool.cap_bytes,
            orders=orders,
        )

    def kept() -> frozenset[int]:
        saves = [] if segment is None else records_in(segment)
        return frozenset(slot for save in saves for slot in save.needed_slots)

    return Client(launch, pool, context.bus, start, kept, replicas if rank.is_first else ())


def continuing(
    found: AttemptName | None, seen: Seen, *, resumed: bool = True, was_read: bool = True
) -> Continue:
    """Return the message that sets which checkpoint saves continue: `found`, restored while `seen`
    was the newest, or none."""
    if found is None:
        return Continue(seen=seen)
    return Continue(
        after=AttemptName(step=found.step, term=found.term, attempt=found.attempt),
        seen=seen,
        resumed_from=found.folder if resumed else None,
        was_read=was_read,
    )


def _sets(segment: Segment | None) -> int:
    """Return how many saves must fit into memory: two if the last one is kept there, else one."""
    return 1 if segment is None else 2


def _left_behind(segment: Segment, ranks_here: int) -> int:
    """Return this rank's share of the shared memory that earlier job instances left on this node,
    which is freed after this job's first commit."""
    dead = segments.of_dead_processes(segment.base, segment.owner.run)
    return sum(earlier.size_bytes for earlier in dead) // ranks_here


def start_parts(context: RunContext) -> RunningParts:
    """Start all parts of a new Checkpointer."""
    store, settings, rank = context.store, context.settings, context.rank
    cap, expected, on_device = memory_for(context)
    pool, segment = pool_in(
        context.tiers.memory, cap, pinned=bool(on_device), run=real_place(store.url), rank=rank
    )
    capturer = Capturer(pool, mode=settings.capture, margin_bytes=settings.device_margin_bytes)
    staged = capturer.start(on_device)
    if segment is not None:
        left_behind = functools.partial(_left_behind, segment, ranks_on_this_node(rank))
        pool.share(left_behind, least_bytes=expected)
    pool.want(_sets(segment) * expected, without_pauses=not staged)
    client, team = client_of(context, pool, segment), None
    try:
        signals.check_signals()
        if rank.ranks > 1:
            team = teaming.gather(context, client)
    except BaseException:
        # A Checkpointer that fails to start must leave no hook, thread or memory behind.
        capturer.close()
        pool.close()
        if segment is not None:
            segment.remove()
        raise
    return RunningParts(store.url, pool, capturer, client, team, segment)


class RunningParts:
    """The running parts of a Checkpointer, until `close`. They hold no reference to the items of
    the state: an item may refer to the Checkpointer, which could then never be collected."""

    def __init__(
        self,
        run: str,
        pool: Pool,
        capturer: Capturer,
        client: Client,
        team: CommitThread | None = None,
        segment: Segment | None = None,
    ) -> None:
        self._run = run
        self._pid = os.getpid()
        self._closing = threading.RLock()
        self._is_closing = False
        self.ends_well = False
        """True if training ended normally: then the shared memory is no longer needed."""
        self.pool, self.capturer, self.client, self.team = pool, capturer, client, team
        self.segment = segment
        self.has_saved = False
        """True once a save has begun."""
        self._is_over: Callable[[], bool] = bool  # never
        ends = [capturer.close, client.close, pool.close]
        if segment is not None:
            ends.append(self._free_segment)
        if team is not None:
            ends.insert(1, team.close)
        self._ends = collections.deque(ends)
        """The functions still to be called to end everything, in order."""
        self._starter: threads.Worker | None = None

    def start_early(self) -> bool:
        """Start the flusher in the background, because training has begun or a restore precedes it,
        and saves will follow. If that fails, the first save tries again and reports the error."""
        if os.getpid() == self._pid:
            with contextlib.suppress(StorageError):
                self._starter = threads.Worker("start", self._start).start()
        return True

    @contextlib.contextmanager
    def starting(self, *, beside: bool) -> Iterator[None]:
        """Start the flusher around a restore, since saves will follow. With `beside`, start it in
        parallel and wait a limited time until it runs; otherwise start it afterwards without
        waiting, because it would take cores from the ranks that read."""
        if not beside:
            yield
            self._start()
            return
        self.start_early()
        yield
        if self._starter is not None:
            self._starter.join(_START_S)
            signals.wait(self.client.up, _START_S)

    def _start(self) -> None:
        try:
            self.client.start()
        except LaststepError:
            self.client.up.set()  # it will not start: wake the waiters

    def under_way(self) -> tuple[SaveHandle, ...]:
        return tuple([save.handle for save in self.saves.under_way()])

    def over_within(self, timeout_s: float | None) -> bool:
        """Wait until all saves are over, whatever their outcome; return False at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self.saves.all():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not save.wait_for(SaveState.COMMITTED, left_s):
                return False
        return True

    def expect(self, context: RunContext) -> None:
        """Allocate memory for items that were created after construction."""
        _cap, expected, on_device = memory_for(context)
        staged = self.capturer.expect(on_device)
        self.pool.want(_sets(self.segment) * expected, without_pauses=not staged)

    def prepare_for(self, size_bytes: int) -> None:
        """Allocate memory for a save of this size, plus the previous one if that is kept in
        memory."""
        self.pool.want(_sets(self.segment) * size_bytes + CHUNK_BYTES)
        self.has_saved = True

    def wait(self) -> None:
        """Wait until all saves are over, whatever their outcome."""
        with self._in_time():
            for save in self.saves.all():
                save.wait_for(SaveState.COMMITTED)

    def close(self) -> None:
        """Wait for all saves and end everything. Runs once, even if called from several threads or
        from a signal handler during the call. The next call completes one that was interrupted."""
        with self._closing:
            if self._is_closing:
                return
            self._is_closing = True
            try:
                with self._in_time():
                    while self._ends:
                        self._ends[0]()
                        self._ends.popleft()
            finally:
                self._is_closing = False

    def revive(self, settings: Settings) -> None:
        """Start a new flusher if the last one died."""
        dead = self.client.dead
        if dead is not None:
            log.warning("starting a new flusher: %s", dead)
            self.capturer.settle()
            self.client.restart(settings.deadline_s + WAIT_FOR_OTHERS_S)

    @property
    def saves(self) -> Saves:
        """The saves in progress."""
        return self.client.saves

    def hurry(self, is_over: Callable[[], bool]) -> None:
        """Stop all waits in this object once `is_over` returns True: the program must end."""
        self._is_over = is_over

    def committed(self, step: int) -> SaveHandle | None:
        """Return the last committed save if it has this step, else None."""
        last = self.client.drains.newest_save()
        return last.handle if last is not None and last.step == step else None

    def drain(self, handle: SaveHandle) -> None:
        """Replicate the last checkpoint of a job to all replicas, and wait until each has it or has
        failed once. Only rank 0 knows the replicas; other ranks do not wait."""
        self.client.drain_last(handle)
        signals.wait(self.client.drains.settled)

    def tiers_of(self, handle: SaveHandle) -> tuple[str, ...]:
        """Return the tiers that hold the newest save, in the order in which they received it.
        Memory counts only if all ranks have the save in the memory of this machine."""
        held = tuple(handle.report.tiers)
        if self.segment is None or MEMORY not in held or self.segment.owner.ranks == 1:
            return held
        newest = self.segment.records()[-1:]
        have = {rank for name in newest for rank in self.segment.ranks_with(name)}
        whole = len(have) == self.segment.owner.ranks
        return tuple(tier for tier in held if whole or tier != MEMORY)

    def _free_segment(self) -> None:
        """Free the shared memory if it is empty, or if training ended normally and the run has all
        saves in it. Otherwise log what remains and how to free it."""
        segment, committed = self.segment, self.client.newest_committed
        if segment is None:
            return
        alone = [save.at.step for save in records_in(segment) if save.at.point > committed]
        steps = sorted({*alone, *(handle.step for handle in self.under_way())})
        if not steps and (self.ends_well or not segment.records()):
            segment.remove()
            return
        why = f"it may hold the only copy of steps {steps}"
        if not steps:
            why = "the job failed, or ended without close()"
        place = "" if segment.base == BASE else f" --base {segment.base}"
        log.warning(
            (
                "%d bytes of shared memory stay in %s: %s. The next job instance on this "
                "machine restores and frees it; `laststep recover %s%s` stores and frees it now"
            ),
            segment.size_bytes,
            segment.folder,
            why,
            self._run,
            place,
        )

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Stop waiting inside the block when time is up, and leave the running parts alone. A
        flusher process continues with the saves that were captured completely."""
        try:
            with signals.deadline(self._is_over):
                yield
        except signals.DeadlineExceeded:
            self._leave()

    def _leave(self) -> None:
        frees = self._free_segment in self._ends
        self._ends.clear()
        for save in self.saves.all():
            if not save.over and save.reached < SaveState.CAPTURED:
                save.seen = True
                save.failed(AbortedError("the program ends before it is captured"))
            if save.job is not None:  # no copy may run while the interpreter unloads torch
                signals.wait(save.job.over, _LEAVE_S)
        if self.team is not None:
            self.team.leave()
        self.client.leave()
        if frees:
            self._free_segment()

    @property
    def closes(self) -> bool:
        """True if everything has ended or is being ended now."""
        return self._is_closing or not self._ends

    def outlive(self, checkpointer: object) -> weakref.finalize[[], object]:
        """Finish all saves when the Checkpointer is collected and at the end of the program. Holds
        only a weak reference to it; returns the finalizer, to be detached after a regular close."""
        system.watch(self, at_exit=self.finish_at_exit, in_child=self.abandon)
        dropped = weakref.finalize(checkpointer, self.drop)
        dropped.atexit = False  # `finish_at_exit` handles that case
        return dropped

    def drop(self) -> None:
        """End everything after the Checkpointer was collected without close(). The collector may
        run on any thread, even on one that must end here, so a new thread does the work."""
        if os.getpid() == self._pid:
            why = f"a Checkpointer of {self._run} was dropped"
            with contextlib.suppress(StorageError):  # at exit, `finish_at_exit` has run
                threads.Worker("end", self._finish, why).start()

    def finish_at_exit(self) -> None:
        """Finish all saves when the program ends without close()."""
        if os.getpid() == self._pid:
            with signals.defer_signals():
                self._finish("the program ends")

    def _finish(self, why: str) -> None:
        """Finish all saves without a close(), and log that."""
        pending = [handle.step for handle in self.under_way()]
        if pending:
            log.warning("%s without close(); finishing saves of steps %s", why, pending)
        self.wait()
        self.close()
        system.let_be(self)  # only now: until here, the exit must wait for it
        self.saves.take_over()
        for error in self.saves.untold():
            log.error("a save failed and its error was never raised: %s", error)

    def abandon(self) -> None:
        """Leave everything to the parent process. Called in a forked child."""
        self.client.abandon()
