"""How far a save is: what `save()` returns, and what the engine marks as it goes.

Thread-safe. A stage is reached, or the save has failed and every stage that was not reached carries
the error. Nothing is ever reported as reached after the first error.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.process import interrupts
from laststep.process.only_one import OnlyOne
from laststep.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.errors import LaststepError


class Stage(OnlyOne):
    """A point that a save reaches."""

    def __init__(self) -> None:
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
        return interrupts.wait(self._event, seconds(timeout_s))

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
    folder: str | None = None
    skipped: str | None = None
    """Why nothing was saved, with on_busy='skip'."""

    @property
    def lost_s(self) -> float:
        """Seconds of training lost: the stall, and what the device did for the capture."""
        return self.stall_s + self.device_copy_s + self.fence_s


class SaveHandle(OnlyOne):
    """A save on its way. `captured`, `durable` and `committed` are reached in that order."""

    def __init__(self, step: int) -> None:
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
        """Wait until the save is committed; False when the time is up. Raises what failed."""
        return self.committed.wait(timeout_s)

    def since_began_s(self) -> float:
        return time.perf_counter() - self._began_s

    def fail(self, error: LaststepError) -> None:
        """Every stage that was not reached carries the error."""
        self.error = error
        for stage in (self.captured, self.durable, self.committed):
            stage.fail(error)

    def skip(self, reason: str) -> None:
        """Nothing is saved, and that is no error."""
        self._report.skipped = reason
        for stage in (self.captured, self.durable, self.committed):
            stage.skip()

    def refresh_with(self, refresh: Callable[[SaveReport], None]) -> None:
        """Have figures that come late (timers on the device) read when the report is asked for."""
        self._refresh = refresh

    def __repr__(self) -> str:
        state = "failed" if self.error else "skipped" if self._report.skipped else "under way"
        for name in ("captured", "durable", "committed"):
            if getattr(self, name).done() and not self._report.skipped:
                state = name
        return f"<SaveHandle step={self.step} {state}>"
