"""Decide which bytes to read for what is wanted, and where they go.

Pure. Every byte that is used is verified, so a read covers whole blocks; neighbouring blocks are
read together, up to a slot at a time; each block is read once however many tensors it holds.
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
