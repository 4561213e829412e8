"""The state of one save on one rank, and the operations shared by leader and members.

Every rank makes its files durable and publishes a receipt. The leader of a group of ranks
(`Groups`) collects the receipts of its group and publishes one summary; rank 0 collects the
summaries (`leader`, `member`). In each save, a rank waits for other ranks for at most one deadline
in total; its own work does not count. A rank that collects stops waiting earlier than the ranks
that wait for it, so that it can still tell them which ranks are missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.attempt import abort
from laststep.codecs.digests import digest
from laststep.commit.differences import ReplicaContents, UnequalRanks, values_of
from laststep.commit.layouts import ABSENT, margin_s
from laststep.constants import listed
from laststep.errors import AbortedError, LaststepError, MismatchError, StorageError
from laststep.format.manifest import Commit
from laststep.plan.receipts import Differing, ItemTally, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.lineage import AttemptName
    from laststep.commit.layouts import GlobalLayouts
    from laststep.flush.client import Client
    from laststep.flush.saves import Save
    from laststep.plan.layouts import GlobalLayout
    from laststep.plan.receipts import Groups
    from laststep.ranks.key_value import KeyValueStore
    from laststep.ranks.rank import Rank
    from laststep.storage.store import Store

BEGUN, SUMMARISED, GATHERED, COMMITTED, DECIDED = 0.5, 0.6, 0.8, 0.9, 1.0
"""The waits of a save, in order, each with the fraction of the margin that is added to the
deadline: until rank 0 has begun (it may itself have waited for local layouts of others), for the
receipts of a group, for the summaries of all groups, for the commit by rank 0's flusher, and for
the decision that rank 0 publishes."""


_SHOWN = 4


class GivenUp(Exception):
    """The save is aborted. The message is meant for all ranks: it names the rank at fault and the
    remedy."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a save; an empty reason means committed. If `asks` is set, the save is not
    decided yet: rank 0 asks ranks for the values or tensors in which they differ."""

    reason: str = ""
    asks: Differing | UnequalRanks | None = None


@dataclass(slots=True)
class Round:
    """One save on this rank, until all ranks have its decision."""

    step: int
    save: Save | None
    global_layout: GlobalLayout | None
    trees: dict[str, bytes] = field(default_factory=dict)
    """The encoded plain values of each item; filled in when they are serialised."""
    receipt: Receipt = field(default_factory=Receipt)
    """This rank's receipt without the fields known only at the end; filled in together with
    `trees`."""
    contained: ReplicaContents | None = None
    """This rank's replicas, if this save compares them."""
    problem: str = ""
    """The reason why this rank takes no part; empty if it does."""
    number: int = 0
    """Rank 0's number of this save; known together with the next two fields."""
    place: AttemptName | None = None
    groups: Groups | None = None
    began_s: float = 0.0
    """The time at which this rank started to take part (monotonic)."""
    own_s: float = 0.0
    """Seconds of this rank's own work since then, which do not count as waiting for others."""

    def seal(self, trees: dict[str, bytes], rank: int) -> bytes:
        """Record the plain values of each item and return the encoded receipt, complete except for
        the written files and the replicas."""
        assert self.save is not None  # noqa: S101 (a rank without a save seals nothing)
        assert self.global_layout is not None  # noqa: S101 (as above)
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
            global_layout=self.global_layout.digest,
            layout_group=self.global_layout.layout_group_of[rank],
            items=items,
            trees={name: digest(trees[name]) for name in shared},
        )
        return msgspec.msgpack.encode(self.receipt)

    def key(self, name: str) -> str:
        """Return the key `name` of this save in the key-value store."""
        return f"s/{self.number}/{name}"

    def answer_key(self, asked: Differing | UnequalRanks, rank: int) -> str:
        """Return the key of a rank's answer to a question of rank 0."""
        return self.key(f"{'v' if isinstance(asked, Differing) else asked.number}/{rank}")

    def answer_to(self, asked: Differing | UnequalRanks) -> bytes:
        """Return this rank's values or tensor digests that rank 0 asks for."""
        if isinstance(asked, Differing):
            return msgspec.msgpack.encode(values_of(self.trees[asked.item]))
        return b"" if self.contained is None else self.contained.single(asked.number)


class RoundContext:
    """The objects that leader and members share: key-value store, flusher client, layouts, run,
    deadline."""

    def __init__(
        self,
        rank: Rank,
        kv: KeyValueStore,
        client: Client,
        global_layouts: GlobalLayouts,
        store: Store,
        *,
        deadline_s: float,
    ) -> None:
        self.rank = rank
        self.kv = kv
        self.client = client
        self.global_layouts = global_layouts
        self.deadline_s = deadline_s
        self._store = store

    def until_s(self, round_: Round, margin: float) -> float:
        """Return the time (monotonic) at which this rank stops waiting for others in this save;
        `margin` is the fraction of the margin to add to the deadline."""
        return round_.began_s + round_.own_s + self.deadline_s + margin * margin_s(self.deadline_s)

    def by_me(self, reason: str) -> bytes:
        """Return a reason for other ranks, prefixed with this rank's name."""
        mine = f"rank {self.rank.number}"
        return (reason if reason.startswith(mine) else f"{mine} gave it up: {reason}").encode()

    def trouble(self, problem: str) -> str:
        """Return a problem for other ranks to read, prefixed with this rank unless it already names
        one."""
        if problem.startswith("rank "):
            return problem
        return f"rank {self.rank.number}: {problem}; see its log"

    def join(self) -> None:
        """Agree on a new global layout if another rank has called for it. If the ranks cannot
        agree, raises `GivenUp` with the differences rather than an error of this rank."""
        try:
            self.global_layouts.join()
        except MismatchError as error:
            differences = "; ".join(error.problems.lines()[:_SHOWN])
            raise GivenUp(f"{error.what}: {differences}; {error.remedy}") from error

    def last_of(self, rank: int) -> str:
        """Return the rank's name with the step at which it was last seen."""
        return self.global_layouts.last_of(rank)

    def absent(self, round_: Round, who: Sequence[str]) -> GivenUp:
        """Return the error for ranks that did not save in time."""
        late = f"did not save step {round_.step} within {self.deadline_s:g} s"
        return GivenUp(f"{listed(who)} {late}; {ABSENT}")

    def own_receipt(self, round_: Round, listen: Callable[[Round], None]) -> Receipt:
        """Wait until this rank's files are durable or have failed, and return its receipt. `listen`
        raises `GivenUp` if another rank has failed."""
        if round_.save is None or round_.global_layout is None:
            return Receipt(problem=round_.problem)
        began_s, durable = self.kv.now_s(), round_.save.handle.durable

        def look() -> bool | None:
            if durable.over():
                return True
            self.join()
            listen(round_)
            return None

        self.kv.until(look, rest=durable.over_within)
        round_.own_s += self.kv.now_s() - began_s
        error = round_.save.error or round_.save.lost
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
        """Wait for keys of this save that other ranks publish. Raises at the first problem, or
        `GivenUp` that names the `missing` ranks when the time is up."""

        def meanwhile() -> None:
            self.join()
            listen(round_)
            self.check_flusher(round_)

        keys = {round_.key(name): name for name in names}
        notes = self.kv.wait_all(keys, until_s, meanwhile=meanwhile)
        late = [name for key, name in keys.items() if key not in notes]
        if late:
            listen(round_)
            raise self.absent(round_, missing(late))
        return {keys[key]: note for key, note in notes.items()}

    def check_flusher(self, round_: Round) -> None:
        """Raise the error of a flusher that has died or has aborted the save."""
        error = None if round_.save is None else round_.save.error or round_.save.lost
        if error is not None:
            raise error

    def await_flusher(self, save: Save, until_s: float | None = None) -> None:
        """Wait until the flusher reports the outcome of a decided save or has died, for at most the
        deadline or until `until_s` (monotonic)."""

        def look() -> bool | None:
            return True if save.over or save.lost is not None else None

        if until_s is None:
            until_s = self.kv.now_s() + self.deadline_s
        self.kv.until(look, until_s, rest=save.rest)

    def settle(self, round_: Round, error: LaststepError | None) -> LaststepError | None:
        """Make sure that this rank's save is over, and return its error, or None if it is
        committed.

        Usually the flusher has already reported the outcome. If it has died or hangs, this rank
        aborts the save in the run itself, or finds there that it is decided. `error` is the failure
        to report otherwise; None if another rank has reported the commit.
        """
        save = round_.save
        if save is None or save.over:
            return None if save is None else save.error
        failure = error or save.lost
        if failure is not None:
            failure = self._given_up(round_, failure)
        if failure is None and round_.place is not None:
            save.decided(round_.place)
        else:
            save.failed(failure or StorageError("a commit failed", found="no answer"))
        return save.error

    def _given_up(self, round_: Round, failure: LaststepError) -> LaststepError | None:
        """Abort the save in the run too, so that a flusher that resumes later cannot commit it.
        Returns the reason; None if the save turns out to be committed."""
        if round_.place is None:
            return failure
        try:
            stands = abort(self._store, round_.place.folder, str(failure))
        except LaststepError as second:
            return StorageError(
                f"unknown whether step {round_.step} is committed",
                found=f"{failure}; then {second}",
                remedy="`laststep ls` shows it if it is",
            )
        if isinstance(stands, Commit):
            return None
        if stands.reason == str(failure) or not isinstance(failure, AbortedError):
            return failure
        return AbortedError(stands.reason)  # the reason of the rank that aborted first
