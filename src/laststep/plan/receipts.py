"""Combine the receipts of all ranks into what the manifest says.

Pure. Every rank posts a receipt. The first rank of each group sums up its group, and rank 0 sums up
the groups; the result does not depend on how ranks are grouped. Jobs of more than 256 ranks are
grouped, so that no rank hears from more than a few hundred others. What ranks should hold alike is
compared by digest.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.format.manifest import ItemRecord, LayoutGroupRecord, WrittenIndexes, spans_of
from laststep.plan.layouts import Replicas

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
        return rank - rank % self.size

    def group_of(self, rank: int) -> range:
        first = self.leader_of(rank)
        return range(first, min(first + self.size, self.ranks))


def cut(ranks: int) -> Groups:
    """Return the groups of a job: about as many as there are ranks in each."""
    return Groups(ranks, ranks if ranks <= ONE_GROUP_RANKS else round(math.sqrt(ranks)))


class Shared(NamedTuple):
    """Something that several ranks should hold alike: the plain values of an item on the ranks of a
    layout group, or a set of tensors (`held_alike`)."""

    number: int
    """The number of the layout group, or of the set of tensors."""
    item: str = ""
    """The item whose plain values these are; "" for tensors."""
    ways: bytes = b""
    """A digest of how each tensor was digested: only equal ways can be compared."""


Seen = dict[Shared, dict[bytes, int]]
"""Digests of contents, each with the first rank that has it; two prove a difference."""


class ReplicatedTensors(NamedTuple):
    """Tensors that the ranks of the same layout groups hold."""

    layout_groups: tuple[int, ...]
    keys: tuple[Key, ...]


def held_alike(global_layout: GlobalLayout) -> tuple[ReplicatedTensors, ...]:
    """Return all tensors that should be equal on several ranks, in the same order everywhere."""
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
    return tuple(ReplicatedTensors(numbers, tuple(keys)) for numbers, keys in held.items())


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks that do not hold the same."""

    shared: Shared
    ranks: tuple[int, int]


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's statement that its files are durable, or why they are not."""

    global_layout: bytes = b""
    layout_group: int = 0
    """The number of its layout group in that global layout."""
    written: WrittenIndexes = WrittenIndexes()
    items: tuple[ItemRecord, ...] = ()
    contents: dict[Shared, bytes] = {}
    """Digests of what other ranks should hold alike; those of tensors only if they are compared."""
    problem: str = ""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The receipts of a group of ranks, summed up."""

    global_layouts: tuple[tuple[bytes, int], ...]
    """The global layouts that ranks assume, each with the first rank that does."""
    items: tuple[ItemRecord, ...]
    written: WrittenIndexes = WrittenIndexes()
    seen: Seen = {}


def summarise(receipts: Mapping[int, Receipt], global_layout: GlobalLayout) -> Summary:
    """Sum up a group's receipts under the global layout of the summing rank."""
    global_layouts: dict[bytes, int] = {}
    seen: Seen = {}
    written = WrittenIndexes()
    in_order = sorted(receipts.items())
    for rank, receipt in in_order:
        written = written.plus(receipt.written)
        global_layouts.setdefault(receipt.global_layout, rank)
        if receipt.global_layout == global_layout.digest:
            for shared, content in receipt.contents.items():
                _see(seen, shared, content, rank)
    return Summary(
        global_layouts=tuple(global_layouts.items()),
        items=_added_up(item for _, receipt in in_order for item in receipt.items),
        written=written,
        seen=seen,
    )


def _see(seen: Seen, shared: Shared, content: bytes, rank: int) -> None:
    ranks = seen.setdefault(shared, {})
    if len(ranks) < 2:
        ranks.setdefault(content, rank)


def objection_to(summaries: Sequence[Summary], global_layout: GlobalLayout) -> str | Differing:
    """Return why this cannot be committed although every rank is done, or "". If plain values
    differ, return only the item and the ranks: only these ranks know the values."""
    for agreed, rank in (entry for summary in summaries for entry in summary.global_layouts):
        if agreed != global_layout.digest:
            return (
                f"rank {rank} describes the state differently than rank 0 expected; the ranks "
                "exchange layouts again, and the next save works"
            )
    differing = _differing(summaries)
    return next((found for found in differing if found.shared.item), "")


def diverged(summaries: Sequence[Summary]) -> Differing | None:
    """Return two ranks whose replicas of tensors differ, if there are any."""
    return next((found for found in _differing(summaries) if not found.shared.item), None)


def _differing(summaries: Sequence[Summary]) -> list[Differing]:
    seen: Seen = {}
    for summary in summaries:
        for shared, contents in summary.seen.items():
            for content, rank in contents.items():
                _see(seen, shared, content, rank)
    pairs = ((shared, tuple(contents.values())) for shared, contents in seen.items())
    return [
        Differing(shared=shared, ranks=(ranks[0], ranks[1])) for shared, ranks in pairs if ranks[1:]
    ]


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
        LayoutGroupRecord(local_layout=group.digest.hex(), spans=spans_of(group.ranks))
        for group in global_layout.layout_groups
    )
