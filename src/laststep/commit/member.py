"""The side of every rank but rank 0 in a save: join, write, report, wait for the decision.

Rank 0 numbers its saves and publishes the current one with its latest predecessors. A member finds
the save of its own step there; if several saves have that step, it takes the first that it has not
joined. If ranks save different steps, the save of the lower step fails at once: a rank that skipped
a save is back in sync at the higher step. A step that no other rank saves is an error and fails
after a grace period of seconds, whichever rank made it. The leader of a group also collects the
receipts of its group and publishes one summary.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import msgspec

from laststep.commit.layouts import SAME_STEPS, CurrentRound, grace_s
from laststep.commit.round import BEGUN, DECIDED, SUMMARISED, Decision, GivenUp
from laststep.flush.protocol import Begun, Decide
from laststep.plan.receipts import Groups, Receipt, summarise

if TYPE_CHECKING:
    from laststep.catalog.lineage import AttemptName
    from laststep.commit.differences import UnequalRanks
    from laststep.commit.round import Round, RoundContext
    from laststep.plan.receipts import Differing

log = logging.getLogger(__name__)

_SEE_FIRST = "it may be stopped, slow or dead: check its log"


class Member:
    """A rank other than rank 0 in the commit of saves, on the commit thread."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._kv = context.kv
        self._number = 0
        """The number of the last save that this rank joined."""
        self._refused = 0
        """The number of the last save that this rank refused."""
        self._passed_by: CurrentRound | None = None
        """The save of a higher step that rank 0 led when this rank last saved another step."""
        self._passed_with, self._passed_s = 0, 0.0
        """The step of this rank's save at that moment, and its time (monotonic)."""
        self._until_s = math.inf
        """Deadline (monotonic) after which this rank abandons a step that rank 0 does not save."""
        self._answered = ""
        """The key of this rank's last answer to a question of rank 0."""
        self._left: list[str] = []
        """Keys of receipts of this rank's group, removed once the summary is published."""

    @property
    def known(self) -> int:
        """The number of rank 0's last save that this rank joined or refused."""
        return max(self._number, self._refused)

    def take_part(self, round_: Round) -> None:
        """Take part in a save that rank 0 leads; raise `GivenUp` if it is aborted."""
        place, save = self._join(round_), round_.save
        if save is not None:
            self._listen(round_)  # this rank may be late: the save may be decided
            save.begin()  # the flusher must know the save before it gets its attempt
            self._context.client.send(Begun(save=save.number, at=place))
        mine = self._context.own_receipt(round_, self._listen)
        me = self._context.rank.number
        if mine.problem or save is None:
            self._kv.put(round_.key("failed"), self._context.trouble(mine.problem).encode())
            return
        self._kv.put(round_.key(f"r/{me}"), msgspec.msgpack.encode(mine))
        if round_.groups is not None and round_.groups.leader_of(me) == me:
            self._announce(round_, round_.groups, mine)
        decision = self._decision(round_)
        if decision.reason:
            raise GivenUp(decision.reason)
        self._context.client.send(Decide(save=save.number))
        self._context.await_flusher(save)

    def warn(self, round_: Round, reason: str) -> None:
        """Notify rank 0 that this rank aborts a save."""
        if round_.number:
            self._kv.put(round_.key("failed"), self._context.by_me(reason))

    def _join(self, round_: Round) -> AttemptName:
        """Wait for rank 0's save of this step and return its attempt; raise `GivenUp` if there will
        be none."""

        def look() -> CurrentRound | None:
            now = self._now()
            if now is not None and now.number > self.known:
                self._check_missed(round_, now)
                if now.step == round_.step:
                    return now
                self._part_ways(round_, now)
            elif now is not None and self._kv.now_s() >= self._until_s:
                raise GivenUp(_apart(now, round_))
            if round_.problem:
                why = self._context.trouble(round_.problem)
                self._context.global_layouts.refuse(round_.step, self.known, why)
            self._context.join()
            return None

        self._until_s = math.inf
        now = self._kv.until(look, self._context.until_s(round_, BEGUN))
        if now is None:
            raise self._context.absent(round_, [self._context.last_of(0)])
        self._number = round_.number = now.number
        self._passed_by = None
        round_.groups, round_.place = Groups(self._context.rank.ranks, now.group_size), now.place
        if now.place is None:
            raise GivenUp(now.problem)
        return now.place

    def _part_ways(self, round_: Round, now: CurrentRound) -> None:
        """Handle a save of another step by rank 0; raise `GivenUp` if this rank's save has to
        fail."""
        if now.step > round_.step:
            if self._passed_by is None or self._passed_by.number != now.number:
                # Rank 0 may have skipped this step; this rank's next save may then match.
                self._passed_by, self._passed_with = now, round_.step
                self._passed_s = self._kv.now_s()
                raise GivenUp(_apart(now, round_))
            self._refuse(now, round_.step)
        elif self._until_s < math.inf:  # rank 0 has moved on to yet another step
            raise GivenUp(_apart(now, round_))
        elif now.place is None or self._kv.look(f"s/{now.number}/decision"):
            self._refused = now.number  # it is over; rank 0 may reach this step next
        else:
            self._until_s = self._kv.now_s() + grace_s(self._context.deadline_s)
            self._refuse(now, round_.step)

    def rest_s(self) -> float | None:
        """Return how long to wait for a save before calling `look_up`; None means without limit."""
        if self._passed_by is None or self._passed_by.number <= self._refused:
            return None
        until_s = self._passed_s + grace_s(self._context.deadline_s)
        return max(until_s - self._kv.now_s(), 0)

    def look_up(self) -> None:
        """Refuse rank 0's save of a higher step, because this rank did not reach it within the
        grace period."""
        if self._passed_by is not None:
            self._refuse(self._passed_by, self._passed_with)

    def _refuse(self, now: CurrentRound, step: int) -> None:
        """Notify rank 0, once, that this rank will not take part in its save."""
        self._refused, self._passed_by = now.number, None
        reason = f"rank {self._context.rank.number} saves step {step} and not {now.step}"
        log.warning("step %d: the save of rank 0 fails: %s; %s", now.step, reason, SAME_STEPS)
        self._kv.put(f"s/{now.number}/failed", f"{reason}; {SAME_STEPS}".encode())

    def _now(self) -> CurrentRound | None:
        note = self._kv.look("now")
        return None if note is None else msgspec.msgpack.decode(note, type=CurrentRound)

    def _check_missed(self, round_: Round, now: CurrentRound) -> None:
        """Raise `GivenUp` with the reason if rank 0 has finished this save without this rank."""
        # A save that this rank has refused or given way to does not count as missed.
        parted = 0 if self._passed_by is None else self._passed_by.number
        known = max(self.known, parted)
        for past in now.past:
            if past.step == round_.step and past.number > known:
                self._number = past.number
                late = f"rank {self._context.rank.number} did not take part and was late"
                raise GivenUp(past.reason or f"{late}; {SAME_STEPS}")

    def _announce(self, round_: Round, groups: Groups, mine: Receipt) -> None:
        """Collect the receipts of this rank's group and publish one summary."""
        me = self._context.rank.number
        others = groups.group_of(me)[1:]
        self._left += [round_.key(f"r/{rank}") for rank in groups.group_of(me)]
        names = {f"r/{rank}": rank for rank in others}
        notes = self._context.gather(
            round_,
            list(names),
            self._context.until_s(round_, SUMMARISED),
            self._listen,
            missing=lambda late: [self._context.last_of(names[name]) for name in late],
        )
        decode = msgspec.msgpack.Decoder(Receipt).decode
        receipts = {me: mine} | {rank: decode(notes[name]) for name, rank in names.items()}
        assert round_.global_layout is not None  # noqa: S101 (without one there is a problem)
        summary = summarise(receipts, round_.global_layout)
        self._kv.put(round_.key(f"g/{me}"), msgspec.msgpack.encode(summary))
        left, self._left = self._left, []
        self._kv.remove(left)

    def _decision(self, round_: Round) -> Decision:
        def look() -> Decision | None:
            decision = self._heard(round_)
            if decision is None:
                self._context.join()
            return decision

        decision = self._kv.until(look, self._context.until_s(round_, DECIDED))
        if decision is None:
            why = f"rank 0 did not commit step {round_.step} within {self._context.deadline_s:g} s"
            raise GivenUp(self._context.by_me(f"{why}; {_SEE_FIRST}").decode())
        return decision

    def _listen(self, round_: Round) -> None:
        """Raise `GivenUp` if the save is already decided."""
        decision = self._heard(round_)
        if decision is not None:
            raise GivenUp(decision.reason)

    def _heard(self, round_: Round) -> Decision | None:
        """Return the outcome of a save that this rank has joined, or None if it is not published.
        Answers a pending question of rank 0."""
        if (note := self._kv.look(round_.key("decision"))) is not None:
            decision = msgspec.msgpack.decode(note, type=Decision)
            if decision.asks is None:
                return decision
            self._answer(round_, decision.asks)
        now = self._now()
        if now is None or now.number <= round_.number:
            return None
        # This rank stalled so long that the keys have been removed.
        for past in now.past:
            if past.number == round_.number:
                return Decision(reason=past.reason)
        return Decision(reason=f"rank {self._context.rank.number} was not told its outcome in time")

    def _answer(self, round_: Round, asked: Differing | UnequalRanks) -> None:
        """Publish the requested values or digests, once, if this rank is among those asked."""
        name = round_.answer_key(asked, self._context.rank.number)
        if self._context.rank.number in asked.ranks and self._answered != name:
            self._answered = name
            self._kv.put(name, round_.answer_to(asked))


def _apart(now: CurrentRound, round_: Round) -> str:
    return f"rank 0 saves step {now.step} and not {round_.step}; {SAME_STEPS}"
