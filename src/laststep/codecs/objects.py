"""Typed JSON: encode plain Python values as JSON, so that decoding returns equal values and types.

None, bool, 64-bit ints, finite floats, str, lists and dicts with str keys are encoded as
themselves. Any other value is an object `{"$": tag, ...}`, and a dict that could be confused with
one is written as its pairs. Tensors and extension types are only markers here (`TensorRef`,
`Tagged`): higher layers create and interpret them. Knows nothing of torch or files.

Invariants: `encode` raises only `UsageError`, decoders only `CorruptError`, for any input. Decoding
uses memory and time in proportion to the input. Equal values give equal bytes, also for sets. A
shared value is written once per occurrence: object identity is not preserved.

JSON is parsed strictly: one document, valid UTF-8, no duplicate keys, nothing after the end.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import keyword
import re
import struct
import sys
from typing import TYPE_CHECKING, Any, cast

import msgspec

from laststep.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


json_bytes = msgspec.json.Encoder().encode


def parse(data: bytes, *, where: str) -> object:
    """Parse the JSON document `data` into plain values. Raise `CorruptError` if it is not valid."""
    try:
        value: object = msgspec.json.decode(data)
        # If encoding the result gives the same bytes, no key is duplicated, because the parser
        # keeps one of each. Far cheaper than a search; all documents that we wrote pass.
        if json_bytes(value) != data.strip(b" "):
            json.loads(data, object_pairs_hook=_refuse_twice)
    except RecursionError:
        raise CorruptError(
            "cannot read JSON", where=where, found="nesting beyond all limits"
        ) from None
    except ValueError as error:  # msgspec's errors and Unicode errors are ValueErrors too
        raise CorruptError("cannot read JSON", where=where, found=str(error)) from None
    return value


def _refuse_twice(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:100]!r} twice in one object")
        seen.add(key)


MAX_DEPTH = 200
"""The maximum nesting depth of containers."""
_TOO_DEEP = f"containers nested more than {MAX_DEPTH} deep"

MAX_NAMEDTUPLES = 256
"""Limit on the namedtuple classes of a document: creating one takes about 0.3 ms."""

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""The range of ints that are plain JSON numbers; others are written in hex."""


class TensorRef(msgspec.Struct, frozen=True):
    """A reference to the tensor with this name."""

    name: str


class Tagged(msgspec.Struct, frozen=True):
    """A value of a type that a higher layer knows: `tag` is the type, `value` has its parts."""

    tag: str
    value: object


_make_namedtuple: Callable[..., Any] = collections.namedtuple  # noqa: PYI024
"""An alias, because the class name and its fields are data here."""


@functools.lru_cache(maxsize=1024)
def namedtuple_class(name: str, fields: tuple[str, ...]) -> type[tuple[object, ...]] | None:
    """Return the class with this name and these fields, or None if they are invalid."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return None
    try:
        # `rename` accepts positional names such as `_1`, and changes other invalid names.
        made = _make_namedtuple(name, fields, rename=True)
    except (ValueError, SyntaxError, TypeError):
        return None
    return cast("type[tuple[object, ...]]", made) if made._fields == fields else None


def is_utf8(text: str) -> bool:
    """Return True if `text` can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


EncodedDicts = dict[int, tuple[object, object]]
"""The large dicts that the last walk met, by id, each with its encoded form. Holds the dicts, so
that no other object can get their ids. Only for values that are never changed."""

_LEAST_KEPT = 16
"""The minimum length of a dict in `EncodedDicts`; encoding smaller ones is just as quick."""


class _Unencodable(Exception):
    """A value that cannot be encoded. Its path is collected on the way to the root: keys as tuples
    of one, and text for what is no key."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.path: list[str | tuple[object]] = []


class _Encoder(msgspec.Struct):
    """One walk over a value. `kept` is what the last walk met, `met` what this one does."""

    kept: EncodedDicts
    met: EncodedDicts = {}
    active: set[int] = set()
    classes: set[tuple[str, tuple[str, ...]]] = set()

    def value(self, value: object) -> object:
        encode = _encoders.get(type(value))
        if encode is not None:
            return encode(self, value)
        if isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
            return _encode_namedtuple(self, value)
        raise _Unencodable(f"a value of type {_type_name(value)}")

    def enter(self, container: object) -> None:
        """Record that the walk is inside `container`; the caller removes it from `active`."""
        if id(container) in self.active:
            raise _Unencodable(f"a {_type_name(container)} that contains itself")
        if len(self.active) == MAX_DEPTH:
            raise _Unencodable(_TOO_DEEP)
        self.active.add(id(container))

    def items(self, container: Any, values: Iterable[object] | None = None) -> list[object]:
        """Encode the values of a container, in a plain loop: trees have 100,000 leaves."""
        self.enter(container)
        encoded: list[object] = []
        try:
            for value in container if values is None else values:
                encode = _encoders.get(type(value))
                encoded.append(encode(self, value) if encode is not None else self.value(value))
        except _Unencodable as refused:
            refused.path.append((len(encoded),))
            raise
        self.active.remove(id(container))
        return encoded


def _type_name(value: object) -> str:
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _path_text(path: list[str | tuple[object]]) -> str:
    text = ""
    for part in path:
        if isinstance(part, str):
            text += part
        elif not text and isinstance(part[0], str) and part[0].isidentifier():
            text = part[0]
        elif type(part[0]) in (str, bytes, float, bool) or (
            type(part[0]) is int and INT_MIN <= part[0] <= INT_MAX  # repr refuses longer ones
        ):
            text += f"[{repr(part[0])[:200]}]"
        else:
            text += f"[<{_type_name(part[0])}>]"
    return text or "its root"


def _encode_int(_: _Encoder, number: int) -> object:
    return number if INT_MIN <= number <= INT_MAX else {"$": "int", "hex": f"{number:x}"}


def _encode_float(_: _Encoder, number: float) -> object:
    if number - number == 0:  # false for inf and nan only
        return number
    return {"$": "float", "bits": struct.pack(">d", number).hex()}


def _encode_complex(encoder: _Encoder, number: complex) -> object:
    re, im = _encode_float(encoder, number.real), _encode_float(encoder, number.imag)
    return {"$": "complex", "re": re, "im": im}


def _encode_str(_: _Encoder, text: str) -> object:
    if text.isascii() or is_utf8(text):
        return text
    return {"$": "str", "base64": _base64(text.encode("utf-8", "surrogatepass"))}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_dict(encoder: _Encoder, mapping: dict[object, object]) -> object:
    known = encoder.kept.get(id(mapping))
    if known is not None:
        encoder.met[id(mapping)] = known
        return known[1]
    for key in mapping:
        if type(key) is not str or not (key.isascii() or is_utf8(key)):
            return _encode_pairs(encoder, mapping)
    if "$" in mapping:
        return _encode_pairs(encoder, mapping)
    encoder.enter(mapping)
    encoded: dict[object, object] = {}
    try:
        for key, item in mapping.items():
            encode = _encoders.get(type(item))
            encoded[key] = encode(encoder, item) if encode is not None else encoder.value(item)
    except _Unencodable as refused:
        refused.path.append((key,))
        raise
    encoder.active.remove(id(mapping))
    if len(mapping) >= _LEAST_KEPT:
        encoder.met[id(mapping)] = mapping, encoded
    return encoded


def _encode_pairs(encoder: _Encoder, mapping: dict[object, object]) -> object:
    encoder.enter(mapping)
    items: list[object] = []
    try:
        for key, item in mapping.items():
            items.append(encoder.value(key))
            items.append(encoder.value(item))
    except _Unencodable as refused:
        if len(items) % 2 == 0:
            refused.path.append(" (a key)")
        refused.path.append((key,))
        raise
    encoder.active.remove(id(mapping))
    return {"$": "dict" if type(mapping) is dict else "ordereddict", "items": items}


def _encode_set(encoder: _Encoder, members: set[object] | frozenset[object]) -> object:
    # Sorted, because the order of a set of strings differs between processes.
    return {"$": type(members).__name__, "items": sorted(encoder.items(members), key=json_bytes)}


def _encode_bounds(encoder: _Encoder, span: Any) -> object:
    items = encoder.items(span, (span.start, span.stop, span.step))
    return {"$": type(span).__name__, "items": items}


def _encode_namedtuple(encoder: _Encoder, value: tuple[object, ...]) -> object:
    name, fields = type(value).__name__, cast("tuple[str, ...]", getattr(value, "_fields", ()))
    if not all(type(field) is str for field in fields) or namedtuple_class(name, fields) is None:
        raise _Unencodable(f"a {_type_name(value)} with invalid field names")
    if len(fields) != len(value) or getattr(value, "__dict__", None):
        raise _Unencodable(f"a {_type_name(value)} that holds more than its fields")
    encoder.classes.add((name, fields))
    if len(encoder.classes) > MAX_NAMEDTUPLES:
        raise _Unencodable(f"more than {MAX_NAMEDTUPLES} namedtuple classes")
    return {"$": "namedtuple", "type": name, "fields": list(fields), "items": encoder.items(value)}


def _encode_tagged(encoder: _Encoder, tagged: Tagged) -> object:
    encoder.enter(tagged)
    encoded = encoder.value(tagged.value)
    encoder.active.remove(id(tagged))
    return {"$": "ext", "tag": tagged.tag, "value": encoded}


_encoders: dict[type, Callable[[_Encoder, Any], object]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    bytes: lambda _, data: {"$": "bytes", "base64": _base64(data)},
    bytearray: lambda _, data: {"$": "bytearray", "base64": _base64(data)},
    list: _Encoder.items,
    tuple: lambda encoder, value: {"$": "tuple", "items": encoder.items(value)},
    dict: _encode_dict,
    collections.OrderedDict: _encode_pairs,
    set: _encode_set,
    frozenset: _encode_set,
    collections.deque: lambda encoder, value: {
        "$": "deque",
        "maxlen": value.maxlen,
        "items": encoder.items(value),
    },
    range: _encode_bounds,
    slice: _encode_bounds,
    TensorRef: lambda _, ref: {"$": "tensor", "name": ref.name},
    Tagged: _encode_tagged,
}


class _Malformed(Exception):
    """A malformed document; `from_parsed` adds its location."""


def _decode_in_place(root: list[object]) -> None:
    """Replace all tagged objects by their values, from the inside out. The walk keeps its own
    stack, so that the depth of the call stack does not decide whether data is readable."""
    classes: set[type] = set()
    for place, key, mapping in reversed(_tagged_objects(root)):
        tag = cast("str", mapping["$"])
        decoder, kinds = _decoders[tag]
        if len(mapping) != len(kinds) + 1:
            raise _Malformed(f"the fields {sorted(mapping)!r:.200} in a {tag}")
        values: list[object] = []
        for field, kind in kinds.items():
            value = mapping.get(field, mapping)  # a dict is of no kind but `object`
            if value is mapping or (type(value) is not kind and kind is not object):
                raise _Malformed(f"{_shown(value)} as the {field} of a {tag}")
            values.append(value)
        place[key] = made = decoder(*values)
        if tag == "namedtuple":
            classes.add(type(made))
            if len(classes) > MAX_NAMEDTUPLES:
                raise _Malformed(f"more than {MAX_NAMEDTUPLES} namedtuple classes")


def _tagged_objects(root: list[object]) -> list[tuple[Any, Any, dict[str, object]]]:
    """Return every tagged object with its position (container, key), outer before inner ones."""
    tagged: list[tuple[Any, Any, dict[str, object]]] = []
    todo: list[tuple[Any, Any, Any, int]] = [(root, 0, root[0], 0)]
    while todo:
        place, key, plain, depth = todo.pop()
        kind = type(plain)
        if kind is dict and "$" in plain:
            tag = plain["$"]
            if type(tag) is not str or tag not in _decoders:
                raise _Malformed(f"the unknown tag {_shown(tag)}")
            tagged.append((place, key, plain))
            for field, levels in _HELD[tag]:
                if depth + levels > MAX_DEPTH:
                    raise _Malformed(_TOO_DEEP)
                todo.append((plain, field, plain.get(field), depth + levels))
        elif kind is dict or kind is list:
            if depth == MAX_DEPTH:
                raise _Malformed(_TOO_DEEP)
            for name, item in plain.items() if kind is dict else enumerate(plain):
                todo.append((plain, name, item, depth + 1))
        elif kind is int and not INT_MIN <= plain <= INT_MAX:
            raise _Malformed("an int beyond 64 bits that is not written in hex")
    return tagged


def _shown(value: object) -> str:
    """Return `value` as text for a message, except containers, which may be very deep."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:100]


def _hashed(key: object) -> object:
    try:
        hash(key)
    except TypeError:
        raise _Malformed(f"a {type(key).__name__}, which cannot be hashed, as a key") from None
    return key


def _distinct(items: list[object]) -> set[object]:
    distinct: set[object] = set()
    for item in items:
        if _hashed(item) in distinct:
            raise _Malformed("an item twice in a set")
        distinct.add(item)
    return distinct


def _fill(into: dict[object, object], items: list[object]) -> dict[object, object]:
    if len(items) % 2:
        raise _Malformed("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if _hashed(key) in into:
            raise _Malformed("a key twice in a dict")
        into[key] = value
    return into


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise _Malformed("invalid base64") from None


def _decode_int(text: str) -> int:
    if re.fullmatch(r"-?[0-9a-f]+", text) is None:
        raise _Malformed("an int that is not lower-case hex")
    return int(text, 16)  # linear time, and without the digit limit of decimals


def _decode_float(text: str) -> float:
    if re.fullmatch(r"[0-9a-f]{16}", text) is None:
        raise _Malformed("a float that is not 16 hex digits")
    return cast("float", struct.unpack(">d", bytes.fromhex(text))[0])


def _decode_str(text: str) -> str:
    try:
        return _from_base64(text).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _Malformed("a str that is not valid UTF-8") from None


def _decode_deque(items: list[object], limit: object) -> collections.deque[object]:
    if limit is None:
        return collections.deque(items)
    if type(limit) is not int or not len(items) <= limit <= sys.maxsize:
        raise _Malformed(f"{_shown(limit)} as the maxlen of a deque of {len(items)}")
    return collections.deque(items, limit)


def _decode_range(items: list[Any]) -> range:
    if list(map(type, items)) != [int, int, int] or items[2] == 0:
        raise _Malformed("a range that is not three ints with a step")
    return range(*items)


def _decode_slice(items: list[Any]) -> slice:
    if len(items) != 3:
        raise _Malformed("a slice without three parts")
    return slice(*items)


def _decode_namedtuple(name: str, names: list[Any], items: list[object]) -> tuple[object, ...]:
    if not all(type(field) is str for field in names) or len(names) != len(items):
        raise _Malformed("a namedtuple whose fields are not one string for each item")
    made = namedtuple_class(name, tuple(names))
    if made is None:
        raise _Malformed("a namedtuple with names that Python would not take")
    return tuple.__new__(made, items)


_decoders: dict[str, tuple[Callable[..., object], dict[str, type]]] = {
    "int": (_decode_int, {"hex": str}),
    "float": (_decode_float, {"bits": str}),
    "complex": (complex, {"re": float, "im": float}),
    "str": (_decode_str, {"base64": str}),
    "bytes": (_from_base64, {"base64": str}),
    "bytearray": (lambda text: bytearray(_from_base64(text)), {"base64": str}),
    "tuple": (tuple, {"items": list}),
    "dict": (lambda items: _fill({}, items), {"items": list}),
    "ordereddict": (lambda items: _fill(collections.OrderedDict(), items), {"items": list}),
    "set": (_distinct, {"items": list}),
    "frozenset": (lambda items: frozenset(_distinct(items)), {"items": list}),
    "deque": (_decode_deque, {"items": list, "maxlen": object}),
    "range": (_decode_range, {"items": list}),
    "slice": (_decode_slice, {"items": list}),
    "namedtuple": (_decode_namedtuple, {"type": str, "fields": list, "items": list}),
    "tensor": (TensorRef, {"name": str}),
    "ext": (Tagged, {"tag": str, "value": object}),
}
"""Tag → the function that creates its value from its fields, and these fields with their types;
`object` is any type."""

_HELD = {
    tag: [(name, int(name == "value")) for name in kinds if name in ("items", "value", "re", "im")]
    for tag, (_, kinds) in _decoders.items()
}
"""Tag → the fields that hold other values, and their depth: a list of items counts by itself."""


def encode(value: object, kept: EncodedDicts | None = None) -> bytes:
    """Encode `value` as typed JSON. Raise `UsageError` with the path of the first value that cannot
    be encoded. Parts that the last call with the same `kept` encoded are not walked again."""
    encoder = _Encoder({} if kept is None else kept)
    path: list[str | tuple[object]] = []
    try:
        encoded = json_bytes(encoder.value(value))
    except _Unencodable as refused:
        path, found = refused.path[::-1], str(refused)
    except RecursionError:
        found = "nesting too deep for the call stack"
    except UnicodeEncodeError:  # other strings have a form for that
        found = "the name of a tensor or of a type that is not valid Unicode"
    else:
        if kept is not None:
            kept.clear()
            kept.update(encoder.met)
        return encoded
    raise UsageError(
        "cannot express a value as typed JSON",
        where=_path_text(path),
        expected="plain Python values (docs/format.md lists them)",
        found=found,
        remedy="pass allow_pickle=True at save and at load, or keep the value out of the state",
    )


def decode(data: bytes, *, where: str) -> object:
    """Decode the result of `encode`. Raise `CorruptError`, naming `where`, for anything else."""
    return from_parsed(parse(data, where=where), where=where)


def from_parsed(plain: object, *, where: str) -> object:
    """Decode a part of a document that `parse` has parsed; `plain` is consumed."""
    root = [plain]
    try:
        _decode_in_place(root)
    except _Malformed as error:
        raise CorruptError("cannot read typed JSON", where=where, found=str(error)) from None
    return root[0]
