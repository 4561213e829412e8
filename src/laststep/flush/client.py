"""The trainer's side of the flusher: start it, hand saves over, receive their progress and that of
the replicas, notice its death.

`Client` owns the connection and one receiving thread, which returns slots to the pool and advances
the stages of saves. When the flusher dies or sends an invalid message, it is ended, and every
uncommitted save fails at once, so that nobody keeps waiting. It may have died after a commit but
before reporting it, so the run itself is checked for that. `restart` starts a new flusher with the
same pool once the old one is dead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from laststep.catalog.attempt import unknown_decision
from laststep.catalog.run import newest_point
from laststep.catalog.terms import Seen
from laststep.errors import StorageError
from laststep.events import Bus, Preflight, Pruned, TierHolds, TierLags
from laststep.flush import protocol
from laststep.flush.saves import Saves, SaveState
from laststep.flush.server import NOT_FOR_THE_HELPER, Flusher, Setup
from laststep.process import signals, system, threads
from laststep.storage.registry import import_path
from laststep.tiers.replicating import TierStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.attempt import AttemptName
    from laststep.catalog.instances import Start
    from laststep.flush.saves import Save, Seal
    from laststep.memory.pool import Pool
    from laststep.plan.files import SavePlan
    from laststep.tiers.replicating import ReplicaOrder

log = logging.getLogger(__name__)

_BARE = ("-S", "-P", "-c")
"""Skip `site`: the startup code that packages install takes longer than all the rest."""
_CODE = (
    "import sys; sys.path[:0], sys.path[len(sys.path):] = sys.argv[2:3], sys.argv[3:]; "
    "sys.modules['typing_extensions'] = None; "
    "from laststep.flush.server import main; "
    "del sys.modules['typing_extensions']; main(sys.argv[1])"
)
"""msgspec imports `typing_extensions` if it is installed, which takes a tenth of the start-up time;
else `typing`, which is equivalent here. A store may need it later."""


class HelperProcess:
    """A flusher in a helper process, which inherits only the descriptors that it needs."""

    def __init__(self, end: socket.socket, setup: Setup) -> None:
        # Opened here, where the pid certainly is the trainer's: the trainer may die, and its pid be
        # reused, before the helper runs. The helper still finishes the saves handed over by then.
        trainer_pidfd = os.pidfd_open(os.getpid())
        opener, orders = import_path(setup.run), setup.orders
        foreign = any(tier.opener is not None for tier in orders.replicas)
        places = _places(encodes=orders.encodes, foreign=opener is not None or foreign)
        setup = msgspec.structs.replace(
            setup,
            opener=opener,
            socket_fd=end.fileno(),
            trainer_pidfd=trainer_pidfd,
            rank=system.logging_rank(),
        )
        # Blocked signals are inherited: the helper ignores them from its first instruction on.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_HELPER)
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_BARE, _CODE, msgspec.json.encode(setup).decode(), *places],
                pass_fds=(setup.pool_fd, end.fileno(), trainer_pidfd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(trainer_pidfd)
        end.close()
        # The pid cannot have been reused: nobody else reaps our children.
        self.pidfd = os.pidfd_open(self._process.pid)
        self._close_pidfd = weakref.finalize(self, os.close, self.pidfd)
        # Not at exit: the pidfd is still needed to wait for saves that finish then.
        self._close_pidfd.atexit = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, timeout_s: float) -> bool:
        """Wait for its exit; return False on timeout."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close_pidfd()  # the process is reaped; no thread polls the pidfd any more
        return True

    def end(self, timeout_s: float) -> bool:
        """Kill it and wait until it is reaped: from then on it touches no slot and decides nothing.
        Return False at the timeout."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return self.join(timeout_s)

    def how_it_ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it does not exit"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"


class HelperThread:
    """A flusher on a thread of the trainer, for systems where a helper process is impossible."""

    pid = None
    pidfd = None

    def __init__(self, end: socket.socket, pool: memoryview, setup: Setup) -> None:
        self._flusher = Flusher(protocol.Connection(end), pool, setup)
        self._thread = threads.Worker("flusher", self._flusher.serve).start()

    def join(self, timeout_s: float) -> bool:
        return self._thread.join(timeout_s)

    def end(self, timeout_s: float) -> bool:
        """Make it give up all saves, once its connection is closed, and wait for its end."""
        self._flusher.is_given_up = True
        return self.join(timeout_s)

    def how_it_ended(self) -> str:
        return "its thread does not exit" if self._thread.is_alive() else "its thread ended"


Helper = HelperProcess | HelperThread
Launch = Callable[[socket.socket], Helper]


def _places(*, encodes: bool, foreign: bool) -> list[str]:
    """Return the import paths for the helper; a third-party store may need all of `sys.path`."""
    files = [module.__file__ or "" for module in (msgspec, xxhash)]
    # Not imported: only saves that encode or round need them.
    for spec in map(importlib.util.find_spec, ("numpy", "zstandard") if encodes else ()):
        files += [] if spec is None or spec.origin is None else [spec.origin]
    needed = [str(Path(file).resolve().parents[1]) for file in files]
    needed += [str(Path(place).resolve()) for place in sys.path] if foreign else []
    return [str(Path(__file__).resolve().parents[2]), *dict.fromkeys(needed)]


_REMEMBERED = 64


class TierNews:
    """Status of the run's replicas, from the flusher's messages. Thread-safe."""

    def __init__(self, bus: Bus, orders: Sequence[ReplicaOrder]) -> None:
        self._bus = bus
        self.orders = orders
        self._lock = threading.Lock()
        self._began_s = time.perf_counter()
        self._saves: deque[tuple[AttemptName, Save]] = deque(maxlen=_REMEMBERED)
        self.heard_s = 0.0
        """Time at which a replication last reported progress."""
        self._owing: set[str] = set()
        """Tiers that have yet to receive the last committed checkpoint."""
        self.settled = threading.Event()
        """Set while each tier has the last checkpoint or failed to get it, or without a flusher."""
        self.settled.set()

    def committed(self, at: AttemptName, save: Save) -> None:
        with self._lock:
            self._saves.append((at, save))
            self._owing = {order.url for order in self.orders if order.is_due(at)}
            (self.settled.clear if self._owing else self.settled.set)()

    def owe_all(self) -> AttemptName | None:
        """Expect the last checkpoint on all tiers. Return its name, if there is one."""
        with self._lock:
            if not self._saves:
                return None
            at, save = self._saves[-1]
            self._owing = set(map(attrgetter("url"), self.orders)) - save.report.tiers.keys()
            (self.settled.clear if self._owing else self.settled.set)()
            return at

    def hear(self, message: TierStatus) -> None:
        at, tier, self.heard_s = message.at, message.tier, time.perf_counter()
        if message.state == "copying":
            return
        if message.state == "held":
            with self._lock:
                save = next((save for known, save in self._saves if known == at), None)
                began_s = self._began_s if save is None else save.began_s
            seconds = self.heard_s - began_s
            if save is not None:
                save.report.tiers[tier] = seconds
            items = next((order.items for order in self.orders if order.url == tier), None)
            self._bus.emit(TierHolds(step=at.step, tier=tier, seconds=seconds, items=items))
        else:
            self._bus.emit(TierLags(step=at.step, tier=tier, reason=message.reason))
        with self._lock:
            if self._saves and at == self._saves[-1][0]:
                self._owing.discard(tier)
            if not self._owing:
                self.settled.set()


_LAST_WORDS_S = 1.0
"""Time that a flusher that has hung up gets to exit by itself, so that its exit status is known."""
_END_S = 60.0
"""Time that a killed flusher gets to die: a hanging disk can delay it."""


class Client:
    """Connection to one flusher at a time."""

    def __init__(
        self,
        launch: Launch,
        pool: Pool,
        bus: Bus,
        start: Start,
        kept: Callable[[], frozenset[int]] = frozenset,
        replicas: Sequence[ReplicaOrder] = (),
    ) -> None:
        """`kept` returns the slots that a dead flusher has left in the memory tier."""
        self._launch = launch
        self._kept = kept
        self.instance = start
        """This start of the job."""
        self._pool = pool
        self.bus = bus
        self.saves = Saves()
        self.drains = TierNews(bus, replicas)
        self._starting = threading.Lock()
        self._announcing = threading.Lock()
        self._has_liveness_lock = False
        """True if the running flusher also holds the liveness lock."""
        self._helper: Helper | None = None
        self._heard_all = threading.Event()
        """Set when nothing more can arrive from the flusher that was started last."""
        self.up = threading.Event()
        """Set while a flusher is running and receiving, or once it is known that none will."""
        self._closing = False
        self.ends_well = False
        """True if this job instance has not failed when it closes; recorded in the run."""
        self.drains_last = False
        """True if all replicas receive the last checkpoint, due there or not."""
        self._continues: protocol.Continue | None = None
        self._slots: int | None = None
        pool.tell_slots = self._tell_slots
        self._told_disk = False
        self.last_committed = 0
        """Number of the last save committed by the running flusher; 0 if none."""
        self.newest_committed = (0, 0)
        """Term and attempt of the last commit by any flusher of this process."""
        self.newest_save: Save | None = None
        """The last committed save."""

    @property
    def helper_pid(self) -> int | None:
        return None if self._helper is None else self._helper.pid

    def start(self) -> None:
        """Start the flusher unless it is running. Called by a save, or ahead of an expected one."""
        with self._starting:
            if self._helper is not None or self._closing:
                return
            with contextlib.ExitStack() as failing:
                try:
                    ours, theirs = socket.socketpair()
                    failing.callback(ours.close)
                    failing.callback(theirs.close)
                    helper = self._launch(theirs)
                except OSError as error:
                    raise StorageError(
                        "cannot start the flusher",
                        found=str(error),
                        remedy="free memory and processes, or raise the limit on open files "
                        "(`ulimit -n`)",
                    ) from error
                failing.pop_all()
            self._connection = protocol.Connection(ours, peer=helper.pidfd)
            self.send = self._connection.send
            """Does nothing if the flusher is gone: the handles report its death."""
            self._has_liveness_lock = False
            self.last_committed = 0
            self.up.clear()
            self._heard_all.clear()
            self.send(protocol.Instruct(continues=self._continues, pool_slots=self._slots))
            self._receiver = threads.Worker("receive", self._receive)
            self._helper = helper  # other threads see it from here on
            try:
                self._receiver.start()
            except StorageError:
                self._helper = None
                self._connection.close()
                helper.end(_END_S)
                raise

    def restart(self, within_s: float) -> None:
        """Replace a dead flusher with a new one; nobody may hold slots. Raise `StorageError` if the
        old one may still touch slots, or the outcome of its saves is not known in time."""
        assert self._helper is not None  # noqa: S101 (it has died)
        deadline = time.monotonic() + within_s
        found = None if self._receiver.join(within_s) else "its exit is still being handled"
        for save in self.saves.all():
            left_s = max(deadline - time.monotonic(), 0.0)
            if save.role != "member" and not save.wait_for(SaveState.COMMITTED, left_s):
                found = f"step {save.step} is in progress"
        if found is None and not self._helper.end(_END_S):
            found = "it does not exit"
        if found is not None:
            raise StorageError(
                "cannot start a new flusher: the outcome of the old one's saves is unknown",
                expected=f"their end within {within_s:g} s",
                found=found,
                remedy="a disk or a rank may hang: check `dmesg` and the logs of the other ranks; "
                "the next save tries again",
            )
        self._connection.close()
        self._pool.slots.reset(self._kept())
        with self._starting:
            # Reset as if there had been no flusher: if this start fails, a later save tries again.
            self._helper = self.saves.refusal = None
        self.start()

    def continue_from(self, continues: protocol.Continue) -> None:
        """Let future saves continue that checkpoint, under a new term."""
        with self._starting:
            self._continues = continues
            if self._helper is not None:
                self.send(protocol.Instruct(continues=continues))

    def _tell_slots(self, slots: int) -> None:
        """Tell the flusher the pool's size: the memory tier holds slots that saves may wait for."""
        with self._starting:
            self._slots = slots
            if self._helper is not None:
                self.send(protocol.Instruct(pool_slots=slots))

    def begin(self, save: Save, plan: SavePlan, seal: Seal) -> None:
        """Register a save and start its capture. Raise if the flusher is gone or cannot start."""
        if self._continues is None and save.role != "member":
            self.continue_from(protocol.Continue(seen=newest_point(self.instance.store)))
        self.start()
        save.plan, save.seal = plan, seal
        self.saves.enter(save)

    def announce(self, begin: protocol.Begin) -> None:
        """Announce a save, after marking it as pending in the liveness lock."""
        with self._announcing:
            descriptor = self.instance.announce(begin.save)
            if self._has_liveness_lock:
                descriptor = None
            if descriptor is not None:
                self._has_liveness_lock = True
                begin = msgspec.structs.replace(begin, liveness=self.instance.liveness_lock_name)
            self.send(begin, descriptor=descriptor)
        if self.saves.find(begin.save) is None:
            # The save failed meanwhile with its flusher: nothing else would clear its marker.
            self.instance.over(begin.save)

    def release(self, slots: list[int]) -> None:
        """Return slots that will not be written to the pool."""
        self._pool.slots.release(*slots)

    def save_ends(self, save: Save, at: AttemptName | None) -> None:
        """Prepare for reporting a save as committed under `at`, or as failed if that is None."""
        self.instance.over(save.number)
        if at is None:
            return
        self.last_committed, self.newest_committed = save.number, at.point
        # If this flusher dies, the next one continues from here.
        before = self._continues
        self._continues = protocol.Continue(
            after=at,
            seen=Seen(term=at.term, commit=at.point),
            resumed_from=None if before is None else before.resumed_from,
        )
        save.report.tiers[self.instance.url] = time.perf_counter() - save.began_s
        self.newest_save = save
        if self.drains.orders:
            self.drains.committed(at, save)

    def close(self) -> None:
        """Accept no more saves; wait until the flusher has finished everything and exited."""
        with self._starting:
            was_closing, self._closing = self._closing, True
        if self._helper is not None:
            if not was_closing:  # else an interrupt ended an earlier wait
                if self.drains_last:
                    self.drain_last()
                self.send(protocol.Bye())
            while not (ended := signals.wait(self._heard_all, _END_S)):
                if time.perf_counter() - self.drains.heard_s >= _END_S:
                    break
            if not ended:
                # All saves are committed or have failed: killing it loses nothing.
                log.warning("the flusher does not end: %s", self._helper.how_it_ended())
                self._helper.end(_END_S)
            self._receiver.join()
            self._helper.join(_END_S)
            self._connection.close()
            if self.ends_well and self.last_committed:
                self.instance.ended_well()
        self.instance.close()

    def drain_last(self) -> None:
        """Have the last checkpoint of a job copied to all replicas."""
        at = self.drains.owe_all()
        if at is not None:
            self.send(protocol.Instruct(replicate=at))

    def leave(self) -> None:
        """Let the flusher finish its work after this program has exited."""
        if self._helper is not None and not self._closing:
            self.send(protocol.Bye(waits=False))

    def abandon(self) -> None:
        """In a forked child: close the copy of the connection without sending anything."""
        if self._helper is not None:
            self._connection.detach()

    def _receive(self) -> None:
        why: str | None = "a message of it could not be handled"
        try:
            with threads.outlasting(log, "a message of the flusher could not be handled"):
                self._hear()
                why = None  # it has hung up
            # This is the only receiving thread: wake every waiter, since no more messages follow.
            self._fail_pending(why)
        finally:
            self.drains.settled.set()
            self._heard_all.set()

    def _hear(self) -> None:
        while (message := self._connection.receive(protocol.in_trainer)) is not None:
            if isinstance(message, protocol.Freed):
                self._pool.slots.release(*message.slots)
            elif isinstance(message, TierStatus) and not message.save:
                self.drains.hear(message)
            elif isinstance(message, protocol.DiskNeed):
                if not self._told_disk:  # a restarted flusher sends it again
                    self._told_disk = True
                    needs = msgspec.structs.asdict(message)
                    self.bus.emit(Preflight(host_memory_bytes=self._pool.cap_bytes, **needs))
            elif isinstance(message, protocol.News) and message.kind == "ready":
                self.up.set()
            elif isinstance(message, protocol.News) and message.kind == "removed":
                self.bus.emit(Pruned(step=message.step, folder=message.folder))
            elif isinstance(message, protocol.News) and message.kind == "logged":
                with threads.outlasting(log, "a log handler failed"):
                    logging.getLogger(message.logger).log(message.level, "%s", message.text)
            elif (save := self.saves.find(message.save)) is not None:
                save.hear(message)
                del save  # free its objects before waiting for the next message

    def _fail_pending(self, why: str | None) -> None:
        """Fail every save that the flusher had not committed; it is gone, or is ended because of
        `why`. It MUST be dead before any failure is reported, or it might still commit the save."""
        if self._closing and not self.saves.under_way():
            return
        helper = self._helper
        assert helper is not None  # noqa: S101 (whose end this is)
        self.up.set()
        self._connection.hang_up()  # unblocks threads that are sending
        is_dead = (why is None and helper.join(_LAST_WORDS_S)) or helper.end(_END_S)
        error = StorageError(
            "the flusher exited before its saves were finished",
            found=why or helper.how_it_ended(),
            remedy="the checkpoints committed so far are whole; the next save starts a new flusher",
        )
        unended = self.saves.refuse(error)
        self._pool.slots.lose_flusher(error)
        for save in unended:
            if save.role != "alone" and save.reached >= SaveState.DURABLE:
                save.lose_flusher(error)
            elif save.role == "alone" and save.at is not None:
                self._find_out(save, save.at, error, is_dead=is_dead)
            else:
                save.fail(error)

    def _find_out(self, save: Save, at: AttemptName, error: StorageError, *, is_dead: bool) -> None:
        """Look in the run for a save that its flusher may have committed without reporting it. Once
        the flusher is dead, the state of the run is final."""
        doubt = None if is_dead else "it may still commit"
        try:
            if is_dead and self.instance.has_committed(at.folder):
                save.decided(at)
                return
        except Exception as second:  # noqa: BLE001 (nobody else would end the save)
            doubt = str(second) or repr(second)
        if doubt is not None:
            error = unknown_decision(at, f"{error.without_remedy()}; then {doubt}")
        save.fail(error)
