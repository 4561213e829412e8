"""Name the plain values in which two ranks differ, once the digests of an item tell that they do.

Pure. The ranks show their values by name: what is short as it is written, the rest by a digest, and
of very many only the first. A flat list is one value: the order of a million samples is one name.
The order of a dict is part of it: it comes back in the order in which it was saved.

Replicas that should be equal and are not are named as well.
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
    from laststep.plan.receipts import Differing, Seen
    from laststep.plan.tables import Agreement
    from laststep.saving.describe import TakenState


_SHORT = 40
_MOST = 10_000
_DIGEST = b"\0"
"""This stands before a digest; the text of a value never begins so."""
_ORDER, _ORDER_SHOWN = "\0", 200
"""What stands before the name of a dict whose keys are shown in order, and how many bytes are."""

Values = dict[str, bytes]


def values_of(encoded: bytes) -> Values:
    """The plain values of an item, from its tree as it is stored, by their names."""
    stored = objects.decode(encoded, where="the tree of an item")
    tree = stored["tree"] if isinstance(stored, dict) else None
    values: Values = {}
    for name, value in itertools.islice(_walk(tree, ()), _MOST):
        values.setdefault(name, value)  # a class comes before an empty state
    return values


def describe(differing: Differing, shown: Mapping[int, Values]) -> str:
    """The difference in words, from the values that the two ranks have shown in time."""
    item, (rank, other) = differing.item, differing.ranks
    mine, theirs = shown.get(rank, {}), shown.get(other, {})
    differing_names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
    names = [name for name in differing_names if not name.startswith(_ORDER)]
    remedy = "make it the same on all, or wrap the item in laststep.PerRank if each has its own"
    if rank in shown and other in shown and differing_names and not names:
        name = differing_names[0]
        text = _of_order(item, name, mine.get(name, b""), theirs.get(name, b""), (rank, other))
        return f"{text}; the order is part of the state: {remedy}"
    if rank not in shown or other not in shown or not names:
        return f"item {item!r} differs between rank {rank} and rank {other}; {remedy}"
    name = names[0]
    where = f"{item}/{name}" if name else item
    values = (mine.get(name, b"nothing"), theirs.get(name, b"nothing"))
    if any(value.startswith(_DIGEST) for value in values):
        text = f"{where} differs between rank {rank} and rank {other}"
    else:
        first, second = (value.decode() for value in values)
        text = f"{where} is {first} on rank {rank} and {second} on rank {other}"
    more = f", and {len(names) - 1} more of its values differ" if names[1:] else ""
    return f"{text}{more}; {remedy}"


def _of_order(item: str, name: str, mine: bytes, theirs: bytes, ranks: tuple[int, int]) -> str:
    """The first place at which two ranks have different keys of a dict, in words."""
    where = f"{item}/{name[1:]}" if name[1:] else item
    keys = [keys.decode(errors="replace").split("\n") for keys in (mine, theirs)]
    text = f"{where} has its keys in another order on rank {ranks[1]} than on rank {ranks[0]}"
    for at, (first, second) in enumerate(zip(*keys, strict=False)):
        if first != second and _DIGEST.decode() not in first + second:
            return f"{text}: {second} and not {first} at place {at}"
    return text


def _walk(value: object, path: tuple[object, ...]) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, objects.TensorRef):
        return  # the tables of both have the same tensors
    if isinstance(value, objects.Tagged) and value.tag == OWNED:
        inside = owned(value)
        yield name_of(path), _written(inside.owner)
        yield from _walk(inside.state, path)
    elif isinstance(value, dict) and value:
        yield _ORDER + name_of(path), _keys(value)
        for key, inner in value.items():
            yield from _walk(inner, (*path, key))
    elif isinstance(value, list | tuple | deque) and not PLAIN.issuperset(map(type, value)):
        for number, inner in enumerate(value):
            yield from _walk(inner, (*path, number))
    else:
        yield name_of(path), _written(value)


def _keys(value: dict[object, object]) -> bytes:
    """The keys of a dict in their order, each on a line; of very many the first, and a digest."""
    text = "\n".join(map(repr, value)).encode()
    if len(text) <= _ORDER_SHOWN:
        return text
    return text[:_ORDER_SHOWN].rpartition(b"\n")[0] + b"\n" + _DIGEST + digest(text)


def _written(value: object) -> bytes:
    """A value as it is written, or the digest of that."""
    if isinstance(value, float) and math.isnan(value):  # of which there are many
        return f"nan ({struct.pack('>d', value).hex()})".encode()
    text = repr(value).encode()
    by_bits = type(value) not in PLAIN and not isinstance(value, list | tuple | deque | dict)
    if by_bits or b"nan" in text:
        return _DIGEST + digest(objects.encode(value))
    return text if len(text) <= _SHORT else _DIGEST + digest(text)


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
        step=step,
        tensors=names if stored else (),
        ranks=differs.others,
        more_ranks=differs.count - len(differs.others),
        stored=differs.stored,
    )


def _at(digests: bytes, number: int) -> bytes:
    return digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
