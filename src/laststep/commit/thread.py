"""This rank's part in committing the saves of a job: one thread, save by save, beside training.

Every rank makes its files durable and reports; the first rank decides (`leader`), the others hear
of it (`member`). Whatever happens, the save is committed whole or absent, every rank that lives
hears in time, and why, and the handle of every save comes to an end here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

from laststep.commit.leader import Leader
from laststep.commit.member import Member
from laststep.commit.round import GivenUp, Round
from laststep.errors import Aborted, LaststepError, StorageFailed
from laststep.flush.protocol import Decide
from laststep.process import threads
from laststep.ranks.board import Board
from laststep.saving.schedule import BoardNotes

if TYPE_CHECKING:
    from laststep.commit.replicas import Comparing
    from laststep.commit.round import RoundContext
    from laststep.events import Bus
    from laststep.flush.saves import SaveUnderWay
    from laststep.plan.groups import Groups
    from laststep.ranks.group import Ranks
    from laststep.saving.describe import TakenState
    from laststep.saving.prepare import Prepared

log = logging.getLogger(__name__)

_NAME_BYTES = 8


class Participant:
    """This rank's part in the saves of its job, one after the other; for one thread at a time."""

    def __init__(self, desk: RoundContext, groups: Groups, bus: Bus) -> None:
        self._desk = desk
        self.part = Leader(desk, groups, bus) if desk.rank.is_first else Member(desk)

    def go_through(self, round_: Round) -> None:
        """Take part in a save; afterwards it is over, however it ended."""
        self._desk.settle(round_, self._outcome(round_))
        # Nobody asks for these any more, and the next may come late.
        round_.trees.clear()
        round_.contained = None

    def _outcome(self, round_: Round) -> LaststepError | None:
        """Take part in a save; returns why it is given up, if it is."""
        round_.began_s = self._desk.board.now_s()
        try:
            self._be_seen(round_)
            self.part.take_part(round_)
        except GivenUp as over:
            return self._give_up(round_, Aborted(str(over)), str(over))
        except LaststepError as error:
            return self._give_up(round_, error, self._desk.trouble(error.without_remedy()))
        except Exception as error:
            log.exception("the commit of step %d failed", round_.step)
            failed = StorageFailed("a commit failed", found=repr(error))
            return self._give_up(round_, failed, self._desk.trouble(str(failed)))
        return None

    def _be_seen(self, round_: Round) -> None:
        """Leave a note for those who may miss this rank. Without why it takes no part: that may
        tell of ranks that were missed, and these notes of others."""
        seen = f"step {round_.step}{', in which it took no part' if round_.problem else ''}"
        try:
            self._desk.board.put(f"last/{self._desk.rank.number}", seen.encode())
        except LaststepError as error:
            log.warning("step %d: others may not hear of this rank: %s", round_.step, error)

    def _give_up(self, round_: Round, error: LaststepError, reason: str) -> LaststepError:
        """Tell the others and the flusher that a save is given up; the run says what stands."""
        with contextlib.suppress(LaststepError):
            self.part.warn(round_, reason)
        save = round_.save
        if save is None:
            return error
        if not save.handle.durable.done():
            save.failed(error)
            return error
        # Its flusher finds out whether it is committed after all.
        self._desk.client.send(Decide(save=save.number, reason=reason))
        self._desk.await_flusher(save)
        return error


class CommitThread:
    """The thread in which this rank takes part in the saves of its job."""

    def __init__(self, desk: RoundContext, groups: Groups, comparing: Comparing, bus: Bus) -> None:
        self.rank = desk.rank
        self.agreements = desk.agreements
        self._desk = desk
        self._comparing = comparing
        self._participant = Participant(desk, groups, bus)
        self._entered = self._ended = 0
        """Saves that were entered, by the training thread, and that are over, by the other."""
        self.agreements.known = self._known
        self._step_board: Board | None = None
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="laststep-commit", daemon=True)
        threads.start(self._thread)

    def meet(self, ranks: Ranks) -> None:
        """Have all ranks leave their notes under a name of this start of the job, before the first:
        a launcher may start ranks again with the store that the dead ones have left theirs in."""
        name = ranks.tell(0, os.urandom(_NAME_BYTES)).hex()
        if not ranks.largest(self._entered > 0):
            self._desk.board.under(name)
            self.agreements.board.under(name)

    def notes(self, ranks: Ranks) -> BoardNotes:
        """Bring all ranks together for `step()`: notes by which they save at the same calls."""
        if self._step_board is not None:
            self._step_board.close()
        self._step_board = self.new_board(ranks, "step")
        deadline_s = self._desk.deadline_s
        return BoardNotes(self._step_board, is_first=self.rank.is_first, deadline_s=deadline_s)

    def new_board(self, ranks: Ranks, what: str) -> Board:
        """A board for that, under a name that is used once; all ranks ask for it now."""
        name = ranks.tell(0, os.urandom(_NAME_BYTES)).hex()
        prefix = f"{self.agreements.board.prefix}/{what}/{name}"
        return Board(prefix, ranks=ranks.size, patience_s=self._desk.deadline_s)

    def begin(self, save: SaveUnderWay, prepared: Prepared, taken: TakenState) -> None:
        """Enter a save of all ranks; its chunks may follow."""
        assert prepared.portion is not None  # noqa: S101 (of several ranks each has one)
        agreement = prepared.portion.agreement
        round_ = Round(save.handle.step, save, agreement)
        round_.contained = self._comparing.begin(save.handle, taken, agreement, self.rank.number)
        seal = functools.partial(round_.seal, rank=self.rank.number)
        self._desk.client.begin(save, prepared.plan, taken.sealing(prepared, seal))
        self._enter(round_)

    def stay_out(self, step: int, why: str) -> None:
        """This rank does not take part in a save of that step; the others must hear it."""
        self._enter(Round(step, None, None, problem=why))

    def close(self) -> None:
        """End the thread; called when all saves are over."""
        self._rounds.put(None)
        self._thread.join()
        self._desk.board.close()
        self.agreements.close()
        if self._step_board is not None:
            self._step_board.close()

    def leave(self) -> None:
        """The program ends, whatever is under way."""
        for board in (self._desk.board, self.agreements.board, self._step_board):
            if board is not None:
                board.hush()

    def _enter(self, round_: Round) -> None:
        self._entered += 1
        self._rounds.put(round_)

    def _known(self) -> int | None:
        return self._participant.part.known if self._entered == self._ended else None

    # -- on its thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (round_ := self._next()) is not None:
            try:
                self._participant.go_through(round_)
            except BaseException as error:
                # Nobody else ends this save: whoever waits for it would wait for ever.
                with threads.outlasting(log, "the commit of step %d failed", round_.step):
                    if round_.save is not None:
                        round_.save.failed(StorageFailed("a commit failed", found=repr(error)))
                    raise
            self._ended += 1

    def _next(self) -> Round | None:
        """The next save; None at the end. Meanwhile `look_up` tells ranks that wait in vain."""
        while True:
            try:
                return self._rounds.get(timeout=self._participant.part.rest_s())
            except queue.Empty:
                # They hear when their time is up.
                with (
                    threads.outlasting(log, "the other ranks hear late"),
                    contextlib.suppress(LaststepError),
                ):
                    self._participant.part.look_up()
