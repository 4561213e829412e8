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

from laststep.commit.agreement import CurrentRound, EndedRound, margin_s
from laststep.commit.differences import Values, describe, gone_apart, incomparable, unequal
from laststep.commit.round import COMMITTED, GATHERED, Decision, GivenUp
from laststep.errors import AbortedError, LaststepError
from laststep.flush.protocol import Decide
from laststep.format.manifest import WrittenIndexes
from laststep.plan.receipts import (
    Differing,
    Receipt,
    Summary,
    classes_of,
    items_of,
    objection_to,
    seen_by,
    summarise,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.lineage import AttemptName
    from laststep.commit.differences import UnequalRanks
    from laststep.commit.round import Round, RoundContext
    from laststep.events import Bus
    from laststep.flush.saves import SaveUnderWay
    from laststep.format.manifest import ClassRecord
    from laststep.plan.receipts import Groups
    from laststep.plan.tables import Agreement

log = logging.getLogger(__name__)

_PAST = 16
_STUCK = "it may be stopped, or its disk may be; the next save tries again"


class Leader:
    """What the first rank does in its commit thread. It numbers the saves."""

    def __init__(self, desk: RoundContext, groups: Groups, bus: Bus) -> None:
        self._desk = desk
        self._bus = bus
        self._board = desk.board
        self._groups = groups
        self._number = time.time_ns() // 1_000_000
        """Of the last save that this rank led. It begins with the time: a launcher may start ranks
        again in the store of those that died, whose notes have lower numbers."""
        self.known = 0
        """The same; 0 where it has led none."""
        self._posted = 0
        """The last save that the others could hear of."""
        self._past: deque[EndedRound] = deque(maxlen=_PAST)
        self._told_incomparable = False
        self._before: list[str] = []
        """Notes of the save before, which nobody needs any more when the next is decided."""
        self._classes: tuple[Agreement | None, tuple[ClassRecord, ...]] = (None, ())

    def take_part(self, round_: Round) -> None:
        """Lead a save to its end."""
        round_.groups = self._groups
        round_.place = self._begun(round_)
        round_.number = self._next_number()
        if round_.place is None or round_.save is None or round_.agreement is None:
            reason = self._desk.trouble(self._desk.own_receipt(round_, self._listen).problem)
            self._post(round_, problem=reason)
            self._past.append(EndedRound(number=round_.number, step=round_.step, reason=reason))
            return
        self._post(round_)
        mine = self._desk.own_receipt(round_, self._listen)
        if mine.problem:
            self._tell(round_, self._desk.trouble(mine.problem))
            return
        receipts, summaries = self._gathered(round_, mine)
        summaries = [summarise(receipts, round_.agreement), *summaries]
        objection = objection_to(summaries, round_.agreement)
        reason = (
            self._difference(round_, objection) if isinstance(objection, Differing) else objection
        )
        if reason:
            self._desk.client.send(Decide(save=round_.save.number, reason=reason))
        else:
            self._tell_of_replicas(round_, round_.agreement, summaries)
            self._decide(round_, round_.save, summaries)
        self._desk.await_flusher(round_.save, self._desk.until_s(round_, COMMITTED))
        error = self._desk.settle(round_, round_.save.lost or self._late(round_, reason))
        if error is not None and not reason:
            reason = self._desk.trouble(error.without_remedy())
        with contextlib.suppress(LaststepError):  # the others find out, in the run
            self._tell(round_, reason)

    def _next_number(self) -> int:
        self._number += 1
        self.known = self._number
        return self._number

    def rest_s(self) -> float | None:
        """None: the first rank rests until it has something to save, since no other leads one."""
        return None

    def look_up(self) -> None:
        """Do nothing: see `rest_s`."""

    def warn(self, round_: Round, reason: str) -> None:
        """Tell everybody that this rank gives a save up."""
        self._tell(round_, reason)

    def _listen(self, round_: Round) -> None:
        """Raise `GivenUp` if another rank has failed: then this one need not go on."""
        note = self._board.look(round_.key("failed"))
        if note is not None:
            raise GivenUp(note.decode())

    def _begun(self, round_: Round) -> AttemptName | None:
        """Wait until this rank's flusher has begun, and return where; None where it has not."""
        save = round_.save
        if save is None:
            return None

        def look() -> bool | None:
            return True if save.at is not None or save.handle.committed.over() else None

        deadline_s = self._desk.deadline_s
        until_s = round_.began_s + deadline_s + margin_s(deadline_s)
        if self._board.until(look, until_s, rest=save.rest) is None:
            raise AbortedError(f"the flusher began nothing within {deadline_s:g} s", remedy=_STUCK)
        round_.own_s = self._board.now_s() - round_.began_s
        return save.at

    def _post(self, round_: Round, *, problem: str = "") -> None:
        now = CurrentRound(
            number=round_.number,
            step=round_.step,
            place=None if problem else round_.place,
            problem=problem,
            past=tuple(self._past),
            group_size=self._groups.size,
        )
        self._board.put("now", msgspec.msgpack.encode(now))
        self._posted = round_.number

    def _gathered(self, round_: Round, mine: Receipt) -> tuple[dict[int, Receipt], list[Summary]]:
        """The receipts of this rank's group, and the summaries of all others."""
        own = self._groups.group_of(0)[1:]
        leaders = self._groups.leaders[1:]
        names = [*(f"r/{rank}" for rank in own), *(f"g/{leader}" for leader in leaders)]
        until_s = self._desk.until_s(round_, GATHERED if leaders else 0.0)
        notes = self._desk.gather(
            round_, names, until_s, self._listen, missing=lambda late: self._missing(round_, late)
        )
        receipts = {0: mine}
        for rank in own:
            receipts[rank] = msgspec.msgpack.decode(notes[f"r/{rank}"], type=Receipt)
        decode = msgspec.msgpack.Decoder(Summary).decode
        return receipts, [decode(notes[f"g/{leader}"]) for leader in leaders]

    def _missing(self, round_: Round, late: Sequence[str]) -> list[str]:
        """The ranks that have left no note, in words. Where the summary of a group is missing, that
        is the ranks for which its first one waits, or that first one itself."""
        missing = []
        for name in late:
            kind, _, number = name.partition("/")
            if kind == "r":
                missing.append(self._desk.last_of(int(number)))
                continue
            group = self._groups.group_of(int(number))
            there = self._board.look_all(round_.key(f"r/{rank}") for rank in group)
            silent = [rank for rank in group if round_.key(f"r/{rank}") not in there]
            missing += map(self._desk.last_of, silent)
            if not silent:
                whose = f"which speaks for ranks {group[0]} to {group[-1]}"
                missing.append(f"{self._desk.last_of(group[0])}, {whose},")
        return missing

    def _decide(self, round_: Round, save: SaveUnderWay, summaries: list[Summary]) -> None:
        """Have the flusher commit the save."""
        agreement = round_.agreement
        assert agreement is not None  # noqa: S101 (without one there is a problem)
        if self._classes[0] is not agreement:
            self._classes = (agreement, classes_of(agreement))
        written = WrittenIndexes()
        for summary in summaries:
            written = written.plus(summary.written)
        self._desk.client.send(
            Decide(
                save=save.number,
                items=items_of(summaries, agreement),
                written=written,
                classes=self._classes[1],
                ranks=self._groups.ranks,
            )
        )

    def _difference(self, round_: Round, differing: Differing) -> str:
        """Why a state in which two ranks differ is not committed, in words. Only now are these two
        asked for their values."""
        shown = self._ask(round_, differing)
        decode = msgspec.msgpack.Decoder(Values).decode
        return describe(differing, {rank: decode(note) for rank, note in shown.items()})

    def _tell_of_replicas(
        self, round_: Round, agreement: Agreement, summaries: list[Summary]
    ) -> None:
        """Say which replicas are not equal that should be; what is stored is one rank's."""
        seen = seen_by(summary.replicas for summary in summaries)
        for differs in unequal(seen, agreement):
            shown = self._ask(round_, differs)
            self._bus.emit(gone_apart(round_.step, differs, shown, agreement))
        if (ranks := incomparable(seen)) is not None and not self._told_incomparable:
            self._told_incomparable = True
            log.warning(
                "replicas of ranks %d and %d are not compared: some are on a device here "
                "and on the host there",
                *ranks,
            )

    def _ask(self, round_: Round, asked: Differing | UnequalRanks) -> dict[int, bytes]:
        """Ask the ranks that differ for what they hold; returns by rank what came in time."""
        self._board.put(round_.key("decision"), msgspec.msgpack.encode(Decision(asks=asked)))
        names = {round_.answer_key(asked, rank): rank for rank in asked.ranks if rank != 0}
        # They have reported just now: one that has died since is not waited for as long as others.
        soon_s = self._board.now_s() + margin_s(self._desk.deadline_s)
        until_s = min(soon_s, self._desk.until_s(round_, COMMITTED))
        notes = self._board.wait_all(names, until_s)
        shown = {names[name]: note for name, note in notes.items()}
        self._board.remove(names)
        return shown | ({0: round_.answer_to(asked)} if 0 in asked.ranks else {})

    def _late(self, round_: Round, reason: str) -> AbortedError:
        """What to report if the flusher has said nothing by now."""
        if reason:
            return AbortedError(reason)
        late = f"did not commit step {round_.step} within {self._desk.deadline_s:g} s"
        return AbortedError(f"the flusher of rank 0 {late}", remedy=_STUCK)

    def _tell(self, round_: Round, reason: str) -> None:
        if not round_.number or self._posted != round_.number:
            # It was never led, or nobody heard that it is: the others do now, and how it ended.
            round_.number = round_.number or self._next_number()
            self._post(round_, problem=reason)
        self._past.append(EndedRound(number=round_.number, step=round_.step, reason=reason))
        self._board.put(round_.key("decision"), msgspec.msgpack.encode(Decision(reason=reason)))
        self._board.remove(self._before)
        names = ["decision", "failed"]
        names += [f"r/{rank}" for rank in self._groups.group_of(0)[1:]]
        names += [f"g/{leader}" for leader in self._groups.leaders[1:]]
        self._before = [round_.key(name) for name in names]
