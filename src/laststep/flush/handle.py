"""How far a save is: what `save()` returns, and what the engine marks as it goes.

Thread-safe. A stage is reached, or the save has failed and every stage that was not reached carries
the error. Nothing is ever reported as reached after the first error. Callbacks run on the thread
that ends the save, when everybody else has been told.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from laststep.checks import seconds
from laststep.process import interrupts, lifetimes, threads
from laststep.process.only_one import OnlyOne

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.errors import LaststepError
    from laststep.flush.protocol import CodingReport
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
        return interrupts.wait(self._event, seconds(timeout_s))

    def check_process(self, what: str) -> None:
        """`Usage` in a forked process, unless it was over by then: nobody tells that process."""
        if not self._event.is_set():
            lifetimes.check_process(what, self._pid)

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
        with interrupts.held():
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
