"""Decide which bytes to read for what is wanted, and where they go.

Pure. Every byte that is used is verified, so a read covers whole blocks; neighbouring blocks are
read together, up to a slot at a time; each block is read once however many tensors it holds.

In a job of several ranks each block is read by one rank, for all: which one follows from who wants
what.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.boxes import Box, boxes_of_range, row_major
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from laststep.plan.who_reads import Wants, WriterSource


class Want(NamedTuple):
    """A byte range of a file's tensor area, and the caller's number for where it goes."""

    start: int
    stop: int
    target: int


class ReadPart(NamedTuple):
    """The piece of a read that belongs to one target."""

    target: int
    at: int
    """First byte within the read."""
    target_at: int
    """First byte within the target's range."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One request: whole blocks of one file's tensor area, and whose bytes they are."""

    file: int
    start: int
    stop: int
    parts: tuple[ReadPart, ...]


def plan_reads(
    file: int, tensor_bytes: int, wants: list[Want], most_bytes: int = CHUNK_BYTES
) -> list[Read]:
    """Reads that cover every want, in order of offset, none of more than `most_bytes`, which are
    whole blocks, and no block twice."""
    wants = sorted(
        (want for want in wants if want.start < want.stop), key=lambda w: (w.start, w.stop)
    )
    ranges = _ranges(wants, tensor_bytes, most_bytes)
    parts: list[list[ReadPart]] = [[] for _ in ranges]
    first = 0
    for want in wants:  # both are sorted by offset
        while first < len(ranges) and ranges[first][1] <= want.start:
            first += 1
        number = first
        while number < len(ranges) and ranges[number][0] < want.stop:
            low, high = ranges[number]
            start, stop = max(low, want.start), min(high, want.stop)
            part = ReadPart(want.target, start - low, start - want.start, stop - start)
            parts[number].append(part)
            number += 1
    return [
        Read(file=file, start=start, stop=stop, parts=tuple(held))
        for (start, stop), held in zip(ranges, parts, strict=True)
    ]


def _ranges(wants: list[Want], tensor_bytes: int, most_bytes: int) -> list[tuple[int, int]]:
    """Runs of whole blocks that hold a want, cut at multiples of `most_bytes`."""
    runs: list[list[int]] = []
    for want in wants:
        first, last = want.start // BLOCK_BYTES, -(-want.stop // BLOCK_BYTES)
        if runs and first <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], last)
        else:
            runs.append([first, last])
    ranges: list[tuple[int, int]] = []
    for first, last in runs:
        start, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, tensor_bytes)
        while start < end:
            stop = min(end, (start // most_bytes + 1) * most_bytes)
            ranges.append((start, stop))
            start = stop
    return ranges


_Reach = tuple[int, int, tuple[int, ...]]
"""Bytes [first, last) of a file, and the ranks that want something of them."""


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

    def cut(self, most_bytes: int) -> Iterator[Chunk]:
        """The same in parts of at most so many bytes, which are whole blocks."""
        for start in range(self.start, self.stop, most_bytes):
            stop = min(start + most_bytes, self.stop)
            held = tuple(s for s in self.stored if s.start < stop and start < s.stop)
            yield Chunk(self.file, start, stop, held)

    def boxes(self) -> Iterator[tuple[FileBox, Box, int]]:
        """The boxes that lie in it, each with the byte at which it begins, in the chunk."""
        for stored in self.stored:
            first = max(self.start - stored.start, 0) // stored.itemsize
            last = (min(self.stop, stored.stop) - stored.start) // stored.itemsize
            at = stored.start + first * stored.itemsize - self.start
            for box in boxes_of_range(stored.box.shape, first, last):
                yield stored, box.moved(stored.box.start), at
                at += box.volume * stored.itemsize


def chunks_of(
    rank: int,
    source: WriterSource,
    stored: Sequence[FileBox],
    wants: Wants,
    tensor_bytes: Mapping[int, int],
) -> list[Chunk]:
    """The chunks that a rank reads of a source's files, in which `stored` lies; `tensor_bytes` says
    how long the tensor area of each is."""
    in_chunk: dict[tuple[int, int], list[FileBox]] = {}
    for box in stored:
        for number in range(box.start // CHUNK_BYTES, -(-box.stop // CHUNK_BYTES)):
            in_chunk.setdefault((box.file, number), []).append(box)
    reach = functools.cache(lambda box: _reach(box, source.readers, wants))
    readers = frozenset(source.readers)

    @functools.cache
    def reach_of_all(box: FileBox) -> list[tuple[int, int]]:
        ranks = wants.ranks(wants.of_box(box.tensor, box.box))
        return _outer(reach(box) if readers.issuperset(ranks) else _reach(box, ranks, wants))

    # Files have other numbers on other ranks, but come in the same order.
    order = {file: at for at, file in enumerate(dict.fromkeys(box.file for box in stored))}
    chunks = sorted(in_chunk, key=lambda chunk: (order[chunk[0]], chunk[1]))
    mine: list[Chunk] = []
    for (file, number), reader in zip(
        chunks, _readers(chunks, in_chunk, reach, source), strict=True
    ):
        if reader == rank:
            start = number * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, tensor_bytes[file])
            chunk = Chunk(file, start, stop, tuple(in_chunk[file, number]))
            mine += filter(None, [_trimmed(chunk, reach_of_all)])
    return mine


def _readers(
    chunks: Sequence[tuple[int, int]],
    in_chunk: Mapping[tuple[int, int], Sequence[FileBox]],
    reach: Callable[[FileBox], list[_Reach]],
    source: WriterSource,
) -> Iterator[int]:
    """Who reads each chunk of a source's files: of those who want something of it, whoever has read
    least. What none of them wants is for somebody else, or for nobody."""
    read = dict.fromkeys(source.readers, 0)
    for turn, (file, number) in enumerate(chunks):
        low, high = number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
        wanting: set[int] = set()
        for box in in_chunk[file, number]:
            for first, last, who in reach(box):
                if first < high and low < last:
                    wanting.update(who)
        able = sorted(wanting) or list(source.readers)
        begin = (source.writer * len(chunks) + turn) % len(able)
        reader = min(able[begin:] + able[:begin], key=read.__getitem__)
        read[reader] += 1
        yield reader


def _reach(stored: FileBox, ranks: tuple[int, ...], wants: Wants) -> list[_Reach]:
    """The bytes of the file that these ranks want of a stored box, from the first to the last."""
    return [
        (first, last, who)
        for boxes, who in wants.alike(stored.tensor, ranks)
        for first, last in _chunk_readers_ranges(stored, boxes)
    ]


def _outer(reach: list[_Reach]) -> list[tuple[int, int]]:
    """What is reached by any; those that lie within another's are left out."""
    outer: list[tuple[int, int]] = []
    for first, last, _ in sorted(reach):
        if not outer or last > outer[-1][1]:
            outer.append((first, last))
    return outer


def _trimmed(chunk: Chunk, reach: Callable[[FileBox], list[tuple[int, int]]]) -> Chunk | None:
    """The blocks of a chunk from the first to the last of which somebody wants something."""
    start, stop = chunk.stop, chunk.start
    for box in chunk.stored:
        for first, last in reach(box):
            if first < chunk.stop and chunk.start < last:
                start, stop = min(start, max(first, chunk.start)), max(stop, min(last, chunk.stop))
    if start >= stop:
        return None
    start = start // BLOCK_BYTES * BLOCK_BYTES
    stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, chunk.stop)
    held = tuple(s for s in chunk.stored if s.start < stop and start < s.stop)
    return Chunk(chunk.file, start, stop, held)


def _chunk_readers_ranges(stored: FileBox, boxes: tuple[Box, ...]) -> Iterator[tuple[int, int]]:
    """The bytes of the file from the first to the last element that is wanted of a stored box."""
    for box in boxes:
        common = stored.box.meet(box)
        if common == stored.box:
            yield stored.start, stored.stop
        elif common is not None:
            inner = common.within(stored.box)
            first = row_major(stored.box.shape, inner.start)
            last = row_major(stored.box.shape, (stop - 1 for stop in inner.stop)) + 1
            yield stored.start + first * stored.itemsize, stored.start + last * stored.itemsize
