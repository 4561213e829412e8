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
from typing import TYPE_CHECKING, Any, TypeVar, cast

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

MAX_NAMEDTUPLES = 256
"""The maximum number of different namedtuple classes in a document: creating one takes about 0.3
ms."""

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""The range of ints that are plain JSON numbers; others are written in hex."""


class TensorRef(msgspec.Struct, frozen=True):
    """A reference to the tensor with this name."""

    name: str


class Tagged(msgspec.Struct, frozen=True):
    """A value of a type that a higher layer knows: `tag` names the type, `value` contains its
    parts."""

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
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class EncodedDicts:
    """Cache of encoded large dicts, for the next walk that meets the same dict objects. Only for
    values that are never changed."""

    LEAST = 16
    """The minimum length of a cached dict; smaller ones are encoded again just as quickly."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[object, object]] = {}
        self._now: dict[int, tuple[object, object]] = {}

    def begin(self) -> None:
        """Start another walk. Entries that it does not meet are dropped when the next one
        starts."""
        self._before, self._now = self._now, {}

    def find(self, value: object) -> object:
        """Return the encoded form of a dict, or None. The cache holds the dict, so that no other
        object can get its id."""
        known = self._now.get(id(value)) or self._before.get(id(value))
        return None if known is None else self.note(value, known[1])

    def note(self, value: object, encoded: object) -> object:
        self._now[id(value)] = value, encoded
        return encoded


class TypedEncoder:
    """One walk over a value. `path` is the current position, for error messages."""

    __slots__ = ("active", "classes", "kept", "path")

    def __init__(self, kept: EncodedDicts | None = None) -> None:
        self.kept = kept
        self.path: list[str | tuple[object]] = []
        self.active: set[int] = set()
        self.classes: set[tuple[str, tuple[str, ...]]] = set()

    def value(self, value: object) -> object:
        encoder = _encoders.get(type(value))
        if encoder is not None:
            return encoder(self, value)
        if isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
            return _encode_namedtuple(self, value)
        raise self.refusal(f"a value of type {_type_name(value)}")

    def enter(self, container: object) -> int:
        """Record that the walk is inside `container`; the caller removes it from `active`."""
        key = id(container)
        if key in self.active:
            raise self.refusal(f"a {_type_name(container)} that contains itself")
        if len(self.active) == MAX_DEPTH:
            raise self.refusal(f"containers nested more than {MAX_DEPTH} deep")
        self.active.add(key)
        return key

    def items(self, container: object, values: Iterable[object]) -> list[object]:
        """Encode all `values` of a container in a plain loop, because trees have 100,000 leaves."""
        entered, path = self.enter(container), self.path
        encoded: list[object] = []
        for index, value in enumerate(values):
            path.append((index,))
            encoder = _encoders.get(type(value))
            encoded.append(encoder(self, value) if encoder is not None else self.value(value))
            path.pop()
        self.active.remove(entered)
        return encoded

    def text(self, text: str) -> str:
        """Return a string inside a tag, which has no other form for invalid UTF-8."""
        if not is_utf8(text):
            raise self.refusal("a name that is not valid Unicode")
        return text

    def refusal(self, found: str) -> UsageError:
        return UsageError(
            "cannot express a value as typed JSON",
            where=_path_text(self.path),
            expected="plain Python values (docs/format.md lists them)",
            found=found,
            remedy="pass allow_pickle=True at save and at load, or keep the value out of the state",
        )


def _type_name(value: object) -> str:
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _path_text(path: list[str | tuple[object]]) -> str:
    if not path:
        return "its root"
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
    return text


def _encode_int(_: TypedEncoder, number: Any) -> object:
    return number if INT_MIN <= number <= INT_MAX else {"$": "int", "hex": f"{number:x}"}


def _encode_float(_: TypedEncoder, number: Any) -> object:
    if number - number == 0:  # false for inf and nan only
        return number
    return {"$": "float", "bits": struct.pack(">d", number).hex()}


def _encode_complex(encoder: TypedEncoder, number: Any) -> object:
    re, im = _encode_float(encoder, number.real), _encode_float(encoder, number.imag)
    return {"$": "complex", "re": re, "im": im}


def _encode_str(_: TypedEncoder, text: Any) -> object:
    if text.isascii() or is_utf8(text):
        return text
    data = text.encode("utf-8", "surrogatepass")
    return {"$": "str", "base64": base64.b64encode(data).decode("ascii")}


def _encode_bytes(_: TypedEncoder, data: Any) -> object:
    return {"$": type(data).__name__, "base64": base64.b64encode(data).decode("ascii")}


def _encode_list(encoder: TypedEncoder, value: Any) -> object:
    return encoder.items(value, value)


def _encode_tuple(encoder: TypedEncoder, value: Any) -> object:
    return {"$": "tuple", "items": encoder.items(value, value)}


def _encode_set(encoder: TypedEncoder, value: Any) -> object:
    entered = encoder.enter(value)
    encoder.path.append("{}")
    items = list(map(encoder.value, value))  # map adds no stack frame
    encoder.path.pop()
    encoder.active.remove(entered)
    # Sorted, because the order of a set of strings differs between processes.
    return {"$": type(value).__name__, "items": sorted(items, key=json_bytes)}


def _encode_dict(encoder: TypedEncoder, mapping: Any) -> object:
    kept = encoder.kept if len(mapping) >= EncodedDicts.LEAST else None
    if kept is not None and (known := kept.find(mapping)) is not None:
        return known
    for key in mapping:
        if type(key) is not str or not (key.isascii() or is_utf8(key)):
            return _encode_pairs(encoder, mapping)
    if "$" in mapping:
        return _encode_pairs(encoder, mapping)
    entered, path = encoder.enter(mapping), encoder.path
    encoded: dict[object, object] = {}
    for key, item in mapping.items():
        path.append((key,))
        handler = _encoders.get(type(item))
        encoded[key] = handler(encoder, item) if handler is not None else encoder.value(item)
        path.pop()
    encoder.active.remove(entered)
    return encoded if kept is None else kept.note(mapping, encoded)


def _encode_pairs(encoder: TypedEncoder, mapping: Any) -> object:
    entered, path = encoder.enter(mapping), encoder.path
    items: list[object] = []
    for key, item in mapping.items():
        path.extend(((key,), " (a key)"))
        items.append(encoder.value(key))
        path.pop()
        items.append(encoder.value(item))
        path.pop()
    encoder.active.remove(entered)
    return {"$": "dict" if type(mapping) is dict else "ordereddict", "items": items}


def _encode_deque(encoder: TypedEncoder, value: Any) -> object:
    return {"$": "deque", "maxlen": value.maxlen, "items": encoder.items(value, value)}


def _encode_bounds(encoder: TypedEncoder, span: Any) -> object:
    items = encoder.items(span, (span.start, span.stop, span.step))
    return {"$": type(span).__name__, "items": items}


def _encode_namedtuple(encoder: TypedEncoder, value: tuple[object, ...]) -> object:
    name, fields = type(value).__name__, cast("tuple[str, ...]", getattr(value, "_fields", ()))
    if not all(type(field) is str for field in fields) or namedtuple_class(name, fields) is None:
        raise encoder.refusal(f"a {_type_name(value)} with invalid field names")
    if len(fields) != len(value) or getattr(value, "__dict__", None):
        raise encoder.refusal(f"a {_type_name(value)} that holds more than its fields")
    encoder.classes.add((name, fields))
    if len(encoder.classes) > MAX_NAMEDTUPLES:
        raise encoder.refusal(f"more than {MAX_NAMEDTUPLES} namedtuple classes")
    items = encoder.items(value, value)
    return {"$": "namedtuple", "type": name, "fields": list(fields), "items": items}


def _encode_tensor(encoder: TypedEncoder, ref: Any) -> object:
    return {"$": "tensor", "name": encoder.text(ref.name)}


def _encode_tagged(encoder: TypedEncoder, tagged: Any) -> object:
    entered = encoder.enter(tagged)
    encoded = encoder.value(tagged.value)
    encoder.active.remove(entered)
    return {"$": "ext", "tag": encoder.text(tagged.tag), "value": encoded}


_encoders: dict[type, Callable[[TypedEncoder, Any], object]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
    collections.OrderedDict: _encode_pairs,
    set: _encode_set,
    frozenset: _encode_set,
    collections.deque: _encode_deque,
    range: _encode_bounds,
    slice: _encode_bounds,
    TensorRef: _encode_tensor,
    Tagged: _encode_tagged,
}


_Mapping = dict[str, object]
"""A tagged object: its tag under "$", and its fields."""
_Field = TypeVar("_Field")
_HEX = re.compile(r"-?[0-9a-f]+")
_BITS = re.compile(r"[0-9a-f]{16}")


class Malformed(Exception):
    """A malformed document; `from_parsed` adds its location."""


def _decoded(plain: object) -> object:
    """Return the value of parsed JSON, which is consumed. The walk keeps its own stack, so that the
    depth of the call stack does not decide whether data is readable. Tagged objects are listed from
    the outside in, and then replaced by their values from the inside out; in place, because nothing
    else uses the parsed JSON."""
    root = [plain]
    classes: set[type] = set()
    for place, key, mapping in reversed(_tagged_objects(root)):
        tag = cast("str", mapping["$"])
        decoder, fields = _decoders[tag]
        if len(mapping) != len(fields) + 1 or not all(field in mapping for field in fields):
            raise Malformed(f"the fields {sorted(mapping)!r:.200} in a {tag}")
        place[key] = value = decoder(mapping)
        if tag == "namedtuple":
            classes.add(type(value))
            if len(classes) > MAX_NAMEDTUPLES:
                raise Malformed(f"more than {MAX_NAMEDTUPLES} namedtuple classes")
    return root[0]


def _tagged_objects(root: list[object]) -> list[tuple[Any, Any, _Mapping]]:
    """Return every tagged object with its position (container, key), outer ones before inner
    ones."""
    tagged: list[tuple[Any, Any, _Mapping]] = []
    todo: list[tuple[Any, Any, object, int]] = [(root, 0, root[0], 0)]
    while todo:
        place, key, plain, depth = todo.pop()
        if type(plain) is list:
            depth = _deeper(depth)
            todo.extend((plain, i, item, depth) for i, item in enumerate(plain))
        elif type(plain) is dict:
            tag = plain.get("$", plain)  # a dict is never a tag, so `plain` itself means no tag
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
                    depth = _deeper(depth)  # for the others the list of items counts
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
    """Return `value` as text for a message. Containers are not shown, because they may be as deep
    as the parser allows."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:100]


def _hashed(key: object) -> object:
    try:
        hash(key)
    except TypeError:
        raise Malformed(f"a {type(key).__name__}, which cannot be hashed, as a key") from None
    return key


def _field(mapping: _Mapping, field: str, kind: type[_Field]) -> _Field:
    """Return a field of a tagged object. Raise `Malformed` if it is of another type."""
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


def _decode_int(mapping: _Mapping) -> object:
    text = _field(mapping, "hex", str)
    if _HEX.fullmatch(text) is None:
        raise Malformed("an int that is not lower-case hex")
    return int(text, 16)  # linear time, and without the digit limit of decimals


def _decode_float(mapping: _Mapping) -> float:
    text = _field(mapping, "bits", str)
    if _BITS.fullmatch(text) is None:
        raise Malformed("a float that is not 16 hex digits")
    return cast("float", struct.unpack(">d", bytes.fromhex(text))[0])


def _decode_complex(mapping: _Mapping) -> object:
    re, im = mapping["re"], mapping["im"]
    if type(re) is not float or type(im) is not float:
        raise Malformed("a complex number whose parts are not floats")
    return complex(re, im)


def _decode_str(mapping: _Mapping) -> object:
    try:
        return _from_base64(mapping).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Malformed("a str that is not valid UTF-8") from None


def _fill(into: dict[object, object], items: list[object]) -> dict[object, object]:
    if len(items) % 2:
        raise Malformed("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if _hashed(key) in into:
            raise Malformed("a key twice in a dict")
        into[key] = value
    return into


def _decode_deque(mapping: _Mapping) -> object:
    items, limit = _items(mapping), mapping["maxlen"]
    if limit is None:
        return collections.deque(items)
    if type(limit) is not int or not len(items) <= limit <= sys.maxsize:
        raise Malformed(f"{_shown(limit)} as the maxlen of a deque of {len(items)}")
    return collections.deque(items, limit)


def _decode_range(mapping: _Mapping) -> object:
    items = _items(mapping)
    numbers = [item for item in items if type(item) is int]
    if len(items) != 3 or len(numbers) != 3 or numbers[2] == 0:
        raise Malformed("a range that is not three ints with a step")
    return range(*numbers)


def _decode_slice(mapping: _Mapping) -> object:
    items = _items(mapping)
    if len(items) != 3:
        raise Malformed("a slice without three parts")
    return slice(*items)


def _decode_namedtuple(mapping: _Mapping) -> object:
    items, name = _items(mapping), _field(mapping, "type", str)
    names = _field(mapping, "fields", list)
    fields = tuple(field for field in names if type(field) is str)
    if not len(fields) == len(names) == len(items):
        raise Malformed("a namedtuple whose fields are not one string for each item")
    made = namedtuple_class(name, fields)
    if made is None:
        raise Malformed("a namedtuple with names that Python would not take")
    return tuple.__new__(made, items)


_decoders: dict[str, tuple[Callable[[_Mapping], object], tuple[str, ...]]] = {
    "int": (_decode_int, ("hex",)),
    "float": (_decode_float, ("bits",)),
    "complex": (_decode_complex, ("re", "im")),
    "str": (_decode_str, ("base64",)),
    "bytes": (_from_base64, ("base64",)),
    "bytearray": (lambda mapping: bytearray(_from_base64(mapping)), ("base64",)),
    "tuple": (lambda mapping: tuple(_items(mapping)), ("items",)),
    "dict": (lambda mapping: _fill({}, _items(mapping)), ("items",)),
    "ordereddict": (lambda m: _fill(collections.OrderedDict(), _items(m)), ("items",)),
    "set": (lambda mapping: _distinct(_items(mapping)), ("items",)),
    "frozenset": (lambda mapping: frozenset(_distinct(_items(mapping))), ("items",)),
    "deque": (_decode_deque, ("items", "maxlen")),
    "range": (_decode_range, ("items",)),
    "slice": (_decode_slice, ("items",)),
    "namedtuple": (_decode_namedtuple, ("type", "fields", "items")),
    "tensor": (lambda mapping: TensorRef(_field(mapping, "name", str)), ("name",)),
    "ext": (lambda m: Tagged(_field(m, "tag", str), m["value"]), ("tag", "value")),
}
"""Tag → the function that creates its value, and the fields that it has besides "$"."""

_CONTAINERS = frozenset(
    tag for tag, (_, fields) in _decoders.items() if "items" in fields or tag == "ext"
)


__all__ = [
    "MAX_DEPTH",
    "MAX_NAMEDTUPLES",
    "EncodedDicts",
    "Tagged",
    "TensorRef",
    "decode",
    "encode",
    "from_parsed",
]


def encode(value: object, kept: EncodedDicts | None = None) -> bytes:
    """Encode `value` as typed JSON. Raise `UsageError` with the path of the first value that cannot
    be encoded. Parts that the last call with the same `kept` encoded are not walked again."""
    if kept is not None:
        kept.begin()
    encoder = TypedEncoder(kept)
    try:
        return json_bytes(encoder.value(value))
    except RecursionError:
        raise encoder.refusal("nesting too deep for the call stack") from None


def decode(data: bytes, *, where: str) -> object:
    """Decode the result of `encode`. Raise `CorruptError`, naming `where`, for anything else."""
    return from_parsed(parse(data, where=where), where=where)


def from_parsed(plain: object, *, where: str) -> object:
    """Decode a part of a document that `parse` has parsed; `plain` is consumed."""
    try:
        return _decoded(plain)
    except Malformed as error:
        raise CorruptError("cannot read typed JSON", where=where, found=str(error)) from None
