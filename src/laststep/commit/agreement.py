"""Agree with the other ranks on what the job holds: who describes what, and so who writes what.

Ranks leave the digests of their tables on a board, the first one puts these together, and for every
table that is new, one rank that has it leaves it there. That is done again only when a table
changes. A rank whose own has not changed hears of it by the way, while one of its saves is under
way. The first rank counts how often that was done; a rank that was late or took no part finds the
next one by what the first rank has left.

A rank that takes no part in a save says so to those who wait to hear what it holds. Which save that
is follows from the first rank's numbers, as in the save itself (`member`): it is the first of that
step that this rank has not been through.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import DIGEST_BYTES
from laststep.commit.receipts import CurrentRound
from laststep.errors import Aborted
from laststep.plan.tables import Agreement, Table, agree, decode_table, digest_of, encode_table
from laststep.process import interrupts
from laststep.ranks import missing_ranks
from laststep.terms import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank

log = logging.getLogger(__name__)


_GRACE_S = 2.0
"""Mostly all tables change at once: a rank that is called waits so long for its own next save."""
_MARGIN_S = 10.0

SAME_STEPS = "every rank must call save() for the same steps"
ABSENT = f"{SAME_STEPS}; one that does may be stopped, slow or dead: see its log"
"""What to do about ranks that are missing."""


def margin_s(deadline_s: float) -> float:
    """Nobody waits longer for the others than the deadline and this: the first rank stops to wait
    before the others do, so that they hear from it who is missing."""
    return min(deadline_s / 2, _MARGIN_S)


def grace_s(deadline_s: float) -> float:
    """How long a rank that is out of step with the others is given to get into it by itself."""
    return min(_GRACE_S, deadline_s / 4)


def on_some_ranks(agreement: Agreement) -> dict[str, tuple[int, ...]]:
    """The items that only some ranks have, and these. Pipeline stages have the same item each, with
    tensors of its own."""
    holders: dict[str, list[tuple[int, ...]]] = {}
    for rank_class in agreement.classes:
        for item in rank_class.table:
            holders.setdefault(item.name, []).append(rank_class.ranks)
    return {
        name: tuple(sorted(itertools.chain.from_iterable(some)))
        for name, some in holders.items()
        if sum(map(len, some)) < len(agreement.class_of)
    }


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank calls the others for: a save of that step, the first after its save of
    that number."""

    step: int
    led: int


class _GatheredDigests(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank says: the digests of all, or who is missing."""

    digests: bytes = b""
    problem: str = ""
    refused: bool = False
    """The problem is a rank's that takes no part, and says so."""


class _Refused(Exception):
    """A rank takes no part, for that reason."""


class Agreements:
    """This rank's part in agreeing; for the training thread, and one other."""

    def __init__(self, rank: Rank, board: Board, *, deadline_s: float) -> None:
        self._rank = rank
        self.board = board
        self._deadline_s = deadline_s
        self._grace_s = grace_s(deadline_s)
        self._lock = threading.Lock()
        self._generation = 0
        """The last one that is settled, as far as this rank knows."""
        self._data = b""
        self._table: Table | None = None
        self._agreement: Agreement | None = None
        self._tables: dict[bytes, Table] = {}
        self._called_s: float | None = None
        self._refused = 0
        """The last one that this rank has refused to take part in."""
        self.known: Callable[[], int | None] = lambda: None
        """The number of the first rank's last save that this rank has been through; None while a
        save of this rank's is under way. A later one is the next save's."""
        self._on_some: dict[str, tuple[int, ...]] = {}
        """The items of some ranks that the log tells of."""

    def on(self, table: Table, step: int) -> Agreement:
        """What the job holds, when this rank holds that, for a save of that step. Waits for the
        others if it is new."""
        while not self._lock.acquire(timeout=interrupts.LOOK_S):
            interrupts.let_in()
        try:
            if self._agreement is not None and (table is self._table or table == self._table):
                self._table = table
                return self._agreement
            self._table, self._data = table, encode_table(table)
            return self._agree(step)
        finally:
            self._lock.release()

    def join(self) -> None:
        """Take part in what another rank has called for, if it has and this one's state stays."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._agreement is None:
                return
            if self.board.look(f"a/{self._generation + 1}/called") is None:
                self._called_s = None
                return
            self._called_s = self._called_s or self.board.now_s()
            if self.board.now_s() - self._called_s >= self._grace_s:
                self._called_s = None
                self._agree(None)
        finally:
            self._lock.release()

    def refuse(self, step: int, known: int, why: str) -> None:
        """This rank takes no part in its present save. Tell the first rank, if it waits to hear
        what this one holds, for a save of that step, and has led none since that number."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._agreement is not None:
                return  # then it takes part in this all the same
            generation = self._settled()[0] + 1
            note = self.board.look(f"a/{generation}/for")
            call = None if note is None else msgspec.msgpack.decode(note, type=_Call)
            if call and call.step == step and call.led <= known and generation > self._refused:
                self._refused = generation
                self.board.put(f"a/{generation}/refused", why.encode())
        finally:
            self._lock.release()

    def last_of(self, rank: int) -> str:
        """A rank, and what is known of it."""
        last = self.board.look(f"last/{rank}")
        return f"rank {rank} ({f'last seen at {last.decode()}' if last else 'not seen before'})"

    def close(self) -> None:
        """When nobody asks any more."""
        self.board.close()

    def _agree(self, step: int | None) -> Agreement:
        self._agreement = None
        mine = digest_of(self._data)
        # One deadline for all of it: the first rank tells by then who is missing, the others wait a
        # bit longer for that, and whoever is told of a table finds it at once.
        began_s = self.board.now_s()
        told_by_s = began_s + self._deadline_s
        if not self._rank.is_first:
            told_by_s += margin_s(self._deadline_s) / 2
        call = self._lead if self._rank.is_first else self._follow
        generation, gathered = call(mine, step, told_by_s)
        if gathered.problem:
            self._generation = generation
            if gathered.refused:
                raise Aborted(gathered.problem)
            raise Aborted(
                "not all ranks of this job came to this save", found=gathered.problem, remedy=ABSENT
            )
        digests = _cut(gathered.digests)
        if digests.index(mine) == self._rank.number:
            self.board.put(f"t/{mine.hex()}", self._data)
        distinct = set(digests)
        new = {f"t/{digest.hex()}": digest for digest in distinct if digest not in self._tables}
        notes = self.board.wait_all(new, began_s + self._deadline_s + margin_s(self._deadline_s))
        for note, digest in new.items():
            if note not in notes:
                raise Aborted(
                    "a rank did not say what it holds",
                    where=f"rank {digests.index(digest)}",
                    expected=f"its table within {self._deadline_s:g} s",
                )
            self._tables[digest] = decode_table(notes[note])
        self._tables = {digest: self._tables[digest] for digest in distinct}
        self._generation = generation
        self._agreement = agree(digests, self._tables)
        if self._rank.is_first:
            self._tell_of_some(on_some_ranks(self._agreement))
        return self._agreement

    def _tell_of_some(self, found: dict[str, tuple[int, ...]]) -> None:
        """Say once which items only some ranks have: that may be meant, or an oversight."""
        for name, some in found.items():
            if self._on_some.get(name) != some:
                log.info(
                    "item %r is only on %d of %d ranks (%s): these save it, and a rank restores it "
                    "that has it then; pass it on all if that is not meant",
                    name, len(some), self._rank.ranks, listed(some),
                )  # fmt: skip
        self._on_some = found

    def _lead(self, mine: bytes, step: int | None, until_s: float) -> tuple[int, _GatheredDigests]:
        """Collect the digests of all ranks, as the first of them, and tell."""
        self._generation += 1  # whatever comes of it: nobody can join this one later
        name = f"a/{self._generation}"
        self.board.put(f"{name}/called", b"1")
        self.board.put(f"{name}/0", mine)
        names = [f"{name}/{rank}" for rank in range(self._rank.ranks)]
        tell = self._impatience(names)
        led: int | None = None

        def meanwhile() -> None:
            nonlocal led
            if step is not None and led is None and (led := self.known()) is not None:
                note = msgspec.msgpack.encode(_Call(step=step, led=led))
                self.board.put(f"{name}/for", note)
            if (why := self.board.look(f"{name}/refused")) is not None:
                raise _Refused(why.decode())
            tell()

        try:
            notes = self.board.wait_all(names, until_s, meanwhile=meanwhile)
        except _Refused as refused:
            gathered = _GatheredDigests(problem=str(refused), refused=True)
        else:
            gathered = self._gathered([notes.get(note) for note in names])
        self.board.put(f"{name}/all", msgspec.msgpack.encode(gathered))
        return self._generation, gathered

    def _gathered(self, notes: Sequence[bytes | None]) -> _GatheredDigests:
        """What the first rank has heard of each, or who is missing."""
        missing = [rank for rank, note in enumerate(notes) if note is None]
        if missing:
            shown = listed(map(self.last_of, missing))
            return _GatheredDigests(problem=f"nothing from {shown} within {self._deadline_s:g} s")
        return _GatheredDigests(digests=b"".join(note for note in notes if note is not None))

    def _impatience(self, names: Sequence[str]) -> Callable[[], None]:
        """Called now and then, it tells once, after a few seconds, whose notes are not there."""
        due_s = self.board.now_s() + missing_ranks.PATIENCE_S

        def look() -> None:
            nonlocal due_s
            if self.board.now_s() >= due_s:
                due_s = math.inf
                there = self.board.look_all(names)
                late = [rank for rank, name in enumerate(names) if name not in there]
                if late:
                    missing_ranks.tell("save()", late, self._deadline_s)

        return look

    def _settled(self) -> tuple[int, _GatheredDigests | None]:
        """The last one that is settled, and how, if that was without this rank, or while it was
        late."""
        generation, gathered = self._generation, None
        while (note := self.board.look(f"a/{generation + 1}/all")) is not None:
            generation += 1
            gathered = msgspec.msgpack.decode(note, type=_GatheredDigests)
        return generation, gathered

    def _follow(
        self, mine: bytes, step: int | None, until_s: float
    ) -> tuple[int, _GatheredDigests]:
        """Leave one's digest where the first rank looks for it, and hear those of all."""
        generation, gathered = self._settled()
        if (
            gathered is not None
            and gathered.digests
            and _cut(gathered.digests)[self._rank.number] == mine
            and self.board.look(f"a/{generation + 1}/called") is None
        ):
            return generation, gathered
        name = f"a/{generation + 1}"
        self.board.put(f"{name}/{self._rank.number}", mine)
        self.board.put(f"{name}/called", b"1")
        tell = self._impatience([f"{name}/0"])  # whom else it waits for, the first rank tells

        def look() -> tuple[int, _GatheredDigests] | None:
            if (note := self.board.look(f"{name}/all")) is not None:
                return generation + 1, msgspec.msgpack.decode(note, type=_GatheredDigests)
            tell()
            why = self._refusal_of_first(step)
            if why is None:
                return None
            return generation, _GatheredDigests(problem=why, refused=True)

        settled = self.board.until(look, until_s)
        if settled is None:
            # Not settled: should the first rank come late, this one's note is there.
            problem = f"nothing from {self.last_of(0)} within {self._deadline_s:g} s"
            return generation, _GatheredDigests(problem=problem)
        gathered = settled[1]
        if gathered.digests and _cut(gathered.digests)[self._rank.number] != mine:
            # An earlier note of this rank's was read.
            return generation + 1, _GatheredDigests(
                problem=f"an old note of rank {self._rank.number}"
            )
        return settled

    def _refusal_of_first(self, step: int | None) -> str | None:
        """Why the first rank takes no part in this rank's save of that step, if it has said so."""
        known = None if step is None else self.known()
        if known is None or (note := self.board.look("now")) is None:
            return None
        now = msgspec.msgpack.decode(note, type=CurrentRound)
        return now.problem if now.step == step and now.number > known and now.problem else None


def _cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
