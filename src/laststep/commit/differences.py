"""Name the plain values in which two ranks differ, once the digests of an item tell that they do.

Pure. The ranks show their values by name: what is short as it is written, the rest by a digest, and
of very many only the first. A flat list is one value: the order of a million samples is one name.
The order of a dict is part of it: it comes back in the order in which it was saved.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import deque
from typing import TYPE_CHECKING

from laststep.codecs import objects
from laststep.codecs.digests import digest
from laststep.state.names import name_of
from laststep.state.tree import OWNED, PLAIN, owned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from laststep.plan.receipts import Differing

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
