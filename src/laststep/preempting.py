"""End a preempted job: agree on a last step, save it, and report the outcome.

A signal may be seen by one rank only, so all ranks agree on the step at which they stop. The grace
period bounds every wait: when it is over, unfinished work is reported and the program ends.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

import msgspec

from laststep.constants import duration_s, listed
from laststep.errors import LaststepError, brief
from laststep.events import PreemptionEnded
from laststep.process import signals, system
from laststep.process.signals import PreemptionSignal, RecordedSignals, preemption_signal
from laststep.process.threads import Worker, ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.events import Bus
    from laststep.flush.saves import SaveHandle
    from laststep.ranks.group import Rank
    from laststep.ranks.key_value import KeyValueStore
    from laststep.running import RunningParts
    from laststep.settings import Preemption


log = logging.getLogger(__name__)

_LOOK_S, _LOOK_EACH_S = 0.25, 0.002
"""Polling interval: seconds, and seconds per rank, since all ranks poll one store."""
_SEEN, _STOP = "seen", "stop"
_LATE = "the grace period ended before it was committed"
_SILENCE = "the ranks did not agree on a step within the grace period"


class StopNote(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision where to stop."""

    step: int = 0
    """All ranks stop at their first step that is not below this one."""
    problem: str = ""
    """The reason why the ranks cannot agree; empty if they do."""


class Watched:
    """The preemption state that the training thread and the watcher thread share, as plain
    attributes. Training sets `passed` and then reads `known`; the watcher makes the preemption
    known and then reads `passed`. So at least one of them sees the other's write."""

    def __init__(self, asked: Preemption) -> None:
        self.signals = RecordedSignals(asked.signals)
        self.heard: PreemptionSignal | None = None
        """Set if another rank has announced a preemption."""
        self.passed = -1
        """The last step that training completed before the preemption was known."""
        self.grace_s = duration_s(asked.grace)

    @property
    def known(self) -> PreemptionSignal | None:
        """The preemption that this rank knows of, or None."""
        return self.signals.came or self.heard


class PreemptionWatcher:
    """The thread that coordinates a preemption with the other ranks, until `end`."""

    def __init__(self, watched: Watched, rank: Rank, kv: KeyValueStore) -> None:
        self._watched, self._rank, self._kv = watched, rank, kv
        self._ended = False
        self._was_told = False
        self.stop = StopNote(problem=_SILENCE)
        """The step to stop at, once settled; before that, or if ranks do not agree, the reason."""
        self.wake, self.settled = threading.Event(), threading.Event()
        self._look_s = max(_LOOK_S, rank.ranks * _LOOK_EACH_S)
        self._thread = Worker("watcher", self._work).start()
        # A forked child has no watcher thread and needs none.
        system.watch(self, at_exit=self.end, in_child=lambda: None)

    def abandon(self) -> None:  # called by a finalizer, on any thread
        self._ended = True

    def end(self) -> None:
        self._ended = True
        self.wake.set()
        self.settled.set()
        self._kv.close_at_exit()
        system.let_be(self)

    def _work(self) -> None:
        watched = self._watched
        try:
            while not self._ended:
                if watched.known is None:
                    watched.heard = self._hear()
                if (known := watched.known) is not None:
                    self._announce(self._kv, known)
                    return
                self.wake.wait(self._look_s)
        finally:
            self.end()

    def _hear(self) -> PreemptionSignal | None:
        """Return the preemption that another rank has announced, or None."""
        try:
            word = self._kv.look(_SEEN)
        except LaststepError:
            return None  # asked again soon; a store that stays away fails saves too
        self._was_told = word is not None
        return None if word is None else preemption_signal(word.decode())

    def _announce(self, kv: KeyValueStore, known: PreemptionSignal) -> None:
        """Publish the last step that this rank completed, then wait for the step to stop at."""
        me, until_s = self._rank.number, known.came_s + self._watched.grace_s
        passed = self._watched.passed  # must be read after `known` is set, see `Watched`
        try:
            if not self._was_told:
                kv.put(_SEEN, f"rank {me}: {known.cause}".encode())
            kv.put(f"at/{me}", str(passed).encode())
            if self._rank.is_first:
                stop = self._decide(kv, until_s)
                kv.put(_STOP, msgspec.msgpack.encode(stop))
            else:
                note = kv.until(lambda: kv.look(_STOP), until_s)
                stop = StopNote(problem="rank 0 has not announced the step to stop at")
                if note is not None:
                    stop = msgspec.msgpack.decode(note, type=ready(StopNote))
        except LaststepError as error:
            stop = StopNote(problem=brief(error))
        self.stop = stop

    def _decide(self, kv: KeyValueStore, until_s: float) -> StopNote:
        names = {f"at/{rank}": rank for rank in range(self._rank.ranks)}
        notes = kv.wait_all(names, until_s)
        missing = [f"rank {rank}" for name, rank in names.items() if name not in notes]
        problem = f"no message from {listed(missing)} within the grace period" if missing else ""
        return StopNote(step=1 + max(map(int, notes.values()), default=-1), problem=problem)


class Preempted(SystemExit):
    """Raised by `step()` after the last save of a preempted job. Ends the program with the exit
    code of its `Preemption`. `report` describes the last save. No `LaststepError`, because nothing
    has failed."""

    def __init__(self, report: PreemptionEnded, exit_code: int) -> None:
        super().__init__(exit_code)
        self.report = report


class Preempting:
    def __init__(self, asked: Preemption, rank: Rank, bus: Bus) -> None:
        """Raises `UsageError` if the signals cannot be handled."""
        self._rank, self._bus = rank, bus
        self._exit_code = asked.exit_code
        self._watched = Watched(asked)
        self._watcher: PreemptionWatcher | None = None
        self._told = self._stops = self._is_done = False
        self._problem = ""
        """The reason why the step to stop at is unknown; empty if it is known."""
        self.is_last = False
        """True once the last save has begun."""

    def install(self) -> None:
        """Install the signal handlers and start watching, outside of `signals.defer_signals`."""
        self._watched.signals.install()
        weakref.finalize(self, self._watched.signals.let_go).atexit = False

    def close(self) -> None:
        self._watched.signals.let_go()
        self._part()

    @property
    def stops(self) -> bool:
        """True if all ranks are at the step where they stop. For a single rank that never calls
        `step()`, true once a preemption is known. A rank that calls `step()` stops only there: it
        could otherwise end before the next call with nothing saved."""
        alone = self._rank.ranks == 1 and self._watched.passed < 0
        return self._stops or (alone and self._watched.known is not None)

    def anew(self) -> None:
        """Reset after a restore: steps may go back, and ranks have to meet again."""
        self._part()
        self._watched.passed = -1

    def reached(self, step: int, meet: Callable[[], KeyValueStore]) -> bool:
        """Return True if all ranks stop at this step. Takes a microsecond until a preemption is
        known; then it waits for the other ranks within the grace period. `meet` is the collective
        that opens their key-value store, called once after a start or a restore."""
        watched, watcher = self._watched, self._watcher
        if watcher is None and self._rank.ranks > 1:
            watcher = self._watcher = PreemptionWatcher(watched, self._rank, meet())
            weakref.finalize(self, watcher.abandon).atexit = False
        if self._is_done:
            return False
        if watched.known is None:
            watched.passed = step
            if watched.known is None:  # again: the watcher may not have seen `passed`
                return False
        since, self._stops = self._tell(), True
        if watcher is not None:
            watcher.wake.set()
            signals.wait(watcher.settled, self._left_s(since))
            stop = watcher.stop
            self._problem = stop.problem
            self._stops = step >= stop.step or bool(stop.problem)
        return self._stops

    def carry_out(
        self, step: int, save: Callable[[], SaveHandle], work: RunningParts
    ) -> SaveHandle | None:
        """Save the step unless it is committed or already being saved, wait until it is committed
        and replicated or the grace period is over, report which tiers have it, and raise
        `Preempted` unless the exit code is None: then the user's loop ends the program."""
        handle, problem = None, self._problem
        self.is_last = self._is_done = True
        try:
            if not problem:
                with signals.deadline(self._grace_is_over):
                    handle = self._save(step, save, work)
                    # Waits; this counts as telling the error, and no later call raises it again.
                    error = None if handle is None else handle.exception()
                    problem = "" if error is None else brief(error)
                    if handle is not None and handle.report.skipped is not None:
                        problem = f"nothing was saved: {handle.report.skipped}"
                    if handle is not None and not problem:
                        work.client.drain_last()  # rank 0 alone knows replicas to wait for
                        signals.wait(work.client.drains.settled)
        except signals.DeadlineExceeded:
            is_primary = handle is not None and handle.committed.done()
            problem = problem or ("" if is_primary else _LATE)
        except LaststepError as error:
            problem = brief(error)
        self._end(step, handle, problem, work)
        return handle

    def bound(
        self, step: int, save: Callable[[], SaveHandle], work: RunningParts
    ) -> SaveHandle | None:
        """Make an ordinary save. End the job if a grace period ends while it waits for others."""
        try:
            with signals.deadline(self._grace_is_over):
                return save()
        except signals.DeadlineExceeded:
            self._stops = self._is_done = True
            self._end(step, None, _LATE, work)
            return None

    def _end(self, step: int, handle: SaveHandle | None, problem: str, work: RunningParts) -> None:
        """Report the outcome of the last save and raise `Preempted`."""
        since = self._tell()
        held = () if handle is None else work.tiers_of(handle)
        with signals.defer_signals():
            work.saves.take_over()
        report = PreemptionEnded(
            step=step,
            cause=since.cause,
            grace_s=self._watched.grace_s,
            seconds=time.monotonic() - since.came_s,
            committed=not problem,
            tiers=held,
            problem=problem,
        )
        self._bus.emit(report)
        work.is_over = self._grace_is_over
        work.ends_well = True  # even if close() is not called
        if self._exit_code is not None:
            raise Preempted(report, self._exit_code)

    def _grace_is_over(self) -> bool:
        return self._watched.known is not None and self._left_s(self._watched.known) <= 0

    def _save(
        self, step: int, save: Callable[[], SaveHandle], work: RunningParts
    ) -> SaveHandle | None:
        """Return the handle of a save of this step; None if it is committed without one."""
        saves = work.saves
        if self._rank.ranks == 1:
            saves.call_off_queued(step)
        found = saves.of_step(step)
        with signals.defer_signals():
            saves.take_over()
            for error in saves.untold():
                log.error("a save failed: %s", error)
        if found is None and step == saves.newest_committed():
            last = work.client.newest_save
            return last.handle if last is not None and last.step == step else None
        while found is None:
            try:
                return save()
            except LaststepError as error:
                # With several ranks the save has begun even though the failure of an earlier one
                # was raised. A single rank tries again: each failure is raised only once.
                found = saves.of_step(step)
                if found is None and (self._rank.ranks > 1 or error.step in (None, step)):
                    raise
                log.error("a save failed: %s", error)  # noqa: TRY400 (an earlier save's error)
        return found.handle

    def _part(self) -> None:
        if self._watcher is not None:
            self._watcher.end()
            self._watcher = None

    def _tell(self) -> PreemptionSignal:
        known = self._watched.known
        assert known is not None  # noqa: S101 (only called after a preemption)
        if not self._told:
            self._told = True
            rank, _, name = known.cause.rpartition(": ")
            log.log(
                system.shared_warning(),
                "%s received %s, so this job will be preempted: its last step is being saved and "
                "has to be committed within %g s",
                rank or "this process",
                name,
                self._watched.grace_s,
            )
        return known

    def _left_s(self, since: PreemptionSignal) -> float:
        return max(since.came_s + self._watched.grace_s - time.monotonic(), 0.0)
