"""Find the tensors that several ranks hold whole though nothing says that they are equal.

Pure. What the ranks have of these can be compared by one digest for each set of ranks that hold the
same tensors; there are as many sets as there are ways in which classes of ranks overlap: few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.codecs.digests import DIGEST_BYTES
from laststep.plan.tables import Replicas

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from laststep.plan.tables import Agreement, Key


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
