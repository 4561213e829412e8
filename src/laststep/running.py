"""The background parts of a Checkpointer, and the checkpoint that its saves continue.

`RunningParts` does not know the Checkpointer, which may disappear first: dropped without close(),
or at the end of the program. Saves that have begun are then finished and all resources released.
`Resuming` belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from laststep.capture.capture import Capturer
from laststep.catalog.attempt import parse_folder
from laststep.catalog.instances import Start
from laststep.catalog.run import newest_point
from laststep.catalog.terms import Seen
from laststep.commit import thread as teaming
from laststep.constants import CHUNK_BYTES, MEMORY
from laststep.errors import (
    AbortedError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.flush.client import Client, HelperProcess, HelperThread
from laststep.flush.protocol import Continue, Orders
from laststep.flush.saves import SaveState
from laststep.flush.server import Setup
from laststep.memory import segments
from laststep.memory.pool import Pool
from laststep.process import signals, system, threads
from laststep.ranks.group import Ranks, collective, ranks_on_this_node
from laststep.restoring.choose import wait_for_others
from laststep.restoring.plan import selection
from laststep.restoring.restore import Restored, newest_of, peek_into, restore_into
from laststep.saving.context import memory_for
from laststep.saving.describe import without_collection
from laststep.settings import WAIT_FOR_OTHERS_S, FlushIn
from laststep.storage.registry import import_path, local_path, real_place
from laststep.tiers.nearest import NearestStore
from laststep.tiers.replicating import ReplicaOrder
from laststep.tiers.snapshots import records_in

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from laststep.commit.thread import CommitThread
    from laststep.flush.client import Helper
    from laststep.flush.saves import SaveHandle, Saves
    from laststep.memory.segments import Segment
    from laststep.restoring.restore import Outcome, Peeked, RestoreRequest
    from laststep.saving.context import RunContext
    from laststep.settings import Settings
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_START_S = 10.0
"""Longest time that a restore waits for the flusher to start, on a busy machine."""
_LEAVE_S = 1.0
"""Longest wait for copies whose result is no longer needed."""


def start_parts(context: RunContext) -> RunningParts:
    store, settings, rank = context.store, context.settings, context.rank
    cap, expected, on_device = memory_for(context)
    pool, segment = _pool(context, cap, pinned=bool(on_device))
    capturer = Capturer(pool, mode=settings.capture, margin_bytes=settings.device_margin_bytes)
    client = _client(context, pool, segment)
    client.saves.on_error = settings.on_error
    staged = capturer.start(on_device)
    if segment is not None:
        left_behind = functools.partial(_left_behind, segment, ranks_on_this_node(rank))
        pool.share(left_behind, least_bytes=expected)
    try:
        signals.check_signals()
        team = teaming.gather(context, client) if rank.ranks > 1 else None
    except BaseException:
        # A Checkpointer that fails to start must leave no hook, thread or memory behind.
        capturer.close()
        pool.close()
        if segment is not None:
            segment.remove()
        raise
    parts = RunningParts(store.url, pool, capturer, client, segment, team)
    pool.want(parts.sets * expected, without_pauses=not staged)
    return parts


def _pool(context: RunContext, cap_bytes: int, *, pinned: bool) -> tuple[Pool, Segment | None]:
    """Create the memory for saves; with a memory tier, it outlives trainer and flusher."""
    base, rank = context.tiers.memory, context.rank
    if base is None:
        return Pool(cap_bytes, pinned=pinned), None
    if pinned:
        segments.refuse_disks(base)
    size = max(cap_bytes // CHUNK_BYTES, 1) * CHUNK_BYTES
    run = real_place(context.store.url)
    segment, fd = segments.make(base, run, rank=rank.number, ranks=rank.ranks, size_bytes=size)
    try:
        return Pool(size, pinned=pinned, fd=fd), segment
    except BaseException:
        segment.remove()
        raise


def _left_behind(segment: Segment, ranks_here: int) -> int:
    """Return this rank's share of memory that earlier jobs left here until the first commit."""
    dead = segments.of_dead_processes(segment.base, segment.owner.run)
    return sum(earlier.size_bytes for earlier in dead) // ranks_here


def _client(context: RunContext, pool: Pool, segment: Segment | None) -> Client:
    """Return the client of the flusher of a new job instance. The flusher is not started yet."""
    start, settings, rank = Start(context.store), context.settings, context.rank
    replicas = tuple(
        ReplicaOrder(
            url=local_path(tier.url) or tier.url,  # whatever a process's working directory is
            opener=import_path(tier.url),
            every=tier.every,
            keep=tier.keep,
            bytes_per_s=tier.limit_bytes_per_s,
            items=tier.items,
        )
        for tier in context.tiers.replicas
    )
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

    in_thread = settings.flush is FlushIn.THREAD
    setup = Setup(
        run=context.store.url,
        trainer=start.writer,
        orders=orders,
        pool_fd=-1 if in_thread else pool.fd,
    )

    launch: Callable[[socket.socket], Helper] = functools.partial(HelperProcess, setup=setup)
    if in_thread:
        launch = functools.partial(HelperThread, pool=pool.memory, setup=setup)

    def kept() -> frozenset[int]:
        saves = [] if segment is None else records_in(segment)
        return frozenset(slot for save in saves for slot in save.needed_slots)

    return Client(launch, pool, context.bus, start, kept, replicas if rank.is_first else ())


class RunningParts:
    """The running parts of a Checkpointer, until `close`. They hold no reference to items: an item
    may refer to the Checkpointer, which could then never be collected."""

    def __init__(
        self,
        run: str,
        pool: Pool,
        capturer: Capturer,
        client: Client,
        segment: Segment | None,
        team: CommitThread | None,
    ) -> None:
        self._run = run
        self._pid = os.getpid()
        self._closing = threading.RLock()
        self._is_closing = False
        self.ends_well = False
        """True if training ended normally: then the shared memory is no longer needed."""
        self.pool, self.capturer, self.client, self.segment = pool, capturer, client, segment
        self.team = team
        """The thread that commits together with other ranks."""
        self.saves: Saves = client.saves
        self.has_saved = False
        """True once a save has begun."""
        self.is_over: Callable[[], bool] = bool
        """Once it returns True, all waits in this object stop: the program must end."""
        self._ends: list[Callable[[], None]] = [
            capturer.close,
            *([] if team is None else [team.close]),
            client.close,
            pool.close,
            self._free_segment,
        ]
        """The functions still to be called to end everything, in order."""
        self._starter: threads.Worker | None = None
        self.sets = 1 if segment is None else 2
        """How many saves must fit into memory: two if the last one is kept there."""

    def start_early(self) -> bool:
        """Start the flusher in the background. If that fails, the first save reports the error."""
        if os.getpid() == self._pid:
            with contextlib.suppress(StorageError):
                self._starter = threads.Worker("start", self._start).start()
        return True

    @contextlib.contextmanager
    def starting(self, *, beside: bool) -> Iterator[None]:
        """Start the flusher around a restore, since saves will follow: in parallel with `beside`,
        else afterwards, because it would take cores from the ranks that read."""
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

    def under_way(self) -> list[SaveHandle]:
        return list(map(attrgetter("handle"), self.saves.under_way()))

    def over_within(self, timeout_s: float | None) -> bool:
        """Wait until all saves are over, whatever their outcome; return False at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self.saves.all():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not save.wait_for(SaveState.COMMITTED, left_s):
                return False
        return True

    def expect(self, context: RunContext) -> None:
        _cap, expected, on_device = memory_for(context)
        staged = self.capturer.expect(on_device)
        self.pool.want(self.sets * expected, without_pauses=not staged)

    def wait(self) -> None:
        with self._in_time():
            self.over_within(None)

    def close(self) -> None:
        """Wait for all saves and end everything, once, whatever threads or signal handlers call.
        The next call completes one that was interrupted."""
        with self._closing:
            if self._is_closing:
                return
            self._is_closing = True
            try:
                with self._in_time():
                    while self._ends:
                        self._ends[0]()
                        del self._ends[0]
            finally:
                self._is_closing = False

    def revive(self, settings: Settings) -> None:
        log.warning("starting a new flusher: %s", self.saves.refusal)
        self.capturer.settle()
        self.client.restart(settings.deadline_s + WAIT_FOR_OTHERS_S)

    def tiers_of(self, handle: SaveHandle) -> tuple[str, ...]:
        """Return the tiers that hold the newest save. Memory must have it of all ranks."""
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
        log.warning(
            "%d bytes of shared memory stay in %s, which may hold the only copy of steps %s. The "
            "next job instance on this machine restores and frees it; `laststep recover %s "
            "--base %s` stores and frees it now",
            segment.size_bytes,
            segment.folder,
            steps,
            self._run,
            segment.base,
        )

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Stop waiting inside the block when time is up, and leave the running parts alone."""
        try:
            with signals.deadline(self.is_over):
                yield
        except signals.DeadlineExceeded:
            self._leave()

    def _leave(self) -> None:
        frees, self._ends = self._free_segment in self._ends, []
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
        return self._is_closing or not self._ends

    def outlive(self, checkpointer: object) -> weakref.finalize[[], object]:
        """Finish all saves when the Checkpointer is collected and at the end of the program.
        Returns the finalizer, to be detached after a regular close."""
        system.watch(self, at_exit=self.finish_at_exit, in_child=self.client.abandon)
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
        if os.getpid() == self._pid:
            with signals.defer_signals():
                self._finish("the program ends")

    def _finish(self, why: str) -> None:
        pending = [handle.step for handle in self.under_way()]
        if pending:
            log.warning("%s without close(); finishing saves of steps %s", why, pending)
        self.wait()
        self.close()
        system.let_be(self)  # only now: until here, the exit must wait for it
        self.saves.take_over()
        for error in self.saves.untold():
            log.error("a save failed and its error was never raised: %s", error)


class Resuming:
    """The checkpoint that this job instance continues."""

    def __init__(self, context: RunContext, work: RunningParts) -> None:
        self._context, self._store, self._work = context, context.store, work
        self._group: Ranks | None = None
        self._origins: dict[str, str | None] = {}
        """The checkpoints that items come from, until the next save, if not all of them were
        restored together; None for an item whose restore failed midway."""
        self._seen = Seen()
        self._resumed = False
        self._knows_lineage = context.settings.new_lineage
        """True once it is decided which checkpoint the first save continues."""
        self._peek: Peeked | None = None
        """The checkpoint that `peek()` returned."""
        self._damaged: frozenset[str] = frozenset()
        """Checkpoints that `peek()` returned and that were then found damaged."""
        self._absent: list[str] = []
        """The items of the checkpoint that saves continue and that no rank of this job has."""

    @property
    def mixed(self) -> str:
        """The items of a live state that is no whole checkpoint; empty if it may be saved."""
        folders = set(self._origins.values())
        return ", ".join(self._origins) if None in folders or len(folders) > 1 else ""

    def all_ranks(self, call: str) -> Ranks:
        """Return the ranks that restore together and meet for `step()`. Collective at first."""
        if self._group is None:
            team = self._work.team
            self._group = Ranks(self._context.rank) if team is None else team.all_ranks(call)
        return self._group

    def peek(self, wanted: RestoreRequest) -> Peeked | None:
        self._peek = None
        with self._looking("peek()") as (store, group):
            found = peek_into(
                store,
                self._context.bus,
                replace(wanted, damaged=self._damaged),
                ranks=group,
                saw=self._saw,
            )
        if found is None and self._damaged:
            raise CorruptError(
                "no checkpoint of this run is sound",
                where=self._store.url,
                found=f"damage in {', '.join(sorted(self._damaged))}",
                remedy="try a copy of the run, or start a new run elsewhere",
            )
        self._peek = found
        return found

    def restore(self, wanted: RestoreRequest, begin_anew: Callable[[], None]) -> Restored:
        """Restore, and let saves continue from there. `begin_anew` is called when all are ready."""
        peek = self._peek = self._peek if wanted.step is None else None
        if peek is not None:
            wanted = replace(wanted, peeked=peek.folder)
        reading = self._work.pool.reading(wanted.threads, remote=self._store.same_everywhere)
        try:
            with self._looking("restore()") as (store, group), reading as room:
                begin_anew()
                before = self._origins
                outcome = restore_into(
                    store,
                    self._context.providers,
                    room,
                    self._context.bus,
                    wanted,
                    ranks=group,
                    touched=functools.partial(self._touch, wanted.only),
                    saw=self._saw,
                )
                absent = set() if outcome is None else self._absent_from(group, outcome.items)
        except (CorruptError, NotFoundError) as error:
            if peek is None:
                raise
            self._peek = None
            if isinstance(error, CorruptError):
                self._damaged |= {peek.folder}
            remedy = "call peek() again for another one, and restore all of it"
            raise error.amended(remedy=remedy) from error
        self._knows_lineage = True
        if outcome is None:
            self._work.saves.restored(0)
            self._work.client.continue_from(Continue(seen=self._seen))
            return Restored(step=None, next_step=0)
        if self._go_on(outcome, wanted, before, peek):
            self._absent = sorted(absent)
        skipped = () if peek is None else peek.skipped
        return replace(outcome.restored, skipped=(*skipped, *outcome.restored.skipped))

    def _touch(self, only: Sequence[str] | None) -> None:
        """Record that the selected items are incomplete until everything is read."""
        touched = [item for item in self._context.providers if selection(only, item)[0]]
        self._origins = self._origins | dict.fromkeys(touched)

    def _go_on(
        self,
        outcome: Outcome,
        wanted: RestoreRequest,
        before: dict[str, str | None],
        peek: Peeked | None,
    ) -> bool:
        """Record the origins of the restored items and let saves continue the checkpoint. A partial
        restore without a peek leaves the origins of all other items unknown; partial restores after
        a peek must all come from that checkpoint. Return True if saves continue it."""
        found, only = outcome.chosen, wanted.only
        if peek is not None:
            items = [
                item for item in self._context.providers if selection(only, item) == (True, None)
            ]
            before = before | dict.fromkeys(items, found.folder)
        elif only is None:
            before = {}
        if not outcome.mixed:
            self._origins = before
        # Restoring a part of an older checkpoint in mid-run does not move the run back to it.
        if only is None or peek is not None or not (self._resumed or self._work.has_saved):
            continues = Continue(
                after=parse_folder(found.folder),
                seen=self._seen,
                resumed_from=found.folder,
                was_read=outcome.was_in_primary and only is None,
            )
            self._work.client.continue_from(continues)
            self._work.saves.restored(found.step, found.lineage_steps)
            self._resumed = True
            return True
        return False

    def _absent_from(self, group: Ranks, items: frozenset[str]) -> set[str]:
        """Return the items of a checkpoint that no rank has: each may have items of its own."""
        absent = set(items - self._context.providers.keys())
        if self._context.rank.ranks > 1:
            for theirs in group.all_gather(msgspec.msgpack.encode(sorted(absent))):
                absent &= set(msgspec.msgpack.decode(theirs))
        return absent

    def saves(self, *, may_lack_items: bool) -> None:
        """Prepare for a save. Raises `UsageError` if it would abandon checkpoints of the run, or
        put one on top of them from which the job that made them cannot resume."""
        if self._absent and not (may_lack_items or self._context.settings.new_lineage):
            raise UsageError(
                "this save would lack items that the run has",
                where=self._store.url,
                expected=f"{', '.join(self._absent)} too, as in the restored checkpoint",
                found=f"only {', '.join(self._context.providers)}",
                remedy=(
                    "save to another run (laststep.load(run, into=…) starts it from this one), or "
                    "pass new_lineage=True to continue this run without them"
                ),
            )
        self._peek = None
        self._origins = {}
        if not self._knows_lineage:
            seen = newest_point(self._store)
            newest = newest_of(self._store)
            if newest is not None:
                raise UsageError(
                    "this save would abandon the checkpoints of the run",
                    where=self._store.url,
                    expected="restore() before the first save",
                    found=f"step {newest.step}, which was not restored",
                    remedy=(
                        "call restore() to continue from it, pass new_lineage=True to start a new "
                        "lineage, or choose another path"
                    ),
                )
            self._work.client.continue_from(Continue(seen=seen))
            self._knows_lineage = True

    def continue_newest(self) -> None:
        """Let saves continue the newest checkpoint without restoring it, as an import does."""
        seen = newest_point(self._store)
        newest = newest_of(self._store)
        after = None if newest is None else parse_folder(newest.folder)
        self._work.client.continue_from(Continue(after=after, seen=seen))
        self._knows_lineage = True
        if newest is not None and newest.commit is not None and self._context.rank.ranks == 1:
            stored = {item.name for item in newest.commit.items}
            self._absent = sorted(stored - self._context.providers.keys())

    @contextlib.contextmanager
    def _looking(self, call: str) -> Iterator[tuple[Store, Ranks]]:
        """Wait until all saves are over, in this and other Checkpointers of this process, and until
        all ranks are here; yield the run's store as the ranks see it, and the ranks."""
        self._work.wait()
        wait_for_others(self._work, self._store.url)
        store, tiers = self._store, self._context.tiers
        with contextlib.ExitStack() as stack:
            if tiers.memory is not None or tiers.replicas:
                near = NearestStore(store, tiers.memory, self._work.segment)
                store = stack.enter_context(contextlib.closing(near))
            stack.enter_context(without_collection())
            known = self._group is not None
            group = self.all_ranks(call)
            if known:  # else creating the group has synchronised them
                group.arrive()
            collective(group, self._ready)
            yield store, group

    def _ready(self) -> None:
        """Raise the error of a failed save, or restart a flusher that died."""
        self._work.saves.take_over()
        self._work.saves.raise_failed()
        if self._work.saves.refusal is not None:
            self._work.revive(self._context.settings)

    def _saw(self, seen: Seen) -> None:
        # A restore bound to a peek ignores checkpoints committed after it. Counting those as seen
        # would let the next save abandon them. `peek()` itself runs unbound.
        if self._peek is None:
            self._seen = seen
