"""Read chosen bytes of a checkpoint's data files, each block once, verified, a few at a time ahead.

A plan first: what is wanted of a file is put together to stretches of whole blocks, of 16 MiB at
most. These are read ahead while the caller uses what came before. Knows nothing of tensors.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from laststep.read.ahead import read_ahead
from laststep.read.blocks import refuse
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from laststep.read.files import DataFile

_THREADS = 4

T = TypeVar("T")


class Wanted(NamedTuple, Generic[T]):
    """Bytes [start, stop) of a file's tensor area, which MUST not be empty, and what for."""

    file: int
    start: int
    stop: int
    use: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch(Generic[T]):
    """Whole blocks of one file (but for its end), and what is wanted of them."""

    file: int
    start: int
    stop: int
    wanted: tuple[Wanted[T], ...]


def plan_stretches(wanted: Iterable[Wanted[T]]) -> list[Stretch[T]]:
    """Put together what lies in the same or neighbouring blocks, in the order of the files."""
    stretches: list[Stretch[T]] = []
    group: list[Wanted[T]] = []
    first = last = 0
    for one in sorted(wanted, key=lambda one: one[:3]):
        start = one.start // BLOCK_BYTES * BLOCK_BYTES
        stop = align_up(one.stop, BLOCK_BYTES)
        joins = group and group[0].file == one.file and start <= last
        if not joins or max(stop, last) - first > CHUNK_BYTES:
            if group:
                stretches.append(_stretch(group, first, last))
            group, first, last = [], start, stop
        group.append(one)
        last = max(last, stop)
    if group:
        stretches.append(_stretch(group, first, last))
    return stretches


def _stretch(group: list[Wanted[T]], first: int, last: int) -> Stretch[T]:
    return Stretch(file=group[0].file, start=first, stop=last, wanted=tuple(group))


def read_stretches(
    files: Sequence[DataFile], stretches: Sequence[Stretch[T]]
) -> Iterator[tuple[Stretch[T], memoryview]]:
    """Each stretch and its bytes, in order, which are gone when the next are asked for; `Corrupt`
    for those that have changed."""
    extents = (files[stretch.file].blocks(stretch.start, stretch.stop) for stretch in stretches)
    with closing(read_ahead(extents, threads=_THREADS)) as reads:
        for stretch, (data, damage) in zip(stretches, reads, strict=True):
            refuse(damage)
            yield stretch, data
