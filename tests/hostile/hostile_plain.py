"""Safetensors files of others, such as are imported, whose headers are hostile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hostile_case import Case, Json

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = bytes(range(24))


def entry(dtype: object, shape: list[object], start: object, stop: object) -> Json:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def region(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def entries() -> Json:
    return {"c": entry("U8", [16], 0, 16), "w": entry("F32", [2, 1], 16, 24)}


def sound() -> bytes:
    return region(json.dumps(entries()).encode()) + DATA


def _entry_cases() -> Iterator[tuple[str, str, Json]]:
    """(name, why, changed entries)"""
    big = 1 << 62
    w = entry("F32", [2], 16, 24)
    yield "dtype", "an unknown dtype", {"w": entry("F31", [2], 16, 24)}
    yield "dtype-number", "a dtype that is a number", {"w": entry(7, [2], 16, 24)}
    yield "shape-negative", "negative sides", {"w": entry("F32", [-2, -1], 16, 24)}
    yield "shape-float", "a side that is a float", {"w": entry("F32", [2.0, 1], 16, 24)}
    yield "shape-bool", "a side that is a boolean", {"w": entry("F32", [2, True], 16, 24)}
    yield "shape-size", "a shape of another size", {"w": entry("F32", [3], 16, 24)}
    yield "shape-overflow", "sides that overflow", {"w": entry("F32", [big, 4, 2], 16, 24)}
    yield "shape-zero", "overflow hidden by a zero", {"w": entry("F32", [big, big, 0], 16, 16)}
    yield "shape-huge", "a side beyond 64 bits", {"w": entry("F32", [1 << 70], 16, 24)}
    yield "hole", "a hole between tensors", {"w": entry("F32", [1], 20, 24)}
    yield "overlap", "tensors that overlap", {"w": entry("F32", [4], 8, 24)}
    yield "same-place", "two tensors in one place", {"w2": w}
    yield "backwards", "an end before the start", {"w": entry("F32", [2], 24, 16)}
    yield "negative", "a negative offset", {"c": entry("U8", [17], -1, 16)}
    yield "start", "data that do not start at 0", {"c": entry("U8", [15], 1, 16)}
    yield "beyond", "an end behind the data", {"w": entry("F32", [3], 16, 28)}
    yield "short", "data that no entry covers", {"w": entry("F32", [1], 16, 20)}
    yield "offset-huge", "an offset beyond 64 bits", {"w": entry("F32", [2], 16, 1 << 64)}
    yield "offset-one", "one offset only", {"w": {**w, "data_offsets": [16]}}
    yield "entry-extra", "an entry with another field", {"w": {**w, "x": 1}}
    yield "entry-fields", "an entry without offsets", {"w": {"dtype": "F32", "shape": [2]}}
    yield "metadata", "metadata that are no strings", {"__metadata__": {"a": 1}}
    yield "metadata-list", "metadata that are a list", {"__metadata__": ["pt"]}


def _text_cases() -> Iterator[tuple[str, str, bytes]]:
    good = json.dumps(entries()).encode()
    w = json.dumps(entries()["w"]).encode()
    yield "empty", "no bytes at all", b""
    yield "only-length", "a length and nothing else", region(good)[:8]
    yield "length-huge", "a length of 2^63", region(good, 1 << 63)
    yield "length-short", "a length that ends within the header", region(good, 50)
    yield "length-zero", "a length of 0", region(good, 0)
    yield "not-json", "a header that is not JSON", region(b"{nonsense")
    yield "json-list", "a header that is a list", region(b"[]")
    yield "json-space", "white space before the JSON", region(b" " + good)
    yield "json-trailing", "text behind the JSON", region(good + b" {}")
    yield "utf8", "a name that is not UTF-8", region(good.replace(b'"w"', b'"\xff"'))
    yield "surrogate", "a name with a lone surrogate", region(good.replace(b'"w"', b'"\\ud800"'))
    yield "nested", "1,900 brackets", region(b'{"a":' + b"[" * 1900 + b"]" * 1900 + b"}")
    yield "entry-twice", "an entry twice", region(good[:-1] + b', "w": ' + w + b"}")
    yield "key-twice", "a key twice", region(good.replace(b'"F32"', b'"F16", "dtype": "F32"'))


def plain_cases() -> Iterator[Case]:
    for name, why, data in _text_cases():
        whole = data + DATA if len(data) > 8 else data
        yield Case(name=f"plain-{name}.safetensors", raises="CorruptError", why=why, data=whole)
    for name, why, changed in _entry_cases():
        data = region(json.dumps({**entries(), **changed}).encode()) + DATA
        yield Case(name=f"plain-{name}.safetensors", raises="CorruptError", why=why, data=data)
    half = region(json.dumps({**entries(), "w": entry("F4", [16], 16, 24)}).encode()) + DATA
    yield Case(
        name="plain-sub-byte.safetensors",
        raises="UsageError",
        why="a dtype of half a byte",
        data=half,
    )
