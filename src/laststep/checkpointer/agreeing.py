"""Agree with the other ranks on what the job holds: who describes what, and so who writes what.

Ranks leave the digests of their tables on a board, the first one puts these together, and for every
table that is new, one rank that has it leaves it there. That is done again only when a table
changes. A rank whose own has not changed hears of it by the way, while one of its saves is under
way.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import Aborted
from laststep.plan.job import Agreement, Table, agree, decode_table, digest_of, encode_table

if TYPE_CHECKING:
    from laststep.dist.board import Board
    from laststep.dist.ranks import Rank

_GRACE_S = 2.0
"""Mostly all tables change at once: a rank that is called waits so long for its own next save."""
_MARGIN_S = 10.0
"""Others wait so much longer than the first rank does, to hear from it who is missing."""


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank says: the digests of all, or who is missing."""

    digests: bytes = b""
    problem: str = ""


class Agreements:
    """This rank's part in agreeing; for the training thread, and one other."""

    def __init__(self, rank: Rank, board: Board, *, deadline_s: float) -> None:
        self._rank = rank
        self._board = board
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._generation = 0
        self._data = b""
        self._table: Table | None = None
        self._agreement: Agreement | None = None
        self._tables: dict[bytes, Table] = {}
        self._called_s: float | None = None

    def on(self, table: Table) -> Agreement:
        """What the job holds, when this rank holds that. Waits for the others if it is new."""
        with self._lock:
            if self._agreement is not None and (table is self._table or table == self._table):
                self._table = table
                return self._agreement
            data = encode_table(table)
            if self._agreement is not None:
                self._board.put(f"a/{self._generation + 1}/called", b"1")
            self._table, self._data = table, data
            return self._agree()

    def join(self) -> None:
        """Take part in what another rank has called for, if it has and this one's state stays."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._agreement is None:
                return
            if self._board.look(f"a/{self._generation + 1}/called") is None:
                self._called_s = None
                return
            self._called_s = self._called_s or time.monotonic()
            if time.monotonic() - self._called_s >= _GRACE_S:
                self._called_s = None
                self._agree()
        finally:
            self._lock.release()

    def _agree(self) -> Agreement:
        self._generation += 1
        self._agreement = None
        name = f"a/{self._generation}"
        mine = digest_of(self._data)
        self._board.put(f"{name}/{self._rank.number}", mine)
        told = self._hear(name)
        if told.problem:
            raise Aborted(
                "the ranks of this job did not all describe their state",
                found=told.problem,
                remedy="every rank must call save() for the same step; see the log of that rank",
            )
        cuts = range(0, len(told.digests), DIGEST_BYTES)
        digests = [told.digests[at : at + DIGEST_BYTES] for at in cuts]
        if digests.index(mine) == self._rank.number:
            self._board.put(f"t/{mine.hex()}", self._data)
        distinct = set(digests)
        new = {f"t/{one.hex()}": one for one in distinct if one not in self._tables}
        notes = self._board.wait_all(new, self._deadline_s)
        for note, one in new.items():
            if note not in notes:
                raise Aborted(
                    "a rank did not say what it holds",
                    where=f"rank {digests.index(one)}",
                    expected=f"its table within {self._deadline_s:g} s",
                )
            self._tables[one] = decode_table(notes[note])
        self._tables = {one: self._tables[one] for one in distinct}
        self._agreement = agree(digests, self._tables)
        return self._agreement

    def _hear(self, name: str) -> _Told:
        """The digests of all ranks, from the first one, which collects them."""
        if not self._rank.is_first:
            note = self._board.wait(f"{name}/all", self._deadline_s + _MARGIN_S)
            if note is None:
                return _Told(problem=f"nothing from rank 0 within {self._deadline_s:g} s")
            return msgspec.msgpack.decode(note, type=_Told)
        names = [f"{name}/{rank}" for rank in range(self._rank.ranks)]
        notes = self._board.wait_all(names, self._deadline_s)
        missing = [str(rank) for rank, one in enumerate(names) if one not in notes]
        if missing:
            shown = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
            told = _Told(problem=f"nothing from rank {shown} within {self._deadline_s:g} s")
        else:
            told = _Told(digests=b"".join(notes[one] for one in names))
        self._board.put(f"{name}/all", msgspec.msgpack.encode(told))
        return told
