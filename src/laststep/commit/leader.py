"""Rank 0's side of a save: announce the attempt, collect receipts, decide, publish the outcome.

The decision is a file of the run that can be created only once. Rank 0's flusher creates it to
commit; a rank that loses contact with rank 0 creates it to abort, or finds that the save is
committed. A checkpoint is therefore complete or absent, even if ranks die or stall meanwhile. Rank
0 also collects the receipts of its own group.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from laststep.commit.differences import Values, describe, gone_apart, incomparable, unequal
from laststep.commit.layouts import CurrentRound, EndedRound, margin_s
from laststep.commit.round import COMMITTED, GATHERED, Decision, GivenUp
from laststep.errors import AbortedError, LaststepError
from laststep.flush.protocol import Decide
from laststep.format.manifest import WrittenIndexes
from laststep.plan.receipts import (
    Differing,
    Receipt,
    Summary,
    items_of,
    layout_groups_of,
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
    from laststep.flush.saves import Save
    from laststep.format.manifest import LayoutGroupRecord
    from laststep.plan.layouts import GlobalLayout
    from laststep.plan.receipts import Groups

log = logging.getLogger(__name__)

_PAST = 16
_STUCK = "it may be stopped or its disk may hang; the next save tries again"


class Leader:
    """Rank 0 in the commit of saves, on the commit thread. It numbers the saves."""

    def __init__(self, context: RoundContext, groups: Groups, bus: Bus) -> None:
        self._context = context
        self._bus = bus
        self._kv = context.kv
        self._groups = groups
        self._number = time.time_ns() // 1_000_000
        """The number of the last save that this rank led. It starts at the current time in ms, so
        that it is higher than the numbers left by a dead job instance: a launcher may restart ranks
        with the same key-value store."""
        self.known = 0
        """The number of the last save that this rank led; 0 if none."""
        self._posted = 0
        """The number of the last save that was published to the other ranks."""
        self._past: deque[EndedRound] = deque(maxlen=_PAST)
        self._told_incomparable = False
        self._before: list[str] = []
        """Keys of the previous save, removed when the next one is decided."""
        self._classes: tuple[GlobalLayout | None, tuple[LayoutGroupRecord, ...]] = (None, ())

    def take_part(self, round_: Round) -> None:
        """Lead a save until it is committed or aborted, and publish the outcome."""
        round_.groups = self._groups
        round_.place = self._begun(round_)
        round_.number = self._next_number()
        if round_.place is None or round_.save is None or round_.global_layout is None:
            reason = self._context.trouble(self._context.own_receipt(round_, self._listen).problem)
            self._post(round_, problem=reason)
            self._past.append(EndedRound(number=round_.number, step=round_.step, reason=reason))
            return
        self._post(round_)
        mine = self._context.own_receipt(round_, self._listen)
        if mine.problem:
            self._tell(round_, self._context.trouble(mine.problem))
            return
        receipts, summaries = self._gathered(round_, mine)
        summaries = [summarise(receipts, round_.global_layout), *summaries]
        objection = objection_to(summaries, round_.global_layout)
        reason = (
            self._difference(round_, objection) if isinstance(objection, Differing) else objection
        )
        if reason:
            self._context.client.send(Decide(save=round_.save.number, reason=reason))
        else:
            self._tell_of_replicas(round_, round_.global_layout, summaries)
            self._decide(round_, round_.save, summaries)
        self._context.await_flusher(round_.save, self._context.until_s(round_, COMMITTED))
        error = self._context.settle(round_, round_.save.lost or self._late(round_, reason))
        if error is not None and not reason:
            reason = self._context.trouble(error.without_remedy())
        with contextlib.suppress(LaststepError):  # the others find the outcome in the run
            self._tell(round_, reason)

    def _next_number(self) -> int:
        self._number += 1
        self.known = self._number
        return self._number

    def rest_s(self) -> float | None:
        """Return None: rank 0 blocks until its own next save, since no other rank leads one."""
        return None

    def look_up(self) -> None:
        """Do nothing: see `rest_s`."""

    def warn(self, round_: Round, reason: str) -> None:
        """Publish that this rank aborts a save."""
        self._tell(round_, reason)

    def _listen(self, round_: Round) -> None:
        """Raise `GivenUp` if another rank has failed."""
        note = self._kv.look(round_.key("failed"))
        if note is not None:
            raise GivenUp(note.decode())

    def _begun(self, round_: Round) -> AttemptName | None:
        """Wait until this rank's flusher has begun the attempt and return its name; None if the
        save has failed or this rank takes no part. Raises `AbortedError` at the deadline."""
        save = round_.save
        if save is None:
            return None

        def look() -> bool | None:
            return True if save.at is not None or save.over else None

        deadline_s = self._context.deadline_s
        until_s = round_.began_s + deadline_s + margin_s(deadline_s)
        if self._kv.until(look, until_s, rest=save.rest) is None:
            raise AbortedError(f"the flusher did not start within {deadline_s:g} s", remedy=_STUCK)
        round_.own_s = self._kv.now_s() - round_.began_s
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
        self._kv.put("now", msgspec.msgpack.encode(now))
        self._posted = round_.number

    def _gathered(self, round_: Round, mine: Receipt) -> tuple[dict[int, Receipt], list[Summary]]:
        """Wait for the receipts of this rank's group and the summaries of all other groups."""
        own = self._groups.group_of(0)[1:]
        leaders = self._groups.leaders[1:]
        names = [*(f"r/{rank}" for rank in own), *(f"g/{leader}" for leader in leaders)]
        until_s = self._context.until_s(round_, GATHERED if leaders else 0.0)
        notes = self._context.gather(
            round_, names, until_s, self._listen, missing=lambda late: self._missing(round_, late)
        )
        receipts = {0: mine}
        for rank in own:
            receipts[rank] = msgspec.msgpack.decode(notes[f"r/{rank}"], type=Receipt)
        decode = msgspec.msgpack.Decoder(Summary).decode
        return receipts, [decode(notes[f"g/{leader}"]) for leader in leaders]

    def _missing(self, round_: Round, late: Sequence[str]) -> list[str]:
        """Describe the ranks that have not reported. If the summary of a group is missing, these
        are the ranks that its leader waits for, or the leader itself."""
        missing = []
        for name in late:
            kind, _, number = name.partition("/")
            if kind == "r":
                missing.append(self._context.last_of(int(number)))
                continue
            group = self._groups.group_of(int(number))
            there = self._kv.look_all(round_.key(f"r/{rank}") for rank in group)
            silent = [rank for rank in group if round_.key(f"r/{rank}") not in there]
            missing += map(self._context.last_of, silent)
            if not silent:
                whose = f"which speaks for ranks {group[0]} to {group[-1]}"
                missing.append(f"{self._context.last_of(group[0])}, {whose},")
        return missing

    def _decide(self, round_: Round, save: Save, summaries: list[Summary]) -> None:
        """Ask the flusher to commit the save."""
        global_layout = round_.global_layout
        assert global_layout is not None  # noqa: S101 (without one there is a problem)
        if self._classes[0] is not global_layout:
            self._classes = (global_layout, layout_groups_of(global_layout))
        written = WrittenIndexes()
        for summary in summaries:
            written = written.plus(summary.written)
        self._context.client.send(
            Decide(
                save=save.number,
                items=items_of(summaries, global_layout),
                written=written,
                layout_groups=self._classes[1],
                ranks=self._groups.ranks,
            )
        )

    def _difference(self, round_: Round, differing: Differing) -> str:
        """Return the reason not to commit a state in which two ranks differ. The two ranks publish
        their values only on request."""
        shown = self._ask(round_, differing)
        decode = msgspec.msgpack.Decoder(Values).decode
        return describe(differing, {rank: decode(note) for rank, note in shown.items()})

    def _tell_of_replicas(
        self, round_: Round, global_layout: GlobalLayout, summaries: list[Summary]
    ) -> None:
        """Emit an event for each replica set that differs; the checkpoint stores one rank's
        contents."""
        seen = seen_by(summary.replicas for summary in summaries)
        for differs in unequal(seen, global_layout):
            shown = self._ask(round_, differs)
            self._bus.emit(gone_apart(round_.step, differs, shown, global_layout))
        if (ranks := incomparable(seen)) is not None and not self._told_incomparable:
            self._told_incomparable = True
            log.warning(
                "replicas of ranks %d and %d are not compared: some are on a device here "
                "and on the host there",
                *ranks,
            )

    def _ask(self, round_: Round, asked: Differing | UnequalRanks) -> dict[int, bytes]:
        """Ask the differing ranks for their values or digests; return, by rank, the answers that
        arrive in time."""
        self._kv.put(round_.key("decision"), msgspec.msgpack.encode(Decision(asks=asked)))
        names = {round_.answer_key(asked, rank): rank for rank in asked.ranks if rank != 0}
        # These ranks have just reported, so a short wait is enough: one that does not answer died.
        soon_s = self._kv.now_s() + margin_s(self._context.deadline_s)
        until_s = min(soon_s, self._context.until_s(round_, COMMITTED))
        notes = self._kv.wait_all(names, until_s)
        shown = {names[name]: note for name, note in notes.items()}
        self._kv.remove(names)
        return shown | ({0: round_.answer_to(asked)} if 0 in asked.ranks else {})

    def _late(self, round_: Round, reason: str) -> AbortedError:
        """Return the error to report if the flusher has not answered by now."""
        if reason:
            return AbortedError(reason)
        late = f"did not commit step {round_.step} within {self._context.deadline_s:g} s"
        return AbortedError(f"the flusher of rank 0 {late}", remedy=_STUCK)

    def _tell(self, round_: Round, reason: str) -> None:
        if not round_.number or self._posted != round_.number:
            # This save was never published: publish it now, together with its outcome.
            round_.number = round_.number or self._next_number()
            self._post(round_, problem=reason)
        self._past.append(EndedRound(number=round_.number, step=round_.step, reason=reason))
        self._kv.put(round_.key("decision"), msgspec.msgpack.encode(Decision(reason=reason)))
        self._kv.remove(self._before)
        names = ["decision", "failed"]
        names += [f"r/{rank}" for rank in self._groups.group_of(0)[1:]]
        names += [f"g/{leader}" for leader in self._groups.leaders[1:]]
        self._before = [round_.key(name) for name in names]
