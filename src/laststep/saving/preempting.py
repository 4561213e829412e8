"""How a job ends that is told to: its last save, and what is said of it.

`lookout` knows when, and at which step. The grace bounds every wait: what is not agreed on, saved
or committed by then is told, and the program ends. Belongs to the training thread.

A signal or a file may be seen by one rank alone: all ranks agree on the step at which they stop.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from laststep.errors import LaststepError, brief
from laststep.events import PreemptionEnded, PreemptionSeen
from laststep.process import signals, system, threads
from laststep.process.signals import NotedSignals, Notice, notice
from laststep.saving import place
from laststep.terms import MEMORY, duration_s, listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.events import Bus
    from laststep.flush.saves import SaveHandle, Saves, Stage
    from laststep.process.signals import Notice
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
    from laststep.saving.place import SavedSteps
    from laststep.settings import Preemption


log = logging.getLogger(__name__)

_LOOK_S, _LOOK_EACH_S = 0.25, 0.002
"""So often ranks look for the word of another. All ask one store: the more, the less often."""
_FILE_S = 1.0
"""So often it is looked for the file."""
_DEAF = 20
"""After so many looks in a row that failed it is told that nobody would be heard."""
_SEEN, _STOP = "seen", "stop"
_SILENCE = "the ranks did not agree on a step within the grace"


class StopNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank says."""

    step: int = 0
    """All stop at their first step from here on."""
    problem: str = ""
    """Why they cannot."""


class Watched:
    """What this rank looks out for, what it knows, and what it has passed. Plain attributes, for
    two threads: training sets `passed` and then looks whether it is `known`; the other makes it
    known, and then looks what is passed. So one of them sees the other."""

    def __init__(self, asked: Preemption) -> None:
        self.signals = NotedSignals(asked.signals)
        self.heard: Notice | None = None
        """The file was seen, or the word of another rank."""
        self.passed = -1
        """The last step that was passed without knowing of anything."""
        self.grace_s = duration_s(asked.grace)
        self._file = asked.file
        self._file_was, self._looked_s = self._touched(), 0.0
        if self._file_was is not None:
            log.warning("%s is there already: it counts once it is touched again", asked.file)

    @property
    def known(self) -> Notice | None:
        """That the job is to end."""
        return self.signals.came or self.heard

    @property
    def has_file(self) -> bool:
        """Whether a file is looked for."""
        return self._file is not None

    def look(self) -> Notice | None:
        """See whether the file has come, now and then."""
        now_s = time.monotonic()
        if self._file is None or now_s - self._looked_s < _FILE_S:
            return None
        self._looked_s = now_s
        return notice(f"the file {self._file}") if self._is_new() else None

    def _is_new(self) -> bool:
        return self._touched() not in (None, self._file_was)

    def _touched(self) -> int | None:
        """When the file was last touched; None where there is none."""
        try:
            return None if self._file is None else Path(self._file).stat().st_mtime_ns
        except OSError:
            return None


class Lookout:
    """The thread that looks, and speaks for this rank; until it is ended."""

    def __init__(self, watched: Watched, rank: Rank, board: Board | None) -> None:
        self._watched, self._rank, self._board = watched, rank, board
        self._ended = False
        self._failures, self._was_told = 0, False
        self._stop: StopNote | None = None
        self.wake, self.settled = threading.Event(), threading.Event()
        look_s = max(_LOOK_S, rank.ranks * _LOOK_EACH_S)
        self._look_s = _FILE_S if board is None else look_s
        self._thread = threading.Thread(target=self._work, name="laststep-lookout", daemon=True)
        threads.start(self._thread)
        system.watch(self, at_exit=self.end, in_child=_stay)

    @property
    def stop(self) -> StopNote:
        """Where to stop, once that is settled; before, or where ranks do not agree, why not."""
        return self._stop or StopNote(problem=_SILENCE)

    def abandon(self) -> None:
        """Nobody needs it any more; from whichever thread that is found, in whatever it does."""
        self._ended = True

    def end(self) -> None:
        """Look no more, and let nobody wait."""
        self._ended = True
        self.wake.set()
        self.settled.set()
        if self._board is not None:
            self._board.hush()
        system.let_be(self)

    def _work(self) -> None:
        watched = self._watched
        try:
            while not self._ended:
                if watched.known is None:
                    watched.heard = watched.look() or self._hear()
                if (known := watched.known) is not None:
                    if self._board is not None:
                        self._speak(self._board, known)
                    return
                self.wake.wait(self._look_s)
        finally:
            self.end()

    def _hear(self) -> Notice | None:
        """The word of another rank."""
        try:
            word = None if self._board is None else self._board.look(_SEEN)
        except LaststepError as error:
            self._failures += 1
            if self._failures == _DEAF:
                log.warning("a preemption that another rank sees is not heard of: %s", error)
            return None
        self._failures, self._was_told = 0, word is not None
        return None if word is None else notice(word.decode())

    def _speak(self, board: Board, known: Notice) -> None:
        """Tell the others what this rank knows and which step it has passed; hear where to stop."""
        me, until_s = self._rank.number, known.came_s + self._watched.grace_s
        passed = self._watched.passed  # after it is known
        try:
            if not self._was_told:
                board.put(_SEEN, f"rank {me}: {known.cause}".encode())
            board.put(f"at/{me}", str(passed).encode())
            if self._rank.is_first:
                stop = self._decide(board, until_s)
                board.put(_STOP, msgspec.msgpack.encode(stop))
            else:
                note = board.until(lambda: board.look(_STOP), until_s)
                stop = StopNote(problem="rank 0 has not said at which step to stop")
                if note is not None:
                    stop = msgspec.msgpack.decode(note, type=StopNote)
        except LaststepError as error:
            stop = StopNote(problem=brief(error))
        self._stop = stop

    def _decide(self, board: Board, until_s: float) -> StopNote:
        names = {f"at/{rank}": rank for rank in range(self._rank.ranks)}
        notes = board.wait_all(names, until_s)
        missing = [f"rank {rank}" for name, rank in names.items() if name not in notes]
        problem = f"nothing was heard of {listed(missing)} within the grace" if missing else ""
        return StopNote(step=1 + max(map(int, notes.values()), default=-1), problem=problem)


def _stay() -> None:
    """In a forked child there is no such thread, and nothing to be done about it."""


_LATE = "the grace was over before it was committed"


class Preempted(SystemExit):
    """Raised by `step()` after the last save of a job that is to end: leaves the program, with the
    exit code of its `Preemption`. No `LaststepError`, and no `Exception`: nothing has failed."""

    def __init__(self, report: PreemptionEnded, exit_code: int) -> None:
        super().__init__(exit_code)
        self.report = report


class Work(Protocol):
    """What runs for saves."""

    ends_well: bool

    @property
    def saves(self) -> Saves: ...

    def hurry(self, is_over: Callable[[], bool]) -> None: ...

    def committed(self, step: int) -> SaveHandle | None: ...

    def drain(self, handle: SaveHandle) -> None: ...

    def tiers_of(self, handle: SaveHandle) -> tuple[str, ...]: ...


def look_out(asked: Preemption | None, rank: Rank, bus: Bus) -> Preempting | None:
    """What knows of the end of this job, where that was asked for."""
    return None if asked is None else Preempting(asked, rank, bus)


class Preempting:
    """The end of a job, as one rank goes through it."""

    def __init__(self, asked: Preemption, rank: Rank, bus: Bus) -> None:
        """`UsageError` where the signals cannot be had."""
        self._rank, self._bus = rank, bus
        self._exit_code = asked.exit_code
        self._watched = Watched(asked)
        self._lookout: Lookout | None = None
        self._told = self._stops = self._is_done = False
        self._problem = ""
        """Why it is not known where to stop."""
        self.is_last = False
        """Whether the last save has begun."""

    def install(self) -> None:
        """Look out from now on. MUST NOT be called inside `interrupts.held`."""
        self._watched.signals.install()
        weakref.finalize(self, self._watched.signals.let_go).atexit = False
        if self._rank.ranks == 1 and self._watched.has_file:
            self._start(None)

    def close(self) -> None:
        """Give everything back."""
        self._watched.signals.let_go()
        self._part()

    @property
    def stops(self) -> bool:
        """Whether all ranks are at a step where they stop. Of one rank that never calls `step()`,
        whether it knows: after a call it could end before the next, with nothing saved."""
        alone = self._rank.ranks == 1 and self._watched.passed < 0
        return self._stops or (alone and self._watched.known is not None)

    def anew(self) -> None:
        """The state was restored: steps may go back, and ranks meet anew."""
        if self._rank.ranks > 1:
            self._part()
        self._watched.passed = -1

    def reached(self, step: int, meet: Callable[[], Board]) -> bool:
        """Whether all ranks stop at this step. Takes a microsecond until there is something to be
        known; then it waits for the others, within the grace. `meet` brings all ranks together,
        after a start or a restore."""
        watched, several = self._watched, self._rank.ranks > 1
        lookout = self._lookout
        if lookout is None and several:
            lookout = self._start(meet())
        if self._is_done:
            return False
        if watched.known is None:
            watched.passed = step
            if watched.known is None:  # else the other thread may have looked before that was set
                return False
        since, self._stops = self._tell(), True
        if lookout is not None and several:
            lookout.wake.set()
            signals.wait(lookout.settled, self._left_s(since))
            stop = lookout.stop
            self._problem = stop.problem
            self._stops = step >= stop.step or bool(stop.problem)
        return self._stops

    def carry_out(
        self, step: int, save: Callable[[], SaveHandle], work: Work, steps: SavedSteps
    ) -> SaveHandle | None:
        """Save that step, unless it is committed or on its way; wait until it is committed, and
        then drained, or the grace is over, tell which tiers have it, and end the program, unless
        that is the loop's own."""
        handle, problem = None, self._problem
        self.is_last = self._is_done = True
        try:
            if not problem:
                with signals.limited(self._grace_is_over):
                    handle = self._save(step, save, work, steps)
                    problem = "" if handle is None else _failure(handle.committed)
                    if handle is not None and not problem:
                        work.drain(handle)
        except signals.TimeIsUp:
            is_home = handle is not None and handle.committed.done()
            problem = problem or ("" if is_home else _LATE)
        except LaststepError as error:
            problem = brief(error)
        self._end(step, handle, problem, work, steps)
        return handle

    def bound(
        self, step: int, save: Callable[[], SaveHandle], work: Work, steps: SavedSteps
    ) -> SaveHandle | None:
        """An ordinary save, which may still wait for others when a grace is over that began since:
        then this is the end."""
        try:
            with signals.limited(self._grace_is_over):
                return save()
        except signals.TimeIsUp:
            self._stops = self._is_done = True
            self._end(step, None, _LATE, work, steps)
            return None

    def _end(
        self, step: int, handle: SaveHandle | None, problem: str, work: Work, steps: SavedSteps
    ) -> None:
        """Tell what became of the last save, and raise what ends the program."""
        since, at_risk = self._tell(), ""
        held = () if handle is None else work.tiers_of(handle)
        with signals.held():
            steps.take_over(work.saves)
        if problem:
            newest = steps.newest()
            at_risk = "all of it" if newest is None else f"what came after step {newest}"
            if MEMORY in held:
                at_risk += ", should this machine be lost, whose memory alone has it"
            if handle is not None and self._rank.ranks == 1 and _goes_on(handle):
                at_risk += f", unless the flusher, which goes on, still commits step {step}"
        report = PreemptionEnded(
            step=step,
            cause=since.cause,
            came_s=since.at_s,
            grace_s=self._watched.grace_s,
            seconds=time.monotonic() - since.came_s,
            committed=not problem,
            tiers=held,
            problem=problem,
            at_risk=at_risk,
        )
        self._bus.emit(report)
        work.hurry(self._grace_is_over)
        work.ends_well = True  # whether or not somebody calls close() now
        if self._exit_code is not None:
            raise Preempted(report, self._exit_code)

    def _grace_is_over(self) -> bool:
        return self._watched.known is not None and self._left_s(self._watched.known) <= 0

    def _save(
        self, step: int, save: Callable[[], SaveHandle], work: Work, steps: SavedSteps
    ) -> SaveHandle | None:
        """The save of that step; None where it is committed and nobody has its handle."""
        saves = work.saves
        if self._rank.ranks == 1:
            place.call_off_queued(saves.all(), step)
        found = place.of_step(saves.all(), step)
        with signals.held():
            steps.take_over(saves)
            for error in saves.tell():
                log.error("a save failed: %s", error)
        if found is not None or step == steps.newest():
            return found or work.committed(step)
        while True:
            try:
                return save()
            except LaststepError as error:
                # With several ranks the save is under way, though an earlier one's failure is
                # raised. One rank by itself tries again: each failure is raised once.
                found = place.of_step(saves.all(), step)
                if found is None and (self._rank.ranks > 1 or error.step in (None, step)):
                    raise
                log.error("a save failed: %s", error)  # noqa: TRY400 (it is an earlier one's)
                if found is not None:
                    return found

    def _start(self, board: Board | None) -> Lookout:
        self._lookout = Lookout(self._watched, self._rank, board)
        weakref.finalize(self, self._lookout.abandon).atexit = False
        return self._lookout

    def _part(self) -> None:
        if self._lookout is not None:
            self._lookout.end()
            self._lookout = None

    def _tell(self) -> Notice:
        known = self._watched.known
        assert known is not None  # noqa: S101 (else nothing is to be done)
        if not self._told:
            self._told = True
            self._bus.emit(PreemptionSeen(cause=known.cause, grace_s=self._watched.grace_s))
        return known

    def _left_s(self, since: Notice) -> float:
        return max(since.came_s + self._watched.grace_s - time.monotonic(), 0.0)


def _failure(stage: Stage) -> str:
    """Why that stage is not reached; "" where it is. Waits for it, and nobody raises it again."""
    stage.over_within(None)
    stage.seen = True
    return "" if stage.error is None else brief(stage.error)


def _goes_on(handle: SaveHandle) -> bool:
    """Whether the flusher has all of it, and has not said how it ended."""
    return handle.captured.done() and not handle.done()
