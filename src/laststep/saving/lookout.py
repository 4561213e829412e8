"""Look out for the end of a job, and agree with all ranks on the step at which they stop.

A signal or a file may be seen by one rank alone. That one leaves a word on a board, where all look
now and then, on a thread of their own. A rank that knows waits at its next step, and its thread
says which step it has passed last; the first rank answers with the step after the last that any
rank has passed, and all stop at the first of their steps that is not before that one. Nobody has
passed it, since whoever knows passes nothing. The thread speaks, not training's, which may be in
the middle of a collective with a rank that waits already.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import LaststepError, brief
from laststep.process import lifetimes, threads
from laststep.process.signals import NotedSignals, Notice, notice
from laststep.terms import duration_s, listed

if TYPE_CHECKING:
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
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
        lifetimes.watch(self, at_exit=self.end, in_child=_stay)

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
        lifetimes.let_be(self)

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
