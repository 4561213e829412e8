"""A save of all ranks, as one rank goes through it: what is noted of it, and what a rank can do.

Every rank makes its files durable and leaves a receipt. The first rank of a group of ranks
(`plan.groups`) gathers those of its group, has its flusher write the group's manifest, and leaves
one summary; the first rank of the job gathers the summaries (`leading`, `following`). A rank waits
for others for one deadline in each save, however many things it waits for; its own work does not
count. Whoever gathers waits less long than those who wait for it: they are to hear who is missing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.catalog.names import AttemptName
from laststep.codecs.digests import digest
from laststep.commit.agreement import ABSENT, margin_s
from laststep.commit.differences import Differing, values_of
from laststep.commit.receipts import ItemTally, Receipt
from laststep.commit.replicas import ReplicaContents, UnequalRanks
from laststep.errors import Aborted, LaststepError, Mismatch, StorageFailed
from laststep.flush.protocol import Decided, Gathered
from laststep.format.manifest import Commit
from laststep.terms import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.commit.agreement import Agreements
    from laststep.flush.client import Client
    from laststep.flush.saves import SaveUnderWay
    from laststep.format.manifest import FileRecord, GroupRecord
    from laststep.plan.groups import Groups
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


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a save; without a reason, it is committed. Unless the first rank asks first:
    ranks whose values or tensors differ are to show these."""

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
    contained: ReplicaContents | None = None
    """What this rank holds of replicas, if they are compared in this save."""
    problem: str = ""
    """Why this rank takes no part."""
    number: int = 0
    """The first rank's number of it, once it is known; with it the next two."""
    place: AttemptName | None = None
    groups: Groups | None = None
    began_s: float = 0.0
    """When this rank turned to it."""
    own_s: float = 0.0
    """How long it has worked on it itself since."""

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

    def until_s(self, one: Round, margin: float) -> float:
        """When this rank stops to wait for others in that save; with so much of the margin."""
        return one.began_s + one.own_s + self.deadline_s + margin * margin_s(self.deadline_s)

    def by_me(self, reason: str) -> bytes:
        """A reason for others to read, with who gives it."""
        mine = f"rank {self.rank.number}"
        return (reason if reason.startswith(mine) else f"{mine} gave it up: {reason}").encode()

    def trouble(self, problem: str) -> str:
        """What keeps this rank from saving, for others to read."""
        return f"rank {self.rank.number}: {problem}; its log says more"

    def join(self) -> None:
        """Agree anew if another rank has called for it. Where that comes to nothing, it is no
        trouble of this rank's: `GivenUp`, and who describes what."""
        try:
            self.agreements.join()
        except Mismatch as error:
            told = "; ".join(error.problems.lines()[:_SHOWN])
            raise GivenUp(f"{error.what}: {told}; {error.remedy}") from error

    def last_of(self, rank: int) -> str:
        """A rank, and what is known of it."""
        return self.agreements.last_of(rank)

    def absent(self, one: Round, who: Sequence[str]) -> GivenUp:
        """Those have not saved in time."""
        late = f"did not save step {one.step} within {self.deadline_s:g} s"
        return GivenUp(f"{listed(who)} {late}; {ABSENT}")

    def own_receipt(self, one: Round, listen: Callable[[Round], None]) -> Receipt:
        """Once this rank's files are durable, or never will be. `listen` looks whether another rank
        has failed, and raises `GivenUp` then."""
        if one.save is None or one.agreement is None:
            return Receipt(problem=one.problem)
        began_s, durable = time.monotonic(), one.save.handle.durable

        def look() -> bool | None:
            if durable.over():
                return True
            self.join()
            listen(one)
            return None

        self.board.until(look, rest=durable.over_within)
        one.own_s += time.monotonic() - began_s
        error = one.save.handle.error or one.save.lost
        if error is not None:
            return Receipt(problem=error.without_remedy())
        names = {file.name for file in one.save.files}
        items = {
            item.name: ItemTally(
                kind=item.kind, per_rank=item.per_rank, tensors=len(item.pieces),
                size_bytes=item.size_bytes,
                file=file if (file := one.save.plan.file_of[item.name]) in names else "",
            )
            for item in one.save.plan.items
        }  # fmt: skip
        shared = [item.name for item in one.save.plan.items if not item.per_rank]
        trees = {name: digest(one.trees[name]) for name in shared}
        files = tuple(msgspec.structs.replace(f, rank=self.rank.number) for f in one.save.files)
        return Receipt(
            agreement=one.agreement.digest, files=files, items=items, trees=trees,
            replicas={} if one.contained is None else one.contained.sums(),
        )  # fmt: skip

    def gather(
        self,
        one: Round,
        names: Sequence[str],
        until_s: float,
        listen: Callable[[Round], None],
        *,
        missing: Callable[[Sequence[str]], list[str]],
    ) -> dict[str, bytes]:
        """What others have to leave about a save. Raises at the first problem, or, when the time is
        up, `GivenUp` with those who are `missing`."""

        def meanwhile() -> None:
            self.join()
            listen(one)
            self.check_flusher(one)

        keys = {one.key(name): name for name in names}
        notes = self.board.wait_all(keys, until_s, meanwhile=meanwhile)
        late = [name for key, name in keys.items() if key not in notes]
        if late:
            listen(one)
            raise self.absent(one, missing(late))
        return {keys[key]: note for key, note in notes.items()}

    def check_flusher(self, one: Round) -> None:
        """Raise why the flusher is gone, or has given up, that this rank needs to go on."""
        error = None if one.save is None else one.save.handle.error or one.save.lost
        if error is not None:
            raise error

    def write_group(self, one: Round, receipts: Mapping[int, Receipt]) -> GroupRecord:
        """Have the manifest of the group of this rank's made, durably."""
        save, groups = one.save, one.groups
        assert save is not None  # noqa: S101 (its files are durable)
        assert groups is not None  # noqa: S101 (known with its place)
        ranks = groups.group_of(self.rank.number)
        files: tuple[FileRecord, ...] = tuple(f for r in ranks for f in receipts[r].files)
        began_s = time.monotonic()
        self.client.send(
            Gathered(save=save.number, first=ranks.start, ranks=len(ranks), files=files)
        )

        def look() -> GroupRecord | None:
            self.check_flusher(one)
            return save.group

        group = self.board.until(look, began_s + self.deadline_s, rest=save.rest)
        if group is None:
            raise GivenUp(self.trouble(f"its flusher wrote nothing within {self.deadline_s:g} s"))
        one.own_s += time.monotonic() - began_s
        return group

    def await_flusher(self, save: SaveUnderWay, until_s: float | None = None) -> None:
        """Until it has said what became of a save that is decided, or is gone, or stands still: for
        the deadline, or until that time (monotonic)."""

        def look() -> bool | None:
            return True if save.handle.committed.over() or save.lost is not None else None

        if until_s is None:
            until_s = time.monotonic() + self.deadline_s
        self.board.until(look, until_s, rest=save.rest)

    def settle(self, one: Round, error: LaststepError | None) -> LaststepError | None:
        """See to it that a save of this rank's is over, and return why it failed, if it has.

        Mostly its flusher has said so. Where that is gone, or stands still, this rank itself gives
        the save up in the run, or finds there what was decided; `error` is what else to report,
        None where others have told of the commit.
        """
        save = one.save
        if save is None or save.handle.committed.over():
            return None if save is None else save.handle.error
        failure = error or save.lost
        if failure is not None:
            failure = self._given_up(one, failure)
        if failure is None and one.place is not None:
            seconds = save.handle.since_began_s()
            self.client.decided(Decided(save=save.number, at=one.place, seconds=seconds))
        else:
            save.failed(failure or StorageFailed("a commit failed", found="no answer"))
        return save.handle.error

    def _given_up(self, one: Round, failure: LaststepError) -> LaststepError | None:
        """Why it is given up, in the run too, so that no flusher that wakes up later can commit it;
        None where it is committed after all."""
        if one.place is None:
            return failure
        try:
            stands = decision.abort(self._store, one.place.folder, str(failure))
        except LaststepError as second:
            return StorageFailed(
                f"it is not known whether step {one.step} is committed",
                found=f"{failure}; then {second}", remedy="`laststep ls` shows it if it is",
            )  # fmt: skip
        if isinstance(stands, Commit):
            return None
        if stands.reason == str(failure) or not isinstance(failure, Aborted):
            return failure
        return Aborted(stands.reason)  # of whoever gave it up first
