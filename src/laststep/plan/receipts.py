"""What ranks have made durable, put together: from receipts to what the manifest says.

Pure. A rank leaves a receipt. The first rank of a group sums up those of its group, and the first
rank of the job these sums: whichever way the ranks are cut into groups, the outcome is the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from laststep.format.manifest import ClassRecord, ItemRecord, Written
from laststep.format.spans import spans_of
from laststep.plan.replicas import Seen, seen_by, seen_on
from laststep.plan.tables import digest_of, encode_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.plan.tables import Agreement


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
    written: Written = Written()
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
    written: Written = Written()
    replicas: Seen = {}
    differing: Differing | None = None


def summarise(receipts: Mapping[int, Receipt], agreement: Agreement) -> Summary:
    """The receipts of a group, by rank, under what the rank that gathers them takes for agreed."""
    agreements: dict[bytes, int] = {}
    firsts: dict[int, Trees] = {}
    items: dict[str, ItemTally] = {}
    written = Written()
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
        agreements=tuple(agreements.items()), trees=firsts, items=items, written=written,
        replicas=seen, differing=differing,
    )  # fmt: skip


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
            name=name, kind=part.kind, per_rank=part.per_rank, size_bytes=part.size_bytes,
            tensors=part.tensors if part.per_rank else shared[name],
        )
        for name, part in parts.items()
    )  # fmt: skip


def classes_of(agreement: Agreement) -> tuple[ClassRecord, ...]:
    """Which ranks hold the same, as the manifest says it."""
    return tuple(
        ClassRecord(
            table=digest_of(encode_table(rank_class.table)).hex(), spans=spans_of(rank_class.ranks)
        )
        for rank_class in agreement.classes
    )
