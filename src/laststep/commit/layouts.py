"""Agree on a global layout: collect the local layouts of all ranks through the key-value store.

1. Rank 0 starts a call: it numbers its calls and keeps the latest under the key `a/now`.
2. While the call is open, each rank puts the digest of its local layout at `a/<number>/<rank>`,
   or the reason for which it takes no part in the save behind the call.
3. Rank 0 settles the call under the same key, with the digests of all ranks or a problem.
4. The lowest rank of each layout group puts the local layout at `t/<digest>`. A rank that has
   all of them has agreed.
5. A rank whose layout does not match a settled call requests another one at `a/<number>/again`.
6. A rank whose own layout has not changed answers, or starts a call, in the background, while one
   of its saves is in progress.

No number is used twice, and no rank relies on having seen an earlier call: if a key is lost, the
save that needed it fails, and the next call recovers.

`CurrentRound` describes the save that rank 0 leads and the saves before it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.attempt import AttemptName
from laststep.codecs.digests import DIGEST_BYTES
from laststep.constants import listed
from laststep.errors import AbortedError, MismatchError
from laststep.plan import layouts
from laststep.process import signals
from laststep.process.threads import ready
from laststep.ranks import key_value

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from laststep.plan.layouts import GlobalLayout, LocalLayout
    from laststep.ranks.group import Rank
    from laststep.ranks.key_value import KeyValueStore


class EndedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A finished save; an empty reason means that it is committed."""

    number: int
    step: int
    reason: str


class CurrentRound(msgspec.Struct, frozen=True, kw_only=True):
    """The save that rank 0 currently leads, with its attempt or the problem that prevents it, and
    the latest saves before it. Published by rank 0 under the key `now`."""

    number: int
    step: int
    place: AttemptName | None
    problem: str
    past: tuple[EndedRound, ...]


_GRACE_S = 2.0
"""Time that a rank that sees a call waits for its own next save before it answers from the
background thread. Usually the layouts of all ranks change at the same step."""
_MARGIN_S = 10.0

SAME_STEPS = "every rank must call save() for the same steps"
ABSENT = f"{SAME_STEPS}; one that does may be stopped, slow or dead: see its log"
"""The remedy for missing ranks."""


def margin_s(deadline_s: float) -> float:
    """Return the time by which others wait longer than rank 0, which names the missing ranks."""
    return min(deadline_s / 2, _MARGIN_S)


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's latest call for local layouts; settled once it has all digests, or a problem."""

    number: int
    step: int | None = None
    """The step of the first save after number `led`, which needs this call; None if unknown."""
    led: int = 0
    digests: bytes = b""
    problem: str = ""

    @property
    def is_open(self) -> bool:
        return not (self.digests or self.problem)


class _CalledAnew(Exception):
    """Rank 0 has abandoned this call and started another."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer to a call: the digest of its local layout, or why it takes no part."""

    digest: bytes = b""
    refusal: str = ""


class GlobalLayouts:
    """This rank's side of agreeing; the training thread and one other use it under a lock."""

    def __init__(self, rank: Rank, kv: KeyValueStore, *, deadline_s: float) -> None:
        self._rank = rank
        self.kv = kv
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._number = time.time_ns() // 1_000_000
        """The number of rank 0's last call. Starts at the time in ms, above the numbers that a dead
        job instance may have left in the same key-value store."""
        self._answered = 0
        """The last call that this rank answered; 0 if that answer is void."""
        self._data = b""
        self._local_layout: LocalLayout | None = None
        self._global_layout: GlobalLayout | None = None
        self._local_layouts: dict[bytes, LocalLayout] = {}
        self._called_s: float | None = None
        self._refused = 0
        """The last call that this rank refused."""
        self.known: Callable[[], int | None] = lambda: None
        """Returns the number of rank 0's last save that this rank has finished; None while a save
        of this rank is in progress. A higher number belongs to the next save."""

    def on(self, local_layout: LocalLayout, step: int) -> GlobalLayout:
        """Return the global layout for a save of `step`, after waiting if the local layout is new.
        Raise `MismatchError` if layouts conflict, `AbortedError` if ranks are missing or refuse."""
        while not self._lock.acquire(timeout=signals.LOOK_S):
            signals.check_signals()
        try:
            if self._global_layout is not None and (
                local_layout is self._local_layout or local_layout == self._local_layout
            ):
                self._local_layout = local_layout
                return self._global_layout
            self._local_layout, self._data = local_layout, layouts.encode_local_layout(local_layout)
            return self._agree(step)
        finally:
            self._lock.release()

    def join(self) -> None:
        """Answer another rank's call, if there is one and this rank's own state has not changed."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._global_layout is None:
                return
            if self._rank.is_first:
                is_called = self.kv.look(f"a/{self._number}/again") is not None
            else:
                is_called = (call := self._latest()) is not None and call.is_open
            if not is_called:
                self._called_s = None
                return
            self._called_s = self._called_s or self.kv.now_s()
            if self.kv.now_s() - self._called_s >= min(_GRACE_S, self._deadline_s / 4):
                self._called_s = None
                self._agree(None)
        finally:
            self._lock.release()

    def refuse(self, step: int, known: int, why: str) -> None:
        """Answer a call for a save of `step`, in which this rank takes no part, with the reason;
        not if rank 0 has led a save after number `known`, since the call is then for a later one. A
        rank that has a global layout answers it as usual."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            call = None if self._global_layout is not None else self._latest()
            is_meant = call is not None and call.is_open and call.step == step
            if call and is_meant and call.led <= known and call.number > self._refused:
                self._refused = call.number
                self._answer(call, _Answer(refusal=why))
        finally:
            self._lock.release()

    def last_of(self, rank: int) -> str:
        """Return the rank's name with the step at which it was last seen."""
        last = self.kv.look(f"last/{rank}")
        seen = f"last seen at {last.decode()}" if last else "which has not saved yet"
        return f"rank {rank} ({seen})"

    def _agree(self, step: int | None) -> GlobalLayout:
        self._global_layout, began_s = None, self.kv.now_s()
        own_digest = layouts.digest_of(self._data)
        settle = self._lead if self._rank.is_first else self._follow
        while self._global_layout is None:
            call = settle(own_digest, step, began_s)
            with contextlib.suppress(_CalledAnew):
                self._global_layout = self._agreed(call, own_digest, began_s)
        return self._global_layout

    def _agreed(self, call: _Call, own_digest: bytes, began_s: float) -> GlobalLayout:
        """Return the global layout of a settled call, after fetching the missing local layouts."""
        digests = _cut(call.digests)
        if digests.index(own_digest) == self._rank.number:
            self.kv.put(f"t/{own_digest.hex()}", self._data)
        distinct = set(digests)
        new = {
            f"t/{digest.hex()}": digest for digest in distinct if digest not in self._local_layouts
        }
        until_s = began_s + self._deadline_s + margin_s(self._deadline_s)

        def look() -> None:
            if (now := self._latest()) is not None and now.number != call.number:
                raise _CalledAnew

        notes = self.kv.wait_all(new, until_s, meanwhile=look)
        for note, local_layout in new.items():
            if note not in notes:
                raise AbortedError(
                    "a rank did not publish its local layout",
                    where=f"rank {digests.index(local_layout)}",
                    expected=f"its local layout within {self._deadline_s:g} s",
                )
            self._local_layouts[local_layout] = layouts.decode_local_layout(notes[note])
        self._local_layouts = {digest: self._local_layouts[digest] for digest in distinct}
        try:
            return layouts.agree(digests, self._local_layouts)
        except MismatchError:
            self._answered = 0
            raise

    def _latest(self) -> _Call | None:
        note = self.kv.look("a/now")
        return None if note is None else msgspec.msgpack.decode(note, type=ready(_Call))

    def _say(self, call: _Call) -> _Call:
        self.kv.put("a/now", msgspec.msgpack.encode(call))
        return call

    def _answer(self, call: _Call, answer: _Answer) -> None:
        self.kv.put(f"a/{call.number}/{self._rank.number}", msgspec.msgpack.encode(answer))

    def _lead(self, own_digest: bytes, step: int | None, began_s: float) -> _Call:
        """Start a call as rank 0 and settle it when all ranks have answered."""
        self._number += 1  # even if the call fails: old answers must not match a new call
        call = self._say(_Call(number=self._number))
        names = [f"a/{call.number}/{rank}" for rank in range(1, self._rank.ranks)]

        def late(notes: Container[str]) -> list[int]:
            return [rank for rank, name in enumerate(names, 1) if name not in notes]

        tell = self._impatience(lambda: late(self.kv.look_all(names)))

        def meanwhile() -> None:
            nonlocal call
            if step is not None and call.step is None and (led := self.known()) is not None:
                call = self._say(msgspec.structs.replace(call, step=step, led=led))
            tell()

        # The other ranks wait a bit longer, so that they still get the missing ranks' names.
        notes = self.kv.wait_all(names, began_s + self._deadline_s, meanwhile=meanwhile)
        decode = msgspec.msgpack.Decoder(ready(_Answer)).decode
        answers = [decode(notes[name]) for name in names if name in notes]
        problem = next((answer.refusal for answer in answers if answer.refusal), "")
        if not problem and len(notes) < len(names):
            problem = self._missing(late(notes))
        if problem:
            self._say(msgspec.structs.replace(call, problem=problem))
            raise AbortedError(problem)
        digests = b"".join([own_digest, *(answer.digest for answer in answers)])
        return self._say(msgspec.structs.replace(call, digests=digests))

    def _missing(self, ranks: Sequence[int]) -> str:
        late = f"{listed(map(self.last_of, ranks))} did not answer within {self._deadline_s:g} s"
        return f"not all ranks of this job took part in this save: {late}; {ABSENT}"

    def _impatience(self, late: Callable[[], list[int]]) -> Callable[[], None]:
        """Return a function to call repeatedly; it logs the late ranks once, after seconds."""
        due_s = self.kv.now_s() + key_value.PATIENCE_S

        def look() -> None:
            nonlocal due_s
            if self.kv.now_s() >= due_s:
                due_s = math.inf
                if ranks := late():
                    key_value.tell("save()", ranks, self._deadline_s)

        return look

    def _follow(self, own_digest: bytes, step: int | None, began_s: float) -> _Call:
        """Answer rank 0's calls, and request one if necessary, until a call is settled with this
        rank's layout. It may already be: this rank may have stopped waiting before its end."""
        me = self._rank.number
        answered = asked = 0
        # Rank 0 logs all other late ranks.
        tell = self._impatience(lambda: [] if answered else [0])

        def is_settled(call: _Call) -> bool:
            return call.number == self._answered and _cut(call.digests)[me : me + 1] == [own_digest]

        def look() -> _Call | None:
            nonlocal answered, asked
            call = self._latest()
            if call is None:
                pass
            elif call.is_open and call.number > self._refused:
                if answered != call.number:
                    answered = self._answered = call.number
                    self._answer(call, _Answer(digest=own_digest))
            elif is_settled(call):
                return call
            elif call.number == answered and call.problem:
                raise AbortedError(call.problem)
            elif asked != call.number:
                asked = call.number
                self.kv.put(f"a/{call.number}/again", b"1")
            tell()
            if (why := self._refusal_of_first(step)) is not None:
                # Rank 0 settles the call before it refuses because of the call's contents, so
                # this rank finds the same difference and reports it itself.
                if (latest := self._latest()) is not None and is_settled(latest):
                    return latest
                raise AbortedError(why)
            return None

        until_s = began_s + self._deadline_s + margin_s(self._deadline_s) / 2
        if settled := self.kv.until(look, until_s):
            return settled
        raise AbortedError(self._missing([0]))

    def _refusal_of_first(self, step: int | None) -> str | None:
        """Return why rank 0 takes no part in this rank's save of `step`, if it has said so."""
        known = None if step is None else self.known()
        if known is None or (note := self.kv.look("now")) is None:
            return None
        now = msgspec.msgpack.decode(note, type=ready(CurrentRound))
        return now.problem if now.step == step and now.number > known and now.problem else None


def _cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
