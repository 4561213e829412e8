"""What ranks have made durable, put together: from receipts to what the manifest says.

Pure. A rank leaves a receipt. The first rank of a group sums up those of its group, and the first
rank of the job these sums: whichever way the ranks are cut into groups, the outcome is the same.

Jobs of more than 256 ranks are cut into groups, so that nobody hears from more than some hundred
others. Replicas that should be equal are compared by digests.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.codecs.digests import DIGEST_BYTES
from laststep.format.manifest import ClassRecord, ItemRecord, WrittenIndexes
from laststep.format.spans import spans_of
from laststep.plan.tables import Replicas, digest_of, encode_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from laststep.plan.tables import Agreement, Key


ONE_GROUP_RANKS = 256
"""Up to so many ranks, all are one group: the first rank hears from everybody itself."""


class Groups(NamedTuple):
    """The groups of a job: so many consecutive ranks in each, but for the last."""

    ranks: int
    size: int

    @property
    def leaders(self) -> range:
        """The first rank of each group."""
        return range(0, self.ranks, self.size)

    def leader_of(self, rank: int) -> int:
        """The first rank of the group that a rank is in."""
        return rank - rank % self.size

    def group_of(self, rank: int) -> range:
        """All ranks of the group that a rank is in."""
        first = self.leader_of(rank)
        return range(first, min(first + self.size, self.ranks))


def cut(ranks: int, per_node: int = 1) -> Groups:
    """The groups of a job of so many ranks. Nodes of `per_node` ranks are not cut apart, where that
    is known."""
    if ranks <= ONE_GROUP_RANKS:
        return Groups(ranks, ranks)
    nodes = max(round(math.sqrt(ranks) / per_node), 1)
    return Groups(ranks, min(nodes * per_node, ranks))


NAMED = 4
"""So many ranks that have other contents than what is stored are asked in which tensors."""


class EqualRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that have the same contents: the first few of them, and how many there are."""

    digest: bytes
    ranks: tuple[int, ...]
    count: int

    @property
    def ways(self) -> bytes:
        """A digest of the ways in which they digested: only ranks with the same can be compared."""
        return self.digest[:DIGEST_BYTES]

    def plus(self, more: EqualRanks) -> EqualRanks:
        ranks = tuple(sorted((*self.ranks, *more.ranks))[:NAMED])
        return EqualRanks(digest=self.digest, ranks=ranks, count=self.count + more.count)


Seen = dict[int, tuple[EqualRanks, ...]]
"""What was seen on some ranks, by the number of the set of ranks that hold the same."""


class ReplicatedTensors(NamedTuple):
    """Tensors that the ranks of the same classes hold, and the lowest of these ranks, whose are
    stored."""

    classes: tuple[int, ...]
    keys: tuple[Key, ...]
    lowest: int


def held_alike(agreement: Agreement) -> tuple[ReplicatedTensors, ...]:
    """All that should be equal on several ranks, in an order that is the same for everybody."""
    holders: dict[Key, list[int]] = {}
    for number, alike in enumerate(agreement.classes):
        for item in alike.table:
            for tensor in () if item.per_rank else item.tensors:
                if tensor.replicas is Replicas.UNPROVEN:
                    holders.setdefault((item.name, tensor.name), []).append(number)
    held: dict[tuple[int, ...], list[Key]] = {}
    for key, numbers in holders.items():
        if sum(len(agreement.classes[number].ranks) for number in numbers) > 1:
            held.setdefault(tuple(numbers), []).append(key)
    return tuple(
        ReplicatedTensors(
            numbers, tuple(keys), min(agreement.classes[number].ranks[0] for number in numbers)
        )
        for numbers, keys in held.items()
    )


def seen_on(rank: int, sums: Mapping[int, bytes]) -> Seen:
    """What one rank tells of itself."""
    return {n: (EqualRanks(digest=digests, ranks=(rank,), count=1),) for n, digests in sums.items()}


def seen_by(many: Iterable[Seen]) -> Seen:
    """What was seen on several ranks."""
    merged: dict[int, dict[bytes, EqualRanks]] = {}
    for seen in many:
        for number, equals in seen.items():
            known = merged.setdefault(number, {})
            for equal in equals:
                before = known.get(equal.digest)
                known[equal.digest] = equal if before is None else before.plus(equal)
    return {number: tuple(known.values()) for number, known in merged.items()}


class Differing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Two ranks whose plain values of an item differ."""

    item: str
    ranks: tuple[int, int]


class ItemTally(msgspec.Struct, frozen=True, kw_only=True):
    """What was written of an item, by a rank or by several."""

    kind: str
    per_rank: bool
    tensors: int
    size_bytes: int

    def plus(self, more: ItemTally) -> ItemTally:
        """The sum of this and of what later ranks wrote."""
        return ItemTally(
            kind=self.kind,
            per_rank=self.per_rank,
            tensors=self.tensors + more.tensors,
            size_bytes=self.size_bytes + more.size_bytes,
        )


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has made durable, or why it has not."""

    agreement: bytes = b""
    rank_class: int = 0
    """Of the classes of that agreement, the one that it is in."""
    written: WrittenIndexes = WrittenIndexes()
    items: dict[str, ItemTally] = {}
    trees: dict[str, bytes] = {}
    """Of the items that ranks have in common: the digest of their plain values."""
    replicas: dict[int, bytes] = {}
    """What it holds of replicas that should be equal (`replicas`), where these are compared."""
    problem: str = ""


class Trees(msgspec.Struct, frozen=True, kw_only=True):
    """The digests of the plain values on a rank."""

    rank: int
    trees: dict[str, bytes]

    def differs(self, other: Trees) -> Differing | None:
        """The item of which another rank of the same class has other values; mostly none."""
        for name, tree in self.trees.items():
            if other.trees.get(name) != tree:
                return Differing(item=name, ranks=(self.rank, other.rank))
        return None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The receipts of a group of ranks, summed up."""

    agreements: tuple[tuple[bytes, int], ...]
    """What the ranks take for agreed, and the first of them that does."""
    trees: dict[int, Trees]
    """The plain values of each class, as its first rank in the group has them."""
    items: dict[str, ItemTally]
    written: WrittenIndexes = WrittenIndexes()
    replicas: Seen = {}
    differing: Differing | None = None


def summarise(receipts: Mapping[int, Receipt], agreement: Agreement) -> Summary:
    """The receipts of a group, by rank, under what the rank that gathers them takes for agreed."""
    agreements: dict[bytes, int] = {}
    firsts: dict[int, Trees] = {}
    items: dict[str, ItemTally] = {}
    written = WrittenIndexes()
    differing = None
    for rank in sorted(receipts):
        receipt = receipts[rank]
        written = written.plus(receipt.written)
        agreements.setdefault(receipt.agreement, rank)
        for name, part in receipt.items.items():
            items[name] = items[name].plus(part) if name in items else part
        if receipt.agreement == agreement.digest:
            trees = Trees(rank=rank, trees=receipt.trees)
            first = firsts.setdefault(agreement.class_of[rank], trees)
            differing = differing or first.differs(trees)
    seen = seen_by(seen_on(rank, receipt.replicas) for rank, receipt in sorted(receipts.items()))
    return Summary(
        agreements=tuple(agreements.items()),
        trees=firsts,
        items=items,
        written=written,
        replicas=seen,
        differing=differing,
    )


def objection_to(summaries: Sequence[Summary], agreement: Agreement) -> str | Differing:
    """Why this cannot be committed though every rank is done; mostly "". Where plain values differ,
    it says only which item of which ranks: the values are known to these ranks alone."""
    for agreed, rank in (entry for summary in summaries for entry in summary.agreements):
        if agreed != agreement.digest:
            return (
                f"rank {rank} describes the state otherwise than rank 0 knew; "
                "the ranks agree anew, and the next save works"
            )
    firsts: dict[int, Trees] = {}
    for summary in summaries:
        if summary.differing is not None:
            return summary.differing
        for number, trees in summary.trees.items():
            differing = firsts.setdefault(number, trees).differs(trees)
            if differing is not None:
                return differing
    return ""


def items_of(summaries: Sequence[Summary], agreement: Agreement) -> tuple[ItemRecord, ...]:
    """The items of a checkpoint, from what all ranks wrote of them."""
    shared = Counter(item for item, _ in agreement.keys)
    parts: dict[str, ItemTally] = {}
    for summary in summaries:
        for name, part in summary.items.items():
            parts[name] = parts[name].plus(part) if name in parts else part
    return tuple(
        ItemRecord(
            name=name,
            kind=part.kind,
            per_rank=part.per_rank,
            size_bytes=part.size_bytes,
            tensors=part.tensors if part.per_rank else shared[name],
        )
        for name, part in parts.items()
    )


def classes_of(agreement: Agreement) -> tuple[ClassRecord, ...]:
    """Which ranks hold the same, as the manifest says it."""
    return tuple(
        ClassRecord(
            table=digest_of(encode_table(rank_class.table)).hex(), spans=spans_of(rank_class.ranks)
        )
        for rank_class in agreement.classes
    )
