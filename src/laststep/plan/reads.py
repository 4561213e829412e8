"""Decide which bytes to read for the requested tensors, and where they go.

Pure. Every byte that is used is verified, so whole blocks are read, neighbours together, up to a
slot at a time. Each is read once, by one rank of a job, however many tensors it holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.state.boxes import Box, boxes_of_range, row_major

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from laststep.plan.who_reads import ReadRequests, WriterSource


_Reach = tuple[int, int, tuple[int, ...]]
"""Bytes [first, last) of a file, and the ranks that request some of them."""


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
    """Bytes of a file that one rank reads, and the boxes in them."""

    file: int
    start: int
    stop: int
    stored: tuple[FileBox, ...]

    def cut(self, most_bytes: int) -> Iterator[Chunk]:
        """Cut into parts of at most `most_bytes`, which are whole blocks."""
        for start in range(self.start, self.stop, most_bytes):
            stop = min(start + most_bytes, self.stop)
            stored = tuple(box for box in self.stored if box.start < stop and start < box.stop)
            yield Chunk(self.file, start, stop, stored)

    def boxes(self) -> Iterator[tuple[FileBox, Box, int]]:
        """Return the boxes in it, each with the byte of the chunk at which it begins."""
        for stored in self.stored:
            if self.start <= stored.start < stored.stop <= self.stop:
                yield stored, stored.box, stored.start - self.start
                continue
            first = max(self.start - stored.start, 0) // stored.itemsize
            last = (min(self.stop, stored.stop) - stored.start) // stored.itemsize
            at = stored.start + first * stored.itemsize - self.start
            for box in boxes_of_range(stored.box.shape, first, last):
                yield stored, box.moved(stored.box.start), at
                at += box.volume * stored.itemsize


Wanted = tuple[int, int, FileBox]
"""Bytes [first, last) of a file's tensor area, which lie in this box."""


def plan_chunks(
    wanted: Iterable[Wanted], tensor_bytes: Mapping[int, int], most_bytes: int = CHUNK_BYTES
) -> list[Chunk]:
    """Return the chunks that hold these bytes, in order of files: whole blocks, none twice, each
    chunk of at most `most_bytes`. `tensor_bytes` is the length of each file's tensor area."""
    spans: list[tuple[int, int, int]] = []
    held: list[dict[FileBox, None]] = []
    last_in: dict[tuple[int, int], int] = {}  # a chunk never crosses a multiple of `most_bytes`
    for file, first, last, box in sorted((box.file, a, b, box) for a, b, box in wanted):
        at = first
        while at < last:
            cell = at // most_bytes
            end = min(last, (cell + 1) * most_bytes)
            start = at // BLOCK_BYTES * BLOCK_BYTES
            stop = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, tensor_bytes[file])
            number = last_in.get((file, cell))
            if number is None or spans[number][2] < start:
                last_in[file, cell] = len(spans)
                spans.append((file, start, stop))
                held.append({box: None})
            else:
                spans[number] = (file, spans[number][1], max(spans[number][2], stop))
                held[number][box] = None
            at = end
    return [Chunk(*span, tuple(boxes)) for span, boxes in zip(spans, held, strict=True)]


def chunks_of(
    rank: int,
    source: WriterSource,
    stored: Sequence[FileBox],
    requests: ReadRequests,
    tensor_bytes: Mapping[int, int],
) -> list[Chunk]:
    """Return the chunks that a rank reads of a source's `stored` boxes; see `plan_chunks`."""
    in_chunk: dict[tuple[int, int], list[FileBox]] = {}
    for box in stored:
        for number in range(box.start // CHUNK_BYTES, -(-box.stop // CHUNK_BYTES)):
            in_chunk.setdefault((box.file, number), []).append(box)
    reach = functools.cache(lambda box: _reach(box, source.readers, requests))
    readers = frozenset(source.readers)

    @functools.cache
    def reach_of_all(box: FileBox) -> list[tuple[int, int]]:
        ranks = requests.ranks(requests.of_box(box.tensor, box.box))
        outer: list[tuple[int, int]] = []
        found = reach(box) if readers.issuperset(ranks) else _reach(box, ranks, requests)
        for first, last, _ in sorted(found):
            if not outer or last > outer[-1][1]:  # else inside another
                outer.append((first, last))
        return outer

    # Files have other numbers on other ranks, but come in the same order.
    order = {file: at for at, file in enumerate(dict.fromkeys(box.file for box in stored))}
    chunks = sorted(in_chunk, key=lambda chunk: (order[chunk[0]], chunk[1]))
    wanted: list[Wanted] = []
    readers_of = _readers(chunks, in_chunk, reach, source)
    for (file, number), reader in zip(chunks, readers_of, strict=True):
        low, high = number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
        for box in in_chunk[file, number] if reader == rank else ():
            for first, last in reach_of_all(box):
                if first < high and low < last:
                    wanted.append((max(first, low), min(last, high), box))
    return plan_chunks(wanted, tensor_bytes)


def _readers(
    chunks: Sequence[tuple[int, int]],
    in_chunk: Mapping[tuple[int, int], Sequence[FileBox]],
    reach: Callable[[FileBox], list[_Reach]],
    source: WriterSource,
) -> Iterator[int]:
    """Choose the reader of each chunk: of the ranks that request some of it, the one that has read
    least. A chunk that none of them requests is left out."""
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


def _reach(stored: FileBox, ranks: tuple[int, ...], requests: ReadRequests) -> list[_Reach]:
    return [
        (first, last, who)
        for boxes, who in requests.alike(stored.tensor, ranks)
        for first, last in requested_ranges(stored, boxes)
    ]


def requested_ranges(stored: FileBox, boxes: tuple[Box, ...]) -> Iterator[tuple[int, int]]:
    """Return the bytes of the file from the first to the last requested element of a stored box."""
    for box in boxes:
        common = stored.box.meet(box)
        if common == stored.box:
            yield stored.start, stored.stop
        elif common is not None:
            inner = common.within(stored.box)
            first = row_major(stored.box.shape, inner.start)
            last = row_major(stored.box.shape, (stop - 1 for stop in inner.stop)) + 1
            yield stored.start + first * stored.itemsize, stored.start + last * stored.itemsize
