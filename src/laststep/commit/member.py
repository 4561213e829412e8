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
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.commit.agreement import SAME_STEPS, grace_s
from laststep.commit.receipts import Receipt, summarise
from laststep.commit.round import BEGUN, DECIDED, SUMMARISED, CurrentRound, Decision, GivenUp
from laststep.flush.protocol import Decide, Located
from laststep.plan.groups import Groups

if TYPE_CHECKING:
    from laststep.catalog.names import AttemptName
    from laststep.commit.differences import Differing
    from laststep.commit.receipts import Summary
    from laststep.commit.replicas import UnequalRanks
    from laststep.commit.round import Round, RoundContext

log = logging.getLogger(__name__)

_SEE_FIRST = "it may be stopped, slow or dead: see its log"


class Member:
    """What a rank does that is not the first; on its team's thread."""

    def __init__(self, desk: RoundContext) -> None:
        self._desk = desk
        self._board = desk.board
        self._number = 0
        """Of the last save that this rank joined."""
        self._refused = 0
        """Of the last save that waits for this rank in vain, which it has told."""
        self._passed_by: CurrentRound | None = None
        """The save of a higher step that the first rank led when this rank last saved another."""
        self._passed_with, self._passed_s = 0, 0.0
        """That other step, and when it was."""
        self._until_s = math.inf
        """When a step that the first rank does not save is wrong."""
        self._answered = ""
        """The last question that this rank has answered."""
        self._left: list[str] = []
        """Receipts of this rank's group, which nobody needs once it has summed them up."""

    def take_part(self, one: Round) -> None:
        """Go through a save that the first rank leads; `GivenUp` where it comes to nothing."""
        place, save = self._join(one), one.save
        if save is not None:
            self._listen(one)  # where it came late
            save.begin()  # the flusher must know of the save before it is told where it is
            self._desk.client.send(Located(save=save.number, at=place))
        mine = self._desk.own_receipt(one, self._listen)
        me = self._desk.rank.number
        if mine.problem or save is None:
            self._board.put(one.key("failed"), self._desk.trouble(mine.problem).encode())
            return
        self._board.put(one.key(f"r/{me}"), msgspec.msgpack.encode(mine))
        if one.groups is not None and one.groups.leader_of(me) == me:
            self._speak(one, one.groups, mine)
        decision = self._decision(one)
        if decision.reason:
            raise GivenUp(decision.reason)
        self._desk.client.send(Decide(save=save.number))
        self._desk.await_flusher(save)

    def warn(self, one: Round, reason: str) -> None:
        """This rank gives a save up: tell the first one."""
        if one.number:
            self._board.put(one.key("failed"), self._desk.by_me(reason))

    def _join(self, one: Round) -> AttemptName:
        """Find the first rank's save of this step."""

        def look() -> CurrentRound | None:
            now = self._now()
            if now is not None and now.number > max(self._number, self._refused):
                self._check_missed(one, now)
                if now.step == one.step:
                    return now
                self._part_ways(one, now)
            elif now is not None and time.monotonic() >= self._until_s:
                raise GivenUp(_apart(now, one))
            self._desk.join()
            return None

        self._until_s = math.inf
        now = self._board.until(look, self._desk.until_s(one, BEGUN))
        if now is None:
            raise self._desk.absent(one, [self._desk.last_of(0)])
        self._number = one.number = now.number
        self._passed_by = None
        one.groups, one.place = Groups(self._desk.rank.ranks, now.group_size), now.place
        if now.place is None:
            raise GivenUp(now.problem)
        return now.place

    def _part_ways(self, one: Round, now: CurrentRound) -> None:
        """The first rank saves another step. `GivenUp` where this rank's is wrong, or gives way."""
        if now.step > one.step:
            if self._passed_by is None or self._passed_by.number != now.number:
                # Perhaps it has left this one out, and the next of this rank's is that step.
                self._passed_by, self._passed_with = now, one.step
                self._passed_s = time.monotonic()
                raise GivenUp(_apart(now, one))
            self._refuse(now, one.step)
        elif self._until_s < math.inf:  # it has gone on, and not to this step
            raise GivenUp(_apart(now, one))
        else:
            self._until_s = time.monotonic() + grace_s(self._desk.deadline_s)
            self._refuse(now, one.step)

    def rest_s(self) -> float | None:
        """When to look up where this rank has nothing to save; None: not at all."""
        if self._passed_by is None or self._passed_by.number <= self._refused:
            return None
        until_s = self._passed_s + grace_s(self._desk.deadline_s)
        return max(until_s - time.monotonic(), 0)

    def look_up(self) -> None:
        """The grace is over: the first rank waits in vain for this one to save that step."""
        if self._passed_by is not None:
            self._refuse(self._passed_by, self._passed_with)

    def _refuse(self, now: CurrentRound, step: int) -> None:
        """The first rank waits for this one in vain: tell it, once."""
        self._refused, self._passed_by = now.number, None
        told = f"rank {self._desk.rank.number} saves step {step} and not {now.step}"
        log.warning("step %d: the save of rank 0 fails: %s; %s", now.step, told, SAME_STEPS)
        self._board.put(f"s/{now.number}/failed", f"{told}; {SAME_STEPS}".encode())

    def _now(self) -> CurrentRound | None:
        note = self._board.look("now")
        return None if note is None else msgspec.msgpack.decode(note, type=CurrentRound)

    def _check_missed(self, one: Round, now: CurrentRound) -> None:
        """`GivenUp`, and why, where the first rank has gone on without this one."""
        # One of this step that this rank has refused, or parted from, is none that it has missed.
        parted = 0 if self._passed_by is None else self._passed_by.number
        known = max(self._number, self._refused, parted)
        for past in now.past:
            if past.step == one.step and past.number > known:
                self._number = past.number
                late = f"rank {self._desk.rank.number} took no part, and came late"
                raise GivenUp(past.reason or f"{late}; {SAME_STEPS}")

    def _speak(self, one: Round, groups: Groups, mine: Receipt) -> None:
        """Gather the receipts of this rank's group, and leave one summary."""
        me = self._desk.rank.number
        others = groups.group_of(me)[1:]
        self._left += [one.key(f"r/{rank}") for rank in groups.group_of(me)]
        names = {f"r/{rank}": rank for rank in others}
        notes = self._desk.gather(
            one, list(names), self._desk.until_s(one, SUMMARISED), self._listen,
            missing=lambda late: [self._desk.last_of(names[name]) for name in late],
        )  # fmt: skip
        decode = msgspec.msgpack.Decoder(Receipt).decode
        receipts = {me: mine} | {rank: decode(notes[name]) for name, rank in names.items()}
        summary = self._summary(one, receipts)
        self._board.put(one.key(f"g/{me}"), msgspec.msgpack.encode(summary))
        left, self._left = self._left, []
        self._board.remove(left)

    def _summary(self, one: Round, receipts: dict[int, Receipt]) -> Summary:
        assert one.agreement is not None  # noqa: S101 (without one there is a problem)
        summary = summarise(receipts, one.agreement)
        if summary.differing is not None:  # the first rank asks how, and gives the save up
            return summary
        return msgspec.structs.replace(summary, group=self._desk.write_group(one, receipts))

    def _decision(self, one: Round) -> Decision:
        def look() -> Decision | None:
            told = self._told(one)
            if told is None:
                self._desk.join()
            return told

        told = self._board.until(look, self._desk.until_s(one, DECIDED))
        if told is None:
            why = f"rank 0 did not commit step {one.step} within {self._desk.deadline_s:g} s"
            raise GivenUp(self._desk.by_me(f"{why}; {_SEE_FIRST}").decode())
        return told

    def _listen(self, one: Round) -> None:
        """Has the save been given up, so that this rank need not go on?"""
        told = self._told(one)
        if told is not None:
            raise GivenUp(told.reason)

    def _told(self, one: Round) -> Decision | None:
        """What became of a save that this rank has joined, as far as anybody has said."""
        if (note := self._board.look(one.key("decision"))) is not None:
            told = msgspec.msgpack.decode(note, type=Decision)
            if told.asks is None:
                return told
            self._answer(one, told.asks)
        now = self._now()
        if now is None or now.number <= one.number:
            return None
        # This rank slept so long that the notes are gone.
        for past in now.past:
            if past.number == one.number:
                return Decision(reason=past.reason)
        return Decision(reason=f"rank {self._desk.rank.number} heard nothing of its end in time")

    def _answer(self, one: Round, asked: Differing | UnequalRanks) -> None:
        """Show what differs from another rank's, once, if that is this one's."""
        name = one.answer_key(asked, self._desk.rank.number)
        if self._desk.rank.number in asked.ranks and self._answered != name:
            self._answered = name
            self._board.put(name, one.answer_to(asked))


def _apart(now: CurrentRound, one: Round) -> str:
    return f"rank 0 saves step {now.step} and not {one.step}; {SAME_STEPS}"
