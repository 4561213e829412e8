"""Parsed JSON to Python values: one function per tag, and the walk over them.

Takes nothing for granted: whatever the input is, the only error raised is `Malformed`.
"""

from __future__ import annotations

import base64
import collections
import re
import struct
import sys
from typing import TYPE_CHECKING, Any, cast

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

    def tagged(self, mapping: dict[str, object]) -> object:
        tag = cast("str", mapping["$"])
        decoder, fields = _decoders[tag]
        if len(mapping) != len(fields) + 1 or not all(field in mapping for field in fields):
            raise Malformed(f"the fields {sorted(mapping)!r:.200} in a {tag}")
        return decoder(self, mapping)


def _tagged_objects(root: list[object]) -> list[tuple[Any, Any, dict[str, object]]]:
    """Every tagged object and its place (a container and a key), outer ones before inner ones."""
    found: list[tuple[Any, Any, dict[str, object]]] = []
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
            found.append((place, key, plain))
            if tag in _CONTAINERS:
                inner = "value" if tag == "ext" else "items"
                if tag == "ext":
                    depth = _deeper(depth)  # the list of items counts for the others
                todo.append((plain, inner, plain.get(inner), depth))
            elif tag == "complex":
                todo.extend((plain, part, plain.get(part), depth) for part in ("re", "im"))
        elif type(plain) is int and not INT_MIN <= plain <= INT_MAX:
            raise Malformed("an int beyond 64 bits that is not written in hex")
    return found


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise Malformed(f"containers nested more than {MAX_DEPTH} deep")
    return depth + 1


def _distinct(items: list[object]) -> set[object]:
    found: set[object] = set()
    for item in items:
        if _hashed(item) in found:
            raise Malformed("an item twice in a set")
        found.add(item)
    return found


def _shown(value: object) -> str:
    """`value` for a message; containers are not, since they may be as deep as the parser goes."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:100]


def _hashed(key: object) -> object:
    try:
        hash(key)
    except TypeError:
        raise Malformed(f"a {type(key).__name__}, which cannot be hashed, as a key") from None
    return key


def _str(mapping: dict[str, object], field: str) -> str:
    value = mapping[field]
    if type(value) is not str:
        raise Malformed(f"{_shown(value)} as the {field} of a {mapping['$']}")
    return value


def _list(mapping: dict[str, object], field: str) -> list[object]:
    value = mapping[field]
    if type(value) is not list:
        raise Malformed(f"{_shown(value)} as the {field} of a {mapping['$']}")
    return value


def _from_base64(mapping: dict[str, object]) -> bytes:
    try:
        return base64.b64decode(_str(mapping, "base64"), validate=True)
    except ValueError:
        raise Malformed(f"invalid base64 in a {mapping['$']}") from None


def _decode_int(_: TypedDecoder, mapping: dict[str, object]) -> object:
    text = _str(mapping, "hex")
    if _HEX.fullmatch(text) is None:
        raise Malformed("an int that is not lower-case hex")
    return int(text, 16)  # linear in the text, and without the limit that decimals have


def _decode_float(_: TypedDecoder, mapping: dict[str, object]) -> float:
    text = _str(mapping, "bits")
    if _BITS.fullmatch(text) is None:
        raise Malformed("a float that is not 16 hex digits")
    return cast("float", struct.unpack(">d", bytes.fromhex(text))[0])


def _decode_complex(_: TypedDecoder, mapping: dict[str, object]) -> object:
    re, im = mapping["re"], mapping["im"]
    if type(re) is not float or type(im) is not float:
        raise Malformed("a complex number whose parts are no floats")
    return complex(re, im)


def _decode_str(_: TypedDecoder, mapping: dict[str, object]) -> object:
    try:
        return _from_base64(mapping).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Malformed("a str that is no UTF-8") from None


def _decode_bytes(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return _from_base64(mapping)


def _decode_bytearray(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return bytearray(_from_base64(mapping))


def _decode_tuple(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return tuple(_list(mapping, "items"))


def _fill(into: dict[object, object], items: list[object]) -> dict[object, object]:
    if len(items) % 2:
        raise Malformed("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if _hashed(key) in into:
            raise Malformed("a key twice in a dict")
        into[key] = value
    return into


def _decode_dict(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return _fill({}, _list(mapping, "items"))


def _decode_ordereddict(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return _fill(collections.OrderedDict(), _list(mapping, "items"))


def _decode_set(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return _distinct(_list(mapping, "items"))


def _decode_frozenset(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return frozenset(_distinct(_list(mapping, "items")))


def _decode_deque(_: TypedDecoder, mapping: dict[str, object]) -> object:
    items, limit = _list(mapping, "items"), mapping["maxlen"]
    if limit is None:
        return collections.deque(items)
    if type(limit) is not int or not len(items) <= limit <= sys.maxsize:
        raise Malformed(f"{_shown(limit)} as the maxlen of a deque of {len(items)}")
    return collections.deque(items, limit)


def _decode_range(_: TypedDecoder, mapping: dict[str, object]) -> object:
    items = _list(mapping, "items")
    numbers = [item for item in items if type(item) is int]
    if len(items) != 3 or len(numbers) != 3 or numbers[2] == 0:
        raise Malformed("a range that is not three ints with a step")
    return range(numbers[0], numbers[1], numbers[2])


def _decode_slice(_: TypedDecoder, mapping: dict[str, object]) -> object:
    items = _list(mapping, "items")
    if len(items) != 3:
        raise Malformed("a slice that has not three parts")
    return slice(items[0], items[1], items[2])


def _decode_namedtuple(decoder: TypedDecoder, mapping: dict[str, object]) -> object:
    items, name = _list(mapping, "items"), _str(mapping, "type")
    fields = tuple(field for field in _list(mapping, "fields") if type(field) is str)
    if len(fields) != len(_list(mapping, "fields")) or len(fields) != len(items):
        raise Malformed("a namedtuple whose fields are not one string for each item")
    decoder.classes.add((name, fields))
    if len(decoder.classes) > MAX_NAMEDTUPLES:
        raise Malformed(f"more than {MAX_NAMEDTUPLES} classes of namedtuple")
    made = namedtuple_class(name, fields)
    if made is None:
        raise Malformed("a namedtuple with names that Python would not take")
    return tuple.__new__(made, items)


def _decode_tensor(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return TensorRef(_str(mapping, "name"))


def _decode_ext(_: TypedDecoder, mapping: dict[str, object]) -> object:
    return Tagged(_str(mapping, "tag"), mapping["value"])


_decoders: dict[
    str, tuple[Callable[[TypedDecoder, dict[str, object]], object], tuple[str, ...]]
] = {
    "int": (_decode_int, ("hex",)),
    "float": (_decode_float, ("bits",)),
    "complex": (_decode_complex, ("re", "im")),
    "str": (_decode_str, ("base64",)),
    "bytes": (_decode_bytes, ("base64",)),
    "bytearray": (_decode_bytearray, ("base64",)),
    "tuple": (_decode_tuple, ("items",)),
    "dict": (_decode_dict, ("items",)),
    "ordereddict": (_decode_ordereddict, ("items",)),
    "set": (_decode_set, ("items",)),
    "frozenset": (_decode_frozenset, ("items",)),
    "deque": (_decode_deque, ("items", "maxlen")),
    "range": (_decode_range, ("items",)),
    "slice": (_decode_slice, ("items",)),
    "namedtuple": (_decode_namedtuple, ("type", "fields", "items")),
    "tensor": (_decode_tensor, ("name",)),
    "ext": (_decode_ext, ("tag", "value")),
}

_CONTAINERS = frozenset(
    tag for tag, (_, fields) in _decoders.items() if "items" in fields or tag == "ext"
)
