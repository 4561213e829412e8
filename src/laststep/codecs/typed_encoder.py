"""Python values to what the JSON encoder takes: one function per type, and the walk over them.

Knows nothing of decoding beyond that `typed_decoder` has a function for each tag written here. A
`TypedEncoder` serves one walk, on one thread; after a refusal it is spent.
"""

from __future__ import annotations

import base64
import collections
import struct
from typing import TYPE_CHECKING, Any, cast

import msgspec

from laststep.codecs.typed_values import (
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    MAX_NAMEDTUPLES,
    Tagged,
    TensorRef,
    is_utf8,
    namedtuple_class,
)
from laststep.errors import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

json_bytes = msgspec.json.Encoder().encode


class EncodedDicts:
    """What the last walk made of large dicts, for the next one that meets the very same dicts.
    Only for values that are never changed."""

    LEAST = 16
    """Smaller ones are walked again just as soon."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[object, object]] = {}
        self._now: dict[int, tuple[object, object]] = {}

    def begin(self) -> None:
        """Another walk: what it does not meet is forgotten after it."""
        self._before, self._now = self._now, {}

    def find(self, value: object) -> object:
        """What was made of it, or None. It is held meanwhile, so nothing else has its identity."""
        known = self._now.get(id(value)) or self._before.get(id(value))
        return None if known is None else self.note(value, known[1])

    def note(self, value: object, encoded: object) -> object:
        self._now[id(value)] = value, encoded
        return encoded


class TypedEncoder:
    """One walk over a value. `path` is where the walk is, for the message of a refusal."""

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
        """Note that the walk is within `container`; the caller removes it from `active`."""
        key = id(container)
        if key in self.active:
            raise self.refusal(f"a {_type_name(container)} that contains itself")
        if len(self.active) == MAX_DEPTH:
            raise self.refusal(f"containers nested more than {MAX_DEPTH} deep")
        self.active.add(key)
        return key

    def items(self, container: object, values: Iterable[object]) -> list[object]:
        """All `values` of a container, encoded; plain loops, since trees have 100,000 leaves."""
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
        """A string within a tag, which has no form of its own for what UTF-8 cannot hold."""
        if not is_utf8(text):
            raise self.refusal("a name that is no valid Unicode")
        return text

    def refusal(self, found: str) -> Usage:
        return Usage(
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
        elif type(part[0]) in (str, bytes, float, bool) or _is_short_int(part[0]):
            text += f"[{repr(part[0])[:200]}]"
        else:
            text += f"[<{_type_name(part[0])}>]"
    return text


def _is_short_int(value: object) -> bool:
    return type(value) is int and INT_MIN <= value <= INT_MAX  # repr refuses 4,300 digits


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
    return {"$": "str", "base64": _to_base64(text.encode("utf-8", "surrogatepass"))}


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_bytes(_: TypedEncoder, data: Any) -> object:
    return {"$": type(data).__name__, "base64": _to_base64(data)}


def _encode_list(encoder: TypedEncoder, value: Any) -> object:
    return encoder.items(value, value)


def _encode_tuple(encoder: TypedEncoder, value: Any) -> object:
    return {"$": "tuple", "items": encoder.items(value, value)}


def _encode_set(encoder: TypedEncoder, value: Any) -> object:
    entered = encoder.enter(value)
    encoder.path.append("{}")
    items = list(map(encoder.value, value))  # map adds no frame
    encoder.path.pop()
    encoder.active.remove(entered)
    # The order of a set of strings differs from process to process; its bytes should not.
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
        raise encoder.refusal(f"a {_type_name(value)}, whose names namedtuple would not take")
    if len(fields) != len(value) or getattr(value, "__dict__", None):
        raise encoder.refusal(f"a {_type_name(value)} that holds more than its fields")
    encoder.classes.add((name, fields))
    if len(encoder.classes) > MAX_NAMEDTUPLES:
        raise encoder.refusal(f"more than {MAX_NAMEDTUPLES} classes of namedtuple")
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
