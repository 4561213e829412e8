"""Combine the receipts of all ranks into what the manifest says.

Pure. Every rank posts a receipt. The first rank of each group sums up its group, and rank 0 sums up
the groups; the result does not depend on how ranks are grouped. Jobs of more than 256 ranks are
grouped, so that no rank hears from more than a few hundred others. Replicas that should be equal
are compared by digest.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.codecs.digests import DIGEST_BYTES
from laststep.format.manifest import ItemRecord, LayoutGroupRecord, WrittenIndexes, spans_of
from laststep.plan.layouts import Replicas, digest_of, encode_local_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from laststep.plan.layouts import GlobalLayout, Key


ONE_GROUP_RANKS = 256
"""Up to this many ranks form one group: rank 0 hears from every rank itself."""


class Groups(NamedTuple):
    """The groups of a job: `size` consecutive ranks each; the last may be smaller."""

    ranks: int
    size: int

    @property
    def leaders(self) -> range:
        """The first rank of each group."""
        return range(0, self.ranks, self.size)

    def leader_of(self, rank: int) -> int:
        """Return the first rank of a rank's group."""
        return rank - rank % self.size

    def group_of(self, rank: int) -> range:
        """Return all ranks of a rank's group."""
        first = self.leader_of(rank)
        return range(first, min(first + self.size, self.ranks))


def cut(ranks: int, per_node: int = 1) -> Groups:
    """Return the groups of a job, without splitting nodes of `per_node` ranks."""
    if ranks <= ONE_GROUP_RANKS:
        return Groups(ranks, ranks)
    nodes = max(round(math.sqrt(ranks) / per_node), 1)
    return Groups(ranks, min(nodes * per_node, ranks))


NAMED = 4
"""At most this many ranks whose contents differ from what is stored are asked for the tensors."""


class EqualRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks with equal contents: the first few, and their number."""

    digest: bytes
    ranks: tuple[int, ...]
    count: int

    @property
    def ways(self) -> bytes:
        """A digest of how they digested; only ranks with the same can be compared."""
        return self.digest[:DIGEST_BYTES]

    def plus(self, more: EqualRanks) -> EqualRanks:
        ranks = tuple(sorted((*self.ranks, *more.ranks))[:NAMED])
        return EqualRanks(digest=self.digest, ranks=ranks, count=self.count + more.count)


Seen = dict[int, tuple[EqualRanks, ...]]
"""Contents seen on ranks, by the number of the set of tensors."""


class ReplicatedTensors(NamedTuple):
    """Tensors that the ranks of the same layout groups hold, and the lowest of these ranks, which
    stores them."""

    layout_groups: tuple[int, ...]
    keys: tuple[Key, ...]
    lowest: int


def held_alike(global_layout: GlobalLayout) -> tuple[ReplicatedTensors, ...]:
    """Return everything that should be equal on several ranks, in the same order everywhere."""
    holders: dict[Key, list[int]] = {}
    for number, alike in enumerate(global_layout.layout_groups):
        for item in alike.local_layout:
            for tensor in () if item.per_rank else item.tensors:
                if tensor.replicas is Replicas.UNPROVEN:
                    holders.setdefault((item.name, tensor.name), []).append(number)
    held: dict[tuple[int, ...], list[Key]] = {}
    for key, numbers in holders.items():
        if sum(len(global_layout.layout_groups[number].ranks) for number in numbers) > 1:
            held.setdefault(tuple(numbers), []).append(key)
    return tuple(
        ReplicatedTensors(
            numbers,
            tuple(keys),
            min(global_layout.layout_groups[number].ranks[0] for number in numbers),
        )
        for numbers, keys in held.items()
    )


def seen_by(many: Iterable[Seen]) -> Seen:
    """Merge the reports of several ranks."""
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


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's statement that its files are durable, or why they are not."""

    global_layout: bytes = b""
    layout_group: int = 0
    """The number of its layout group in that global layout."""
    written: WrittenIndexes = WrittenIndexes()
    items: tuple[ItemRecord, ...] = ()
    trees: dict[str, bytes] = {}
    """Digests of the plain values of items that ranks share."""
    replicas: dict[int, bytes] = {}
    """Digests of the replicas that should be equal, if they are compared."""
    problem: str = ""


class Trees(msgspec.Struct, frozen=True, kw_only=True):
    """The digests of a rank's plain values."""

    rank: int
    trees: dict[str, bytes]

    def differs(self, other: Trees) -> Differing | None:
        """Return an item whose values differ on another rank of the same layout group, if any."""
        for name, tree in self.trees.items():
            if other.trees.get(name) != tree:
                return Differing(item=name, ranks=(self.rank, other.rank))
        return None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The receipts of a group of ranks, summed up."""

    global_layouts: tuple[tuple[bytes, int], ...]
    """The global layouts that ranks assume, each with the first rank that does."""
    trees: dict[int, Trees]
    """The plain values of each layout group, as its first rank in this group has them."""
    items: tuple[ItemRecord, ...]
    written: WrittenIndexes = WrittenIndexes()
    replicas: Seen = {}
    differing: Differing | None = None


def summarise(receipts: Mapping[int, Receipt], global_layout: GlobalLayout) -> Summary:
    """Sum up the receipts of a group, by rank, under the global layout that the summing rank
    assumes."""
    global_layouts: dict[bytes, int] = {}
    firsts: dict[int, Trees] = {}
    written = WrittenIndexes()
    differing = None
    in_order = sorted(receipts.items())
    for rank, receipt in in_order:
        written = written.plus(receipt.written)
        global_layouts.setdefault(receipt.global_layout, rank)
        if receipt.global_layout == global_layout.digest:
            trees = Trees(rank=rank, trees=receipt.trees)
            first = firsts.setdefault(global_layout.layout_group_of[rank], trees)
            differing = differing or first.differs(trees)
    seen = seen_by(
        {n: (EqualRanks(digest=sums, ranks=(rank,), count=1),) for n, sums in own.replicas.items()}
        for rank, own in in_order
    )
    return Summary(
        global_layouts=tuple(global_layouts.items()),
        trees=firsts,
        items=_added_up(item for _, receipt in in_order for item in receipt.items),
        written=written,
        replicas=seen,
        differing=differing,
    )


def objection_to(summaries: Sequence[Summary], global_layout: GlobalLayout) -> str | Differing:
    """Return why this cannot be committed although every rank is done, or "". If plain values
    differ, return only the item and the ranks: only these ranks know the values."""
    for agreed, rank in (entry for summary in summaries for entry in summary.global_layouts):
        if agreed != global_layout.digest:
            return (
                f"rank {rank} describes the state differently than rank 0 expected; the ranks "
                "exchange layouts again, and the next save works"
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


def _added_up(parts: Iterable[ItemRecord]) -> tuple[ItemRecord, ...]:
    """Return one record per item, for the parts that ranks wrote."""
    items: dict[str, ItemRecord] = {}
    for part in parts:
        before = items.setdefault(part.name, part)
        if before is not part:
            items[part.name] = msgspec.structs.replace(
                before,
                tensors=before.tensors + part.tensors,
                size_bytes=before.size_bytes + part.size_bytes,
            )
    return tuple(items.values())


def items_of(summaries: Sequence[Summary], global_layout: GlobalLayout) -> tuple[ItemRecord, ...]:
    """Return the items of a checkpoint, from what all ranks wrote."""
    shared = Counter(item for item, _ in global_layout.keys)
    return tuple(
        item if item.per_rank else msgspec.structs.replace(item, tensors=shared[item.name])
        for item in _added_up(item for summary in summaries for item in summary.items)
    )


def layout_groups_of(global_layout: GlobalLayout) -> tuple[LayoutGroupRecord, ...]:
    """Return the layout groups as the manifest lists them."""
    return tuple(
        LayoutGroupRecord(
            local_layout=digest_of(encode_local_layout(layout_group.local_layout)).hex(),
            spans=spans_of(layout_group.ranks),
        )
        for layout_group in global_layout.layout_groups
    )
