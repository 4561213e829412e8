"""The trainer's side of the flusher: hand saves over, hear how they fare, notice its death.

Owns the connection and one thread that receives. Slots go back to the pool, stages of handles are
reached, and errors land in the handles from that thread. When the flusher dies, or says what cannot
be understood, it is ended, and every save that was not committed fails at once, waiting included:
whether it was is looked up in the run, where the flusher may have died between doing it and saying
so. `restart` begins anew with the same pool, once the old one is dead.

Also hears what further tiers hold, what fails there, and what is therefore at risk.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from laststep.catalog.lineage import Seen
from laststep.errors import LaststepError, StorageError, from_wire
from laststep.events import (
    Bus,
    Captured,
    Committed,
    Durable,
    MetricMissing,
    Pruned,
    SaveFailed,
    TierHolds,
    TierLags,
    WorkAtRisk,
    Written,
)
from laststep.flush.protocol import (
    Begun,
    Bye,
    Connection,
    Continue,
    Decided,
    DrainLast,
    Drop,
    Failed,
    Flushed,
    Freed,
    Granted,
    Held,
    NoMetric,
    PoolSlots,
    Ready,
    Removed,
    ToFlusher,
    ToTrainer,
    Witness,
    WrittenBytes,
)
from laststep.flush.saves import Saves
from laststep.process import signals, threads
from laststep.tiers.drains import Drained, DrainFailed, Draining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.capture.job import CaptureTiming
    from laststep.catalog.failures import Past
    from laststep.catalog.lineage import AttemptName
    from laststep.catalog.starts import Start
    from laststep.flush.launch import Helper, Launch
    from laststep.flush.saves import SaveHandle, SaveUnderWay, SealParts
    from laststep.memory.pool import Pool
    from laststep.plan.files import SavePlan
    from laststep.tiers.drains import DrainOrder


_REMEMBERED = 64


class TierNews:
    """The further tiers of a run."""

    def __init__(self, bus: Bus, orders: Sequence[DrainOrder]) -> None:
        self._bus = bus
        self._orders = orders
        self._items = {order.url: order.items for order in orders}
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._newest: dict[str, tuple[int, float] | None] = {order.url: None for order in orders}
        """Of each tier the newest step that it has got since the start, and of when that is."""
        self._handles: deque[tuple[AttemptName, SaveHandle, float]] = deque(maxlen=_REMEMBERED)
        self._heard_s = 0.0
        self._last: AttemptName | None = None
        self._owing: set[str] = set()
        """Which tiers are still to get the last checkpoint that was committed."""
        self.settled = threading.Event()
        """Set while each of them has it, or has failed to get it once, or nobody would tell."""
        self.settled.set()

    def committed(self, at: AttemptName, handle: SaveHandle) -> None:
        """A checkpoint is committed at home; what the further tiers lack of it is at risk."""
        now_s = time.monotonic()
        with self._lock:
            self._handles.append((at, handle, now_s - handle.since_began_s()))
            newest = dict(self._newest)
            self._owe(at, [order.url for order in self._orders if order.is_due(at)])
        for tier, has in newest.items():
            step, since_s = (None, self._began_s) if has is None else has
            risk = WorkAtRisk(
                tier=tier, step=step, seconds=now_s - since_s, items=self._items[tier]
            )
            self._bus.emit(risk)

    def owe_all(self, handle: SaveHandle) -> AttemptName | None:
        """That checkpoint is to go to all tiers; returns its name, where it is remembered."""
        with self._lock:
            found = [at for at, known, _ in self._handles if known is handle]
            for at in found:
                held = handle.report.tiers
                self._owe(at, [order.url for order in self._orders if order.url not in held])
            return found[0] if found else None

    def _owe(self, at: AttemptName, tiers: Sequence[str]) -> None:
        self._last, self._owing = at, set(tiers)
        (self.settled.clear if tiers else self.settled.set)()

    def last_save(self, step: int) -> SaveHandle | None:
        """The last that was committed, if it is of that step."""
        last = self.newest_save()
        return last if last is not None and last.step == step else None

    def newest_save(self) -> SaveHandle | None:
        """The last that was committed."""
        with self._lock:
            return self._handles[-1][1] if self._handles else None

    def hear(self, message: Drained | Draining | DrainFailed) -> None:
        """What the flusher says of a drain."""
        self._heard_s = time.monotonic()
        if isinstance(message, Drained):
            self._drained(message)
        elif isinstance(message, DrainFailed):
            self._bus.emit(TierLags(step=message.at.step, tier=message.tier, reason=message.reason))
        if not isinstance(message, Draining):
            self._settle(message)

    def _settle(self, message: Drained | DrainFailed) -> None:
        with self._lock:
            if message.at == self._last:
                self._owing.discard(message.tier)
            if not self._owing:
                self.settled.set()

    def was_heard_within(self, seconds: float) -> bool:
        """Whether a drain is getting on."""
        return time.monotonic() - self._heard_s < seconds

    def _drained(self, message: Drained) -> None:
        with self._lock:
            known = [(handle, began) for at, handle, began in self._handles if at == message.at]
            began_s = known[0][1] if known else self._began_s
            self._newest[message.tier] = message.at.step, began_s
        seconds = time.monotonic() - began_s
        for handle, _ in known:
            handle.report.tiers[message.tier] = seconds
        items = self._items.get(message.tier)
        self._bus.emit(
            TierHolds(step=message.at.step, tier=message.tier, seconds=seconds, items=items)
        )


log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""So long a flusher that has hung up may take to end by itself, so that it is known how."""
_END_S = 60.0
"""So long one that was killed may take to be dead: a disk that hangs keeps it."""


class Client:
    """Talks to one flusher at a time."""

    def __init__(
        self,
        launch: Launch,
        pool: Pool,
        bus: Bus,
        start: Start,
        kept: Callable[[], frozenset[int]] = frozenset,
        further: Sequence[DrainOrder] = (),
    ) -> None:
        """`kept` tells which slots a flusher that died has left as they are to be; of the drains to
        `further` tiers it tells this rank."""
        self._launch = launch
        self._kept = kept
        self._job = start
        self._pool = pool
        self._bus = bus
        self.saves = Saves()
        self.drains = TierNews(bus, further)
        self._starting = threading.Lock()
        self._announcing = threading.Lock()
        self._has_witness = False
        """Whether the flusher that runs holds the witness too."""
        self._helper: Helper | None = None
        self._heard_all = threading.Event()
        """Set when nothing more comes from the flusher that was started last."""
        self.up = threading.Event()
        """Set while a flusher runs that listens, or when it is known that none will."""
        self._closing = False
        self.ends_well = False
        """Whether this start, when it closes, has not failed; others want to know."""
        self.drains_last = False
        """Whether all further tiers get the last checkpoint, due there or not."""
        self._continues: Continue | None = None
        self._slots: PoolSlots | None = None
        pool.tell_slots = self._tell_slots
        self._told_no_metric = False
        self.last_committed = 0
        """The number of the last save that is committed; 0: none by the flusher that runs."""
        self.newest_committed = (0, 0)
        """The epoch and the attempt of the last that is, by whichever flusher."""

    @property
    def helper_pid(self) -> int | None:
        return None if self._helper is None else self._helper.pid

    @property
    def dead(self) -> LaststepError | None:
        """Why the flusher is gone, if it is."""
        return self.saves.refusal

    def start(self) -> None:
        """Start the flusher, unless it has been: a save does, or whoever sees one coming."""
        with self._starting:
            if self._helper is None and not self._closing:
                self._start()

    def restart(self, within_s: float) -> None:
        """A new flusher in place of one that is over; nobody may hold slots. `StorageError` where
        the old one cannot be ended, and may still touch them, or its saves are not over in time."""
        assert self._helper is not None  # noqa: S101 (it has died)
        self._await_end_of_saves(within_s)
        if not self._helper.end(_END_S):
            raise StorageError(
                "cannot start a new flusher: the old one does not end",
                expected=f"its death within {_END_S:g} s",
                found=self._helper.how_it_ended(),
                remedy="a disk that hangs keeps it: look at `dmesg`; the next save tries again",
            )
        self._connection.close()
        self._pool.slots.reset(self._kept())
        with self._starting:
            # As if there had been none yet: where this start fails, a later save tries again.
            self._helper = self.saves.refusal = None
            self._start()

    def _await_end_of_saves(self, within_s: float) -> None:
        """Ended by now, or being ended by other threads: saves go on from what was committed
        last."""
        deadline = time.monotonic() + within_s
        self._receiver.join(within_s)
        for save in self.saves.all():
            left_s = max(deadline - time.monotonic(), 0.0)
            if not save.is_member and not save.handle.committed.over_within(left_s):
                raise _not_over(f"step {save.handle.step} is under way", within_s)
        if self._receiver.is_alive():
            raise _not_over("its death is still being looked into", within_s)

    def newest_point(self) -> Seen:
        """The newest epoch of the run now, and the last commit."""
        return self._job.newest_point()

    def past(self) -> Past:
        """How often earlier starts have failed."""
        return self._job.past()

    def continue_from(self, continues: Continue) -> None:
        """Saves from now on continue that checkpoint, under a new epoch."""
        with self._starting:
            self._continues = continues
            if self._helper is not None:
                self.send(continues)

    def _tell_slots(self, slots: int) -> None:
        """The flusher keeps what it can do without, and saves wait for: tell it how much it can."""
        with self._starting:
            self._slots = PoolSlots(slots=slots)
            if self._helper is not None:
                self.send(self._slots)

    def begin(self, save: SaveUnderWay, plan: SavePlan, parts: SealParts) -> None:
        """Enter a save; its chunks may follow. Raises if the flusher is gone, or cannot start."""
        if self._continues is None and not save.is_member:
            self.continue_from(Continue(seen=self.newest_point()))
        self.start()
        save.planned(plan, parts)
        self.saves.enter(save)

    def announce(self, number: int) -> None:
        """Show to others that a save is coming, before the flusher hears of it."""
        with self._announcing:
            descriptor = self._job.announce(number)
            if descriptor is not None and not self._has_witness:
                with contextlib.suppress(OSError):  # its death is noticed elsewhere
                    witness = Witness(name=self._job.witness_name)
                    self._connection.send(witness, descriptor=descriptor)
                    self._has_witness = True
        if self.saves.find(number) is None:
            # It failed meanwhile, with its flusher: nobody else would take the mark back.
            self._job.over(number)

    def send(self, message: ToFlusher) -> None:
        """Send; when the flusher is gone, its death is reported through the handles instead."""
        try:
            self._connection.send(message)
        except OSError:
            log.debug("a message found no flusher")

    def release(self, slots: list[int]) -> None:
        """Take back slots that nobody will write."""
        self._pool.slots.release(slots)

    def drop(self, number: int, error: LaststepError, *, begun: bool) -> None:
        """Give a save up."""
        save = self.saves.end(number)
        if save is None:
            return
        if begun:
            self.send(Drop(save=number, reason=str(error)))
        self._tell_failed(save, error)

    def note_captured(self, save: SaveUnderWay, timing: CaptureTiming) -> None:
        report = save.handle.report
        report.captured_s = timing.drained_s
        save.handle.captured.reach()
        self._bus.emit(
            Captured(
                step=save.handle.step,
                size_bytes=save.plan.tensor_bytes,
                seconds=timing.drained_s,
                blocked_s=timing.stall_s,
            )
        )

    def close(self) -> None:
        """No more saves: wait for the flusher to finish all that it has and to end."""
        with self._starting:
            was_closing, self._closing = self._closing, True
        if self._helper is not None:
            if not was_closing:  # else an interrupt came while this waited
                if self.drains_last and (last := self.drains.newest_save()) is not None:
                    self.drain_last(last)
                self.send(Bye())
            while not (ended := signals.wait(self._heard_all, _END_S)):
                if not self.drains.was_heard_within(_END_S):
                    break
            if not ended:
                # Everything is committed or has failed: it has nothing left that could be lost.
                log.warning("the flusher does not end: %s", self._helper.how_it_ended())
                self._helper.end(_END_S)
            self._receiver.join()
            self._helper.join(_END_S)
            self._connection.close()
            if self.ends_well and self.last_committed:
                self._job.ended_well()
        self._job.close()

    def drain_last(self, handle: SaveHandle) -> None:
        """Have that checkpoint, the last of a job, brought to all further tiers."""
        at = self.drains.owe_all(handle)
        if at is not None:
            self.send(DrainLast(at=at))

    def leave(self) -> None:
        """The program ends before the flusher, which is to go on with all that it has."""
        if self._helper is not None and not self._closing:
            self.send(Bye())

    def abandon(self) -> None:
        """In a forked child: let go of the connection without saying anything."""
        if self._helper is not None:
            self._connection.detach()

    def _start(self) -> None:
        ends: tuple[socket.socket, ...] = ()
        try:
            ends = ours, theirs = socket.socketpair()
            helper = self._launch(theirs)
        except (StorageError, OSError) as error:
            for end in ends:
                end.close()
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                "cannot start the flusher",
                found=str(error),
                remedy="free memory, or raise the limit on open files (`ulimit -n`)",
            ) from error
        self._connection = Connection(ours, peer=helper.pidfd)
        self._has_witness = False
        self.last_committed = 0
        self.up.clear()
        self._heard_all.clear()
        for message in (self._continues, self._slots):
            if message is not None:
                self.send(message)
        self._receiver = threading.Thread(
            target=self._receive, name="laststep-receive", daemon=True
        )
        self._helper = helper  # from here on there is one, for other threads too
        try:
            threads.start(self._receiver)
        except StorageError:
            self._helper = None
            self._connection.close()
            helper.end(_END_S)
            raise

    def _receive(self) -> None:
        why: str | None = "a message of it could not be handled"
        try:
            with threads.outlasting(log, "a message of the flusher could not be handled"):
                why = self._listen()
            # Nobody else listens: whoever waits must hear that nothing more will come.
            self._mourn(why)
        finally:
            self.drains.settled.set()
            self._heard_all.set()

    def _listen(self) -> str | None:
        """Until the flusher has hung up, or there is a reason to end it."""
        while True:
            try:
                message = self._connection.receive_in_trainer()
            except (OSError, ValueError) as error:
                log.warning("the flusher spoke nonsense: %s", error)
                return "it spoke nonsense"
            if message is None:
                return None
            self._handle(message)

    def _handle(self, message: ToTrainer) -> None:
        if isinstance(message, Drained | Draining | DrainFailed):
            self.drains.hear(message)
        else:
            self._hear(message)

    def _hear(self, message: ToTrainer) -> None:
        """What is said of saves, or of the flusher itself."""
        if isinstance(message, Ready):
            self.up.set()
        elif isinstance(message, Freed):
            self._pool.slots.release(message.slots)
        elif isinstance(message, Removed):
            self._bus.emit(Pruned(step=message.step, folder=message.folder))
        elif isinstance(message, NoMetric):
            if not self._told_no_metric:  # it comes after every commit until one has it
                self._told_no_metric = True
                self._bus.emit(MetricMissing(reason=message.reason))
        elif isinstance(message, WrittenBytes):
            save = self.saves.find(message.save)
            if save is not None:
                self._bus.emit(
                    Written(
                        step=save.handle.step,
                        done_bytes=message.done_bytes,
                        size_bytes=save.plan.tensor_bytes,
                    )
                )
        elif isinstance(message, Begun | Granted):
            save = self.saves.find(message.save)
            if save is not None:
                save.note(message)
        elif isinstance(message, Held):
            self._held(message)
        elif isinstance(message, Flushed):
            self._flushed(message)
        elif isinstance(message, Decided):
            self.decided(message)
        elif isinstance(message, Failed):
            self._fail(message.save, from_wire(message.kind, message.fields))

    def _held(self, message: Held) -> None:
        save = self.saves.find(message.save)
        if save is not None:
            seconds = save.handle.since_began_s()
            save.handle.report.tiers[message.tier] = seconds
            self._bus.emit(TierHolds(step=save.handle.step, tier=message.tier, seconds=seconds))

    def _flushed(self, message: Flushed) -> None:
        save = self.saves.find(message.save)
        if save is None:
            return
        with save.telling:
            report = save.handle.report
        report.durable_s, report.size_bytes = save.handle.since_began_s(), message.size_bytes
        written = message.written
        report.shared_bytes = written.shared_bytes
        report.written_bytes = written.size_bytes - written.shared_bytes
        report.coding = message.coding
        report.opened_s, report.written_s = message.opened_s, message.written_s
        save.written = written
        save.handle.durable.reach()
        self._bus.emit(
            Durable(
                step=save.handle.step,
                size_bytes=message.size_bytes,
                written_bytes=report.written_bytes,
                shared_bytes=report.shared_bytes,
                seconds=report.durable_s,
            )
        )

    def decided(self, message: Decided) -> None:
        """A save is committed, as its flusher says, or whoever has looked in its place."""
        save = self.saves.end(message.save)
        if save is None:
            return
        self._job.over(save.number)
        self.last_committed, self.newest_committed = save.number, message.at.point
        # Should this flusher die, the next one goes on from here.
        before = self._continues
        self._continues = Continue(
            after=message.at,
            seen=Seen(epoch=message.at.epoch, commit=message.at.point),
            resumed_from=None if before is None else before.resumed_from,
        )
        report = save.handle.report
        report.committed_s, report.folder = save.handle.since_began_s(), message.at.folder
        report.tiers[self._job.url] = report.committed_s
        self.drains.committed(message.at, save.handle)
        save.handle.committed.reach()
        save.note()
        self._bus.emit(
            Committed(
                step=save.handle.step,
                folder=report.folder,
                size_bytes=report.size_bytes,
                seconds=report.committed_s,
            )
        )
        save.handle.end()

    def _fail(self, number: int, error: LaststepError) -> None:
        save = self.saves.end(number)
        if save is not None:
            self._tell_failed(save, error)

    def _tell_failed(self, save: SaveUnderWay, error: LaststepError) -> None:
        self._job.over(save.number)
        save.handle.fail(error)
        save.note()
        self._bus.emit(SaveFailed(step=save.handle.step, reason=error.without_remedy()))
        save.handle.end()

    def _mourn(self, why: str | None) -> None:
        """The flusher is gone, or is ended for that reason: whatever it had not committed has
        failed. It MUST be dead before anybody hears so, or it might commit it after all."""
        if self._closing and not self.saves.to_end():
            return
        helper = self._helper
        assert helper is not None  # noqa: S101 (whose end this is)
        self.up.set()
        self._connection.hang_up()  # who sends to it waits for nobody
        is_dead = (why is None and helper.join(_LAST_WORDS_S)) or helper.end(_END_S)
        error = StorageError(
            "the flusher ended before its work was done",
            found=why or helper.how_it_ended(),
            remedy="the checkpoints committed so far are whole; the next save starts a new flusher",
        )
        unended = self.saves.refuse(error)
        self._pool.slots.lose_flusher(error)
        for save in unended:
            # What it has said after a message that could not be handled, nobody has heard.
            unheard = why is not None and save.at is not None and not save.decided_by_all
            if not save.may_be_committed and not unheard:
                self._fail(save.number, error)
            elif save.decided_by_all:
                save.lost = error
                save.note()
            else:
                self._find_out(save, error, is_dead=is_dead)

    def _find_out(self, save: SaveUnderWay, error: StorageError, *, is_dead: bool) -> None:
        """Look in the run what became of a save that its flusher may have committed before it could
        say so. Once that is dead, what stands there is final."""
        at = save.at
        assert at is not None  # noqa: S101 (its flusher said so before it was durable)
        doubt = None if is_dead else "it may still commit"
        try:
            if is_dead and self._job.has_committed(at.folder):
                seconds = save.handle.since_began_s()
                self.decided(Decided(save=save.number, at=at, seconds=seconds))
                return
        except Exception as second:  # noqa: BLE001 (nobody else would end the save)
            doubt = str(second) or repr(second)
        if doubt is not None:
            error = StorageError(
                f"it is not known whether step {save.handle.step} is committed",
                where=at.folder,
                found=f"{error.without_remedy()}; then {doubt}",
                remedy="`laststep ls` shows it if it is",
            )
        self._fail(save.number, error)


def _not_over(found: str, within_s: float) -> StorageError:
    return StorageError(
        "cannot start a new flusher: it is not known what became of the old one's saves",
        expected=f"their end within {within_s:g} s",
        found=found,
        remedy="a disk or a rank that hangs keeps them: look at `dmesg` and at the log of the "
        "other ranks; the next save tries again",
    )
