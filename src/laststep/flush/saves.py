"""One save of this process, from `save()` until its caller knows the outcome.

Only `Save` holds the state of a save: capturing, captured, durable, then committed or failed. The
capture hands its chunks to it, the client's receiving thread the flusher's messages, and in a job
of several ranks the commit thread works with it. Each transition happens once and wakes its
waiters. `SaveHandle`, which `save()` returns, and its stages are views of a `Save`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from laststep.checks import seconds
from laststep.errors import AlreadyExistsError, LaststepError, ends_tracebacks, from_wire
from laststep.events import Captured, Committed, Durable, SaveFailed, TierHolds, Written, human
from laststep.flush import protocol
from laststep.format.manifest import WrittenIndexes
from laststep.process import signals, system, threads
from laststep.process.threads import OnlyOne
from laststep.settings import MAX_UNCOMMITTED, OnError
from laststep.tiers.replicating import TierStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from laststep.capture.mover import CaptureTiming, Job
    from laststep.catalog.attempt import AttemptName
    from laststep.flush.client import Client
    from laststep.memory.pool import Filled
    from laststep.plan.files import SavePlan
    from laststep.plan.frequency import IntervalEstimate


log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Interval at which a thread that waits for an answer checks whether the save has ended."""

Seal = Callable[[int], protocol.CaptureDone]
"""Serialises everything but tensors of the save with this number."""


class SaveState(IntEnum):
    """The last three are final."""

    CAPTURING = 0
    CAPTURED = 1
    DURABLE = 2
    COMMITTED = 3
    FAILED = 4
    SKIPPED = 5


@dataclass(frozen=True, eq=False, repr=False)
class Stage(OnlyOne):
    """A state that a save reaches, to wait for."""

    _save: Save
    _state: SaveState

    def done(self) -> bool:
        """Return True if the stage was reached."""
        return self._save.reached >= self._state

    def over(self) -> bool:
        """Return True if the stage was reached or never will be."""
        return self._save.events[self._state].is_set()

    @ends_tracebacks
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the stage is reached. Return False on timeout or if the save was skipped;
        raise the save's error if it failed."""
        if self.over_within(timeout_s) and not self.done() and self._save.error is not None:
            self._save.seen = True
            raise self._save.error
        return self.done()

    def over_within(self, timeout_s: float | None) -> bool:
        """Wait until the stage was reached or never will be; return False on timeout."""
        return self._save.wait_for(self._state, timeout_s)


@dataclass(slots=True, kw_only=True)
class SaveReport:
    """Size and cost of a save. Fields are filled in as it proceeds; None means not reached yet."""

    step: int
    size_bytes: int = 0
    """Size of the state: its tensors and, once captured, its plain values."""
    written_bytes: int | None = None
    """Size of the files that were written for it; known once durable."""
    shared_bytes: int | None = None
    """Size of the files of earlier checkpoints that it shares instead of writing them again."""
    unchanged_bytes: int = 0
    """Bytes that were not copied off their device, because the last checkpoint has them."""
    coding: tuple[protocol.CodingReport, ...] = ()
    """With compression: the encodings picked for each file and the result; known once durable."""
    tensors: int = 0
    capture: str = ""
    """Bytes captured in each way, e.g. `device staged 7.26 GB, host staged 1.28 kB`: staged bytes
    are first copied on their own device inside save(), direct bytes straight to the pool."""
    stall_s: float = 0.0
    """Time that the training thread spent inside save()."""
    waited_s: float = 0.0
    """Part of `stall_s` spent waiting for an earlier save or for room in the pool."""
    device_copy_s: float = 0.0
    """Time that the training stream spent copying on the device."""
    fence_s: float = 0.0
    """Time by which a lazy capture delayed the optimizer."""
    captured_s: float | None = None
    """This and the times below are measured from the call of save()."""
    durable_s: float | None = None
    committed_s: float | None = None
    tiers: dict[str, float] = field(default_factory=dict)
    """Tiers that hold it, by name, each with the seconds from the call of save()."""
    folder: str | None = None
    skipped: str | None = None
    """The reason why nothing was saved, with on_busy='skip' or `LASTSTEP_DISABLED`."""
    estimate: IntervalEstimate | None = None
    """The reason why `step()` saved now, with every='auto', on rank 0; None for the first save,
    which serves to measure the costs."""

    @property
    def lost_s(self) -> float:
        """Seconds of training lost: the stall, and the device time of the capture."""
        return self.stall_s + self.device_copy_s + self.fence_s


class SaveHandle(OnlyOne, Future["SaveReport"]):
    """A save in progress. `captured`, `durable` and `committed` are reached in that order.

    It is a `concurrent.futures.Future` of the report. Methods that a user calls on the training
    thread take locks of that class only inside `defer_signals`: a lock left locked by an interrupt
    would block the flusher's thread.
    """

    def __init__(self, save: Save) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # a save cannot be cancelled
        self._save = save
        self.step = save.step
        self.captured = Stage(save, SaveState.CAPTURED)
        self.durable = Stage(save, SaveState.DURABLE)
        self.committed = Stage(save, SaveState.COMMITTED)

    @property
    def report(self) -> SaveReport:
        """The report with everything known of the save so far; reads the timers on the device."""
        report, job = self._save.report, self._save.job
        if job is None:
            return report
        job.read_fence_timers()
        timing = job.timing
        report.stall_s, report.waited_s = timing.stall_s, timing.waited_s
        report.device_copy_s, report.fence_s = timing.device_copy_s, timing.fence_s
        report.unchanged_bytes = timing.unchanged_bytes
        if not report.capture:
            sums: dict[str, int] = {}
            for piece, way in zip(job.plan.pieces, job.layout.ways, strict=True):
                key = f"{'host' if piece.device == 'cpu' else 'device'} {way.value}"
                sums[key] = sums.get(key, 0) + piece.size_bytes
            report.capture = ", ".join(map("{} {}".format, sums, map(human, sums.values())))
        return report

    @property
    def error(self) -> LaststepError | None:
        return self._save.error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save is committed; see `Stage.wait`."""
        return self.committed.wait(timeout_s)

    @ends_tracebacks
    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the save is over and return its report. Raise the save's error if it failed,
        `TimeoutError` on timeout."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.report

    def exception(self, timeout: float | None = None) -> LaststepError | None:
        """Wait until the save is over and return its error, or None; no later call raises that
        error. Raise `TimeoutError` on timeout."""
        if not self._save.wait_for(SaveState.COMMITTED, timeout):
            raise TimeoutError(f"the save of step {self.step} is not over after {timeout} s")
        self._save.seen = True
        return self._save.error

    def done(self) -> bool:
        """Return True if the save is over: committed, failed or skipped."""
        return self._save.over

    def running(self) -> bool:
        return not self._save.over

    def cancel(self) -> Literal[False]:
        return False

    cancelled = cancel

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Call `fn(handle)` when the save is over, on the thread that ends it, or now. It must
        return quickly and not call a Checkpointer; its exceptions are logged."""
        if not self._save.over:
            system.check_process("add a callback", self._save.pid)

        def call(_: object) -> None:
            what = "a callback for the end of the save of step %d failed"
            with threads.outlasting(log, what, self.step):
                fn(self)

        with signals.defer_signals():
            super().add_done_callback(call)

    def resolve(self) -> None:
        """Complete the future and run its callbacks, once the save is over and reported."""
        if self._save.error is None:
            self.set_result(self._save.report)
        else:
            self.set_exception(self._save.error)

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} {self._save.state.name.lower()}>"


class Save:
    """A save of this process. Any thread may end it; the first to know the outcome does."""

    plan: SavePlan
    """Its files; set when its capture starts."""

    def __init__(
        self, client: Client, step: int, *, overwrite: bool = False, role: protocol.Role = "alone"
    ) -> None:
        self._client = client
        self.pid = os.getpid()
        self.began_s = time.perf_counter()
        self.step, self._overwrite, self.role = step, overwrite, role
        self.number = 0
        """Number that identifies it to the flusher; assigned by `Saves`."""
        self.state = self.reached = SaveState.CAPTURING
        """`reached` is the last state before it failed."""
        self.events = {
            SaveState.CAPTURED: threading.Event(),
            SaveState.DURABLE: threading.Event(),
            SaveState.COMMITTED: threading.Event(),
        }
        """Set when the state was reached or never will be."""
        self.error: LaststepError | None = None
        self.seen = False
        """True if a caller has received the error."""
        self.report = SaveReport(step=step)
        self.job: Job | None = None
        """Its capture, once `save()` has returned."""
        self.at: AttemptName | None = None
        """The attempt of this rank's flusher; None on members, which join that of rank 0."""
        self.written = WrittenIndexes()
        """The indexes that this rank has made durable."""
        self.lost: LaststepError | None = None
        """The error that ended the flusher after everything was durable. Other ranks may still
        commit the save: the commit thread reports the outcome."""
        self.seal: Seal | None = None
        """Set when its capture starts, and cleared early: it keeps the state's trees alive."""
        self._news = threading.Event()
        self._granted: frozenset[tuple[int, int]] = frozenset()
        self._answered = threading.Event()
        self._begun = False
        """True once it was announced to the flusher."""
        self._lock = threading.Lock()
        """Guards `state` and `unreported`."""
        self._announcing = threading.Lock()
        self._telling = threading.Lock()
        """Held while it is reported as captured, which nothing may overtake."""
        self.unreported: SaveHandle | None = SaveHandle(self)
        """The handle, kept even if its caller drops it; None once the outcome is being reported."""
        self._handle = weakref.ref(self.unreported)

    # -- states -----------------------------------------------------------------------------------

    def _enter(self, state: SaveState) -> bool:
        """Advance to a later state and wake its waiters; return False if the save is over."""
        with self._lock:
            if self.state >= SaveState.COMMITTED:
                return False
            if state <= self.state:
                raise RuntimeError(f"a save cannot go from {self.state.name} to {state.name}")
            self.state = state
            if state <= SaveState.COMMITTED:
                self.reached = state
        for stage, event in self.events.items():
            if stage <= state:
                event.set()
        self._news.set()
        return True

    def _claim_end(self) -> SaveHandle | None:
        """Return the handle to the first caller only, which then reports how the save ended."""
        with self._lock:
            handle, self.unreported = self.unreported, None
            return handle

    def decided(self, at: AttemptName) -> None:
        """End the save as committed: the flusher says so, or the commit was found in the run."""
        handle = self._claim_end()
        if handle is None:
            return
        report = self.report
        report.committed_s, report.folder = time.perf_counter() - self.began_s, at.folder
        self._client.save_ends(self, at)  # before waking waiters, which ask for the last commit
        self._enter(SaveState.COMMITTED)
        self._client.bus.emit(
            Committed(
                step=self.step,
                folder=report.folder,
                size_bytes=report.size_bytes,
                seconds=report.committed_s,
            )
        )
        handle.resolve()

    def fail(self, error: LaststepError) -> None:
        """End the save as failed; called when the flusher reports it or is dead."""
        self._fail(self._claim_end(), error)

    def failed(self, error: LaststepError) -> None:
        """End the save as failed on this side, and have the flusher give it up."""
        with self._announcing:
            handle = self._claim_end()
        if handle is not None and self._begun:
            self._client.send(protocol.Decide(save=self.number, reason=str(error), by_all=False))
        self._fail(handle, error)

    def _fail(self, handle: SaveHandle | None, error: LaststepError) -> None:
        if handle is not None:
            self.seal = None
            self._client.save_ends(self, None)
            self.error = error.of_save(self.step)
            self._enter(SaveState.FAILED)
            self._client.bus.emit(SaveFailed(step=self.step, reason=error.without_remedy()))
            handle.resolve()

    def skip(self, reason: str) -> None:
        """End the save without saving anything and without an error."""
        handle = self._claim_end()
        if handle is not None:
            self.report.skipped = reason
            self._enter(SaveState.SKIPPED)
            handle.resolve()

    # -- queries ----------------------------------------------------------------------------------

    @property
    def handle(self) -> SaveHandle:
        """The handle that `save()` returned, or a new one if that was garbage-collected."""
        handle = self._handle()
        if handle is None:
            handle = SaveHandle(self)
            self._handle = weakref.ref(handle)
            handle.resolve()
        return handle

    @property
    def over(self) -> bool:
        return self.events[SaveState.COMMITTED].is_set()

    def wait_for(self, state: SaveState, timeout_s: float | None = None) -> bool:
        """Wait until a state is reached or never will be; False on timeout. Raises in a fork."""
        if not self.events[state].is_set():
            system.check_process("wait for a save", self.pid)
        return signals.wait(self.events[state], seconds(timeout_s))

    @property
    def since(self) -> int:
        """Number of the last save committed by the running flusher; 0 if none."""
        return self._client.last_committed

    # -- messages from the flusher ----------------------------------------------------------------

    def rest(self, timeout_s: float) -> None:
        """Wait for a message of the flusher or a change of state; for one thread only."""
        self._news.wait(timeout_s)
        self._news.clear()

    def hear(self, message: protocol.OfSave | TierStatus) -> None:
        if isinstance(message, protocol.Begun):
            self.at = message.at
            self._news.set()
        elif isinstance(message, protocol.Unchanged):
            self._granted = frozenset((file, start) for file, start, _ in message.chunks)
            self._answered.set()
        elif isinstance(message, TierStatus):
            held_s = self.report.tiers[message.tier] = time.perf_counter() - self.began_s
            self._client.bus.emit(TierHolds(step=self.step, tier=message.tier, seconds=held_s))
        elif isinstance(message, protocol.News):
            size_bytes, done = self.plan.tensor_bytes, message.done_bytes
            self._client.bus.emit(Written(step=self.step, done_bytes=done, size_bytes=size_bytes))
        elif isinstance(message, protocol.Flushed):
            with self._telling:
                pass  # wait until "captured" has been reported
            report, self.written = self.report, message.written
            report.durable_s = time.perf_counter() - self.began_s
            report.shared_bytes = message.written.shared_bytes
            report.written_bytes = message.written.size_bytes - message.written.shared_bytes
            report.coding = message.coding
            if self._enter(SaveState.DURABLE):
                self._client.bus.emit(
                    Durable(
                        step=self.step,
                        size_bytes=report.size_bytes,
                        written_bytes=report.written_bytes,
                        shared_bytes=report.shared_bytes,
                        seconds=report.durable_s,
                    )
                )
        elif isinstance(message, protocol.Ended):
            if message.at is not None:
                self.decided(message.at)
            else:
                self.fail(from_wire(message.kind, message.fields))

    def lose_flusher(self, error: LaststepError) -> None:
        """Record the flusher's death; the ranks of the job still decide about the save."""
        self.lost = error
        self._news.set()

    # -- calls from the capture -------------------------------------------------------------------

    def begin(self) -> None:
        """Announce the save to the flusher, once, before anything of it is handed over."""
        with self._announcing:  # several threads copy host state: no chunk may be sent before this
            if self._begun or self.unreported is None:
                return
            begin = protocol.Begin(
                save=self.number,
                step=self.step,
                overwrite=self._overwrite,
                files=tuple(map(attrgetter("layout"), self.plan.files)),
                role=self.role,
            )
            # One of several ranks cannot finish a save alone, so it marks nothing as pending.
            (self._client.announce if self.role == "alone" else self._client.send)(begin)
            self._begun = True

    def chunks(self, filled: list[Filled]) -> None:
        self.begin()
        if self.unreported is None:
            self._client.release([chunk.slot for chunk in filled])
        else:
            self._client.send(protocol.Chunks(save=self.number, filled=filled))

    def unchanged(
        self, of: int, chunks: Sequence[tuple[int, int, int]]
    ) -> frozenset[tuple[int, int]]:
        """Ask the flusher which of these unchanged chunks need not be handed over."""
        self.begin()
        if self.unreported is None:
            return frozenset()
        self._client.send(protocol.Unchanged(save=self.number, of=of, chunks=tuple(chunks)))
        while not (self._answered.wait(_LOOK_S) or self.over or self.lost):
            pass
        return self._granted

    def captured(self, timing: CaptureTiming) -> None:
        """Serialise the plain values once all chunks are handed over, and report the stage."""
        seal, self.seal = self.seal, None
        if seal is None or self.unreported is None:
            return
        try:
            done = seal(self.number)
        except LaststepError as error:
            self.failed(error)
            return
        self.begin()
        # Sent first: once "captured" is reported, the trainer's death must lose nothing. The lock
        # keeps the flusher's answer from being reported before that.
        with self._telling:
            self._client.send(done)
            self.report.captured_s = timing.drained_s
            self.report.size_bytes += sum(map(len, done.values.values()))
            if self._enter(SaveState.CAPTURED):
                self._client.bus.emit(
                    Captured(
                        step=self.step,
                        size_bytes=self.plan.tensor_bytes,
                        seconds=timing.drained_s,
                        blocked_s=timing.stall_s,
                    )
                )

    def call_off(self, reason: str) -> None:
        """Ask the flusher to give the save up, unless it is too late. Its error is not raised."""
        self.seen = True
        self.begin()  # the flusher ignores messages about a save that it does not know
        self._client.send(protocol.Decide(save=self.number, reason=reason, by_all=False))


class Saves:
    """A Checkpointer's saves in progress or not reported yet, and the steps of its lineage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[int, Save] = {}
        self._failed: list[Save] = []
        self._count = 0
        self._committed: set[int] = set()
        self._ahead: set[int] = set()
        """Steps after the restored one: saving them again replaces them."""
        self.refusal: LaststepError | None = None
        """The reason why no save can start, until it is cleared."""
        self.on_error = OnError.RAISE

    def enter(self, save: Save) -> None:
        """Add a save and give it a number; raise `refusal` if there is one."""
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            self._count += 1
            save.number = self._count
            self._saves[save.number] = save

    def all(self) -> list[Save]:
        """Return the saves in the order in which they began; an interrupt handler may call it."""
        return list(self._saves.values())

    def under_way(self) -> list[Save]:
        return list(filterfalse(attrgetter("over"), self.all()))

    def of_step(self, step: int) -> Save | None:
        """Return the last save of that step, unless it has failed."""
        found = [save for save in self.all() if save.step == step and save.error is None]
        return found[-1] if found else None

    def find(self, number: int) -> Save | None:
        """Return the save of that number, unless it has been ended."""
        save = self._saves.get(number)
        return None if save is None or save.unreported is None else save

    def refuse(self, error: LaststepError) -> list[Save]:
        """Refuse new saves and return those in progress. Atomic: a save that started in between
        would wait forever."""
        with self._lock:
            self.refusal = error
            return self.under_way()

    def forget(self, save: Save) -> None:
        self._saves.pop(save.number, None)

    def call_off_queued(self, step: int) -> None:
        """Cancel all saves in progress but that of `step` and the first, which is being written."""
        for save in [save for save in self.under_way() if save.step != step][1:]:
            save.call_off("it was cancelled so that the last save of the job finishes in time")

    # -- the next save ----------------------------------------------------------------------------

    def obstacle(self, *, short_of_room: bool) -> str | None:
        """Return the reason why the next save cannot begin at once, or None."""
        for save in self.all():
            if save.job is not None and not save.job.over.is_set():
                return "an earlier save is still being captured"
        uncommitted = self.under_way()
        if len(uncommitted) >= MAX_UNCOMMITTED:
            return f"{len(uncommitted)} earlier saves are not committed yet"
        if uncommitted and short_of_room:
            return "an earlier save still holds the host memory that this one needs"
        return None

    def wait_for_turn(self) -> float:
        """Wait until one more save may begin; return the seconds. Does not report failures."""
        began, uncommitted = time.perf_counter(), self.under_way()
        for save in uncommitted[: max(len(uncommitted) - MAX_UNCOMMITTED + 1, 0)]:
            save.wait_for(SaveState.COMMITTED)
        for save in self.all():
            if save.job is not None:
                signals.wait(save.job.over)
        return time.perf_counter() - began

    def check_new(self, step: int, where: str, *, overwrite: bool) -> bool:
        """Return True if a save of that step may replace one; raise if it would and may not."""
        taken = self._committed.union(map(attrgetter("step"), self.all()))
        if step in taken and not overwrite:
            raise AlreadyExistsError(
                f"step {step} has already been saved",
                where=where,
                remedy="save with overwrite=True to replace it, or restore an earlier step",
            )
        return overwrite or step in self._ahead - taken

    # -- the end of saves -------------------------------------------------------------------------

    def restored(self, step: int, steps: Iterable[int] = ()) -> None:
        """Continue from `step` of a lineage that has `steps`."""
        every = set(steps)
        self._ahead = set(filter(step.__lt__, every))
        self._committed = every - self._ahead

    def newest_committed(self) -> int | None:
        """Return the last step of the lineage, with the saves that `take_over` has processed."""
        return max(self._committed, default=None)

    def take_over(self) -> None:
        """Remove the saves that are over; keep the failed ones until their errors are reported."""
        for save in self.all():
            if save.over:
                self.forget(save)
                if save.error is None:
                    self._committed.add(save.step)
                else:
                    self._failed.append(save)

    def untold(self) -> list[LaststepError]:
        """Return, once, the errors of removed saves that no caller has received."""
        failed, self._failed = self._failed, []
        return [save.error for save in failed if save.error is not None and not save.seen]

    def raise_failed(self, unsaved: int | None = None) -> bool:
        """Raise the error of the first removed save that failed, with a note about the others; or
        only log them and return False, if the user has asked for that. `unsaved` is the step that
        is therefore not saved, if there is one. Return True if none has failed."""
        failed = self.untold() if self._failed else []
        if self.on_error is OnError.WARN:
            for error in failed:
                what = "training continues without a checkpoint of step %s; %s"
                log.warning(what, error.step, error.remedy or "the next save tries again")
            return not failed
        for error in failed[1:]:
            failed[0].add_note(f"step {error.step} failed too: {error.without_remedy()}")
        if failed and unsaved is not None:
            failed[0].add_note(f"step {unsaved} is not saved either")
        if failed:
            raise failed[0]
        return True
