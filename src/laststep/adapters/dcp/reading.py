"""Read chosen bytes of a checkpoint's data files, each block once, verified, a few at a time ahead.

A plan first: what is wanted of a file is put together to stretches of whole blocks, of 16 MiB at
most. Then threads read and verify while the caller uses what came before: not by `read_all`, which
delivers on its own threads, where DCP's planners may not be called. Knows nothing of tensors.
"""

from __future__ import annotations

import mmap
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from laststep.read.blocks import refuse
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

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
    files: Sequence[DataFile], stretches: Iterable[Stretch[T]]
) -> Iterator[tuple[Stretch[T], memoryview]]:
    """Each stretch and its bytes, in order; `Corrupt` for those that have changed."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="laststep-dcp-read") as threads:
        ahead: deque[tuple[Stretch[T], Future[memoryview]]] = deque()
        try:
            for stretch in stretches:
                data = threads.submit(_read, files[stretch.file], stretch.start, stretch.stop)
                ahead.append((stretch, data))
                if len(ahead) > _THREADS:
                    done, data = ahead.popleft()
                    yield done, data.result()
            while ahead:
                done, data = ahead.popleft()
                yield done, data.result()
        finally:
            for _, data in ahead:
                data.cancel()


def _read(file: DataFile, start: int, stop: int) -> memoryview:
    extent = file.blocks(start, stop)
    size = extent.stop - extent.start
    # Page-aligned, so that a direct read lands in it uncopied; freed with the last view of it.
    view = memoryview(mmap.mmap(-1, align_up(size, ALIGN_BYTES)))
    refuse(extent.read(view))
    return view[:size]
