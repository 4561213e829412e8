"""Decide which rank reads what when a job loads, so that every block is read once and used by all.

Pure. Files are looked at in chunks. Of each chunk the ranks that want something of it are found by
intersecting boxes, and one of them, the same in everybody's eyes, reads it and passes the rest on.
A rank looks only at chunks that hold something for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.layouts import Box, boxes_of_range
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Stored(NamedTuple):
    """A box of a tensor that lies in a file, at bytes [start, stop) of its tensor area."""

    tensor: int
    itemsize: int
    file: int
    start: int
    stop: int
    box: Box


Wanted = list[tuple[int, tuple[Box, ...]]]
"""The ranks that want something of a tensor, in order, and which boxes of it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file that one rank reads, and what of them is whose."""

    file: int
    start: int
    stop: int
    stored: tuple[Stored, ...]

    def boxes(self) -> Iterator[tuple[Stored, Box, int]]:
        """The boxes that lie in it, each with the byte at which it begins, in the chunk."""
        for one in self.stored:
            first = max(self.start - one.start, 0) // one.itemsize
            last = (min(self.stop, one.stop) - one.start) // one.itemsize
            at = one.start + first * one.itemsize - self.start
            for box in boxes_of_range(one.box.shape, first, last):
                yield one, _moved(box, one.box.start), at
                at += box.volume * one.itemsize


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    return Box(
        tuple(a + b for a, b in zip(box.start, by, strict=True)),
        tuple(a + b for a, b in zip(box.stop, by, strict=True)),
    )


def chunks_of(
    rank: int,
    stored: Sequence[Stored],
    wanted: Callable[[int], Wanted],
    tensor_bytes: Sequence[int],
) -> list[Chunk]:
    """The chunks that a rank reads. `wanted` says who wants what of a tensor, `tensor_bytes` how
    long each file's tensor area is."""
    grid: dict[tuple[int, int], list[Stored]] = {}
    touched: set[tuple[int, int]] = set()
    for one in stored:
        if one.start == one.stop:
            continue
        for number in range(one.start // CHUNK_BYTES, -(-one.stop // CHUNK_BYTES)):
            grid.setdefault((one.file, number), []).append(one)
        for who, boxes in wanted(one.tensor):
            if who == rank:
                for start, stop in _ranges(one, boxes):
                    numbers = range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))
                    touched.update((one.file, number) for number in numbers)
    found = []
    for file, number in sorted(touched):
        low, high = number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
        ranks: set[int] = set()
        start, stop = high, low
        for one in grid[file, number]:
            for who, boxes in wanted(one.tensor):
                for first, last in _ranges(one, boxes):
                    if first < high and low < last:
                        ranks.add(who)
                        start, stop = min(start, max(first, low)), max(stop, min(last, high))
        readers = sorted(ranks)
        if readers and readers[(file + number) % len(readers)] == rank:
            start = start // BLOCK_BYTES * BLOCK_BYTES
            stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, tensor_bytes[file])
            held = tuple(s for s in grid[file, number] if s.start < stop and start < s.stop)
            found.append(Chunk(file, start, stop, held))
    return found


def _ranges(stored: Stored, boxes: tuple[Box, ...]) -> Iterator[tuple[int, int]]:
    """The bytes of the file from the first to the last element that is wanted of a stored box."""
    for box in boxes:
        common = stored.box.meet(box)
        if common is not None:
            inner = common.within(stored.box)
            first = _offset(stored.box.shape, inner.start)
            last = _offset(stored.box.shape, tuple(stop - 1 for stop in inner.stop)) + 1
            yield stored.start + first * stored.itemsize, stored.start + last * stored.itemsize


def _offset(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    return sum(one * math.prod(shape[dim + 1 :]) for dim, one in enumerate(index))
