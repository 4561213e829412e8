"""The first rank's part in a save of all ranks: say where, gather, decide, and tell everybody.

What decides is a name in the run that can be created only once: the first rank's flusher commits
under it, and a rank that loses the first one gives the save up under it, or finds that it was
committed. So it is committed whole or absent, whoever dies or sleeps meanwhile. The first rank also
speaks for its own group.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from laststep.commit.agreement import margin_s
from laststep.commit.differences import Differing, Values, describe
from laststep.commit.receipts import (
    Receipt,
    Summary,
    classes_of,
    items_of,
    objection_to,
    summarise,
)
from laststep.commit.replicas import gone_apart, incomparable, seen_by, unequal
from laststep.commit.round import COMMITTED, GATHERED, CurrentRound, Decision, EndedRound, GivenUp
from laststep.errors import Aborted, LaststepError
from laststep.flush.protocol import Decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.names import AttemptName
    from laststep.commit.replicas import UnequalRanks
    from laststep.commit.round import Round, RoundContext
    from laststep.events import Bus
    from laststep.flush.saves import SaveUnderWay
    from laststep.format.manifest import ClassRecord
    from laststep.plan.groups import Groups
    from laststep.plan.tables import Agreement

log = logging.getLogger(__name__)

_PAST = 16
_STUCK = "it may be stopped, or its disk may be; the next save tries again"


class Leader:
    """What the first rank does; on its team's thread. It numbers the saves."""

    def __init__(self, desk: RoundContext, groups: Groups, bus: Bus) -> None:
        self._desk = desk
        self._bus = bus
        self._board = desk.board
        self._groups = groups
        self._number = time.time_ns() // 1_000_000
        """Of the last save that this rank led. It begins with the time: a launcher may start ranks
        again in the store of those that died, whose notes have lower numbers."""
        self._past: deque[EndedRound] = deque(maxlen=_PAST)
        self._told_incomparable = False
        self._before: list[str] = []
        """Notes of the save before, which nobody needs any more when the next is decided."""
        self._classes: tuple[Agreement | None, tuple[ClassRecord, ...]] = (None, ())

    def take_part(self, one: Round) -> None:
        """Lead a save to its end."""
        one.groups = self._groups
        one.place = self._begun(one)
        self._number += 1
        one.number = self._number
        if one.place is None or one.save is None or one.agreement is None:
            reason = self._desk.trouble(self._desk.own_receipt(one, self._listen).problem)
            self._post(one, problem=reason)
            self._past.append(EndedRound(number=one.number, step=one.step, reason=reason))
            return
        self._post(one)
        mine = self._desk.own_receipt(one, self._listen)
        if mine.problem:
            self._tell(one, self._desk.trouble(mine.problem))
            return
        receipts, summaries = self._gathered(one, mine)
        summaries = [summarise(receipts, one.agreement), *summaries]
        objection = objection_to(summaries, one.agreement)
        reason = self._difference(one, objection) if isinstance(objection, Differing) else objection
        if reason:
            self._desk.client.send(Decide(save=one.save.number, reason=reason))
        else:
            self._tell_of_replicas(one, one.agreement, summaries)
            self._decide(one, one.save, receipts, summaries)
        self._desk.await_flusher(one.save, self._desk.until_s(one, COMMITTED))
        error = self._desk.settle(one, one.save.lost or self._late(one, reason))
        if error is not None and not reason:
            reason = self._desk.trouble(error.without_remedy())
        with contextlib.suppress(LaststepError):  # the others find out, in the run
            self._tell(one, reason)

    def rest_s(self) -> float | None:
        """The first rank has nothing to look up to while it has nothing to save."""
        return None

    def look_up(self) -> None:
        """Nothing, as above."""

    def warn(self, one: Round, reason: str) -> None:
        """This rank gives a save up: tell everybody."""
        self._tell(one, reason)

    def _listen(self, one: Round) -> None:
        """Has another rank failed, so that this one need not go on?"""
        note = self._board.look(one.key("failed"))
        if note is not None:
            raise GivenUp(note.decode())

    def _begun(self, one: Round) -> AttemptName | None:
        """Where this rank's flusher has begun; None where there is nothing to begin."""
        save = one.save
        if save is None:
            return None

        def look() -> bool | None:
            return True if save.at is not None or save.handle.committed.over() else None

        deadline_s = self._desk.deadline_s
        until_s = one.began_s + deadline_s + margin_s(deadline_s)
        if self._board.until(look, until_s, rest=save.rest) is None:
            raise Aborted(f"the flusher began nothing within {deadline_s:g} s", remedy=_STUCK)
        one.own_s = time.monotonic() - one.began_s
        return save.at

    def _post(self, one: Round, *, problem: str = "") -> None:
        now = CurrentRound(
            number=one.number, step=one.step, place=None if problem else one.place,
            problem=problem, past=tuple(self._past), group_size=self._groups.size,
        )  # fmt: skip
        self._board.put("now", msgspec.msgpack.encode(now))

    def _gathered(self, one: Round, mine: Receipt) -> tuple[dict[int, Receipt], list[Summary]]:
        """The receipts of this rank's group, and the summaries of all others."""
        own = self._groups.group_of(0)[1:]
        leaders = self._groups.leaders[1:]
        names = [*(f"r/{rank}" for rank in own), *(f"g/{leader}" for leader in leaders)]
        until_s = self._desk.until_s(one, GATHERED if leaders else 0.0)
        notes = self._desk.gather(
            one, names, until_s, self._listen, missing=lambda late: self._missing(one, late)
        )
        receipts = {0: mine}
        for rank in own:
            receipts[rank] = msgspec.msgpack.decode(notes[f"r/{rank}"], type=Receipt)
        decode = msgspec.msgpack.Decoder(Summary).decode
        return receipts, [decode(notes[f"g/{leader}"]) for leader in leaders]

    def _missing(self, one: Round, late: Sequence[str]) -> list[str]:
        """Who has left nothing. Where the first rank of a group has not spoken, that is a rank of
        its group that it waits for, or itself."""
        found = []
        for name in late:
            kind, _, number = name.partition("/")
            if kind == "r":
                found.append(self._desk.last_of(int(number)))
                continue
            group = self._groups.group_of(int(number))
            there = self._board.look_all(one.key(f"r/{rank}") for rank in group)
            silent = [rank for rank in group if one.key(f"r/{rank}") not in there]
            found += map(self._desk.last_of, silent)
            if not silent:
                whose = f"which speaks for ranks {group[0]} to {group[-1]}"
                found.append(f"{self._desk.last_of(group[0])}, {whose},")
        return found

    def _decide(
        self, one: Round, save: SaveUnderWay, receipts: dict[int, Receipt], summaries: list[Summary]
    ) -> None:
        """Have it committed."""
        agreement = one.agreement
        assert agreement is not None  # noqa: S101 (without one there is a problem)
        if self._classes[0] is not agreement:
            self._classes = (agreement, classes_of(agreement))
        groups = [summary.group for summary in summaries[1:] if summary.group is not None]
        if groups:
            groups.insert(0, self._desk.write_group(one, receipts))
        files = (
            () if groups else tuple(f for rank in sorted(receipts) for f in receipts[rank].files)
        )
        self._desk.client.send(
            Decide(save=save.number, items=items_of(summaries, agreement), files=files,
                   groups=tuple(groups), classes=self._classes[1], ranks=self._groups.ranks)
        )  # fmt: skip

    def _difference(self, one: Round, differing: Differing) -> str:
        """Why that is no state to commit. The two ranks are asked what they have, which nobody is
        while all agree."""
        shown = self._ask(one, differing)
        decode = msgspec.msgpack.Decoder(Values).decode
        return describe(differing, {rank: decode(note) for rank, note in shown.items()})

    def _tell_of_replicas(self, one: Round, agreement: Agreement, summaries: list[Summary]) -> None:
        """Say which replicas are not equal that should be; what is stored is one rank's."""
        seen = seen_by(summary.replicas for summary in summaries)
        for differs in unequal(seen, agreement):
            shown = self._ask(one, differs)
            self._bus.emit(gone_apart(one.step, differs, shown, agreement))
        if (ranks := incomparable(seen)) is not None and not self._told_incomparable:
            self._told_incomparable = True
            log.warning("replicas of ranks %d and %d are not compared: some are on a device here "
                        "and on the host there", *ranks)  # fmt: skip

    def _ask(self, one: Round, asked: Differing | UnequalRanks) -> dict[int, bytes]:
        """What ranks answer that differ, by rank; those who do so in time."""
        self._board.put(one.key("decision"), msgspec.msgpack.encode(Decision(asks=asked)))
        names = {one.answer_key(asked, rank): rank for rank in asked.ranks if rank != 0}
        # They have reported just now: one that has died since is not waited for as long as others.
        soon_s = time.monotonic() + margin_s(self._desk.deadline_s)
        until_s = min(soon_s, self._desk.until_s(one, COMMITTED))
        notes = self._board.wait_all(names, until_s)
        shown = {names[name]: note for name, note in notes.items()}
        self._board.remove(names)
        return shown | ({0: one.answer_to(asked)} if 0 in asked.ranks else {})

    def _late(self, one: Round, reason: str) -> Aborted:
        """What to report if the flusher has said nothing by now."""
        if reason:
            return Aborted(reason)
        late = f"did not commit step {one.step} within {self._desk.deadline_s:g} s"
        return Aborted(f"the flusher of rank 0 {late}", remedy=_STUCK)

    def _tell(self, one: Round, reason: str) -> None:
        if not one.number:  # it was never led; the others give it up by themselves, or hear now
            self._number += 1
            one.number = self._number
            self._post(one, problem=reason)
        self._past.append(EndedRound(number=one.number, step=one.step, reason=reason))
        self._board.put(one.key("decision"), msgspec.msgpack.encode(Decision(reason=reason)))
        self._board.remove(self._before)
        names = ["decision", "failed"]
        names += [f"r/{rank}" for rank in self._groups.group_of(0)[1:]]
        names += [f"g/{leader}" for leader in self._groups.leaders[1:]]
        self._before = [one.key(name) for name in names]
