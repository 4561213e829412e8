"""Copy host state into slots at memory speed, on several threads.

One copy call of torch splits its work evenly over its threads and waits for the slowest, which on a
busy machine is the one that shares its core with the flusher. Here every thread takes the next
chunk when it has finished one, and a large piece is a plain memmove outside the GIL.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Self

from laststep.capture.exact import changed, copy_each
from laststep.capture.gather import gather, strided_bits
from laststep.capture.layout import ElementRange, StagingGroup
from laststep.constants import DTYPES
from laststep.process.threads import WorkerPool
from laststep.state.boxes import boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import torch

    from laststep.capture.sources import Tensors

_LARGE_BYTES = 256 << 10
_MAX_THREADS = 4


class HostCopier:
    """A few threads for copies; started when first needed."""

    def __init__(self) -> None:
        self._threads: WorkerPool | None = None

    def batch(self) -> Batch:
        """Copies that belong together."""
        if self._threads is None:
            self._threads = WorkerPool("copy", min(_MAX_THREADS, os.cpu_count() or 1)).start()
        return Batch(self._threads)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()


class Batch:
    """Runs the copies that are added; on exit all have ended, and the first error is raised."""

    def __init__(self, threads: WorkerPool) -> None:
        self._threads = threads
        self._running: list[Future[None]] = []

    def add(self, task: Callable[[], None]) -> None:
        self._running.append(self._threads.submit(task))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupted: BaseException | None = None
        for copy in self._running:
            while not copy.done():
                try:
                    wait([copy])
                except BaseException as raised:  # noqa: BLE001 (Ctrl-C: raised below)
                    # The threads still write into slots: nobody may have these back before the end.
                    interrupted = raised
        errors = [failed for copy in self._running if (failed := copy.exception()) is not None]
        if interrupted is not None:
            raise interrupted
        if errors and error is None:
            raise errors[0]


def fill(target: torch.Tensor, groups: Sequence[StagingGroup], sources: Tensors) -> None:
    """Fill a host buffer from host pieces, which MUST have their planned sizes: large ones are
    copied by address."""
    for group in groups:
        if group.stop > target.nbytes:
            raise changed((group.stop, "bytes"), (target.nbytes, "bytes"))
        size = DTYPES[group.dtype].size_bytes
        small: list[ElementRange] = []
        at = small_at = group.start
        for span in group.spans:
            length = (span.last - span.first) * size
            source = sources[span.piece]
            strided = not source.is_contiguous()
            if strided or length >= _LARGE_BYTES:
                _fill_small(target, group, small, small_at, at, sources)
                if strided:
                    _fill_strided(target[at : at + length], source, span)
                else:
                    start = source.data_ptr() + span.first * size
                    ctypes.memmove(target.data_ptr() + at, start, length)
                small, small_at = [], at + length
            else:
                small.append(span)
            at += length
        _fill_small(target, group, small, small_at, at, sources)


def _fill_strided(target: torch.Tensor, source: torch.Tensor, span: ElementRange) -> None:
    """Copy strided elements directly: a contiguous copy would not be counted by any memory cap."""
    source = strided_bits(source.detach())
    typed = target.view(source.dtype)
    for box in boxes_of_range(tuple(source.shape), span.first, span.last):
        place, typed = typed[: box.volume], typed[box.volume :]
        indices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        copy_each([place.view(box.shape)], [source[indices]])


def _fill_small(
    target: torch.Tensor,
    group: StagingGroup,
    spans: list[ElementRange],
    start: int,
    stop: int,
    sources: Tensors,
) -> None:
    if spans:
        part = StagingGroup(
            dtype=group.dtype, device=group.device, start=start, stop=stop, spans=tuple(spans)
        )
        gather(target, [part], sources)
