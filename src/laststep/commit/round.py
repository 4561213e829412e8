"""A save of all ranks, as one rank goes through it: what is noted of it, and what a rank can do.

Every rank makes its files durable and leaves a receipt. The first rank of a group of ranks
(`plan.groups`) gathers those of its group and leaves one summary; the first rank of the job gathers
the summaries (`leader`, `member`). A rank waits for others for one deadline in each save, however
many things it waits for; its own work does not count. Whoever gathers waits less long than those
who wait for it: they are to hear who is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.codecs.digests import digest
from laststep.commit.agreement import ABSENT, margin_s
from laststep.commit.differences import ReplicaContents, UnequalRanks, values_of
from laststep.errors import AbortedError, LaststepError, MismatchError, StorageError
from laststep.flush.protocol import Decided
from laststep.format.manifest import Commit
from laststep.plan.receipts import Differing, ItemTally, Receipt
from laststep.terms import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.lineage import AttemptName
    from laststep.commit.agreement import Agreements
    from laststep.flush.client import Client
    from laststep.flush.saves import SaveUnderWay
    from laststep.plan.receipts import Groups
    from laststep.plan.tables import Agreement
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
    from laststep.storage.store import Store

BEGUN, SUMMARISED, GATHERED, COMMITTED, DECIDED = 0.5, 0.6, 0.8, 0.9, 1.0
"""What is waited for in a save, in this order, and how much longer than the deadline, in parts of
the margin: that the first rank has begun, which may have waited itself for others to describe their
state; the receipts of a group; the summaries of all groups; the commit, which the first rank's
flusher does; and that the first rank tells of it."""


_SHOWN = 4


class GivenUp(Exception):
    """The save is given up, for a reason that everybody may read: it names the rank, and what to
    do."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a save; without a reason, it is committed. With `asks` it is not decided yet:
    the first rank asks ranks to show the values or tensors in which they differ."""

    reason: str = ""
    asks: Differing | UnequalRanks | None = None


@dataclass(slots=True)
class Round:
    """A save of this rank, on its way to the decision of all."""

    step: int
    save: SaveUnderWay | None
    agreement: Agreement | None
    trees: dict[str, bytes] = field(default_factory=dict)
    """The plain values of each item, as they are stored; filled in when they are serialised."""
    receipt: Receipt = field(default_factory=Receipt)
    """What this rank reports, but for what is known only at the end; filled in with these."""
    contained: ReplicaContents | None = None
    """What this rank holds of replicas, if they are compared in this save."""
    problem: str = ""
    """Why this rank takes no part."""
    number: int = 0
    """The first rank's number of this save; it becomes known together with the next two fields."""
    place: AttemptName | None = None
    groups: Groups | None = None
    began_s: float = 0.0
    """When this rank began to take part in it (monotonic)."""
    own_s: float = 0.0
    """How long this rank has been busy with its own work since: that is no waiting for others."""

    def seal(self, trees: dict[str, bytes], rank: int) -> bytes:
        """Note the plain values of each item; the receipt of this rank, as far as it is known."""
        assert self.save is not None  # noqa: S101 (who takes no part seals nothing)
        assert self.agreement is not None  # noqa: S101 (as above)
        plan = self.save.plan
        items = {
            item.name: ItemTally(
                kind=item.kind,
                per_rank=item.per_rank,
                tensors=len(item.pieces),
                size_bytes=item.size_bytes,
            )
            for item in plan.items
        }
        shared = [item.name for item in plan.items if not item.per_rank]
        self.trees.update(trees)
        self.receipt = Receipt(
            agreement=self.agreement.digest,
            rank_class=self.agreement.class_of[rank],
            items=items,
            trees={name: digest(trees[name]) for name in shared},
        )
        return msgspec.msgpack.encode(self.receipt)

    def key(self, name: str) -> str:
        """The name of a note about it."""
        return f"s/{self.number}/{name}"

    def answer_key(self, asked: Differing | UnequalRanks, rank: int) -> str:
        """The name of a rank's answer to a question."""
        return self.key(f"{'v' if isinstance(asked, Differing) else asked.number}/{rank}")

    def answer_to(self, asked: Differing | UnequalRanks) -> bytes:
        """What this rank has of that in which ranks differ."""
        if isinstance(asked, Differing):
            return msgspec.msgpack.encode(values_of(self.trees[asked.item]))
        return b"" if self.contained is None else self.contained.single(asked.number)


class RoundContext:
    """What this rank works with, whatever its part: notes, its flusher, the run, and patience."""

    def __init__(
        self,
        rank: Rank,
        board: Board,
        client: Client,
        agreements: Agreements,
        store: Store,
        *,
        deadline_s: float,
    ) -> None:
        self.rank = rank
        self.board = board
        self.client = client
        self.agreements = agreements
        self.deadline_s = deadline_s
        self._store = store

    def until_s(self, round_: Round, margin: float) -> float:
        """When this rank stops waiting for others in that save, with so much of the margin."""
        return round_.began_s + round_.own_s + self.deadline_s + margin * margin_s(self.deadline_s)

    def by_me(self, reason: str) -> bytes:
        """A reason for others to read, with who gives it."""
        mine = f"rank {self.rank.number}"
        return (reason if reason.startswith(mine) else f"{mine} gave it up: {reason}").encode()

    def trouble(self, problem: str) -> str:
        """What keeps this rank from saving, for others to read; or what keeps another, by which it
        was told."""
        if problem.startswith("rank "):
            return problem
        return f"rank {self.rank.number}: {problem}; its log says more"

    def join(self) -> None:
        """Agree anew if another rank has called for it. Where ranks cannot agree, raise `GivenUp`
        with who describes what: this rank itself is in no trouble."""
        try:
            self.agreements.join()
        except MismatchError as error:
            differences = "; ".join(error.problems.lines()[:_SHOWN])
            raise GivenUp(f"{error.what}: {differences}; {error.remedy}") from error

    def last_of(self, rank: int) -> str:
        """A rank, and what is known of it."""
        return self.agreements.last_of(rank)

    def absent(self, round_: Round, who: Sequence[str]) -> GivenUp:
        """The error for ranks that have not saved in time."""
        late = f"did not save step {round_.step} within {self.deadline_s:g} s"
        return GivenUp(f"{listed(who)} {late}; {ABSENT}")

    def own_receipt(self, round_: Round, listen: Callable[[Round], None]) -> Receipt:
        """Wait until this rank's files are durable, or never will be, and return its receipt.
        `listen` raises `GivenUp` if another rank has failed."""
        if round_.save is None or round_.agreement is None:
            return Receipt(problem=round_.problem)
        began_s, durable = self.board.now_s(), round_.save.handle.durable

        def look() -> bool | None:
            if durable.over():
                return True
            self.join()
            listen(round_)
            return None

        self.board.until(look, rest=durable.over_within)
        round_.own_s += self.board.now_s() - began_s
        error = round_.save.handle.error or round_.save.lost
        if error is not None:
            return Receipt(problem=error.without_remedy())
        return msgspec.structs.replace(
            round_.receipt,
            written=round_.save.written,
            replicas={} if round_.contained is None else round_.contained.sums(),
        )

    def gather(
        self,
        round_: Round,
        names: Sequence[str],
        until_s: float,
        listen: Callable[[Round], None],
        *,
        missing: Callable[[Sequence[str]], list[str]],
    ) -> dict[str, bytes]:
        """Wait for the notes that others leave about a save. Raises at the first problem, or, when
        the time is up, `GivenUp` with those who are `missing`."""

        def meanwhile() -> None:
            self.join()
            listen(round_)
            self.check_flusher(round_)

        keys = {round_.key(name): name for name in names}
        notes = self.board.wait_all(keys, until_s, meanwhile=meanwhile)
        late = [name for key, name in keys.items() if key not in notes]
        if late:
            listen(round_)
            raise self.absent(round_, missing(late))
        return {keys[key]: note for key, note in notes.items()}

    def check_flusher(self, round_: Round) -> None:
        """Raise the error of a flusher that is gone or has given up: this rank cannot go on."""
        error = None if round_.save is None else round_.save.handle.error or round_.save.lost
        if error is not None:
            raise error

    def await_flusher(self, save: SaveUnderWay, until_s: float | None = None) -> None:
        """Wait until the flusher has said what became of a decided save, or is gone; for the
        deadline at most, or until that time (monotonic)."""

        def look() -> bool | None:
            return True if save.handle.committed.over() or save.lost is not None else None

        if until_s is None:
            until_s = self.board.now_s() + self.deadline_s
        self.board.until(look, until_s, rest=save.rest)

    def settle(self, round_: Round, error: LaststepError | None) -> LaststepError | None:
        """See to it that a save of this rank's is over, and return why it failed, if it has.

        Mostly its flusher has said so. Where that is gone, or stands still, this rank itself gives
        the save up in the run, or finds there what was decided; `error` is what else to report,
        None where others have told of the commit.
        """
        save = round_.save
        if save is None or save.handle.committed.over():
            return None if save is None else save.handle.error
        failure = error or save.lost
        if failure is not None:
            failure = self._given_up(round_, failure)
        if failure is None and round_.place is not None:
            seconds = save.handle.since_began_s()
            self.client.decided(Decided(save=save.number, at=round_.place, seconds=seconds))
        else:
            save.failed(failure or StorageError("a commit failed", found="no answer"))
        return save.handle.error

    def _given_up(self, round_: Round, failure: LaststepError) -> LaststepError | None:
        """Give the save up in the run too, so that no flusher that wakes up later can commit it.
        Returns why; None where it is committed after all."""
        if round_.place is None:
            return failure
        try:
            stands = decision.abort(self._store, round_.place.folder, str(failure))
        except LaststepError as second:
            return StorageError(
                f"it is not known whether step {round_.step} is committed",
                found=f"{failure}; then {second}",
                remedy="`laststep ls` shows it if it is",
            )
        if isinstance(stands, Commit):
            return None
        if stands.reason == str(failure) or not isinstance(failure, AbortedError):
            return failure
        return AbortedError(stands.reason)  # of whoever gave it up first
