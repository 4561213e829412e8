"""The part of all ranks but the first in a save of all: join, write, report, hear how it ended.

The first rank numbers its saves. The others find the one of their step by what it says of the
present one and of those before: of several saves of one step, the first that this rank has not
joined. Where ranks save different steps, the lower one fails at once. A rank that has left a save
out is in step again with the higher one; a step that nobody else saves was wrong, and fails within
a grace of seconds, on whichever rank it is. The first rank of a group also gathers what its group
has written, and leaves one summary of it.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import msgspec

from laststep.commit.agreement import SAME_STEPS, CurrentRound, grace_s
from laststep.commit.round import BEGUN, DECIDED, SUMMARISED, Decision, GivenUp
from laststep.flush.protocol import Decide, Located
from laststep.plan.receipts import Groups, Receipt, summarise

if TYPE_CHECKING:
    from laststep.catalog.lineage import AttemptName
    from laststep.commit.differences import UnequalRanks
    from laststep.commit.round import Round, RoundContext
    from laststep.plan.receipts import Differing

log = logging.getLogger(__name__)

_SEE_FIRST = "it may be stopped, slow or dead: see its log"


class Member:
    """What every rank but the first does in its commit thread."""

    def __init__(self, desk: RoundContext) -> None:
        self._desk = desk
        self._board = desk.board
        self._number = 0
        """The number of the last save that this rank joined."""
        self._refused = 0
        """The number of the last save of which this rank has said that it takes no part."""
        self._passed_by: CurrentRound | None = None
        """The save of a higher step that the first rank led when this rank last saved another."""
        self._passed_with, self._passed_s = 0, 0.0
        """That other step, and when it was."""
        self._until_s = math.inf
        """When this rank gives up a step that the first rank does not save."""
        self._answered = ""
        """The last question that this rank has answered."""
        self._left: list[str] = []
        """Receipts of this rank's group, which nobody needs once it has summed them up."""

    @property
    def known(self) -> int:
        """The number of the first rank's last save that this rank joined, or has refused."""
        return max(self._number, self._refused)

    def take_part(self, round_: Round) -> None:
        """Go through a save that the first rank leads; `GivenUp` where it comes to nothing."""
        place, save = self._join(round_), round_.save
        if save is not None:
            self._listen(round_)  # where it came late
            save.begin()  # the flusher must know of the save before it is told where it is
            self._desk.client.send(Located(save=save.number, at=place))
        mine = self._desk.own_receipt(round_, self._listen)
        me = self._desk.rank.number
        if mine.problem or save is None:
            self._board.put(round_.key("failed"), self._desk.trouble(mine.problem).encode())
            return
        self._board.put(round_.key(f"r/{me}"), msgspec.msgpack.encode(mine))
        if round_.groups is not None and round_.groups.leader_of(me) == me:
            self._speak(round_, round_.groups, mine)
        decision = self._decision(round_)
        if decision.reason:
            raise GivenUp(decision.reason)
        self._desk.client.send(Decide(save=save.number))
        self._desk.await_flusher(save)

    def warn(self, round_: Round, reason: str) -> None:
        """Tell the first rank that this one gives a save up."""
        if round_.number:
            self._board.put(round_.key("failed"), self._desk.by_me(reason))

    def _join(self, round_: Round) -> AttemptName:
        """Find the first rank's save of this step."""

        def look() -> CurrentRound | None:
            now = self._now()
            if now is not None and now.number > self.known:
                self._check_missed(round_, now)
                if now.step == round_.step:
                    return now
                self._part_ways(round_, now)
            elif now is not None and self._board.now_s() >= self._until_s:
                raise GivenUp(_apart(now, round_))
            if round_.problem:
                why = self._desk.trouble(round_.problem)
                self._desk.agreements.refuse(round_.step, self.known, why)
            self._desk.join()
            return None

        self._until_s = math.inf
        now = self._board.until(look, self._desk.until_s(round_, BEGUN))
        if now is None:
            raise self._desk.absent(round_, [self._desk.last_of(0)])
        self._number = round_.number = now.number
        self._passed_by = None
        round_.groups, round_.place = Groups(self._desk.rank.ranks, now.group_size), now.place
        if now.place is None:
            raise GivenUp(now.problem)
        return now.place

    def _part_ways(self, round_: Round, now: CurrentRound) -> None:
        """Handle that the first rank saves another step; `GivenUp` where this one gives way."""
        if now.step > round_.step:
            if self._passed_by is None or self._passed_by.number != now.number:
                # Perhaps it has left this one out, and the next of this rank's is that step.
                self._passed_by, self._passed_with = now, round_.step
                self._passed_s = self._board.now_s()
                raise GivenUp(_apart(now, round_))
            self._refuse(now, round_.step)
        elif self._until_s < math.inf:  # it has gone on, and not to this step
            raise GivenUp(_apart(now, round_))
        elif now.place is None or self._board.look(f"s/{now.number}/decision"):
            self._refused = now.number  # it is over; the first rank may be on its way to this one
        else:
            self._until_s = self._board.now_s() + grace_s(self._desk.deadline_s)
            self._refuse(now, round_.step)

    def rest_s(self) -> float | None:
        """How long to wait for a save before `look_up`; None: for ever."""
        if self._passed_by is None or self._passed_by.number <= self._refused:
            return None
        until_s = self._passed_s + grace_s(self._desk.deadline_s)
        return max(until_s - self._board.now_s(), 0)

    def look_up(self) -> None:
        """Refuse the save of the first rank for which this one had a grace: the grace is over."""
        if self._passed_by is not None:
            self._refuse(self._passed_by, self._passed_with)

    def _refuse(self, now: CurrentRound, step: int) -> None:
        """Tell the first rank, once, that it waits for this one in vain."""
        self._refused, self._passed_by = now.number, None
        reason = f"rank {self._desk.rank.number} saves step {step} and not {now.step}"
        log.warning("step %d: the save of rank 0 fails: %s; %s", now.step, reason, SAME_STEPS)
        self._board.put(f"s/{now.number}/failed", f"{reason}; {SAME_STEPS}".encode())

    def _now(self) -> CurrentRound | None:
        note = self._board.look("now")
        return None if note is None else msgspec.msgpack.decode(note, type=CurrentRound)

    def _check_missed(self, round_: Round, now: CurrentRound) -> None:
        """`GivenUp`, and why, where the first rank has gone on without this one."""
        # One of this step that this rank has refused, or parted from, is none that it has missed.
        parted = 0 if self._passed_by is None else self._passed_by.number
        known = max(self.known, parted)
        for past in now.past:
            if past.step == round_.step and past.number > known:
                self._number = past.number
                late = f"rank {self._desk.rank.number} took no part, and came late"
                raise GivenUp(past.reason or f"{late}; {SAME_STEPS}")

    def _speak(self, round_: Round, groups: Groups, mine: Receipt) -> None:
        """Gather the receipts of this rank's group, and leave one summary."""
        me = self._desk.rank.number
        others = groups.group_of(me)[1:]
        self._left += [round_.key(f"r/{rank}") for rank in groups.group_of(me)]
        names = {f"r/{rank}": rank for rank in others}
        notes = self._desk.gather(
            round_,
            list(names),
            self._desk.until_s(round_, SUMMARISED),
            self._listen,
            missing=lambda late: [self._desk.last_of(names[name]) for name in late],
        )
        decode = msgspec.msgpack.Decoder(Receipt).decode
        receipts = {me: mine} | {rank: decode(notes[name]) for name, rank in names.items()}
        assert round_.agreement is not None  # noqa: S101 (without one there is a problem)
        summary = summarise(receipts, round_.agreement)
        self._board.put(round_.key(f"g/{me}"), msgspec.msgpack.encode(summary))
        left, self._left = self._left, []
        self._board.remove(left)

    def _decision(self, round_: Round) -> Decision:
        def look() -> Decision | None:
            decision = self._heard(round_)
            if decision is None:
                self._desk.join()
            return decision

        decision = self._board.until(look, self._desk.until_s(round_, DECIDED))
        if decision is None:
            why = f"rank 0 did not commit step {round_.step} within {self._desk.deadline_s:g} s"
            raise GivenUp(self._desk.by_me(f"{why}; {_SEE_FIRST}").decode())
        return decision

    def _listen(self, round_: Round) -> None:
        """Raise `GivenUp` if the save is over: then this rank need not go on."""
        decision = self._heard(round_)
        if decision is not None:
            raise GivenUp(decision.reason)

    def _heard(self, round_: Round) -> Decision | None:
        """What became of a save that this rank has joined, as far as anybody has said."""
        if (note := self._board.look(round_.key("decision"))) is not None:
            decision = msgspec.msgpack.decode(note, type=Decision)
            if decision.asks is None:
                return decision
            self._answer(round_, decision.asks)
        now = self._now()
        if now is None or now.number <= round_.number:
            return None
        # This rank slept so long that the notes are gone.
        for past in now.past:
            if past.number == round_.number:
                return Decision(reason=past.reason)
        return Decision(reason=f"rank {self._desk.rank.number} heard nothing of its end in time")

    def _answer(self, round_: Round, asked: Differing | UnequalRanks) -> None:
        """Show what this rank holds, once, if it is one of the ranks that are asked."""
        name = round_.answer_key(asked, self._desk.rank.number)
        if self._desk.rank.number in asked.ranks and self._answered != name:
            self._answered = name
            self._board.put(name, round_.answer_to(asked))


def _apart(now: CurrentRound, round_: Round) -> str:
    return f"rank 0 saves step {now.step} and not {round_.step}; {SAME_STEPS}"
