"""Compare what ranks should hold alike: the plain values of an item, and replicated tensors.

Each rank's receipt has one digest of all plain values of an item and one of each set of replicated
tensors. Only if two ranks differ, both publish the digests of the single values or tensors by name.
A flat list counts as one value, so that the order of a million samples is one name. The key order
of a dict is compared too, because a restore reproduces it.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from laststep.capture.contents import Contents
from laststep.codecs import objects
from laststep.codecs.digests import digest
from laststep.constants import listed
from laststep.plan.receipts import Shared, held_alike
from laststep.settings import CompareReplicas
from laststep.state.tree import OWNED, PLAIN, name_of, owned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from laststep.flush.saves import SaveHandle
    from laststep.plan.layouts import GlobalLayout, Key
    from laststep.plan.receipts import Differing, ReplicatedTensors
    from laststep.saving.describe import TakenState


_MOST_VALUES = 10_000

Parts = dict[str, bytes]
"""Digests of single values or tensors, by their full names."""


def values_of(item: str, encoded: bytes) -> Parts:
    """Return the digests of the first plain values of an item, from its stored tree."""
    stored = objects.decode(encoded, where="the tree of an item")
    tree = stored["tree"] if isinstance(stored, dict) else None
    named = itertools.islice(_walk(item, tree, ()), _MOST_VALUES)
    return {name: digest(objects.encode(value)) for name, value in named}


def _walk(item: str, value: object, path: tuple[object, ...]) -> Iterator[tuple[str, object]]:
    if isinstance(value, objects.TensorRef):
        return  # both local layouts have the same tensors
    name = f"{item}/{name_of(path)}" if path else item
    if isinstance(value, objects.Tagged) and value.tag == OWNED:
        inside = owned(value)
        yield f"the class of {name}", inside.owner
        yield from _walk(item, inside.state, path)
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _walk(item, inner, (*path, key))
        yield f"the order of the keys of {name}", list(value)
    elif isinstance(value, list | tuple | deque) and not PLAIN.issuperset(map(type, value)):
        for number, inner in enumerate(value):
            yield from _walk(item, inner, (*path, number))
    else:
        yield name, value


def names_that_differ(asked: Differing, answers: Mapping[int, Parts]) -> list[str]:
    """Return the differing names, from the answers of the two ranks; none if one is missing."""
    first, second = (answers.get(rank) for rank in asked.ranks)
    if first is None or second is None:
        return []
    return [name for name in first | second if first.get(name) != second.get(name)]


def describe(asked: Differing, names: list[str]) -> str:
    """Return the reason for which a save with differing plain values fails."""
    first, second = asked.ranks
    what = listed(names, 3) or f"item {asked.shared.item!r}"
    remedy = "make it equal on all ranks, or wrap the item in laststep.PerRank"
    return f"{what} differs between rank {first} and rank {second}; {remedy}"


class ReplicaDigests:
    """The replicated tensors of this rank, as of one save."""

    def __init__(self, taken: TakenState, sets: dict[int, tuple[Key, ...]]) -> None:
        """Start digesting the tensors of these sets, by number."""
        wanted = {key for keys in sets.values() for key in keys}
        sources = {
            (item, piece.name): source
            for item, collected in taken.collected.items()
            for piece, source in zip(collected.pieces, collected.sources, strict=True)
            if (item, piece.name) in wanted
        }
        self._sets = sets
        self._keys = list(sources)
        self._contents = Contents(list(sources.values()))
        self._digests: dict[Key, bytes] = {}

    def contents(self) -> dict[Shared, bytes]:
        """Return one digest per set, or nothing; waits, so call it on a background thread."""
        digests = self._contents.digests()
        if digests is None:
            return {}
        self._digests = dict(zip(self._keys, digests, strict=True))
        contents = {}
        for number, keys in self._sets.items():
            each = [self._digests[key] for key in keys]
            ways = digest(b"".join(value[:1] for value in each))
            contents[Shared(number, ways=ways)] = digest(b"".join(each))
        return contents

    def parts(self, number: int) -> Parts:
        return {"/".join(key): self._digests[key] for key in self._sets[number]}


class Comparing:
    """Decides when to compare replicas and which ones. Used on the training thread."""

    def __init__(self, mode: CompareReplicas) -> None:
        self._mode = mode
        self._last: SaveHandle | None = None
        """The last save that compared replicas."""
        self._known: tuple[GlobalLayout | None, tuple[ReplicatedTensors, ...]] = (None, ())

    def begin(
        self, handle: SaveHandle, taken: TakenState, global_layout: GlobalLayout, rank: int
    ) -> ReplicaDigests | None:
        """Return this rank's replicas if this save compares them, else None."""
        if self._mode is CompareReplicas.NEVER:
            return None
        if self._mode is CompareReplicas.FIRST and self._last and self._last.error is None:
            return None  # compare again after a failure: that save may not have got so far
        self._last = handle
        if self._known[0] is not global_layout:
            self._known = (global_layout, held_alike(global_layout))
        own_group = global_layout.layout_group_of[rank]
        sets = {
            number: held.keys
            for number, held in enumerate(self._known[1])
            if own_group in held.layout_groups
        }
        return ReplicaDigests(taken, sets) if sets else None
