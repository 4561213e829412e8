"""Find tensors that share memory, from numbers alone.

Pure. Tensors that are the same window of the same storage are *tied*: one is stored, the others
named. Tensors whose bytes overlap otherwise are *views*: the union of their bytes is stored once as
a base. Tensors that merely lie in one storage without touching (views of a flat buffer) are
independent.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple


class MemoryRange(NamedTuple):
    """Where a tensor's bytes lie: its storage's address, first and last byte, exact window."""

    name: str
    storage: int
    start: int
    stop: int
    window: tuple[object, ...]
    """dtype, shape, stride and offset: equal windows of one storage are the same tensor."""


class Overlap(NamedTuple):
    """Tensors of one storage whose bytes overlap without being the same tensor."""

    start: int
    stop: int
    members: tuple[MemoryRange, ...]


def find_ties(extents: list[MemoryRange]) -> dict[str, str]:
    """Name → first name with the very same window."""
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for extent in extents:
        if extent.start == extent.stop:
            continue
        known = first.setdefault((extent.storage, extent.window), extent.name)
        if known != extent.name:
            ties[extent.name] = known
    return ties


def find_overlaps(extents: list[MemoryRange]) -> list[Overlap]:
    """Groups of at least two different windows whose byte ranges touch, by storage."""
    by_storage: dict[int, list[MemoryRange]] = defaultdict(list)
    for extent in extents:
        if extent.start < extent.stop:
            by_storage[extent.storage].append(extent)
    overlaps: list[Overlap] = []
    for members in by_storage.values():
        if len(members) > 1:
            overlaps.extend(_groups(sorted(members, key=lambda e: (e.start, e.stop))))
    return overlaps


def _groups(members: list[MemoryRange]) -> list[Overlap]:
    overlaps: list[Overlap] = []
    group, stop = [members[0]], members[0].stop
    for extent in [*members[1:], None]:
        if extent is not None and extent.start < stop:
            group.append(extent)
            stop = max(stop, extent.stop)
            continue
        if len(group) > 1:
            overlaps.append(Overlap(group[0].start, stop, tuple(group)))
        if extent is not None:
            group, stop = [extent], extent.stop
    return overlaps
