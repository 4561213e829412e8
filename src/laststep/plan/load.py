"""Decide which bytes to read for what is wanted, and where they go.

Pure. Every byte that is used is verified, so a read covers whole blocks; neighbouring blocks are
read together, up to a chunk at a time; each block is read once however many tensors it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from laststep.terms import BLOCK_BYTES, CHUNK_BYTES


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


def plan_reads(file: int, tensor_bytes: int, wants: list[Want]) -> list[Read]:
    """Reads that cover every want, in order of offset, none above a chunk, no block twice."""
    wants = sorted(
        (want for want in wants if want.start < want.stop), key=lambda w: (w.start, w.stop)
    )
    reads: list[Read] = []
    for start, stop in _ranges(wants, tensor_bytes):
        reads.append(Read(file=file, start=start, stop=stop, parts=()))
    return _with_parts(reads, wants)


def _ranges(wants: list[Want], tensor_bytes: int) -> list[tuple[int, int]]:
    """Runs of whole blocks that hold a want, cut where a chunk ends."""
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
            stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
            ranges.append((start, stop))
            start = stop
    return ranges


def _with_parts(reads: list[Read], wants: list[Want]) -> list[Read]:
    """Hand each read the parts of the wants that it holds; both are sorted by offset."""
    parts: list[list[ReadPart]] = [[] for _ in reads]
    first = 0
    for want in wants:
        while first < len(reads) and reads[first].stop <= want.start:
            first += 1
        number = first
        while number < len(reads) and reads[number].start < want.stop:
            read = reads[number]
            start, stop = max(read.start, want.start), min(read.stop, want.stop)
            parts[number].append(
                ReadPart(want.target, start - read.start, start - want.start, stop - start)
            )
            number += 1
    return [
        Read(file=read.file, start=read.start, stop=read.stop, parts=tuple(mine))
        for read, mine in zip(reads, parts, strict=True)
    ]
