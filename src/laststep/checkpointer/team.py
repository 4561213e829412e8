"""This rank's part in committing the saves of a job: receipts, one decision, and telling everybody.

One thread, save by save, beside training. Every rank makes its files durable and leaves a receipt;
the first rank collects them, within a deadline, and decides. What decides is a name in the run that
can be created only once: the first rank's flusher commits under it, and a rank that loses the first
one gives the save up under it, or finds that it was committed. So it is committed whole or absent,
whoever dies or sleeps meanwhile, and everybody is told why.

The first rank numbers its saves. The others find the one of their step by what it says of the
present one; where ranks save different steps, the lower step gives way, at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.checkpointer.agreeing import margin_s
from laststep.engine.wire import Decide, Located
from laststep.errors import Aborted, LaststepError, StorageFailed
from laststep.format.manifest import FileRecord, ItemRecord

if TYPE_CHECKING:
    from laststep.checkpointer.agreeing import Agreements
    from laststep.checkpointer.parts import Taken
    from laststep.dist.board import Board
    from laststep.dist.ranks import Rank
    from laststep.engine.client import Client, SaveLink
    from laststep.engine.handle import SaveHandle
    from laststep.plan.job import Agreement
    from laststep.plan.save import SavePlan

log = logging.getLogger(__name__)

_LOOK_S = 0.02
_LOOK_EACH_S = 0.0002
"""All ranks ask one store: the more there are, the less often each does."""
_PAST = 16


class _Over(Exception):
    """The save is given up, for a reason that names the rank and that everybody may read."""


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first rank has begun a save."""

    epoch: int
    attempt: int
    folder: str


class _Past(msgspec.Struct, frozen=True, kw_only=True):
    """A save that is over; without a reason, it is committed."""

    number: int
    step: int
    reason: str


class _Now(msgspec.Struct, frozen=True, kw_only=True):
    """The save that the first rank leads: where, or why it does not; and the latest before it."""

    number: int
    step: int
    place: _Place | None
    problem: str
    past: tuple[_Past, ...]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wrote of an item."""

    kind: str
    per_rank: bool
    tensors: int
    size_bytes: int
    file: str
    """Where that lies; nowhere, if it was nothing."""
    tree: bytes
    """The digest of its plain values."""


class _Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has made durable, or why it has not."""

    agreement: bytes = b""
    files: tuple[FileRecord, ...] = ()
    items: dict[str, _Part] = {}
    problem: str = ""


class _Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a save; without a reason, it is committed."""

    reason: str = ""


@dataclass(slots=True)
class Round:
    """A save of this rank, on its way to the decision of all."""

    step: int
    link: SaveLink | None
    plan: SavePlan | None
    agreement: Agreement | None
    trees: dict[str, bytes] = field(default_factory=dict)
    """The digest of each item's plain values; filled in when they are serialised."""
    problem: str = ""
    """Why this rank takes no part."""
    number: int = 0
    """The first rank's number of it, once it is known."""

    def key(self, name: str) -> str:
        """The name of a note about it."""
        return f"s/{self.number}/{name}"


class Team:
    """The ranks of a job, as this one sees them."""

    def __init__(
        self, rank: Rank, board: Board, client: Client, agreements: Agreements, *, deadline_s: float
    ) -> None:
        self.rank = rank
        self.agreements = agreements
        self._board = board
        self._client = client
        self._deadline_s = deadline_s
        self._margin_s = margin_s(deadline_s)
        self._look_s = max(_LOOK_S, rank.ranks * _LOOK_EACH_S)
        self._number = 0
        """Of the last save that this rank led or joined."""
        self._past: deque[_Past] = deque(maxlen=_PAST)
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._before: list[str] = []
        """Notes of the save before, which nobody needs any more when the next is decided."""
        self._thread = threading.Thread(target=self._work, name="laststep-commit", daemon=True)
        self._thread.start()

    def begin(
        self,
        handle: SaveHandle,
        plan: SavePlan,
        taken: Taken,
        agreement: Agreement,
        *,
        overwrite: bool,
    ) -> SaveLink:
        """Enter a save of all ranks; its chunks may follow."""
        one = Round(handle.step, None, plan, agreement)
        one.link = self._client.begin(
            plan, handle, taken.sealing(plan, one.trees.update), overwrite=overwrite,
            role="first" if self.rank.is_first else "member",
        )  # fmt: skip
        self._rounds.put(one)
        return one.link

    def stay_out(self, step: int, why: str) -> None:
        """This rank does not take part in a save of that step; the others must hear it."""
        self._rounds.put(Round(step, None, None, None, problem=why))

    def close(self) -> None:
        """When all saves are over."""
        self._rounds.put(None)
        self._thread.join()
        self._board.close()
        self.agreements.close()

    # -- on its thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (one := self._rounds.get()) is not None:
            try:
                self._go(one)
            except BaseException as error:
                # Nobody else ends this save: whoever waits for it would wait for ever.
                log.exception("the commit of step %d failed", one.step)
                if one.link is not None:
                    one.link.failed(StorageFailed("a commit failed", found=repr(error)))

    def _go(self, one: Round) -> None:
        mine = f"rank {self.rank.number}"
        try:
            out = f", in which it takes no part: {one.problem}" if one.problem else ""
            self._board.put(f"last/{self.rank.number}", f"step {one.step}{out}".encode())
            if self.rank.is_first:
                self._lead(one)
            else:
                self._follow(one)
        except _Over as over:
            self._give_up(one, Aborted(str(over)), str(over))
        except LaststepError as error:
            self._give_up(one, error, f"{mine}: {error.without_remedy()}")
        except Exception as error:
            log.exception("the commit of step %d failed", one.step)
            failed = StorageFailed("a commit failed", found=repr(error))
            self._give_up(one, failed, f"{mine}: {failed}")

    def _give_up(self, one: Round, error: LaststepError, reason: str) -> None:
        """Whoever can be told is told; the run itself says what stands."""
        with contextlib.suppress(LaststepError):
            if self.rank.is_first:
                self._tell(one, _Decision(reason=reason))
            elif one.number:
                self._board.put(one.key("failed"), self._by_me(reason))
        if one.link is None:
            return
        handle = one.link.handle
        if not handle.durable.done():
            one.link.failed(error)
            return
        # Its flusher finds out whether it is committed after all.
        self._client.send(Decide(save=one.link.number, reason=reason))
        if self.rank.is_first:
            # Nobody but this rank commits, and it does not: no need to wait for a flusher for ever.
            if not handle.committed.over_within(self._deadline_s):
                one.link.failed(error)
            return
        handle.committed.over_within(None)
        if isinstance(handle.error, Aborted):
            with contextlib.suppress(LaststepError):
                self._board.put(one.key("given-up"), self._by_me(reason))

    def _by_me(self, reason: str) -> bytes:
        mine = f"rank {self.rank.number}"
        return (reason if reason.startswith(mine) else f"{mine} gave it up: {reason}").encode()

    def _own_receipt(self, one: Round) -> _Receipt:
        """Once this rank's files are durable, or never will be."""
        if one.link is None or one.plan is None or one.agreement is None:
            return _Receipt(problem=one.problem)
        handle = one.link.handle
        while not handle.durable.over_within(self._look_s):
            self.agreements.join()
            self._listen(one)
        if handle.error is not None:
            return _Receipt(problem=handle.error.without_remedy())
        names = {file.name for file in one.link.files}
        items = {
            item.name: _Part(
                kind=item.kind, per_rank=item.per_rank, tensors=len(item.pieces),
                size_bytes=item.size_bytes, tree=one.trees[item.name],
                file=file if (file := one.plan.file_of[item.name]) in names else "",
            )
            for item in one.plan.items
        }  # fmt: skip
        files = tuple(msgspec.structs.replace(f, rank=self.rank.number) for f in one.link.files)
        return _Receipt(agreement=one.agreement.digest, files=files, items=items)

    def _listen(self, one: Round) -> None:
        """While this rank still writes: has another failed, so that it need not go on?"""
        if self.rank.is_first:
            note = self._board.look(one.key("failed"))
            if note is not None:
                raise _Over(note.decode())
        elif (told := self._told(one)) is not None:
            raise _Over(told.reason)

    # The first rank

    def _lead(self, one: Round) -> None:
        place = self._begun(one)
        self._number += 1
        one.number = self._number
        if place is None or one.link is None:
            reason = f"rank 0: {self._own_receipt(one).problem}"
            self._post(one, place=None, problem=reason)
            self._past.append(_Past(number=one.number, step=one.step, reason=reason))
            return
        self._post(one, place=place)
        mine = self._own_receipt(one)
        if mine.problem:
            self._tell(one, _Decision(reason=f"rank 0: {mine.problem}"))
            return
        receipts = {0: mine} | self._collect(one)
        reason = self._objection(one, receipts)
        if reason:
            self._client.send(Decide(save=one.link.number, reason=reason))
        else:
            files = tuple(file for rank in sorted(receipts) for file in receipts[rank].files)
            self._client.send(
                Decide(save=one.link.number, items=_items(receipts, one.agreement), files=files,
                       ranks=self.rank.ranks)
            )  # fmt: skip
        self._await_flusher(one, one.link)
        error = one.link.handle.error
        if error is not None and not reason:
            reason = f"rank 0: {error.without_remedy()}"
        with contextlib.suppress(LaststepError):  # the others find out, in the run
            self._tell(one, _Decision(reason=reason))

    def _begun(self, one: Round) -> _Place | None:
        """Where this rank's flusher has begun; None where there is nothing to begin."""
        if one.link is None:
            return None
        deadline = time.monotonic() + self._deadline_s + self._margin_s
        while (place := one.link.place) is None:
            if one.link.handle.committed.over_within(_LOOK_S / 10):
                return None
            if time.monotonic() >= deadline:  # nobody waits for it any more
                raise Aborted(f"the flusher began nothing within {self._deadline_s:g} s")
        return _Place(epoch=place.epoch, attempt=place.attempt, folder=place.folder)

    def _post(self, one: Round, *, place: _Place | None, problem: str = "") -> None:
        now = _Now(
            number=one.number, step=one.step, place=place, problem=problem, past=tuple(self._past)
        )
        self._board.put("now", msgspec.msgpack.encode(now))

    def _await_flusher(self, one: Round, link: SaveLink) -> None:
        """Until it has committed, or failed to; or another rank has given the save up under the
        name that decides, so that it never can."""
        with contextlib.suppress(LaststepError):
            while not link.handle.committed.over_within(self._look_s):
                if (note := self._board.look(one.key("given-up"))) is not None:
                    link.failed(Aborted(note.decode()))
        link.handle.committed.over_within(None)

    def _collect(self, one: Round) -> dict[int, _Receipt]:
        """The receipts of all others; raises at the first problem, or when the time is up."""
        deadline = time.monotonic() + self._deadline_s
        missing = set(range(1, self.rank.ranks))
        found: dict[int, _Receipt] = {}
        pause = 0.001
        while missing:
            late = time.monotonic() >= deadline
            for rank in sorted(missing):
                note = self._board.look(one.key(f"r/{rank}"))
                if note is not None:
                    found[rank] = msgspec.msgpack.decode(note, type=_Receipt)
                    missing.remove(rank)
                elif not late:
                    break
            if missing:
                self.agreements.join()
                self._listen(one)
                if late:
                    raise _Over(self._who_is_missing(missing))
                time.sleep(pause)
                pause = min(2 * pause, self._look_s)
        return found

    def _who_is_missing(self, missing: set[int]) -> str:
        late = []
        for rank in sorted(missing)[:4]:
            last = self._board.look(f"last/{rank}")
            late.append(f"rank {rank}" + (f" (last seen at {last.decode()})" if last else ""))
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return f"no receipt within {self._deadline_s:g} s from {', '.join(late)}{more}"

    def _objection(self, one: Round, receipts: dict[int, _Receipt]) -> str:
        """Why this cannot be committed though everybody is done; mostly nothing."""
        assert one.agreement is not None  # noqa: S101 (without one there is a problem)
        others = [r for r, receipt in receipts.items() if receipt.agreement != one.agreement.digest]
        if others:
            return (
                f"rank {others[0]} describes the state otherwise than rank 0 knew; "
                "the ranks agree anew, and the next save works"
            )
        for ranks in (one_class.ranks for one_class in one.agreement.classes):
            first = receipts[ranks[0]]
            for rank in ranks[1:]:
                for name, part in receipts[rank].items.items():
                    same = part.per_rank or part.tree == first.items[name].tree
                    if not same:
                        return (
                            f"the plain values of item {name!r} differ between rank {ranks[0]} "
                            f"and rank {rank}: wrap it in laststep.PerRank if they may"
                        )
        return ""

    def _tell(self, one: Round, decision: _Decision) -> None:
        if not one.number:  # it was never led; the others give it up by themselves, or hear now
            self._number += 1
            one.number = self._number
            self._post(one, place=None, problem=decision.reason)
        self._past.append(_Past(number=one.number, step=one.step, reason=decision.reason))
        self._board.put(one.key("decision"), msgspec.msgpack.encode(decision))
        self._board.remove(self._before)
        ranks = range(1, self.rank.ranks)
        self._before = [one.key(name) for name in ("decision", "failed", "given-up")]
        self._before += [one.key(f"r/{rank}") for rank in ranks]

    # All others

    def _follow(self, one: Round) -> None:
        place = self._join(one)
        if one.link is not None:
            self._listen(one)  # where it came late
            one.link.begin()  # the flusher must know of the save before it is told where it is
            self._client.send(
                Located(save=one.link.number, epoch=place.epoch, attempt=place.attempt,
                        folder=place.folder)
            )  # fmt: skip
        mine = self._own_receipt(one)
        if mine.problem or one.link is None:
            told = f"rank {self.rank.number}: {mine.problem}"
            self._board.put(one.key("failed"), told.encode())
            return
        self._board.put(one.key(f"r/{self.rank.number}"), msgspec.msgpack.encode(mine))
        decision = self._decision(one)
        if decision.reason:
            raise _Over(decision.reason)
        self._client.send(Decide(save=one.link.number))
        one.link.handle.committed.over_within(None)

    def _join(self, one: Round) -> _Place:
        """Find the first rank's save of this step."""
        deadline = time.monotonic() + self._deadline_s + self._margin_s
        pause, refused = 0.001, 0
        while True:
            note = self._board.look("now")
            now = None if note is None else msgspec.msgpack.decode(note, type=_Now)
            if now is not None and now.number > self._number:
                if now.step == one.step:
                    self._number = one.number = now.number
                    if now.place is None:
                        raise _Over(now.problem)
                    return now.place
                if now.step > one.step:
                    raise _Over(self._missed(one, now))
                if refused < now.number:  # it waits for this rank in vain
                    refused = now.number
                    told = f"rank {self.rank.number} saves step {one.step} and not {now.step}"
                    self._board.put(f"s/{now.number}/failed", told.encode())
            self.agreements.join()
            if time.monotonic() >= deadline:
                last = self._board.look("last/0")
                seen = f" (last seen at {last.decode()})" if last else ""
                raise _Over(
                    f"rank 0{seen} began no save of step {one.step} within {self._deadline_s:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, self._look_s)

    def _missed(self, one: Round, now: _Now) -> str:
        """Why the first rank has gone on to a later step."""
        for past in reversed(now.past):
            if past.step == one.step and past.number > self._number:
                return past.reason or f"rank {self.rank.number} took no part, and came late"
        return f"rank 0 saves step {now.step} and not {one.step}"

    def _decision(self, one: Round) -> _Decision:
        deadline = time.monotonic() + self._deadline_s + self._margin_s
        pause = 0.001
        while (told := self._told(one)) is None:
            self.agreements.join()
            if time.monotonic() >= deadline:
                why = f"rank 0 decided nothing within {self._deadline_s:g} s"
                raise _Over(self._by_me(why).decode())
            time.sleep(pause)
            pause = min(2 * pause, self._look_s)
        return told

    def _told(self, one: Round) -> _Decision | None:
        """What became of a save that this rank has joined, as far as anybody has said."""
        if (note := self._board.look(one.key("decision"))) is not None:
            return msgspec.msgpack.decode(note, type=_Decision)
        if (note := self._board.look(one.key("given-up"))) is not None:
            return _Decision(reason=note.decode())
        note = self._board.look("now")
        now = None if note is None else msgspec.msgpack.decode(note, type=_Now)
        if now is None or now.number <= one.number:
            return None
        # This rank slept so long that the notes are gone.
        for past in now.past:
            if past.number == one.number:
                return _Decision(reason=past.reason)
        return _Decision(reason=f"rank {self.rank.number} heard nothing of its end in time")


def _items(receipts: dict[int, _Receipt], agreement: Agreement | None) -> tuple[ItemRecord, ...]:
    """The items of a checkpoint, from what all ranks wrote of them."""
    found: dict[str, ItemRecord] = {}
    shared = Counter(item for item, _ in (agreement.keys if agreement is not None else ()))
    for rank in sorted(receipts):
        for name, part in receipts[rank].items.items():
            known = found.get(name)
            if not part.file:
                continue
            found[name] = ItemRecord(
                name=name, kind=part.kind, per_rank=part.per_rank,
                file=part.file if known is None else known.file,
                tensors=part.tensors + (0 if known is None else known.tensors)
                if part.per_rank
                else shared[name],
                size_bytes=part.size_bytes + (0 if known is None else known.size_bytes),
            )  # fmt: skip
    return tuple(found.values())
