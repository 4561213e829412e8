"""The tensors of the second reader: put together from parts, or seen through a window."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


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
