"""Decide which rank reads what when a job loads, so that every block is read once and used by all.

Pure. Files are looked at in chunks. Of each chunk the ranks that want something of it are found by
intersecting boxes, and one of them, the same in everybody's eyes, reads it and passes the rest on.
A rank looks only at chunks that hold something for itself.
"""

from __future__ import annotations

import functools
import itertools
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
    alone: bool
    """Whether nobody but its reader wants anything of it."""

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
    alike = functools.cache(lambda tensor: _Alike(wanted(tensor)))
    grid: dict[tuple[int, int], list[Stored]] = {}
    touched: set[tuple[int, int]] = set()
    for one in stored:
        if one.start == one.stop:
            continue
        for number in range(one.start // CHUNK_BYTES, -(-one.stop // CHUNK_BYTES)):
            grid.setdefault((one.file, number), []).append(one)
        for start, stop in _ranges(one, alike(one.tensor).of(rank)):
            numbers = range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))
            touched.update((one.file, number) for number in numbers)
    found = []
    before = _chunks_before(tensor_bytes)
    for file, number in sorted(touched):
        low, high = number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
        wanting: dict[int, list[int]] = {}
        start, stop = high, low
        for one in grid[file, number]:
            for boxes, who in alike(one.tensor).ranks_of.items():
                for first, last in _ranges(one, boxes):
                    if first < high and low < last:
                        wanting[id(who)] = who
                        start, stop = min(start, max(first, low)), max(stop, min(last, high))
        readers = sorted(set(itertools.chain(*wanting.values())))
        if readers and readers[(before[file] + number) % len(readers)] == rank:
            start = start // BLOCK_BYTES * BLOCK_BYTES
            stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, tensor_bytes[file])
            held = tuple(s for s in grid[file, number] if s.start < stop and start < s.stop)
            found.append(Chunk(file, start, stop, held, len(readers) == 1))
    return found


class _Alike:
    """Who wants which boxes of a tensor; those who want the same are looked at once. A model that
    every rank holds whole is wanted by all of them, and lies in as many parts."""

    def __init__(self, wanted: Wanted) -> None:
        self.ranks_of: dict[tuple[Box, ...], list[int]] = {}
        for rank, boxes in wanted:
            self.ranks_of.setdefault(boxes, []).append(rank)
        self._boxes_of = dict(wanted)

    def of(self, rank: int) -> tuple[Box, ...]:
        """What a rank wants."""
        return self._boxes_of.get(rank, ())


def _chunks_before(tensor_bytes: Sequence[int]) -> list[int]:
    """How many chunks lie in the files before each, so that readers take turns over all of them.
    Small files do not count: each rank has one beside its large one, and every other turn would
    fall on those."""
    counts = [-(-size // CHUNK_BYTES) if size >= BLOCK_BYTES else 0 for size in tensor_bytes]
    return [0, *itertools.accumulate(counts)]


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
