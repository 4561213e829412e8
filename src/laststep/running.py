"""What runs for a Checkpointer: memory, capture thread, flusher, and the saves under way.

Knows nothing of the Checkpointer, which may be gone before it: dropped without a close(), or at the
end of the program. What was handed over is then finished, and all of it given back.
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
from laststep.catalog.lineage import AttemptName
from laststep.catalog.starts import Start
from laststep.commit import thread as teaming
from laststep.errors import AbortedError, LaststepError, StorageError
from laststep.flush import launch as starting
from laststep.flush.client import Client
from laststep.flush.protocol import Continue, Orders
from laststep.memory import segments
from laststep.memory.pool import Pool
from laststep.process import signals, system, threads
from laststep.ranks.rank import ranks_on_this_node
from laststep.saving import preflight as sizing
from laststep.settings import WAIT_FOR_OTHERS_S, FlushIn
from laststep.storage.registry import import_path, local_path, real_place
from laststep.storage.shared_memory import BASE
from laststep.terms import CHUNK_BYTES, MEMORY
from laststep.tiers.drains import DrainOrder
from laststep.tiers.sealed import saves_in

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from laststep.catalog.epochs import Trainer
    from laststep.catalog.lineage import Seen
    from laststep.catalog.retention import Keep
    from laststep.commit.thread import CommitThread
    from laststep.events import Bus
    from laststep.flush.launch import Helper, Launch
    from laststep.flush.saves import SaveHandle, Saves
    from laststep.memory.segments import Segment
    from laststep.ranks.rank import Rank
    from laststep.settings import Settings
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store
    from laststep.tiers.tier import Arranged


log = logging.getLogger(__name__)

_START_S = 10.0
"""So long a restore waits for the flusher to run, on a machine that has better things to do."""
_LEAVE_S = 1.0
"""So long copies may take to end that are of no use any more."""


def pool_in(
    base: str | None, cap_bytes: int, *, pinned: bool, run: str, rank: Rank
) -> tuple[Pool, Segment | None]:
    """The memory for saves: that of this process and its flusher alone or, with a base, a segment
    of shared memory there, which outlives both."""
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
    """A tier by a name that every process understands, wherever it runs."""
    return local_path(url) or url


def drain_orders(tiers: Arranged) -> tuple[DrainOrder, ...]:
    """What a flusher is told of the further tiers."""
    return tuple(
        DrainOrder(
            url=place_of(tier.url),
            opener=import_path(tier.url),
            every=tier.every,
            keep=tier.keep,
            bytes_per_s=tier.limit_bytes_per_s,
            items=tier.items,
        )
        for tier in tiers.further
    )


def launcher(
    run: str,
    tiers: Arranged,
    pool: Pool,
    settings: Settings,
    trainer: Trainer,
    segment: str | None,
    rank: Rank,
) -> Launch:
    """How to start a flusher for that run."""

    def launch(end: socket.socket) -> Helper:
        orders = Orders(
            writers=settings.writers,
            keep=tiers.keep,
            compression=settings.compression,
            lossy=settings.lossy or {},
            segment=segment,
            rank=rank.number,
            ranks=rank.ranks,
            further=drain_orders(tiers),
        )
        if settings.flush is FlushIn.THREAD:
            return starting.start_thread(
                end, pool.memory(), run=run, trainer=trainer, orders=orders
            )
        return starting.start_process(
            end, run=run, trainer=trainer, pool_fd=pool.fd, pool_bytes=pool.cap_bytes, orders=orders
        )

    return launch


def client_of(
    store: Store,
    tiers: Arranged,
    pool: Pool,
    settings: Settings,
    bus: Bus,
    segment: Segment | None,
    rank: Rank,
) -> Client:
    """The way to the flusher of a new start of a job."""
    start = Start(store)
    folder = None if segment is None else segment.folder
    launch = launcher(store.url, tiers, pool, settings, start.writer, folder, rank)

    def kept() -> frozenset[int]:
        saves = [] if segment is None else saves_in(segment)
        return frozenset(slot for save in saves for slot in save.needed_slots)

    return Client(launch, pool, bus, start, kept, drain_orders(tiers) if rank.is_first else ())


def continuing(
    found: AttemptName | None, seen: Seen, *, resumed: bool = True, was_read: bool = True
) -> Continue:
    """What saves continue from: what was found when that was the newest, or nothing."""
    if found is None:
        return Continue(seen=seen)
    return Continue(
        after=AttemptName(step=found.step, epoch=found.epoch, attempt=found.attempt),
        seen=seen,
        resumed_from=found.folder if resumed else None,
        was_read=was_read,
    )


def _sets(segment: Segment | None) -> int:
    """How many saves are in memory at a time: where the last one is kept there, that too."""
    return 1 if segment is None else 2


def _left_behind(segment: Segment, ranks_here: int) -> int:
    """Return this rank's share of the memory that earlier starts have left on this node, and that
    is freed when this start has committed."""
    dead = segments.of_dead_processes(segment.base, segment.owner.run)
    return sum(earlier.size_bytes for earlier in dead) // ranks_here


def start_parts(
    store: Store,
    tiers: Arranged,
    providers: Mapping[str, StateProvider],
    settings: Settings,
    rank: Rank,
    bus: Bus,
) -> RunningParts:
    """Start everything that runs for a new Checkpointer."""
    cap, expected, on_device = sizing.memory_for(providers, settings, rank)
    pool, segment = pool_in(
        tiers.memory, cap, pinned=bool(on_device), run=real_place(store.url), rank=rank
    )
    capturer = Capturer(pool, mode=settings.capture, margin_bytes=settings.device_margin_bytes)
    staged = capturer.start(on_device)
    if segment is not None:
        left_behind = functools.partial(_left_behind, segment, ranks_on_this_node(rank))
        pool.share(left_behind, least_bytes=expected)
    pool.want(_sets(segment) * expected, without_pauses=not staged)
    client, team = client_of(store, tiers, pool, settings, bus, segment, rank), None
    try:
        signals.let_in()
        if rank.ranks > 1:
            team = teaming.gather(rank, store.url, client, settings, bus)
    except BaseException:
        # Half a Checkpointer must leave no hook, thread or memory behind.
        capturer.close()
        pool.close()
        if segment is not None:
            segment.remove()
        raise
    return RunningParts(store.url, pool, capturer, client, team, segment)


class RunningParts:
    """The parts that run, until they are closed."""

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
        """Whether training has ended as it should: then nobody needs what is in shared memory."""
        self.pool, self.capturer, self.client, self.team = pool, capturer, client, team
        self.segment = segment
        self.preflight: threading.Thread | None = None
        self._is_over: Callable[[], bool] = bool  # never
        ends = [capturer.close, client.close, self._end_preflight, pool.close]
        if segment is not None:
            ends.append(self._free_segment)
        if team is not None:
            ends.insert(1, team.close)
        self._ends = collections.deque(ends)
        """What is left to do in order to end everything."""
        self._starter: threading.Thread | None = None

    def start_early(self) -> bool:
        """Somebody trains, or restores to train, and so will save: start the flusher, which takes a
        while, beside that. Should it fail, the first save tries again, and reports it."""
        if os.getpid() == self._pid:
            self._starter = threading.Thread(target=self._start, name="laststep-start", daemon=True)
            try:
                threads.start(self._starter)
            except StorageError:
                self._starter = None
        return True

    @contextlib.contextmanager
    def starting(self, *, beside: bool) -> Iterator[None]:
        """Who restores, inside, is about to train, and to save: start the flusher beside that, and
        wait, not for ever, until it runs; or only afterwards, without waiting, where it would take
        the cores from the ranks that read."""
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
            self.client.up.set()  # there is nothing to wait for

    def under_way(self) -> tuple[SaveHandle, ...]:
        return tuple(save.handle for save in self.saves.all() if not save.over)

    def over_within(self, timeout_s: float | None) -> bool:
        """Wait until all saves are over, however they end; False when the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self.saves.all():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not save.handle.committed.over_within(left_s):
                return False
        return True

    def expect(
        self, providers: Mapping[str, StateProvider], settings: Settings, rank: Rank
    ) -> None:
        """Have memory ready for items that were made after construction."""
        _cap, expected, on_device = sizing.memory_for(providers, settings, rank)
        staged = self.capturer.expect(on_device)
        self.pool.want(_sets(self.segment) * expected, without_pauses=not staged)

    def prepare_for(self, size_bytes: int, store: Store, keep: Keep | None, bus: Bus) -> None:
        """A save of that size comes: have memory for it, and for the one before beside it where
        that is kept. Before the first one, look whether there is room for all of it."""
        self.pool.want(_sets(self.segment) * size_bytes + CHUNK_BYTES)
        if self.preflight is None:
            cap_bytes = self.pool.cap_bytes
            self.preflight = sizing.start_preflight(store, size_bytes, cap_bytes, keep, bus)

    def wait(self) -> None:
        """Wait until all saves are over, however they end."""
        with self._in_time():
            for save in self.saves.all():
                save.handle.committed.over_within(None)

    def close(self) -> None:
        """Wait for all saves and end everything; once, whoever else asks for it too, be it a
        signal's handler in the midst of this. What an interrupt leaves, the next call does."""
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
        """A new flusher in place of one that died."""
        dead = self.client.dead
        if dead is not None:
            log.warning("starting a new flusher: %s", dead)
            self.capturer.settle()
            self.client.restart(settings.deadline_s + WAIT_FOR_OTHERS_S)

    @property
    def saves(self) -> Saves:
        """Those under way."""
        return self.client.saves

    def hurry(self, is_over: Callable[[], bool]) -> None:
        """From now on nobody waits for anything here once that is true: the program must end."""
        self._is_over = is_over

    def committed(self, step: int) -> SaveHandle | None:
        """The last save that is committed, if it is of that step."""
        return self.client.drains.last_save(step)

    def drain(self, handle: SaveHandle) -> None:
        """Have the last checkpoint of a job brought to all further tiers, and wait until each has
        it, as far as this rank is told, or has failed to get it once."""
        self.client.drain_last(handle)
        signals.wait(self.client.drains.settled)

    def tiers_of(self, handle: SaveHandle) -> tuple[str, ...]:
        """Which tiers hold that save, the newest, in the order in which they got it. Memory does if
        all ranks have it in this machine's."""
        held = tuple(handle.report.tiers)
        if self.segment is None or MEMORY not in held or self.segment.owner.ranks == 1:
            return held
        newest = self.segment.records()[-1:]
        have = {rank for name in newest for rank in self.segment.ranks_with(name)}
        whole = len(have) == self.segment.owner.ranks
        return tuple(tier for tier in held if whole or tier != MEMORY)

    def _free_segment(self) -> None:
        """Free shared memory if training has ended as it should and the run has all that is in it,
        or if nothing is; else log what stays, and how to free it."""
        segment, committed = self.segment, self.client.newest_committed
        if segment is None:
            return
        alone = [save.at.step for save in saves_in(segment) if save.at.point > committed]
        steps = sorted({*alone, *(handle.step for handle in self.under_way())})
        if not steps and (self.ends_well or not segment.records()):
            segment.remove()
            return
        why = f"it may hold the only copy of steps {steps}"
        if not steps:
            why = "the job failed, or ended without close()"
        place = "" if segment.base == BASE else f" --base {segment.base}"
        log.warning(
            "%d bytes of shared memory stay in %s: %s. The next start on this machine restores "
            "what is needed and then frees it; `laststep rescue %s%s` stores and frees it now",
            segment.size_bytes,
            segment.folder,
            why,
            self._run,
            place,
        )

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Inside is waited for what runs; where the time is up it is left alone. The flusher, where
        that is a process, goes on with what was handed over whole."""
        try:
            with signals.limited(self._is_over):
                yield
        except signals.TimeIsUp:
            self._leave()

    def _leave(self) -> None:
        frees = self._free_segment in self._ends
        self._ends.clear()
        for save in self.saves.all():
            if not (save.over or save.handle.captured.done()):
                save.handle.committed.seen = True
                save.failed(AbortedError("the program ends before it is captured"))
            if save.job is not None:  # no copy may run while the interpreter takes torch down
                signals.wait(save.job.over, _LEAVE_S)
        if self.team is not None:
            self.team.leave()
        self.client.leave()
        if frees:
            self._free_segment()

    @property
    def closes(self) -> bool:
        """Whether everything has ended, or is being ended now."""
        return self._is_closing or not self._ends

    def _end_preflight(self) -> None:
        if self.preflight is not None and self.preflight.is_alive():
            self.preflight.join()

    def outlive(self, checkpointer: object) -> weakref.finalize[[], object]:
        """See to it that all is finished when that is collected, and at the end of the program. It
        is not kept alive; returns what is to be detached when it is closed."""
        system.watch(self, at_exit=self.finish_at_exit, in_child=self.abandon)
        dropped = weakref.finalize(checkpointer, self.drop)
        dropped.atexit = False  # `finish_at_exit` comes then
        return dropped

    def drop(self) -> None:
        """The Checkpointer was collected without a close(). Where and when that happens nobody
        knows, be it on one of the threads that are to end: so a thread of its own sees to it."""
        if os.getpid() == self._pid:
            why = f"a Checkpointer of {self._run} was dropped"
            ending = threading.Thread(
                target=self._finish, args=(why,), name="laststep-end", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the program ends: `finish_at_exit` was there
                ending.start()

    def finish_at_exit(self) -> None:
        """The program ends without close()."""
        if os.getpid() == self._pid:
            with signals.held():
                self._finish("the program ends")

    def _finish(self, why: str) -> None:
        """Nobody is left to close it: finish what was handed over, and say so."""
        pending = [handle.step for handle in self.under_way()]
        if pending:
            log.warning("%s without close(); finishing saves of steps %s", why, pending)
        self.wait()
        self.close()
        system.let_be(self)  # not before: the end of the program waits for it here
        self.saves.take_over()
        for error in self.saves.tell():
            log.error("a save failed and nobody was there to see it: %s", error)

    def abandon(self) -> None:
        """In a forked child: all of it belongs to the parent."""
        self.client.abandon()
