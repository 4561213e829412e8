"""Find out whether replicas are equal where nothing says that they are, and tell which are not.

Each rank sums up what it holds of them in one digest for each set of ranks that hold the same. Only
where these differ are the digests of single tensors exchanged, between a few ranks. A save is not
given up for it: what is stored is the lowest holder's, whole (`plan.tables`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from laststep.capture.contents import Contents
from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.events import ReplicasDiffer
from laststep.plan.replicas import NAMED, ReplicatedTensors, held_alike
from laststep.settings import CompareReplicas

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.flush.handle import SaveHandle
    from laststep.plan.replicas import Seen
    from laststep.plan.tables import Agreement
    from laststep.saving.describe import TakenState


class UnequalRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The ranks of a set that should hold the same and whose contents are not what is stored."""

    number: int
    stored: int
    """The rank whose contents are stored."""
    others: tuple[int, ...]
    """The first few ranks whose contents are other ones."""
    count: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are asked in which tensors they differ."""
        return self.stored, *self.others


class ReplicaContents:
    """What this rank holds of all replicas at the moment of one save."""

    def __init__(self, taken: TakenState, alike: tuple[ReplicatedTensors, ...], mine: int) -> None:
        """Digests begin now; `mine` is the number of this rank's class."""
        keys = {number: held.keys for number, held in enumerate(alike) if mine in held.classes}
        wanted = {key for tensors in keys.values() for key in tensors}
        sources = {
            (item, piece.name): source
            for item, collected in taken.collected.items()
            for piece, source in zip(collected.pieces, collected.sources, strict=True)
            if (item, piece.name) in wanted
        }
        self._keys = keys
        self._order = {key: at for at, key in enumerate(sources)}
        self._contents = Contents(list(sources.values()))
        self._digests: list[bytes] | None = None

    def sums(self) -> dict[int, bytes]:
        """Two digests for each set of ranks that this one belongs to, of the ways in which it has
        digested the tensors and of what came of it; for background threads."""
        self._digests = self._contents.digests()
        if self._digests is None:
            return {}
        ways = self._contents.ways
        return {
            number: digest(bytes(ways[self._order[key]] for key in keys))
            + digest(self.single(number))
            for number, keys in self._keys.items()
        }

    def single(self, number: int) -> bytes:
        """The digests of the tensors of such a set, one after the other."""
        digests = self._digests or []
        return b"".join(
            digests[self._order[key]].ljust(DIGEST_BYTES, b"\0") for key in self._keys[number]
        )


class Comparing:
    """When to compare, and what; on the training thread."""

    def __init__(self, mode: CompareReplicas) -> None:
        self._mode = mode
        self._last: SaveHandle | None = None
        """The last save with which replicas were compared."""
        self._known: tuple[Agreement | None, tuple[ReplicatedTensors, ...]] = (None, ())

    def begin(
        self, handle: SaveHandle, taken: TakenState, agreement: Agreement, rank: int
    ) -> ReplicaContents | None:
        """What this rank holds now, if it is time to compare and there is something to."""
        if self._mode is CompareReplicas.NEVER:
            return None
        if self._mode is CompareReplicas.FIRST and self._last and self._last.error is None:
            return None  # one that has failed may have had no comparison
        self._last = handle
        if self._known[0] is not agreement:
            self._known = (agreement, held_alike(agreement))
        alike, mine = self._known[1], agreement.class_of[rank]
        if not any(mine in held.classes for held in alike):
            return None
        return ReplicaContents(taken, alike, mine)


def unequal(seen: Seen, agreement: Agreement) -> list[UnequalRanks]:
    """The sets in which some ranks do not have what is stored; mostly none."""
    if all(len(equals) == 1 for equals in seen.values()):
        return []
    alike, result = held_alike(agreement), []
    for number, equals in seen.items():
        stored = alike[number].lowest
        right = next((equal for equal in equals if stored in equal.ranks), None)
        if right is None:
            continue
        others = [equal for equal in equals if equal is not right and equal.ways == right.ways]
        if others:
            ranks = sorted(rank for equal in others for rank in equal.ranks)[:NAMED]
            count = sum(equal.count for equal in others)
            result.append(
                UnequalRanks(number=number, stored=stored, others=tuple(ranks), count=count)
            )
    return result


def incomparable(seen: Seen) -> tuple[int, int] | None:
    """Two ranks of which it cannot be told whether they hold the same, since some tensors are on
    the host of one and on a device of the other; mostly None."""
    for equals in seen.values():
        for equal in equals[1:]:
            if equal.ways != equals[0].ways:
                return equals[0].ranks[0], equal.ranks[0]
    return None


def gone_apart(
    step: int, differs: UnequalRanks, shown: Mapping[int, bytes], agreement: Agreement
) -> ReplicasDiffer:
    """The event that names the differing tensors, from the digests that ranks showed in time."""
    keys = held_alike(agreement)[differs.number].keys
    stored = shown.get(differs.stored, b"")
    names = tuple(
        "/".join(key)
        for at, key in enumerate(keys)
        if any(_at(shown[rank], at) != _at(stored, at) for rank in differs.others if rank in shown)
    )
    return ReplicasDiffer(
        step=step, tensors=names if stored else (), ranks=differs.others,
        more_ranks=differs.count - len(differs.others), stored=differs.stored,
    )  # fmt: skip


def _at(digests: bytes, number: int) -> bytes:
    return digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
