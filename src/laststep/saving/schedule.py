"""Decide when `step()` saves, identically on all ranks.

Belongs to the training thread. With an interval in steps, every rank decides by itself. With an
interval in time, only rank 0 measures and decides. All ranks count their calls of `step()`, and at
some of these calls, the sync points, they read one key. It holds the decision whether all save at
this very call, and the number of calls until the next sync point. Rank 0 publishes each decision
one sync point ahead, so no rank waits for it, and only rank 0's clock matters. The distance between
sync points is half of the time left to the next save, and never more than `_LOOK_S`, so that a
slowdown of training is noticed.

The speed of training and the cost of saves are measured at the calls of `step()`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.catalog.instances import Past
from laststep.constants import duration_s, duration_text
from laststep.errors import AbortedError, UsageError
from laststep.plan import frequency
from laststep.plan.frequency import mid
from laststep.process import signals, system
from laststep.process.threads import ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.flush.saves import SaveHandle
    from laststep.plan.frequency import IntervalEstimate
    from laststep.ranks.group import Rank
    from laststep.ranks.key_value import KeyValueStore
    from laststep.settings import Settings


WARM_UP = 3
"""Iterations after a start that are not measured: kernels are still being compiled and selected."""
BASELINE = 8
"""Number of undisturbed iterations to measure before the first save, unless they take too long."""
_RECENT, _SAVES = 16, 5


class _Beside(NamedTuple):
    """The iterations during one save."""

    usual_s: float | None
    """Median seconds of the iterations just before it; None if none were measured."""
    seconds: list[float]


class _EndedSave(NamedTuple):
    stall_s: float
    device_s: float
    """Time that its copies took on the device."""
    slower_s: float
    """Extra seconds of the iterations beside it."""
    latency_s: float
    """Time until its commit."""


class StepTimer:
    """Measures iterations and saves, including saves that the user requested with `save()`."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the latest iterations without a save."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the latest iterations, with or without a save."""
        self._ended: deque[_EndedSave] = deque(maxlen=_SAVES)
        self.under_way: dict[SaveHandle, _Beside] = {}
        """The saves in progress."""
        self._fresh: deque[SaveHandle] = deque(maxlen=_SAVES)
        """The latest saves of the current iteration."""
        self._seen = 0
        self._last_s: float | None = None
        self._last: SaveHandle | None = None
        self.captured_s: float | None = None
        """The time at which the last save began."""
        self.failed = False
        """True if the last save failed."""

    def anew(self) -> None:
        """Reset after a restore: iterations are measured again, the cost of saves is kept."""
        self._last_s, self._seen = None, 0
        self._alone.clear()
        self._recent.clear()

    def iterated(self, now_s: float) -> None:
        if self._last_s is not None:
            self._seen += 1
            # Subtract the stall of saves: their reports account for it.
            held_s = sum(handle.report.stall_s for handle in self._fresh)
            seconds = max(now_s - self._last_s - held_s, 0.0)
            self._recent.append(seconds)
            for beside in self.under_way.values():
                beside.seconds.append(seconds)
            if self._seen > WARM_UP and not self.under_way:
                self._alone.append(seconds)
        self._last_s = now_s
        self._fresh.clear()
        if self.under_way:
            self._look()

    def began(self, handle: SaveHandle, now_s: float) -> None:
        self._look()  # needed if the user never calls step()
        self.under_way[handle] = _Beside(mid(self._alone) if self._alone else None, [])
        self._fresh.append(handle)
        self._last, self.captured_s, self.failed = handle, now_s, False

    def _look(self) -> None:
        for handle in list(self.under_way):
            if not handle.done():
                continue
            beside, report = self.under_way.pop(handle), handle.report
            if report.committed_s is None:
                self.failed = self.failed or handle is self._last
                continue
            slower_s = 0.0  # of all these iterations together; can be negative by chance
            if beside.usual_s is not None:
                slower_s = (mid(beside.seconds) - beside.usual_s) * len(beside.seconds)
            self._ended.append(
                _EndedSave(
                    stall_s=report.stall_s,
                    device_s=report.device_copy_s + report.fence_s,
                    slower_s=slower_s,
                    latency_s=report.committed_s,
                )
            )

    @property
    def missing(self) -> int:
        """Number of iterations still to be measured before the first save."""
        return max(WARM_UP + BASELINE - self._seen, 0)

    @property
    def step_s(self) -> float | None:
        """Median seconds of the latest iterations."""
        return mid(self._recent) if self._recent else None

    @property
    def usual_save(self) -> _EndedSave | None:
        """The medians over the latest saves; None before the first save has ended."""
        if not self._ended:
            return None
        return _EndedSave(*(mid(column) for column in zip(*self._ended, strict=True)))


log = logging.getLogger(__name__)

FIRST_S = 60.0
"""With every="auto", the first save, which is measured, starts at the latest after this time."""
AFTER_FAILURE = 0.25
"""Fraction of an interval after which a failed save is retried: the cause may be gone."""
_LOOK_S, _LOOK_EACH_S = 2.0, 0.002
"""The longest time between sync points: seconds, and seconds per rank. All ranks read one store, so
larger jobs read less often."""
_SOON_S = 1.0
"""The longest time between sync points while the next save waits for one in progress."""
_CLOSE = 0.02
"""Fraction of an interval before a save within which sync points get no closer."""
_RING = 1024
"""Number of keys that decisions rotate through; no rank is so many sync points behind."""


class SyncPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision for one sync point; all ranks read it there."""

    number: int
    save: bool = False
    gap: int = 1
    """Number of calls until the next sync point."""


class Notes:
    """The decisions of sync points, for a single rank in memory."""

    def __init__(self) -> None:
        self._notes = {0: SyncPoint(number=0)}

    def leave(self, note: SyncPoint) -> None:
        self._notes[note.number] = note

    def read(self, number: int) -> SyncPoint:
        self._notes.pop(number - 1, None)
        return self._notes[number]


class SharedNotes(Notes):
    """The decisions for several ranks, in a key-value store of this start or restore alone."""

    def __init__(self, kv: KeyValueStore, *, is_first: bool, deadline_s: float) -> None:
        super().__init__()
        self._kv = kv
        self._is_first = is_first
        self._deadline_s = deadline_s

    def leave(self, note: SyncPoint) -> None:
        self._kv.put(str(note.number % _RING), msgspec.msgpack.encode(note))
        super().leave(note)

    def read(self, number: int) -> SyncPoint:
        if self._is_first or number == 0:
            return super().read(number)

        def look() -> SyncPoint | None:
            data = self._kv.look(str(number % _RING))
            note = None if data is None else msgspec.msgpack.decode(data, type=ready(SyncPoint))
            return None if note is None or note.number < number else note

        note = self._kv.until(look, self._kv.now_s() + self._deadline_s)
        if note is None or note.number != number:
            raise AbortedError(
                "this rank has not been told when to save next",
                expected=f"a decision of rank 0 within {self._deadline_s:g} s",
                remedy=(
                    "every rank must call step() for the same steps; rank 0 may be stopped, slow "
                    "or dead: check its log, or pass a larger deadline_s"
                ),
            )
        return note


class Schedule:
    def __init__(
        self,
        settings: Settings,
        rank: Rank,
        past: Callable[[], Past],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`past` returns the earlier failures of the run and is called once."""
        self._settings, self._ranks = settings, rank.ranks
        self._every = every = settings.every
        self._fixed_s = duration_s(every) if isinstance(every, str) and every != "auto" else None
        self._ask_past, self._clock = past, clock
        self._past = Past()
        self._timer = StepTimer() if rank.is_first and isinstance(every, str) else None
        """Rank 0's measurements; None on other ranks and if nothing has to be measured."""
        self._began_s: float | None = None
        self._resumed_s = 0.0
        self._last_step: int | None = None
        self._saved_step: int | None = None
        self._notes: Notes | None = None
        self._said: SyncPoint | None = None
        """The decision for the next sync point, while it could not be published yet."""
        self._calls = self._at = self._number = 0

    def anew(self) -> None:
        """Reset after a restore: steps may go back, and ranks have to meet again."""
        self._last_step = self._saved_step = None
        self._notes = self._said = None
        if self._timer is not None:
            self._timer.anew()

    def due(self, step: int, meet: Callable[[], Notes], *, last: bool = False) -> bool:
        """Return True if all ranks save at this call. The `last` step is always saved, and no step
        twice. Takes microseconds except at a sync point. `meet` is the collective that connects all
        ranks, called at the first call after a start or a restore."""
        return (self._is_time(step, meet) or last) and step != self._saved_step

    def _is_time(self, step: int, meet: Callable[[], Notes]) -> bool:
        before = self._last_step
        if before is not None and step <= before:
            if step == before:
                return False
            raise UsageError(
                f"step {step} comes after step {before}",
                expected=f"a step from {before} on",
                found=str(step),
                remedy="count steps over the whole training; restore() a step to go back to it",
            )
        self._last_step = step
        if self._every is None:
            return False
        if isinstance(self._every, int):
            # Works for strides larger than one too. Step 0 is not due: it has nothing to lose.
            before = max(step - 1, 0) if before is None else before
            return step // self._every > before // self._every
        return self._called(meet)

    def began(self, handle: SaveHandle) -> None:
        """Record the start of a save, requested by `step()` or by the user."""
        self._saved_step = handle.step
        if self._timer is not None:
            if (estimate := self.estimate) is not None:
                handle.report.estimate = estimate
                log.info("step %d: %s", handle.step, estimate)
            self._timer.began(handle, self._clock())

    def warn_of_unsaved_step(self) -> None:
        saved = -1 if self._saved_step is None else self._saved_step
        if self._last_step is not None and self._last_step > saved:
            log.log(
                system.shared_warning(),
                "training ends with step %d, which is not saved: step(…, last=True) saves it",
                self._last_step,
            )

    # -- by the clock -----------------------------------------------------------------------------

    def _called(self, meet: Callable[[], Notes]) -> bool:
        if self._timer is not None:
            self._timer.iterated(self._clock())
        if self._notes is None:
            self._notes = self._begin(meet())
        self._calls += 1
        saves = False
        while self._at <= self._calls:
            with signals.defer_signals():
                saves = self._at_sync_point(self._notes)
        return saves

    def _at_sync_point(self, notes: Notes) -> bool:
        """Read this decision and, on rank 0, publish the next one."""
        note = notes.read(self._number)
        if self._timer is not None:
            # Keep the decision if publishing fails: ranks that read it must not see another one.
            self._said = self._said or self._decided(note, self._timer)
            notes.leave(self._said)
        saves = note.save and self._at == self._calls
        if note.save and not saves:  # the key-value store did not answer in time
            log.warning("this rank missed a save of the other ranks: see above")
        self._at += note.gap
        self._number += 1
        self._said = None
        return saves

    def _begin(self, notes: Notes) -> Notes:
        self._calls, self._at, self._number = 0, 1, 0
        if self._timer is not None:
            self._resumed_s = self._clock()
            if self._timer.captured_s is not None:
                self._timer.captured_s = self._resumed_s  # restored state is safe already
            if self._began_s is None:
                if self._fixed_s is None and self._settings.mtbf is None:
                    self._past = self._ask_past()
                self._began_s = self._resumed_s
        return notes

    def _decided(self, note: SyncPoint, timer: StepTimer) -> SyncPoint:
        """Return the decision for the sync point after this one, whose decision is `note`."""
        number, step_s = note.number + 1, timer.step_s
        if step_s is None:
            return SyncPoint(number=number)
        step_s = max(step_s, 1e-6)
        interval_s = self._fixed_s
        if interval_s is None and (estimate := self.estimate) is not None:
            interval_s = estimate.interval_s
        then_s = math.inf if interval_s is None else interval_s
        wait_s = then_s if note.save else self._due_s(timer, step_s, interval_s) - self._clock()
        left_s = wait_s - note.gap * step_s
        save = left_s <= 0.05 * step_s
        if save:
            left_s = then_s
        left = min(left_s / step_s, 1e9)
        close = max(2.0, _CLOSE * (interval_s or 0.0) / step_s)
        look_s = max(_LOOK_S, self._ranks * _LOOK_EACH_S)
        if math.isinf(left_s):
            look_s = _SOON_S
        gap = min(math.ceil(left - 0.05) if left <= close else left // 2, look_s // step_s)
        return SyncPoint(number=number, save=save, gap=max(int(gap), 1))

    def _due_s(self, timer: StepTimer, step_s: float, interval_s: float | None) -> float:
        """Return the time at which the next save begins; infinite while that is unknown."""
        if timer.under_way:
            return math.inf  # no backlog of saves, however long this one takes
        if timer.captured_s is None:
            if self._fixed_s is not None:
                return self._resumed_s + self._fixed_s
            return min(self._clock() + timer.missing * step_s, self._resumed_s + FIRST_S)
        wait_s = FIRST_S if interval_s is None else interval_s
        return timer.captured_s + wait_s * (AFTER_FAILURE if timer.failed else 1.0)

    @property
    def estimate(self) -> IntervalEstimate | None:
        """With every="auto", on rank 0, after the first save has ended; else None."""
        timer = self._timer
        if timer is None or self._fixed_s is not None:
            return None
        save, step_s = timer.usual_save, timer.step_s
        if save is None or step_s is None:
            return None
        # The copies on the device may be what slows the iterations down: count that time once.
        cost_s = save.stall_s + max(save.device_s, save.slower_s)
        mtbf_s, mtbf_from = self._mtbf_s()
        costs = cost_s, save.latency_s, mtbf_s
        interval_s, bound = frequency.best_interval(*costs, self._settings.most_share)
        return frequency.IntervalEstimate(
            interval_s=interval_s,
            bound=bound,
            cost_s=cost_s,
            latency_s=save.latency_s,
            mtbf_s=mtbf_s,
            mtbf_from=mtbf_from,
            lost_share=frequency.lost_share(interval_s, *costs),
            step_s=step_s,
        )

    def _mtbf_s(self) -> tuple[float, str]:
        """Return the mean time between failures and a text that explains its origin."""
        if self._settings.mtbf is not None:
            return duration_s(self._settings.mtbf), "given"
        failures, uptime_s = self._past
        uptime_s += self._clock() - (self._began_s or 0.0)
        prior_s = frequency.believed_mtbf_s(0, 0.0, self._ranks)
        known = f"{failures} failures in {duration_text(uptime_s)} of this run, and a prior belief "
        known += f"of one in {duration_text(prior_s)}"
        return frequency.believed_mtbf_s(failures, uptime_s, self._ranks), known
