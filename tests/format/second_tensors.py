"""Tensors put together from their parts, written from docs/format.md for `second_reader`."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

NAMES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz "
    "float4_e2m1fn_x2",
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Part(NamedTuple):
    """A box of a tensor, as an entry holds it."""

    item: str
    tensor: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    held: Tensor


def joined(parts: list[Part]) -> Tensor:
    """A tensor, of its parts: every element once."""
    whole, size = parts[0].whole, SIZES[parts[0].held.dtype]
    data, seen = bytearray(math.prod(whole) * size), 0
    for part in parts:
        assert part.whole == whole
        shape = part.held.shape
        row = shape[-1] * size if shape else size
        seen += math.prod(shape)
        for number, index in enumerate(itertools.product(*map(range, shape[:-1]))):
            at = 0
            for one, start, side in zip((*index, 0), part.start, whole, strict=False):
                at = at * side + one + start
            data[at * size : at * size + row] = part.held.data[number * row : (number + 1) * row]
    assert seen == math.prod(whole)
    return Tensor(parts[0].held.dtype, whole, bytes(data))


def viewed(base: Tensor, entry: dict[str, Any]) -> Tensor:
    """A window into a base."""
    _, dtype, shape, stride, offset = entry["items"]
    shape, stride, size = shape["items"], stride["items"], SIZES[dtype]
    places = [
        offset + size * sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    return Tensor(dtype, tuple(shape), b"".join(base.data[at : at + size] for at in places))
