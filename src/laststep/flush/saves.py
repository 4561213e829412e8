"""The saves that are under way: one record for each, and the one place where all of them are.

`save()` makes a record, which goes with the save to its end: the capture hands its chunks to it,
the client's receiving thread notes on it what the flusher says, the commit thread works with it.
Any thread may hand chunks over; whichever has some first announces the save. All are in `Saves`
until whoever called `save()` was told how they ended; queues of single threads only point to them.

`SaveHandle` is what `save()` returns. A stage is reached, or the save has failed and every stage
that was not reached carries the error.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn

from laststep.checks import seconds
from laststep.errors import AbortedError, LaststepError, StorageError
from laststep.flush.protocol import Begin, Begun, Chunks, Drop, Granted, Role, Seal, Unchanged
from laststep.format.manifest import ItemRecord, WrittenIndexes
from laststep.process import signals, system, threads
from laststep.process.threads import OnlyOne

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.capture.job import CaptureTiming, Job
    from laststep.catalog.lineage import AttemptName
    from laststep.flush.client import Client
    from laststep.flush.protocol import CodingReport
    from laststep.memory.filled import Filled
    from laststep.plan.files import SavePlan
    from laststep.plan.frequency import Reckoning


log = logging.getLogger(__name__)


class Stage(OnlyOne):
    """A point that a save reaches."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._event = threading.Event()
        self._skipped = False
        self.error: LaststepError | None = None
        self.seen = False
        """Whether somebody was told of the error."""

    def done(self) -> bool:
        """Whether it was reached; False while it is under way and when the save failed."""
        return self._event.is_set() and self.error is None and not self._skipped

    def over(self) -> bool:
        """Whether it was reached or never will be."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is reached; False when the time is up or the save was skipped. Raises what
        made the save fail."""
        if not self.over_within(timeout_s) or self._skipped:
            return False
        if self.error is not None:
            self.seen = True
            raise self.error
        return True

    def over_within(self, timeout_s: float | None) -> bool:
        """Wait until it was reached or never will be; False when the time is up."""
        self.check_process("wait for a save")
        return signals.wait(self._event, seconds(timeout_s))

    def check_process(self, what: str) -> None:
        """`UsageError` in a forked process, unless it was over by then: nobody tells that
        process."""
        if not self._event.is_set():
            system.check_process(what, self._pid)

    def skip(self) -> None:
        """It will not be reached, and that is no error."""
        self._skipped = True
        self._event.set()

    def reach(self) -> None:
        self._event.set()

    def fail(self, error: LaststepError) -> None:
        if not self._event.is_set():
            self.error = error
            self._event.set()


@dataclass(slots=True, kw_only=True)
class SaveReport:
    """What a save moved and cost; fields fill up as it goes, None means not reached yet."""

    step: int
    size_bytes: int = 0
    """Of the state: its tensors and, once durable, its plain values."""
    written_bytes: int | None = None
    """Of the files that were written for it; known once durable."""
    shared_bytes: int | None = None
    """Of the files of earlier checkpoints that it shares instead of writing them again."""
    unchanged_bytes: int = 0
    """What did not leave its device, because the last checkpoint has it."""
    coding: tuple[CodingReport, ...] = ()
    """With compression or `derived`: of each file what was picked, why, and what came of it; known
    once durable."""
    tensors: int = 0
    capture: str = ""
    """How bytes were captured, e.g. `device staged 7.26 GB, host staged 1.28 kB`: staged is copied
    aside on its own device in save(), direct is copied straight to the pool."""
    stall_s: float = 0.0
    """The training thread was inside save() for so long."""
    waited_s: float = 0.0
    """Of that, waiting for an earlier save or for room in the pool: back-pressure."""
    device_copy_s: float = 0.0
    """The training stream copied on the device for so long."""
    fence_s: float = 0.0
    """The optimizer was held back for so long by a lazy capture."""
    captured_s: float | None = None
    """All times from here on count from the call of save()."""
    opened_s: float | None = None
    """In the flusher: files made, and all bytes handed to the disk, since it heard of the save."""
    written_s: float | None = None
    durable_s: float | None = None
    committed_s: float | None = None
    tiers: dict[str, float] = field(default_factory=dict)
    """Which tiers hold it, by their names, and since when: seconds from the call of save()."""
    folder: str | None = None
    skipped: str | None = None
    """Why nothing was saved, with on_busy='skip'."""
    reckoning: Reckoning | None = None
    """Why `step()` saved now, with every='auto', on the first rank; None for the first save, by
    which everything is measured."""

    @property
    def lost_s(self) -> float:
        """Seconds of training lost: the stall, and what the device did for the capture."""
        return self.stall_s + self.device_copy_s + self.fence_s


class SaveHandle(OnlyOne, Future["SaveReport"]):
    """A save on its way. `captured`, `durable` and `committed` are reached in that order.

    It is a `concurrent.futures.Future` of the report, so that `concurrent.futures.wait` and
    `asyncio.wrap_future` take it. What a user calls on the training thread takes no lock of that
    class outside of `held`: one that an interrupt leaves locked would block the flusher's thread.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # nobody can cancel what the flusher has heard of
        self.step = step
        self.captured = Stage()
        self.durable = Stage()
        self.committed = Stage()
        self._report = SaveReport(step=step)
        self._refresh: Callable[[SaveReport], None] | None = None
        self._began_s = time.perf_counter()
        self.error: LaststepError | None = None

    @property
    def report(self) -> SaveReport:
        """What is known of the save now."""
        if self._refresh is not None:
            self._refresh(self._report)
        return self._report

    @property
    def seen(self) -> bool:
        """Whether somebody was told that this save failed."""
        return any(stage.seen for stage in (self.captured, self.durable, self.committed))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save is committed; False when the time is up, or the save was skipped.
        Raises what failed."""
        return self.committed.wait(timeout_s)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the save is over, and return its report; `skipped` there says why nothing was
        saved. Raises what failed, and `TimeoutError` when the time is up."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.report

    def exception(self, timeout: float | None = None) -> LaststepError | None:
        """Wait until the save is over, and return what made it fail, if anything did: no later call
        raises that. `TimeoutError` when the time is up."""
        if not self.committed.over_within(timeout):
            raise TimeoutError(f"the save of step {self.step} is not over after {timeout} s")
        self.committed.seen = True
        return self.error

    def done(self) -> bool:
        """Whether the save is over: committed, failed or skipped."""
        return self.committed.over()

    def running(self) -> bool:
        """Whether the save is under way."""
        return not self.committed.over()

    def cancel(self) -> Literal[False]:
        """A save cannot be called back."""
        return False

    def cancelled(self) -> Literal[False]:
        """A save that was skipped is no cancelled one: it has a result, which says so."""
        return False

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Call `fn(handle)` when the save is over: on the thread that ends it, or now if it is. The
        function must return quickly, and call no Checkpointer; one that raises is logged."""
        self.committed.check_process("add a callback")
        with signals.held():
            super().add_done_callback(functools.partial(_call, fn))

    def reckoned(self, reckoning: Reckoning) -> None:
        """It was made because that was reckoned."""
        self._report.reckoning = reckoning

    def since_began_s(self) -> float:
        return time.perf_counter() - self._began_s

    def fail(self, error: LaststepError) -> None:
        """Every stage that was not reached carries the error, which names the step."""
        self.error = error.of_save(self.step)
        for stage in (self.captured, self.durable, self.committed):
            stage.fail(self.error)

    def skip(self, reason: str) -> None:
        """Nothing is saved, and that is no error."""
        self._report.skipped = reason
        for stage in (self.captured, self.durable, self.committed):
            stage.skip()
        self.end()

    def end(self) -> None:
        """The save is over and has been told: whoever asked for it is called. MUST come once."""
        if self.error is None:
            self.set_result(self._report)
        else:
            self.set_exception(self.error)

    def refresh_with(self, refresh: Callable[[SaveReport], None]) -> None:
        """Have figures that come late (timers on the device) read when the report is asked for."""
        self._refresh = refresh

    def __repr__(self) -> str:
        state = "failed" if self.error else "skipped" if self._report.skipped else "under way"
        for name in ("captured", "durable", "committed"):
            if getattr(self, name).done() and not self._report.skipped:
                state = name
        return f"<SaveHandle step={self.step} {state}>"


def _call(function: Callable[[SaveHandle], object], handle: SaveHandle) -> None:
    what = "a callback for the end of the save of step %d failed"
    with threads.outlasting(log, what, handle.step):
        function(handle)


_LOOK_S = 0.2
"""How often one who waits for an answer looks whether there will be none."""

SealedParts = tuple[dict[str, bytes], tuple[ItemRecord, ...], bytes, bytes, bytes]
SealParts = Callable[[], SealedParts]


class SaveUnderWay:
    """A save of this process, from `save()` on; seals itself when all of its chunks are there."""

    plan: SavePlan
    """Which files it has; known from `planned` on."""

    def __init__(
        self, client: Client, step: int, *, overwrite: bool = False, role: Role = "alone"
    ) -> None:
        self._client = client
        self.handle = SaveHandle(step)
        self._overwrite = overwrite
        self._role = role
        self.number = 0
        """By which the flusher knows it; given by `Saves`."""
        self.ended = False
        """Whether somebody tells, or has told, how it ended; `Saves` sees to it that one does."""
        self.job: Job | None = None
        """Its capture, once `save()` has returned."""
        self.at: AttemptName | None = None
        """Where the flusher has begun it, unless this rank is told by the first one."""
        self.written = WrittenIndexes()
        """What this rank has made durable of it."""
        self.lost: LaststepError | None = None
        """Why the flusher is gone that had made all of it durable: others may still commit it, so
        whoever takes part in that finds out and reports."""
        self._news = threading.Event()
        self._granted: tuple[tuple[int, int], ...] = ()
        self._answered = threading.Event()
        self._parts: SealParts = _spent
        self._begun = False
        self._dropped = False
        self._beginning = threading.Lock()
        self.telling = threading.Lock()

    def planned(self, plan: SavePlan, parts: SealParts) -> None:
        """It is planned; `parts` gives what is sealed with it."""
        self.plan, self._parts = plan, parts

    @property
    def since(self) -> int:
        """The number of the last save that is committed; 0: none by the flusher that runs."""
        return self._client.last_committed

    @property
    def over(self) -> bool:
        """Whether it is committed or never will be."""
        return self.handle.committed.over()

    @property
    def capturing(self) -> bool:
        """Whether its capture is not over."""
        return self.job is not None and not self.job.is_over()

    @property
    def is_member(self) -> bool:
        """Whether the first rank of its job says where it is written."""
        return self._role == "member"

    @property
    def may_be_committed(self) -> bool:
        """Whether all of it is durable that this rank has to write."""
        return self.handle.durable.done()

    @property
    def decided_by_all(self) -> bool:
        """Whether the ranks of a job decide about it."""
        return self._role != "alone"

    def rest(self, timeout_s: float) -> None:
        """Wait for news of the flusher; for one thread, which then looks what they are."""
        self._news.wait(timeout_s)
        self._news.clear()

    def note(self, message: Begun | Granted | None = None) -> None:
        """The flusher has said so; or, where that is nothing more, the save is over for it."""
        if isinstance(message, Granted):
            self._granted = message.chunks
            self._answered.set()
            return
        if message is not None:
            self.at = message.at
        self._news.set()

    def begin(self) -> None:
        """Announce the save to the flusher, once; by whichever thread has something to hand over
        first, which is the capture thread unless host state is copied at once."""
        with self._beginning:  # several threads copy host state: no chunk may overtake this
            if self._begun or self._dropped:
                return
            if self._role == "alone":  # of several ranks no one can finish a save by itself
                self._client.announce(self.number)
            self._client.send(
                Begin(
                    save=self.number,
                    step=self.handle.step,
                    overwrite=self._overwrite,
                    files=tuple(file.layout for file in self.plan.files),
                    derived=self.plan.derived,
                    is_declared=self.plan.is_declared,
                    role=self._role,
                )
            )
            self._begun = True

    def chunks(self, filled: list[Filled]) -> None:
        self.begin()
        if self._dropped:
            self._client.release([chunk.slot for chunk in filled])
            return
        self._client.send(Chunks(save=self.number, filled=filled))

    def unchanged(
        self, of: int, chunks: Sequence[tuple[int, int, int]]
    ) -> frozenset[tuple[int, int]]:
        """Of chunks that hold what they held in an earlier save, those that need not be handed
        over. Waits for the flusher's answer; called by the capture thread."""
        self.begin()
        if self._dropped:
            return frozenset()
        self._client.send(Unchanged(save=self.number, of=of, chunks=tuple(chunks)))
        while not (self._answered.wait(_LOOK_S) or self.over or self.lost):
            pass
        return frozenset(self._granted)

    def captured(self, timing: CaptureTiming) -> None:
        """All chunks are handed over: serialise the objects, seal, and tell."""
        if self._dropped:
            return
        try:
            values, items, metrics, metadata, receipt = self._parts()
        except LaststepError as error:
            self.failed(error)
            return
        except Exception as error:  # such as a device error that a metric's value brings to light
            log.exception("the objects of step %d cannot be serialised", self.handle.step)
            self.failed(StorageError("a capture failed", found=repr(error)))
            return
        self.begin()
        seal = Seal(
            save=self.number,
            values=values,
            items=items,
            metrics=metrics,
            metadata=metadata,
            receipt=receipt,
        )
        # Sealed first: once somebody is told "captured", the death of the trainer loses nothing.
        # The lock keeps the flusher's answer from overtaking that.
        with self.telling:
            self._client.send(seal)
            self._client.note_captured(self, timing)
        self._parts = _spent

    def call_off(self, reason: str) -> None:
        """Have the flusher give it up, unless it is too late, and raise nothing then; the flusher
        says how it ended."""
        self.handle.committed.seen = True
        self.begin()  # the flusher ignores what is said of a save that it does not know
        self._client.send(Drop(save=self.number, reason=reason))

    def failed(self, error: LaststepError) -> None:
        with self._beginning:
            self._dropped = True
        self._parts = _spent
        self._client.drop(self.number, error, begun=self._begun)


def _spent() -> NoReturn:
    """In place of what a save would seal, once it is over: that held the state's trees."""
    raise AbortedError("the save is over")


class Saves:
    """All saves of one Checkpointer that are under way, or whose end their caller was not told.

    The training thread enters them and takes out those that are over. Whoever hears first how one
    ended ends it, on any thread; nobody does so twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[int, SaveUnderWay] = {}
        self._failed: list[SaveHandle] = []
        self._count = 0
        self.refusal: LaststepError | None = None
        """Why no save can be entered, until that is taken back."""

    def enter(self, save: SaveUnderWay) -> None:
        """One more, under a number of its own; raises why there can be none."""
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            self._count += 1
            save.number = self._count
            self._saves[save.number] = save

    def all(self) -> list[SaveUnderWay]:
        """In the order in which they began. Takes no lock: an interrupt may come here."""
        return list(self._saves.values())

    def to_end(self) -> list[SaveUnderWay]:
        """Those that nobody has ended."""
        return [save for save in self.all() if not save.ended]

    def find(self, number: int) -> SaveUnderWay | None:
        """The save of that number, unless somebody has ended it."""
        save = self._saves.get(number)
        return None if save is None or save.ended else save

    def end(self, number: int) -> SaveUnderWay | None:
        """The same for whoever ends it: nobody else gets it after this."""
        with self._lock:
            save = self.find(number)
            if save is not None:
                save.ended = True
            return save

    def refuse(self, error: LaststepError) -> list[SaveUnderWay]:
        """Enter no more, for that reason; returns those that are to be ended. At once: a save that
        came between the two would wait for ever."""
        with self._lock:
            self.refusal = error
            return self.to_end()

    def forget(self, save: SaveUnderWay) -> None:
        """It is no longer under way."""
        self._saves.pop(save.number, None)

    def take_over(self) -> list[SaveUnderWay]:
        """Those that are over, which are no longer under way; what failed is still to be told."""
        over = [save for save in self.all() if save.over]
        for save in over:
            self.forget(save)
        self._failed += [save.handle for save in over if save.handle.error is not None]
        return over

    def tell(self) -> list[LaststepError]:
        """What made those fail that were taken over and nobody has seen: it is told now."""
        failed, self._failed = self._failed, []
        return [save.error for save in failed if save.error is not None and not save.seen]
