"""This rank's part in committing the saves of a job: one thread, save by save, beside training.

Every rank makes its files durable and reports; the first rank decides (`leader`), the others hear
of it (`member`). Whatever happens, the save is committed whole or absent, every rank that lives
hears in time, and why, and the handle of every save comes to an end here.

Before the first save, the ranks give the notes of their job a name of their own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
from collections import Counter
from typing import TYPE_CHECKING

from laststep.codecs.digests import digest
from laststep.commit.agreement import Agreements
from laststep.commit.differences import Comparing
from laststep.commit.leader import Leader
from laststep.commit.member import Member
from laststep.commit.round import GivenUp, Round, RoundContext
from laststep.errors import AbortedError, LaststepError, StorageError
from laststep.flush.protocol import Decide
from laststep.plan.receipts import cut
from laststep.process import threads
from laststep.ranks.board import Board
from laststep.ranks.group import Alone, RankGroup
from laststep.ranks.rank import ranks_per_node
from laststep.saving.describe import refuse_mixed
from laststep.saving.schedule import BoardNotes
from laststep.settings import WAIT_FOR_OTHERS_S
from laststep.state.values import PerRank
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.events import Bus
    from laststep.flush.client import Client
    from laststep.flush.saves import SaveUnderWay
    from laststep.plan.receipts import Groups
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.saving.describe import TakenState
    from laststep.saving.prepare import Prepared
    from laststep.settings import Settings
    from laststep.state.provider import StateProvider


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
            return self._give_up(round_, AbortedError(str(over)), str(over))
        except LaststepError as error:
            return self._give_up(round_, error, self._desk.trouble(error.without_remedy()))
        except Exception as error:
            log.exception("the commit of step %d failed", round_.step)
            failed = StorageError("a commit failed", found=repr(error))
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
                        round_.save.failed(StorageError("a commit failed", found=repr(error)))
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


_made: Counter[str] = Counter()


def check_own(providers: Mapping[str, StateProvider], rank: Rank) -> None:
    """Of several ranks, refuse groups that are each rank's own in part. The log tells of items that
    are taken for each rank's own though nobody said so."""
    for name, provider in providers.items() if rank.ranks > 1 else ():
        refuse_mixed(name, mixed=getattr(provider, "mixed", False))
        if provider.per_rank and provider.parts() and not isinstance(provider, PerRank):
            log.info(
                "%s is taken for each rank's own: it reads data (it has __iter__ or a dataset); "
                "laststep.PerRank(%s, …) says what becomes of it when the number of ranks changes",
                name,
                name,
            )


def all_ranks(rank: Rank, settings: Settings, team: CommitThread | None, call: str) -> Ranks:
    """The ranks that restore together; with a team, those that save together too. All make that
    `call` now."""
    if team is None:
        return Alone(rank)
    # The first rank may wait for a save that another process has not finished.
    name = team.agreements.board.prefix
    deadline_s = settings.deadline_s + WAIT_FOR_OTHERS_S
    group = RankGroup(rank, name, deadline_s=deadline_s, call=call)
    team.meet(group)
    return group


def gather(rank: Rank, run: str, client: Client, settings: Settings, bus: Bus) -> CommitThread:
    """Start this rank's commit thread, through which it saves together with the others."""
    _made[run] += 1
    prefix = f"laststep/{digest(run.encode()).hex()}/{_made[run]}"
    # A connection for each thread that asks: the training thread's must not wait for the other's.
    deadline_s = settings.deadline_s
    boards = [Board(prefix, ranks=rank.ranks, patience_s=deadline_s) for _ in range(2)]
    agreements = Agreements(rank, boards[0], deadline_s=deadline_s)
    store = open_store(run)
    desk = RoundContext(rank, boards[1], client, agreements, store, deadline_s=deadline_s)
    comparing = Comparing(settings.compare_replicas)
    return CommitThread(desk, cut(rank.ranks, ranks_per_node()), comparing, bus)


def board_to_stop(team: CommitThread | None, ranks: Ranks) -> Board:
    """The notes by which several ranks agree on the step at which they stop."""
    assert team is not None  # noqa: S101 (of several ranks)
    return team.new_board(ranks, "stop")
