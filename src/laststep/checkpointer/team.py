"""This rank's part in committing the saves of a job: receipts, one decision, and telling everybody.

One thread, save by save, beside training. Every rank makes its files durable and leaves a receipt;
the first rank collects them, within a deadline, and decides. What decides is a name in the run that
can be created only once: the first rank's flusher commits under it, and a rank that loses the first
one gives the save up under it, or finds that it was committed. So it is committed whole or absent,
whoever dies or sleeps meanwhile, and everybody is told why.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

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
_MARGIN_S = 10.0
"""Members wait so much longer than the first rank does, to hear what it decided."""


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first rank has begun a save."""

    epoch: int
    attempt: int
    folder: str


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wrote of an item."""

    kind: str
    per_rank: bool
    tensors: int
    size_bytes: int
    file: str
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
    key: str
    link: SaveLink | None
    plan: SavePlan | None
    agreement: Agreement | None
    trees: dict[str, bytes] = field(default_factory=dict)
    """The digest of each item's plain values; filled in when they are serialised."""
    problem: str = ""
    """Why this rank takes no part."""


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
        self._seen: Counter[int] = Counter()
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
        one = Round(handle.step, self._key(handle.step), None, plan, agreement)
        one.link = self._client.begin(
            plan, handle, taken.sealing(plan, one.trees.update), overwrite=overwrite,
            role="first" if self.rank.is_first else "member",
        )  # fmt: skip
        self._rounds.put(one)
        return one.link

    def stay_out(self, step: int, why: str) -> None:
        """This rank does not take part in a save of that step; the others must hear it."""
        self._rounds.put(Round(step, self._key(step), None, None, None, problem=why))

    def close(self) -> None:
        """When all saves are over."""
        self._rounds.put(None)
        self._thread.join()

    def _key(self, step: int) -> str:
        self._seen[step] += 1
        return f"s/{step}.{self._seen[step]}"

    # -- on its thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (one := self._rounds.get()) is not None:
            try:
                self._board.put(f"last/{self.rank.number}", str(one.step).encode())
                if self.rank.is_first:
                    self._lead(one)
                else:
                    self._follow(one)
            except LaststepError as error:
                self._give_up(one, error)
            except Exception as error:
                log.exception("the commit of step %d failed", one.step)
                self._give_up(one, StorageFailed("a commit failed", found=repr(error)))

    def _give_up(self, one: Round, error: LaststepError) -> None:
        """Whoever can be told is told; the run itself says what stands."""
        reason = f"rank {self.rank.number}: {error.without_remedy()}"
        if self.rank.is_first:
            with contextlib.suppress(LaststepError):
                self._tell(one, _Decision(reason=reason))
        if one.link is None:
            return
        if one.link.handle.durable.done():
            # Its flusher finds out whether it is committed after all.
            self._client.send(Decide(save=one.link.number, reason=reason))
            one.link.handle.committed.over_within(None)
        else:
            one.link.failed(error)

    def _own_receipt(self, one: Round) -> _Receipt:
        """Once this rank's files are durable, or never will be."""
        if one.link is None or one.plan is None or one.agreement is None:
            return _Receipt(problem=one.problem)
        handle = one.link.handle
        while not handle.durable.over_within(_LOOK_S):
            self.agreements.join()
            self._listen(one)
        if handle.error is not None:
            return _Receipt(problem=handle.error.without_remedy())
        names = {file.name for file in one.link.files}
        items = {
            item.name: _Part(
                kind=item.kind, per_rank=item.per_rank, tensors=len(item.pieces),
                size_bytes=item.size_bytes, file=one.plan.file_of[item.name],
                tree=one.trees[item.name],
            )
            for item in one.plan.items if one.plan.file_of[item.name] in names
        }  # fmt: skip
        files = tuple(msgspec.structs.replace(f, rank=self.rank.number) for f in one.link.files)
        return _Receipt(agreement=one.agreement.digest, files=files, items=items)

    def _listen(self, one: Round) -> None:
        """While this rank still writes: has another failed, so that it need not go on?"""
        if self.rank.is_first:
            note = self._board.look(f"{one.key}/failed")
            if note is not None:
                raise Aborted(note.decode())
        elif (note := self._board.look(f"{one.key}/decision")) is not None:
            raise Aborted(msgspec.msgpack.decode(note, type=_Decision).reason)

    # The first rank

    def _lead(self, one: Round) -> None:
        if one.link is not None:
            self._post_place(one, one.link)
        mine = self._own_receipt(one)
        if mine.problem:
            self._tell(one, _Decision(reason=f"rank 0: {mine.problem}"))
            return
        receipts = {0: mine} | self._collect(one)
        reason = self._objection(one, receipts)
        assert one.link is not None  # noqa: S101 (without one there is a problem)
        if reason:
            self._client.send(Decide(save=one.link.number, reason=reason))
        else:
            files = tuple(file for rank in sorted(receipts) for file in receipts[rank].files)
            self._client.send(
                Decide(save=one.link.number, items=_items(receipts, one.agreement), files=files,
                       ranks=self.rank.ranks)
            )  # fmt: skip
        one.link.handle.committed.over_within(None)
        error = one.link.handle.error
        self._tell(one, _Decision(reason="" if error is None else reason or f"rank 0: {error}"))

    def _post_place(self, one: Round, link: SaveLink) -> None:
        while link.place is None and not link.handle.committed.over():
            time.sleep(_LOOK_S / 10)
        if link.place is not None:
            place = link.place
            note = _Place(epoch=place.epoch, attempt=place.attempt, folder=place.folder)
            self._board.put(f"{one.key}/place", msgspec.msgpack.encode(note))

    def _collect(self, one: Round) -> dict[int, _Receipt]:
        """The receipts of all others; raises at the first problem, or when the time is up."""
        deadline = time.monotonic() + self._deadline_s
        missing = set(range(1, self.rank.ranks))
        found: dict[int, _Receipt] = {}
        pause = 0.001
        while missing:
            for rank in sorted(missing):
                note = self._board.look(f"{one.key}/r/{rank}")
                if note is None:
                    break
                found[rank] = msgspec.msgpack.decode(note, type=_Receipt)
                missing.remove(rank)
                if found[rank].problem:
                    raise Aborted(f"rank {rank}: {found[rank].problem}")
            if missing:
                self.agreements.join()
                self._listen(one)
                if time.monotonic() >= deadline:
                    raise Aborted(self._who_is_missing(one, missing))
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_S)
        return found

    def _who_is_missing(self, one: Round, missing: set[int]) -> str:
        late = []
        for rank in sorted(missing):
            if self._board.look(f"{one.key}/r/{rank}") is None:
                last = self._board.look(f"last/{rank}")
                told = f", whose last save was of step {last.decode()}" if last else ""
                late.append(f"rank {rank}{told}")
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        return f"no receipt within {self._deadline_s:g} s from {', '.join(late[:4])}{more}"

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
        self._board.put(f"{one.key}/decision", msgspec.msgpack.encode(decision))
        self._board.remove(self._before)
        ranks = range(1, self.rank.ranks)
        self._before = [f"{one.key}/{name}" for name in ("place", "decision", "failed")]
        self._before += [f"{one.key}/r/{rank}" for rank in ranks]

    # All others

    def _follow(self, one: Round) -> None:
        if one.link is not None:
            place = self._place(one)
            self._client.send(
                Located(save=one.link.number, epoch=place.epoch, attempt=place.attempt,
                        folder=place.folder)
            )  # fmt: skip
        mine = self._own_receipt(one)
        if mine.problem:
            self._board.put(
                f"{one.key}/failed", f"rank {self.rank.number}: {mine.problem}".encode()
            )
        self._board.put(f"{one.key}/r/{self.rank.number}", msgspec.msgpack.encode(mine))
        if mine.problem or one.link is None:
            return
        decision = self._decision(one)
        self._client.send(Decide(save=one.link.number, reason=decision.reason or None))
        one.link.handle.committed.over_within(None)

    def _place(self, one: Round) -> _Place:
        deadline = time.monotonic() + self._deadline_s + _MARGIN_S
        pause = 0.001
        while (note := self._board.look(f"{one.key}/place")) is None:
            self._listen(one)
            self.agreements.join()
            if one.link is not None and one.link.handle.error is not None:
                raise one.link.handle.error
            if time.monotonic() >= deadline:
                last = self._board.look("last/0")
                raise Aborted(
                    f"rank 0 began no save of step {one.step}",
                    expected=f"one within {self._deadline_s:g} s",
                    found=f"its last save was of step {last.decode()}" if last else "none at all",
                    remedy="all ranks must save the same steps",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)
        return msgspec.msgpack.decode(note, type=_Place)

    def _decision(self, one: Round) -> _Decision:
        deadline = time.monotonic() + self._deadline_s + _MARGIN_S
        pause = 0.001
        while (note := self._board.look(f"{one.key}/decision")) is None:
            self.agreements.join()
            if time.monotonic() >= deadline:
                raise Aborted(f"rank 0 decided nothing within {self._deadline_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)
        return msgspec.msgpack.decode(note, type=_Decision)


def _items(receipts: dict[int, _Receipt], agreement: Agreement | None) -> tuple[ItemRecord, ...]:
    """The items of a checkpoint, from what all ranks wrote of them."""
    found: dict[str, ItemRecord] = {}
    shared = Counter(item for item, _ in (agreement.keys if agreement is not None else ()))
    for rank in sorted(receipts):
        for name, part in receipts[rank].items.items():
            known = found.get(name)
            found[name] = ItemRecord(
                name=name, kind=part.kind, per_rank=part.per_rank,
                file=part.file if known is None else known.file,
                tensors=part.tensors + (0 if known is None else known.tensors)
                if part.per_rank
                else shared[name],
                size_bytes=part.size_bytes + (0 if known is None else known.size_bytes),
            )  # fmt: skip
    return tuple(found.values())
