"""Agree with the other ranks on what the job holds: who describes what, and so who writes what.

1. The first rank calls: it numbers its calls and keeps the latest in one note, `a/now`.
2. While that call is open, each rank leaves the digest of its table, as `a/<number>/<rank>`.
3. The first rank settles it, in the same note: the digests of all, or the problem.
4. The first rank with a table leaves that, as `t/<digest>`. Whoever has them all has agreed.
5. A rank that a settled call does not fit asks for another, as `a/<number>/again`.
6. A rank that takes no part in the save that a call is for says so, as `a/<number>/refused`.
7. A rank whose own table stays answers, or calls, by the way, while one of its saves is under way.

No number is used twice, and no rank relies on having seen an earlier call: whatever note is lost,
the save that needed it fails, and the next call makes up for it.

`CurrentRound` is what the first rank says of the save that it leads, and of those before it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.lineage import AttemptName
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import AbortedError, MismatchError
from laststep.plan.tables import Agreement, Table, agree, decode_table, digest_of, encode_table
from laststep.process import signals
from laststep.ranks import missing_ranks
from laststep.terms import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank


class EndedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A save that is over; without a reason, it is committed."""

    number: int
    step: int
    reason: str


class CurrentRound(msgspec.Struct, frozen=True, kw_only=True):
    """The save that the first rank leads: where, or why it does not; and the latest before it."""

    number: int
    step: int
    place: AttemptName | None
    problem: str
    past: tuple[EndedRound, ...]
    group_size: int
    """How the ranks are cut. The first rank says it: nodes, and what ranks know of them, differ."""


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
    """The first rank's latest call; settled once it has the digests of all, or a problem."""

    number: int
    step: int | None = None
    """It is for a save of that step, the first after its save `led`; None: that is not known."""
    led: int = 0
    digests: bytes = b""
    problem: str = ""

    @property
    def is_open(self) -> bool:
        return not (self.digests or self.problem)

    def has(self, rank: int, digest: bytes) -> bool:
        """Whether it is settled, with that digest of that rank's."""
        return _cut(self.digests)[rank : rank + 1] == [digest]


class _CalledAnew(Exception):
    """The first rank has given this call up, and calls again."""


class Agreements:
    """This rank's part in agreeing; for the training thread, and one other."""

    def __init__(self, rank: Rank, board: Board, *, deadline_s: float) -> None:
        self._rank = rank
        self.board = board
        self._deadline_s = deadline_s
        self._grace_s = grace_s(deadline_s)
        self._lock = threading.Lock()
        self._number = time.time_ns() // 1_000_000
        """The first rank's last call. They begin with the time: a launcher may start ranks again in
        the store of those that died, whose calls have lower numbers."""
        self._answered = 0
        """The last call that this rank answered; 0 where nothing can come of that any more."""
        self._data = b""
        self._table: Table | None = None
        self._agreement: Agreement | None = None
        self._tables: dict[bytes, Table] = {}
        self._called_s: float | None = None
        self._refused = 0
        """The last call that this rank has refused."""
        self._all_disagreed = False
        """Whether the last call ended in a mismatch, which every rank finds by itself."""
        self.known: Callable[[], int | None] = lambda: None
        """The number of the first rank's last save that this rank has been through; None while a
        save of this rank's is under way. A later one is the next save's."""
        self._on_some: dict[str, tuple[int, ...]] = {}
        """The items of some ranks that the log tells of."""

    def on(self, table: Table, step: int) -> Agreement:
        """What the job holds, when this rank holds that, for a save of that step. Waits for the
        others if it is new."""
        while not self._lock.acquire(timeout=signals.LOOK_S):
            signals.let_in()
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
            if not self._is_called():
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
            # With an agreement, this rank takes part in the call all the same. After a mismatch,
            # the first rank waits for nobody: a call that is open now is for its next save.
            if self._agreement is not None or self._all_disagreed:
                return
            call = self._latest()
            if call and call.step == step and call.led <= known and call.number > self._refused:
                self._refused = call.number
                self.board.put(f"a/{call.number}/refused", why.encode())
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
        self._agreement, self._all_disagreed, began_s = None, False, self.board.now_s()
        mine = digest_of(self._data)
        while self._agreement is None:
            settle = self._lead if self._rank.is_first else self._follow
            call = settle(mine, step, began_s)
            with contextlib.suppress(_CalledAnew):
                self._agreement = self._agreed(call, mine, step, began_s)
        if self._rank.is_first:
            self._tell_of_some(on_some_ranks(self._agreement))
        return self._agreement

    def _agreed(self, call: _Call, mine: bytes, step: int | None, began_s: float) -> Agreement:
        """What follows from a call that is settled, when the tables are there."""
        digests = _cut(call.digests)
        if digests.index(mine) == self._rank.number:
            self.board.put(f"t/{mine.hex()}", self._data)
        distinct = set(digests)
        new = {f"t/{digest.hex()}": digest for digest in distinct if digest not in self._tables}
        until_s = began_s + self._deadline_s + margin_s(self._deadline_s)

        def listen() -> None:
            try:
                self._listen(call, step)
            except AbortedError:
                # The first rank may have refused because of these tables. If they have arrived
                # since the last look, this rank finds the same difference and names it.
                if len(self.board.look_all(new)) < len(new):
                    raise

        notes = self.board.wait_all(new, until_s, meanwhile=listen)
        for note, table in new.items():
            if note not in notes:
                raise AbortedError(
                    "a rank did not say what it holds",
                    where=f"rank {digests.index(table)}",
                    expected=f"its table within {self._deadline_s:g} s",
                )
            self._tables[table] = decode_table(notes[note])
        self._tables = {digest: self._tables[digest] for digest in distinct}
        try:
            return agree(digests, self._tables)
        except MismatchError:
            self._answered, self._all_disagreed = 0, True
            raise

    def _tell_of_some(self, found: dict[str, tuple[int, ...]]) -> None:
        """Say once which items only some ranks have: that may be meant, or an oversight."""
        for name, some in found.items():
            if self._on_some.get(name) != some:
                log.info(
                    "item %r is only on %d of %d ranks (%s): these save it, and a rank restores it "
                    "that has it then; pass it on all if that is not meant",
                    name,
                    len(some),
                    self._rank.ranks,
                    listed(some),
                )
        self._on_some = found

    def _latest(self) -> _Call | None:
        note = self.board.look("a/now")
        return None if note is None else msgspec.msgpack.decode(note, type=_Call)

    def _is_called(self) -> bool:
        """Whether others wait to hear what this rank holds."""
        if self._rank.is_first:
            return self.board.look(f"a/{self._number}/again") is not None
        call = self._latest()
        return call is not None and call.is_open

    def _say(self, call: _Call) -> _Call:
        self.board.put("a/now", msgspec.msgpack.encode(call))
        return call

    def _listen(self, call: _Call, step: int | None) -> None:
        """Raise `AbortedError` if a call is in vain, since a rank takes no part that it needs."""
        if self._rank.is_first:
            note = self.board.look(f"a/{call.number}/refused")
            why = None if note is None else note.decode()
        else:
            why = self._refusal_of_first(step)
            if (now := self._latest()) is not None and now.number != call.number:
                raise _CalledAnew
        if why is not None:
            raise AbortedError(why)

    def _lead(self, mine: bytes, step: int | None, began_s: float) -> _Call:
        """Call, as the first rank, and settle it when all have answered."""
        self._number += 1  # whatever comes of it: what is left for this one is not for the next
        call = self._say(_Call(number=self._number))
        names = [f"a/{call.number}/{rank}" for rank in range(1, self._rank.ranks)]

        def late(notes: Container[str]) -> list[int]:
            return [rank for rank, name in enumerate(names, 1) if name not in notes]

        tell = self._impatience(lambda: late(self.board.look_all(names)))

        def meanwhile() -> None:
            nonlocal call
            if step is not None and call.step is None and (led := self.known()) is not None:
                call = self._say(msgspec.structs.replace(call, step=step, led=led))
            self._listen(call, step)
            tell()

        try:
            # It tells by then who is missing; the others wait a bit longer for that.
            notes = self.board.wait_all(names, began_s + self._deadline_s, meanwhile=meanwhile)
            if len(notes) < len(names):
                raise self._missing(late(notes))
        except AbortedError as error:
            self._say(msgspec.structs.replace(call, problem=error.what))
            raise
        digests = b"".join([mine, *(notes[name] for name in names)])
        return self._say(msgspec.structs.replace(call, digests=digests))

    def _missing(self, ranks: Sequence[int]) -> AbortedError:
        nothing = f"nothing from {listed(map(self.last_of, ranks))} within {self._deadline_s:g} s"
        return AbortedError(f"not all ranks of this job came to this save: {nothing}; {ABSENT}")

    def _impatience(self, late: Callable[[], list[int]]) -> Callable[[], None]:
        """Called now and then, it tells once, after a few seconds, who is late."""
        due_s = self.board.now_s() + missing_ranks.PATIENCE_S

        def look() -> None:
            nonlocal due_s
            if self.board.now_s() >= due_s:
                due_s = math.inf
                if ranks := late():
                    missing_ranks.tell("save()", ranks, self._deadline_s)

        return look

    def _follow(self, mine: bytes, step: int | None, began_s: float) -> _Call:
        """Answer the first rank's calls, and ask for one if need be, until one is settled with
        what this rank holds now: the latest may be, where this rank did not wait for its end."""
        me = self._rank.number
        answered = asked = 0
        # For whom else all wait, the first rank tells.
        tell = self._impatience(lambda: [] if answered else [0])

        def is_settled(call: _Call) -> bool:
            return call.number == self._answered and call.has(me, mine)

        def look() -> _Call | None:
            nonlocal answered, asked
            call = self._latest()
            if call is None:
                pass
            elif call.is_open and call.number > self._refused:
                if answered != call.number:
                    answered = self._answered = call.number
                    self.board.put(f"a/{call.number}/{me}", mine)
            elif is_settled(call):
                return call
            elif call.number == answered and call.problem:
                raise AbortedError(call.problem)
            elif asked != call.number:
                asked = call.number
                self.board.put(f"a/{call.number}/again", b"1")
            tell()
            if (why := self._refusal_of_first(step)) is not None:
                # The first rank settles the call before it refuses because of what that call says:
                # this rank then finds the same difference and names it.
                if (latest := self._latest()) is not None and is_settled(latest):
                    return latest
                raise AbortedError(why)
            return None

        until_s = began_s + self._deadline_s + margin_s(self._deadline_s) / 2
        if (settled := self.board.until(look, until_s)) is None:
            raise self._missing([0])
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
