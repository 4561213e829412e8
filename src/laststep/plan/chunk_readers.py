"""Decide which rank reads what of a writer's files, so that every block is read once, for all.

Pure. Files are looked at in chunks. Of each chunk the readers that want something of it are found
by intersecting boxes, and one of them, the same in everybody's eyes, reads it and passes the rest
on.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.boxes import Box, boxes_of_range
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from laststep.plan.who_reads import WriterSource
    from laststep.plan.wishes import Wants


class FileBox(NamedTuple):
    """A box of a tensor that lies in a file, at bytes [start, stop) of its tensor area."""

    tensor: int
    itemsize: int
    file: int
    start: int
    stop: int
    box: Box


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file that one rank reads, and what of them is whose."""

    file: int
    start: int
    stop: int
    stored: tuple[FileBox, ...]

    def boxes(self) -> Iterator[tuple[FileBox, Box, int]]:
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
    source: WriterSource,
    stored: Sequence[FileBox],
    wants: Wants,
    tensor_bytes: Mapping[int, int],
) -> list[Chunk]:
    """The chunks that a rank reads of a source's files, in which `stored` lies; `tensor_bytes` says
    how long the tensor area of each is."""
    grid: dict[tuple[int, int], list[FileBox]] = {}
    for one in stored:
        for number in range(one.start // CHUNK_BYTES, -(-one.stop // CHUNK_BYTES)):
            grid.setdefault((one.file, number), []).append(one)
    reach = functools.cache(lambda one: _reach(one, source.readers, wants))
    # Files have other numbers on other ranks, but come in the same order.
    order = {file: at for at, file in enumerate(dict.fromkeys(one.file for one in stored))}
    chunks = sorted(grid, key=lambda chunk: (order[chunk[0]], chunk[1]))
    readers = frozenset(source.readers)

    @functools.cache
    def everybody(one: FileBox) -> list[tuple[int, int]]:
        ranks = wants.ranks(wants.of_box(one.tensor, one.box))
        return _outer(reach(one) if readers.issuperset(ranks) else _reach(one, ranks, wants))

    found = []
    read = dict.fromkeys(source.readers, 0)
    for turn, (file, number) in enumerate(chunks):
        low, high = number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
        wanting: set[int] = set()
        for one in grid[file, number]:
            for first, last, who in reach(one):
                if first < high and low < last:
                    wanting.update(who)
        # What none of them wants is for somebody else, or for nobody. Who has read least is next.
        able = sorted(wanting) or list(source.readers)
        begin = (source.writer * len(chunks) + turn) % len(able)
        reader = min(able[begin:] + able[:begin], key=read.__getitem__)
        read[reader] += 1
        if reader == rank:
            stop = min(high, tensor_bytes[file])
            chunk = _trimmed(Chunk(file, low, stop, tuple(grid[file, number])), everybody)
            found += [] if chunk is None else [chunk]
    return found


def _reach(
    stored: FileBox, ranks: tuple[int, ...], wants: Wants
) -> list[tuple[int, int, tuple[int, ...]]]:
    """The bytes of the file that these ranks want of a stored box, from the first to the last."""
    return [
        (first, last, who)
        for boxes, who in wants.alike(stored.tensor, ranks)
        for first, last in _ranges(stored, boxes)
    ]


def _outer(reach: list[tuple[int, int, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """What is reached by any; those that lie within another's are left out."""
    found: list[tuple[int, int]] = []
    for first, last, _ in sorted(reach):
        if not found or last > found[-1][1]:
            found.append((first, last))
    return found


def _trimmed(chunk: Chunk, reach: Callable[[FileBox], list[tuple[int, int]]]) -> Chunk | None:
    """The blocks of a chunk from the first to the last of which somebody wants something."""
    start, stop = chunk.stop, chunk.start
    for one in chunk.stored:
        for first, last in reach(one):
            if first < chunk.stop and chunk.start < last:
                start, stop = min(start, max(first, chunk.start)), max(stop, min(last, chunk.stop))
    if start >= stop:
        return None
    start = start // BLOCK_BYTES * BLOCK_BYTES
    stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, chunk.stop)
    held = tuple(s for s in chunk.stored if s.start < stop and start < s.stop)
    return Chunk(chunk.file, start, stop, held)


def _ranges(stored: FileBox, boxes: tuple[Box, ...]) -> Iterator[tuple[int, int]]:
    """The bytes of the file from the first to the last element that is wanted of a stored box."""
    for box in boxes:
        common = stored.box.meet(box)
        if common == stored.box:
            yield stored.start, stored.stop
        elif common is not None:
            inner = common.within(stored.box)
            first = _offset(stored.box.shape, inner.start)
            last = _offset(stored.box.shape, tuple(stop - 1 for stop in inner.stop)) + 1
            yield stored.start + first * stored.itemsize, stored.start + last * stored.itemsize


def _offset(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    return sum(one * math.prod(shape[dim + 1 :]) for dim, one in enumerate(index))
