"""Parsed JSON to Python values: one function per tag, and the walk over them.

Takes nothing for granted: whatever the input is, the only error raised is `Malformed`.
"""

from __future__ import annotations

import base64
import collections
import re
import struct
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

from laststep.codecs.typed_values import (
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    MAX_NAMEDTUPLES,
    Tagged,
    TensorRef,
    namedtuple_class,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_Mapping = dict[str, object]
"""A tagged object: its tag under "$", and its fields."""
_Field = TypeVar("_Field")
_HEX = re.compile(r"-?[0-9a-f]+")
_BITS = re.compile(r"[0-9a-f]{16}")


class Malformed(Exception):
    """What is wrong with a document; `decode` adds where it lies."""


class TypedDecoder:
    """One document. The walk keeps its own stack: a deep call stack must not make data unreadable.

    Containers are listed from the outside in and then replaced by their values from the inside
    out, in place, since the parsed JSON is ours alone.
    """

    __slots__ = ("classes",)

    def __init__(self) -> None:
        self.classes: set[tuple[str, tuple[str, ...]]] = set()

    def value(self, plain: object) -> object:
        """The value that the parsed JSON `plain` stands for; `plain` is used up."""
        root = [plain]
        for place, key, mapping in reversed(_tagged_objects(root)):
            place[key] = self.tagged(mapping)
        return root[0]

    def tagged(self, mapping: _Mapping) -> object:
        tag = cast("str", mapping["$"])
        decoder, fields = _decoders[tag]
        if len(mapping) != len(fields) + 1 or not all(field in mapping for field in fields):
            raise Malformed(f"the fields {sorted(mapping)!r:.200} in a {tag}")
        return decoder(self, mapping)


def _tagged_objects(root: list[object]) -> list[tuple[Any, Any, _Mapping]]:
    """Every tagged object and its place (a container and a key), outer ones before inner ones."""
    tagged: list[tuple[Any, Any, _Mapping]] = []
    todo: list[tuple[Any, Any, object, int]] = [(root, 0, root[0], 0)]
    while todo:
        place, key, plain, depth = todo.pop()
        if type(plain) is list:
            depth = _deeper(depth)
            todo.extend((plain, i, item, depth) for i, item in enumerate(plain))
        elif type(plain) is dict:
            tag = plain.get("$", plain)  # no dict is a tag, so this one stands for none at all
            if tag is plain:
                depth = _deeper(depth)
                todo.extend((plain, name, item, depth) for name, item in plain.items())
                continue
            if type(tag) is not str or tag not in _decoders:
                raise Malformed(f"the unknown tag {_shown(tag)}")
            tagged.append((place, key, plain))
            if tag in _CONTAINERS:
                inner = "value" if tag == "ext" else "items"
                if tag == "ext":
                    depth = _deeper(depth)  # the list of items counts for the others
                todo.append((plain, inner, plain.get(inner), depth))
            elif tag == "complex":
                todo.extend((plain, part, plain.get(part), depth) for part in ("re", "im"))
        elif type(plain) is int and not INT_MIN <= plain <= INT_MAX:
            raise Malformed("an int beyond 64 bits that is not written in hex")
    return tagged


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise Malformed(f"containers nested more than {MAX_DEPTH} deep")
    return depth + 1


def _distinct(items: list[object]) -> set[object]:
    distinct: set[object] = set()
    for item in items:
        if _hashed(item) in distinct:
            raise Malformed("an item twice in a set")
        distinct.add(item)
    return distinct


def _shown(value: object) -> str:
    """`value` for a message; containers are not, since they may be as deep as the parser goes."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:100]


def _hashed(key: object) -> object:
    try:
        hash(key)
    except TypeError:
        raise Malformed(f"a {type(key).__name__}, which cannot be hashed, as a key") from None
    return key


def _field(mapping: _Mapping, field: str, kind: type[_Field]) -> _Field:
    """A field of a tagged object, which MUST be of that type."""
    value = mapping[field]
    if type(value) is not kind:
        raise Malformed(f"{_shown(value)} as the {field} of a {mapping['$']}")
    return value


def _items(mapping: _Mapping) -> list[object]:
    return _field(mapping, "items", list)


def _from_base64(mapping: _Mapping) -> bytes:
    try:
        return base64.b64decode(_field(mapping, "base64", str), validate=True)
    except ValueError:
        raise Malformed(f"invalid base64 in a {mapping['$']}") from None


def _decode_int(_: TypedDecoder, mapping: _Mapping) -> object:
    text = _field(mapping, "hex", str)
    if _HEX.fullmatch(text) is None:
        raise Malformed("an int that is not lower-case hex")
    return int(text, 16)  # linear in the text, and without the limit that decimals have


def _decode_float(_: TypedDecoder, mapping: _Mapping) -> float:
    text = _field(mapping, "bits", str)
    if _BITS.fullmatch(text) is None:
        raise Malformed("a float that is not 16 hex digits")
    return cast("float", struct.unpack(">d", bytes.fromhex(text))[0])


def _decode_complex(_: TypedDecoder, mapping: _Mapping) -> object:
    re, im = mapping["re"], mapping["im"]
    if type(re) is not float or type(im) is not float:
        raise Malformed("a complex number whose parts are no floats")
    return complex(re, im)


def _decode_str(_: TypedDecoder, mapping: _Mapping) -> object:
    try:
        return _from_base64(mapping).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Malformed("a str that is no UTF-8") from None


def _fill(into: dict[object, object], items: list[object]) -> dict[object, object]:
    if len(items) % 2:
        raise Malformed("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if _hashed(key) in into:
            raise Malformed("a key twice in a dict")
        into[key] = value
    return into


def _decode_deque(_: TypedDecoder, mapping: _Mapping) -> object:
    items, limit = _items(mapping), mapping["maxlen"]
    if limit is None:
        return collections.deque(items)
    if type(limit) is not int or not len(items) <= limit <= sys.maxsize:
        raise Malformed(f"{_shown(limit)} as the maxlen of a deque of {len(items)}")
    return collections.deque(items, limit)


def _decode_range(_: TypedDecoder, mapping: _Mapping) -> object:
    items = _items(mapping)
    numbers = [item for item in items if type(item) is int]
    if len(items) != 3 or len(numbers) != 3 or numbers[2] == 0:
        raise Malformed("a range that is not three ints with a step")
    return range(*numbers)


def _decode_slice(_: TypedDecoder, mapping: _Mapping) -> object:
    items = _items(mapping)
    if len(items) != 3:
        raise Malformed("a slice that has not three parts")
    return slice(*items)


def _decode_namedtuple(decoder: TypedDecoder, mapping: _Mapping) -> object:
    items, name = _items(mapping), _field(mapping, "type", str)
    names = _field(mapping, "fields", list)
    fields = tuple(field for field in names if type(field) is str)
    if not len(fields) == len(names) == len(items):
        raise Malformed("a namedtuple whose fields are not one string for each item")
    decoder.classes.add((name, fields))
    if len(decoder.classes) > MAX_NAMEDTUPLES:
        raise Malformed(f"more than {MAX_NAMEDTUPLES} classes of namedtuple")
    made = namedtuple_class(name, fields)
    if made is None:
        raise Malformed("a namedtuple with names that Python would not take")
    return tuple.__new__(made, items)


_decoders: dict[str, tuple[Callable[[TypedDecoder, _Mapping], object], tuple[str, ...]]] = {
    "int": (_decode_int, ("hex",)),
    "float": (_decode_float, ("bits",)),
    "complex": (_decode_complex, ("re", "im")),
    "str": (_decode_str, ("base64",)),
    "bytes": (lambda _, mapping: _from_base64(mapping), ("base64",)),
    "bytearray": (lambda _, mapping: bytearray(_from_base64(mapping)), ("base64",)),
    "tuple": (lambda _, mapping: tuple(_items(mapping)), ("items",)),
    "dict": (lambda _, mapping: _fill({}, _items(mapping)), ("items",)),
    "ordereddict": (lambda _, m: _fill(collections.OrderedDict(), _items(m)), ("items",)),
    "set": (lambda _, mapping: _distinct(_items(mapping)), ("items",)),
    "frozenset": (lambda _, mapping: frozenset(_distinct(_items(mapping))), ("items",)),
    "deque": (_decode_deque, ("items", "maxlen")),
    "range": (_decode_range, ("items",)),
    "slice": (_decode_slice, ("items",)),
    "namedtuple": (_decode_namedtuple, ("type", "fields", "items")),
    "tensor": (lambda _, mapping: TensorRef(_field(mapping, "name", str)), ("name",)),
    "ext": (lambda _, m: Tagged(_field(m, "tag", str), m["value"]), ("tag", "value")),
}
"""Of each tag the function that makes its value, and the fields that it has besides."""

_CONTAINERS = frozenset(
    tag for tag, (_, fields) in _decoders.items() if "items" in fields or tag == "ext"
)
