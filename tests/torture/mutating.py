"""Change a piece of JSON, or a row of bytes, in one way that an attacker or a bug might.

The JSON may hold bytes, as msgpack does.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

Json = Any

_SCALARS: tuple[Json, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    624,
    625,
    255,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    -(1 << 63),
    10**30,
    0.0,
    -0.0,
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    -1e-320,
    "",
    "a",
    "..",
    ".",
    "/",
    "../../outside",
    "/etc/passwd",
    "outside/kept",
    "a/b",
    "~layout",
    "#0",
    "#-1",
    "~3",
    "~3true",
    "~",
    "$",
    "__metadata__",
    "\x00",
    "\ud800",
    "\u202e",
    "é" * 300,
    "x" * 5000,
    "step-00000000.1-1",
    "F64",
    "I64",
    "U8",
    "float64",
    "complex128",
    "O",
    "S99999999",
    "xxh3-128:" + "0" * 32,
    "0" * 32,
    "[1]",
    [],
    {},
    [[]],
    [None],
    [0, 1],
    [1, 0],
    [-1],
    [1 << 62, 1 << 62, 4],
    {"a": 1},
    {"": None},
)
_TAGGED: tuple[Json, ...] = (
    {"$": "tuple", "items": []},
    {"$": "tuple", "items": [1, 2]},
    {"$": "set", "items": [1]},
    {"$": "dict", "items": []},
    {"$": "dict", "items": [1, 2]},
    {"$": "dict", "items": [{"$": "tuple", "items": [1]}, 2]},
    {"$": "ordereddict", "items": []},
    {"$": "deque", "items": [1], "maxlen": None},
    {"$": "range", "items": [0, 1 << 62, 1]},
    {"$": "slice", "items": [None, None, None]},
    {"$": "bytes", "base64": "AAAA"},
    {"$": "int", "hex": "f" * 300},
    {"$": "float", "bits": "7ff8000000000001"},
    {"$": "complex", "re": 1.0, "im": 0.0},
    {"$": "str", "base64": "7aCA"},
    {"$": "namedtuple", "type": "P", "fields": ["x"], "items": [1]},
    {"$": "tensor", "name": "nothing"},
    {"$": "tensor", "name": ""},
    {"$": "ext", "tag": "owned", "value": ["AdamW", {}]},
    {"$": "ext", "tag": "owned", "value": 3},
    {"$": "ext", "tag": "owned", "value": ["SGD", {"state": {}, "groups": []}]},
    {"$": "ext", "tag": "pickle", "value": {"$": "bytes", "base64": "gASVAAAAAAAAAAAu"}},
    {"$": "ext", "tag": "ndarray", "value": ["<f4", None]},
    {"$": "ext", "tag": "ndarray", "value": ["S99999999", 1]},
    {"$": "ext", "tag": "ndarray", "value": 1},
    {"$": "ext", "tag": "scalar", "value": ["<f8", {"$": "bytes", "base64": "AAAA"}]},
    {"$": "ext", "tag": "scalar", "value": ["O", {"$": "bytes", "base64": "AAAAAAAAAAA="}]},
    {"$": "ext", "tag": "scalar", "value": ["<M8[ns]", {"$": "bytes", "base64": "AAAAAAAAAAA="}]},
    {"$": "ext", "tag": "sparse", "value": ["sparse_coo", [1 << 62, 1 << 62], {}]},
    {"$": "ext", "tag": "sparse", "value": ["load", [2], {"values": 1}]},
    {"$": "ext", "tag": "dtype", "value": "load"},
    {"$": "ext", "tag": "dtype", "value": "_dynamo"},
    {"$": "ext", "tag": "device", "value": "cuda:99"},
    {"$": "ext", "tag": "device", "value": 5},
    {"$": "ext", "tag": "size", "value": ["a"]},
    {"$": "ext", "tag": "counter", "value": [[]]},
    {"$": "ext", "tag": "bytes", "value": "x"},
    {"$": "ext", "tag": "subclass", "value": ["x", {}]},
    {"$": "ext", "tag": "unknown", "value": None},
)


class Place:
    """A place in a piece of JSON: what is there, and how to put something else there."""

    def __init__(self, holder: Json, key: Json) -> None:
        self.holder, self.key = holder, key

    @property
    def value(self) -> Json:
        return self.holder[self.key]

    @value.setter
    def value(self, value: Json) -> None:
        self.holder[self.key] = value


def places(root: list[Json]) -> list[Place]:
    """Every place in what a list of one holds, outer ones first."""
    found, at = [Place(root, 0)], 0
    while at < len(found):
        value = found[at].value
        at += 1
        if isinstance(value, dict):
            found += [Place(value, key) for key in value]
        elif isinstance(value, list):
            found += [Place(value, number) for number in range(len(value))]
    return found


def mutate(value: Json, chance: random.Random) -> tuple[Json, str]:
    """The value with one change, and what it was, for a reader."""
    root = [copy.deepcopy(value)]
    there = places(root)
    # Deep places are many, and shallow ones decide more: half of the changes are near the top.
    place = there[min(chance.randrange(len(there)), chance.randrange(len(there)))]
    how = chance.choice(_WAYS)
    before = repr(place.value)[:60]
    how(place, there, chance)
    return root[0], f"{how.__name__.strip('_')} of {before} under {str(place.key)[:60]!r}"


def _delete(place: Place, _: list[Place], __: random.Random) -> None:
    if isinstance(place.holder, dict):
        del place.holder[place.key]
    elif len(place.holder) > 1:
        place.holder.pop(place.key)
    else:
        place.value = None


def _duplicate(place: Place, _: list[Place], chance: random.Random) -> None:
    if isinstance(place.holder, list):
        place.holder.insert(place.key, copy.deepcopy(place.value))
    else:
        place.holder[chance.choice(("copy", "../x", "", f"{place.key}/x"))] = copy.deepcopy(
            place.value
        )


def _swap(place: Place, there: list[Place], chance: random.Random) -> None:
    other = chance.choice(there)
    one, two = copy.deepcopy(place.value), copy.deepcopy(other.value)
    place.value = two
    if (
        other.key in other.holder
        if isinstance(other.holder, dict)
        else other.key < len(other.holder)
    ):
        other.value = one


def _retype(place: Place, _: list[Place], chance: random.Random) -> None:
    place.value = copy.deepcopy(chance.choice(_SCALARS))


def _retag(place: Place, _: list[Place], chance: random.Random) -> None:
    place.value = copy.deepcopy(chance.choice(_TAGGED))


def _rename(place: Place, _: list[Place], chance: random.Random) -> None:
    if isinstance(place.holder, dict):
        name = chance.choice([one for one in _SCALARS if isinstance(one, str)])
        kept = list(place.holder.items())
        place.holder.clear()
        place.holder.update((name if key == place.key else key, value) for key, value in kept)
    else:
        place.value = {"0": place.value}


def _overflow(place: Place, there: list[Place], chance: random.Random) -> None:
    numbers = [one for one in there if type(one.value) in (int, float)]
    if not numbers:
        _retype(place, there, chance)
        return
    one = chance.choice(numbers)
    if isinstance(one.value, float):
        one.value = chance.choice((one.value * 1e300, -one.value, int(one.value)))
        return
    by = chance.choice((1, -1, 8, 4096, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63))
    one.value = one.value * by if chance.random() < 0.3 else one.value + by


def _nest(place: Place, _: list[Place], chance: random.Random) -> None:
    value = place.value
    for _number in range(chance.choice((1, 2, 150, 199, 200, 201, 400))):
        value = [value] if chance.random() < 0.7 else {"k": value}
    place.value = value


def _truncate(place: Place, _: list[Place], chance: random.Random) -> None:
    value = place.value
    if isinstance(value, str | bytes | list) and value:
        place.value = value[: chance.randrange(len(value))]
    elif isinstance(value, dict) and value:
        place.value = dict(list(value.items())[: chance.randrange(len(value))])
    else:
        place.value = None


def _change_bytes(place: Place, there: list[Place], chance: random.Random) -> None:
    rows = [one for one in there if isinstance(one.value, bytes)]
    if not rows:
        _retype(place, there, chance)
        return
    one = chance.choice(rows)
    one.value, _ = mutate_bytes(one.value, chance)


def _splice(place: Place, there: list[Place], chance: random.Random) -> None:
    place.value = copy.deepcopy(chance.choice(there).value)


_WAYS = (
    _delete,
    _duplicate,
    _swap,
    _retype,
    _retype,
    _retag,
    _retag,
    _rename,
    _overflow,
    _overflow,
    _nest,
    _truncate,
    _change_bytes,
    _splice,
)


def mutate_bytes(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """The bytes with one change, and what it was."""
    if not data:
        return bytes([chance.randrange(256)]), "a byte where there was none"
    at = chance.randrange(len(data))
    size = min(chance.choice((1, 1, 1, 2, 4, 8, 64)), len(data) - at)
    match chance.randrange(6):
        case 0:
            return data[:at], f"cut at {at} of {len(data)}"
        case 1:
            return data[:at] + data[at + size :], f"{size} bytes gone at {at}"
        case 2:
            other = chance.randrange(len(data))
            piece = data[other : other + size]
            return data[:at] + piece + data[at + len(piece) :], f"{size} bytes from {other} to {at}"
        case 3:
            piece = chance.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * size
            return data[:at] + piece + data[at + size :], f"{size} bytes of {piece[:1]!r} at {at}"
        case 4:
            flipped = data[at] ^ (1 << chance.randrange(8))
            return data[:at] + bytes([flipped]) + data[at + 1 :], f"a bit flipped at {at}"
        case _:
            piece = chance.randbytes(size)
            return data[:at] + piece + data[at:], f"{size} more bytes at {at}"
