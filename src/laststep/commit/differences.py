"""Name the plain values and the replicated tensors in which ranks differ.

Pure, except for `ReplicaContents` and `Comparing`. When the digests of an item differ between two
ranks, both publish its plain values by name: short values as text, longer ones as a digest, and
only the first 10,000 values. A flat list counts as one value, so that the order of a million
samples is one name. The key order of a dict is compared too, because a restore reproduces it.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from laststep.capture.contents import Contents
from laststep.codecs import objects
from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.events import ReplicasDiffer
from laststep.plan.receipts import NAMED, ReplicatedTensors, held_alike
from laststep.settings import CompareReplicas
from laststep.state.tree import OWNED, PLAIN, name_of, owned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from laststep.flush.saves import SaveHandle
    from laststep.plan.layouts import GlobalLayout
    from laststep.plan.receipts import Differing, Seen
    from laststep.saving.describe import TakenState


_SHORT = 40
_MOST = 10_000
_DIGEST = b"\0"
"""Prefix of a digest; the text of a value never starts with it."""
_ORDER = "\0"
"""Prefix of the name under which the keys of a dict are published, in their order."""

Values = dict[str, bytes]


def values_of(encoded: bytes) -> Values:
    """Return the plain values of an item by name, decoded from its stored tree."""
    stored = objects.decode(encoded, where="the tree of an item")
    tree = stored["tree"] if isinstance(stored, dict) else None
    values: Values = {}
    for name, value in itertools.islice(_walk(tree, ()), _MOST):
        values.setdefault(name, value)  # the class of an object precedes its empty state
    return values


def describe(differing: Differing, shown: Mapping[int, Values]) -> str:
    """Describe the first difference, from the values that the two ranks published in time."""
    item, (rank, other) = differing.item, differing.ranks
    mine, theirs = shown.get(rank), shown.get(other)
    names: list[str] = []
    if mine is not None and theirs is not None:
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        # Other keys are named by their values; the order counts if nothing else differs.
        names = [name for name in names if not name.startswith(_ORDER)] or names
    remedy = "make it equal on all ranks, or wrap the item in laststep.PerRank"
    if mine is None or theirs is None or not names:
        return f"item {item!r} differs between rank {rank} and rank {other}; {remedy}"
    name = names[0].removeprefix(_ORDER)
    where = f"{item}/{name}" if name else item
    if names[0].startswith(_ORDER):
        where = f"the order of the keys of {where}, which is part of the state,"
    values = (mine.get(names[0], b"nothing"), theirs.get(names[0], b"nothing"))
    if any(value.startswith(_DIGEST) for value in values):
        text = f"{where} differs between rank {rank} and rank {other}"
    else:
        first, second = (value.decode() for value in values)
        text = f"{where} is {first} on rank {rank} and {second} on rank {other}"
    more = f", and {len(names) - 1} more of its values differ" if names[1:] else ""
    return f"{text}{more}; {remedy}"


def _walk(value: object, path: tuple[object, ...]) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, objects.TensorRef):
        return  # both local layouts have the same tensors
    if isinstance(value, objects.Tagged) and value.tag == OWNED:
        inside = owned(value)
        yield name_of(path), _written(inside.owner)
        yield from _walk(inside.state, path)
    elif isinstance(value, dict) and value:
        yield _ORDER + name_of(path), _written(list(value))
        for key, inner in value.items():
            yield from _walk(inner, (*path, key))
    elif isinstance(value, list | tuple | deque) and not PLAIN.issuperset(map(type, value)):
        for number, inner in enumerate(value):
            yield from _walk(inner, (*path, number))
    else:
        yield name_of(path), _written(value)


def _written(value: object) -> bytes:
    """Return the text of a value, or a digest if that is long or does not identify the value."""
    if isinstance(value, float) and math.isnan(value):  # NaN has many bit patterns
        return f"nan ({struct.pack('>d', value).hex()})".encode()
    text = repr(value).encode()
    by_bits = type(value) not in PLAIN and not isinstance(value, list | tuple | deque | dict)
    if by_bits or b"nan" in text:
        return _DIGEST + digest(objects.encode(value))
    return text if len(text) <= _SHORT else _DIGEST + digest(text)


class UnequalRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ranks of one replica set whose contents differ from the stored contents."""

    number: int
    stored: int
    """The rank whose contents are stored."""
    others: tuple[int, ...]
    """The first few ranks whose contents differ; `count` is the number of all of them."""
    count: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are asked for per-tensor digests."""
        return self.stored, *self.others


class ReplicaContents:
    """Digests of all replicated tensors that this rank holds, as of one save."""

    def __init__(self, taken: TakenState, alike: tuple[ReplicatedTensors, ...], mine: int) -> None:
        """Start computing the digests; `mine` is the number of this rank's layout group."""
        keys = {
            number: held.keys for number, held in enumerate(alike) if mine in held.layout_groups
        }
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
        """Return two concatenated digests per replica set of this rank: one over the digest method
        of every tensor, one over the tensor digests. Waits for the digests, so call it on a
        background thread. Empty if they could not be computed."""
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
        """Return the digests of the tensors of one replica set, concatenated."""
        digests = self._digests or []
        return b"".join(
            digests[self._order[key]].ljust(DIGEST_BYTES, b"\0") for key in self._keys[number]
        )


class Comparing:
    """Decides when to compare replicas and which ones. Used on the training thread."""

    def __init__(self, mode: CompareReplicas) -> None:
        self._mode = mode
        self._last: SaveHandle | None = None
        """The last save that compared replicas."""
        self._known: tuple[GlobalLayout | None, tuple[ReplicatedTensors, ...]] = (None, ())

    def begin(
        self, handle: SaveHandle, taken: TakenState, global_layout: GlobalLayout, rank: int
    ) -> ReplicaContents | None:
        """Return the contents of this rank's replicas if this save compares them, else None."""
        if self._mode is CompareReplicas.NEVER:
            return None
        if self._mode is CompareReplicas.FIRST and self._last and self._last.error is None:
            return None  # compare again after a failure: that save may not have got so far
        self._last = handle
        if self._known[0] is not global_layout:
            self._known = (global_layout, held_alike(global_layout))
        alike, mine = self._known[1], global_layout.layout_group_of[rank]
        if not any(mine in held.layout_groups for held in alike):
            return None
        return ReplicaContents(taken, alike, mine)


def unequal(seen: Seen, global_layout: GlobalLayout) -> list[UnequalRanks]:
    """Return the replica sets in which ranks differ from the stored contents; usually empty."""
    if all(len(equals) == 1 for equals in seen.values()):
        return []
    alike, result = held_alike(global_layout), []
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
    """Return two ranks of which one has on a device what the other has on the host, if any."""
    for equals in seen.values():
        for equal in equals[1:]:
            if equal.ways != equals[0].ways:
                return equals[0].ranks[0], equal.ranks[0]
    return None


def gone_apart(
    step: int, differs: UnequalRanks, shown: Mapping[int, bytes], global_layout: GlobalLayout
) -> ReplicasDiffer:
    """Name the differing tensors, from the digests that ranks published in time."""
    keys = held_alike(global_layout)[differs.number].keys
    stored = shown.get(differs.stored, b"")
    names = tuple(
        "/".join(key)
        for at, key in enumerate(keys)
        if any(_at(shown[rank], at) != _at(stored, at) for rank in differs.others if rank in shown)
    )
    return ReplicasDiffer(
        step=step,
        tensors=names if stored else (),
        ranks=differs.others,
        more_ranks=differs.count - len(differs.others),
        stored=differs.stored,
    )


def _at(digests: bytes, number: int) -> bytes:
    return digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
