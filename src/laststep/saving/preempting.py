"""How a job ends that is told to: who sees it, at which step all ranks stop, and what is saved.

A signal or a file may be seen by one rank alone. That one leaves a word on a board, where all look
now and then, on a thread of their own. A rank that knows waits at its next step, and has said by
then which step it has passed last; the first rank answers with the step after the last that any
rank has passed, and all stop at the first of their steps that is not before that one. Nobody has
passed it, since whoever knows passes nothing. That thread speaks, not training's, which may be in
the middle of a collective with a rank that waits already. The grace bounds every wait: what is not
agreed on, saved or committed by then is told, and the program ends.
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
from laststep.process import interrupts, lifetimes, threads
from laststep.process.signals import NotedSignals, Notice, notice
from laststep.saving import backlog
from laststep.terms import duration_s, listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.events import Bus
    from laststep.flush.handle import SaveHandle
    from laststep.flush.saves import Saves
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
    from laststep.saving.saved_steps import SavedSteps
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
_LATE = "the grace was over before it was committed"


class Preempted(SystemExit):
    """Raised by `step()` after the last save of a job that is to end: leaves the program, with the
    exit code of its `Preemption`. No `LaststepError`, and no `Exception`: nothing has failed."""

    def __init__(self, report: PreemptionEnded, exit_code: int) -> None:
        super().__init__(exit_code)
        self.report = report


class Work(Protocol):
    """What runs for saves."""

    @property
    def saves(self) -> Saves: ...

    def hurry(self, is_over: Callable[[], bool]) -> None: ...


class StopNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank says."""

    step: int = 0
    """All stop at their first step from here on."""
    problem: str = ""
    """Why they cannot."""


def look_out(asked: Preemption | None, rank: Rank, bus: Bus) -> Preempting | None:
    """What knows of the end of this job, where that was asked for."""
    return None if asked is None else Preempting(asked, rank, bus)


class Preempting:
    """What this rank knows of the end of its job. `reached` and `carry_out` are training's."""

    def __init__(self, asked: Preemption, rank: Rank, bus: Bus) -> None:
        """`Usage` where the signals cannot be had."""
        self._asked, self._rank, self._bus = asked, rank, bus
        self._grace_s = duration_s(asked.grace)
        self._signals = NotedSignals(asked.signals)
        self._file_was = _changed(asked.file)
        if self._file_was is not None:
            log.warning("%s is there already: it counts once it is touched again", asked.file)
        self._heard: Notice | None = None
        """What the thread has seen: the file, or the word of another rank."""
        self._told = self._stops = self._is_done = False
        self._passed = -1
        """The last step that was passed without knowing of anything."""
        self._agreement: _Agreement | None = None
        self._problem = ""
        """Why it is not known where to stop."""
        self.is_last = False
        """Whether the last save has begun."""

    def install(self) -> None:
        """Look out from now on. MUST NOT be called inside `interrupts.held`."""
        self._signals.install()
        weakref.finalize(self, self._signals.let_go).atexit = False
        if self._rank.ranks == 1 and self._asked.file is not None:
            self._agree(None)

    def close(self) -> None:
        """Give everything back."""
        self._signals.let_go()
        self._part()

    @property
    def known(self) -> Notice | None:
        """That the job is to end, as soon as this rank knows."""
        return self._signals.came or self._heard

    @property
    def stops(self) -> bool:
        """The same, once all ranks are at a step where they stop. Of one rank that never calls
        `step()`, at once: else it could end between the two, with nothing saved."""
        alone = self._rank.ranks == 1 and self._passed < 0
        return self._stops or (alone and self.known is not None)

    def anew(self) -> None:
        """The state was restored: steps may go back, and ranks meet anew."""
        if self._rank.ranks > 1:
            self._part()
        self._passed = -1

    def _part(self) -> None:
        if self._agreement is not None:
            self._agreement.end()
            self._agreement = None

    def reached(self, step: int, meet: Callable[[], Board]) -> bool:
        """Whether all ranks stop at this step. Takes a microsecond until there is something to be
        known; then it waits for the others, within the grace. `meet` brings all ranks together,
        after a start or a restore."""
        if self._agreement is None and self._rank.ranks > 1:
            self._agree(meet())
        if self._is_done:
            return False
        if self.known is None:
            self._passed = step
            if self.known is None:  # else the other thread may have looked before that was set
                return False
        since, agreement, stop = self._tell(), self._agreement, None
        if self._rank.ranks > 1 and agreement is not None:
            agreement.wake.set()
            interrupts.wait(agreement.settled, self._left_s(since))
            stop = agreement.stop or StopNote(problem=agreement.problem or _SILENCE)
        self._problem = "" if stop is None else stop.problem
        self._stops = stop is None or step >= stop.step
        return self._stops

    def carry_out(
        self, step: int, save: Callable[[], SaveHandle], work: Work, steps: SavedSteps
    ) -> SaveHandle | None:
        """Save that step, unless it is committed or on its way; wait until it is committed or the
        grace is over, tell of it, and end the program, unless that is the loop's own."""
        handle, problem = None, self._problem
        self.is_last = self._is_done = True
        try:
            if not problem:
                with interrupts.limited(self._grace_is_over):
                    handle = self._save(step, save, work.saves, steps)
                    # Nobody raises it again, and what follows is not interrupted.
                    error = None if handle is None else handle.exception()
                    problem = "" if error is None else brief(error)
        except interrupts.TimeIsUp:
            problem = _LATE
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
            with interrupts.limited(self._grace_is_over):
                return save()
        except interrupts.TimeIsUp:
            self._stops = self._is_done = True
            self._end(step, None, _LATE, work, steps)
            return None

    def _end(
        self, step: int, handle: SaveHandle | None, problem: str, work: Work, steps: SavedSteps
    ) -> None:
        """Tell what became of the last save, and raise what ends the program."""
        since, at_risk = self._tell(), ""
        with interrupts.held():
            steps.take_over(work.saves)
        if problem:
            newest = steps.newest()
            at_risk = "all of it" if newest is None else f"what came after step {newest}"
            if handle is not None and self._rank.ranks == 1 and _goes_on(handle):
                at_risk += f", unless the flusher, which goes on, still commits step {step}"
        report = PreemptionEnded(
            step=step, cause=since.cause, came_s=since.at_s, grace_s=self._grace_s,
            seconds=time.monotonic() - since.came_s, committed=not problem, problem=problem,
            at_risk=at_risk,
        )  # fmt: skip
        self._bus.emit(report)
        work.hurry(self._grace_is_over)
        if self._asked.exit_code is not None:
            raise Preempted(report, self._asked.exit_code)

    def _grace_is_over(self) -> bool:
        return self.known is not None and self._left_s(self.known) <= 0

    def _save(
        self, step: int, save: Callable[[], SaveHandle], saves: Saves, steps: SavedSteps
    ) -> SaveHandle | None:
        """The save of that step; None where it is committed and nobody has its handle."""
        if self._rank.ranks == 1:
            backlog.call_off_queued(saves.all(), step)
        found = backlog.of_step(saves.all(), step)
        with interrupts.held():
            steps.take_over(saves)
            for error in saves.tell():
                log.error("a save failed: %s", error)
        if found is not None or step == steps.newest():
            return found
        try:
            return save()
        except LaststepError as error:
            # Of several ranks it is under way, though what is raised is why another one failed.
            if (found := backlog.of_step(saves.all(), step)) is None:
                raise
            log.error("a save failed: %s", error)  # noqa: TRY400 (it is an earlier one's)
            return found

    def _agree(self, board: Board | None) -> None:
        file = None if self._asked.file is None else (self._asked.file, self._file_was)
        self._agreement = _Agreement(weakref.ref(self), self._rank, board, file, self._grace_s)

    def _tell(self) -> Notice:
        known = self.known
        assert known is not None  # noqa: S101 (else nothing is to be done)
        if not self._told:
            self._told = True
            self._bus.emit(PreemptionSeen(cause=known.cause, grace_s=self._grace_s))
        return known

    def _left_s(self, since: Notice) -> float:
        return max(since.came_s + self._grace_s - time.monotonic(), 0.0)


class _Agreement:
    """The thread that looks out for the file and for the words of other ranks, and speaks for this
    one; until it is ended. It does not keep its owner alive."""

    def __init__(
        self,
        owner: weakref.ref[Preempting],
        rank: Rank,
        board: Board | None,
        file: tuple[str, int | None] | None,
        grace_s: float,
    ) -> None:
        self._owner, self._rank, self._board = owner, rank, board
        self._file, self._file_s = file, 0.0
        self._grace_s = grace_s
        self._ended = False
        self._failures, self._was_told = 0, False
        self.wake, self.settled = threading.Event(), threading.Event()
        self.stop: StopNote | None = None
        self.problem = ""
        look_s = max(_LOOK_S, rank.ranks * _LOOK_EACH_S)
        self._look_s = _FILE_S if board is None else look_s
        self._thread = threading.Thread(target=self._work, name="laststep-preempted", daemon=True)
        threads.start(self._thread)
        lifetimes.watch(self, at_exit=self.end, in_child=_stay)

    def end(self) -> None:
        """Look no more."""
        self._ended = True
        self.wake.set()
        self.settled.set()
        if self._board is not None:
            self._board.hush()
        lifetimes.let_be(self)

    def _work(self) -> None:
        try:
            while not self._ended:
                owner = self._owner()
                if owner is None:
                    return
                if owner.known is None:
                    owner._heard = self._look()  # noqa: SLF001 (the two are one)
                if owner.known is not None:
                    self._speak(owner)
                    return
                del owner
                self.wake.wait(self._look_s)
        finally:
            self.end()

    def _look(self) -> Notice | None:
        """The file, or the word of another rank."""
        now_s = time.monotonic()
        if self._file is not None and now_s - self._file_s >= _FILE_S:
            self._file_s = now_s
            path, was = self._file
            if _changed(path) not in (None, was):
                return notice(f"the file {path}")
        try:
            word = None if self._board is None else self._board.look(_SEEN)
        except LaststepError as error:
            self._failures += 1
            if self._failures == _DEAF:
                log.warning("a preemption that another rank sees is not heard of: %s", error)
            return None
        self._failures = 0
        self._was_told = word is not None
        return None if word is None else notice(word.decode())

    def _speak(self, owner: Preempting) -> None:
        """Tell the others what this rank knows and which step it has passed; hear where to stop."""
        board, known = self._board, owner.known
        if board is None or known is None:
            return
        until_s = known.came_s + self._grace_s
        me, passed = self._rank.number, owner._passed  # noqa: SLF001 (read after it is known)
        del owner
        try:
            if not self._was_told:
                board.put(_SEEN, f"rank {me}: {known.cause}".encode())
            board.put(f"at/{me}", str(passed).encode())
            if self._rank.is_first:
                self.stop = self._decide(board, until_s)
                board.put(_STOP, msgspec.msgpack.encode(self.stop))
                return
            note = board.until(lambda: None if self._ended else board.look(_STOP), until_s)
            if note is not None:
                self.stop = msgspec.msgpack.decode(note, type=StopNote)
            else:
                self.problem = "rank 0 has not said at which step to stop"
        except LaststepError as error:
            self.problem = brief(error)

    def _decide(self, board: Board, until_s: float) -> StopNote:
        names = {f"at/{rank}": rank for rank in range(self._rank.ranks)}
        notes = board.wait_all(names, until_s)
        missing = [f"rank {rank}" for name, rank in names.items() if name not in notes]
        problem = f"nothing was heard of {listed(missing)} within the grace" if missing else ""
        return StopNote(step=1 + max(map(int, notes.values()), default=0), problem=problem)


def _stay() -> None:
    """In a forked child there is no such thread, and nothing to be done about it."""


def _goes_on(handle: SaveHandle) -> bool:
    """Whether the flusher has all of it, and has not said how it ended."""
    return handle.captured.done() and not handle.done()


def _changed(path: str | None) -> int | None:
    """When a file was last touched; None where there is none."""
    if path is None:
        return None
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None
