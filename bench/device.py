"""What the GPU's links can do at most: copies to and from pinned memory, copies on the device, and
reading files straight into device memory with reads and copies overlapped."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.raw import Way

_COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Bytes per second, the best of several copies of 1 GiB. On the device: bytes copied, not
    bytes read plus bytes written."""

    to_host: float
    to_device: float
    on_device: float


def copy_limits(repetitions: int = 5) -> CopyLimits:
    """Measure the three kinds of copy with large blocks."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    return CopyLimits(
        to_host=_best_rate(lambda: host.copy_(here, non_blocking=True), repetitions),
        to_device=_best_rate(lambda: here.copy_(host, non_blocking=True), repetitions),
        on_device=_best_rate(lambda: there.copy_(here), repetitions),
    )


def _best_rate(copy: Callable[[], object], repetitions: int) -> float:
    best = 0.0
    for _ in range(repetitions + 1):  # the first one warms up
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        copy()
        after.record()
        after.synchronize()
        best = max(best, _COPY_BYTES / (before.elapsed_time(after) / 1e3))
    return best


class DeviceReader:
    """Reads cold files into device memory; buffers are pinned once, ahead of the timed part."""

    def __init__(self, way: Way, slots: int = 2) -> None:
        self._way = way
        self._slots = slots
        shape = (way.threads, slots, way.request_bytes)
        self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._streams = [torch.cuda.Stream() for _ in range(way.threads)]

    def read_s(self, files: list[Path], size_bytes: int) -> float:
        """Seconds until all bytes of `files` lie on the device."""
        target = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        direct = os.O_DIRECT if self._way.direct else 0
        fds = [os.open(file, os.O_RDONLY | direct) for file in files]
        request, each = self._way.request_bytes, size_bytes // len(files)
        places = [
            (fd, at, i * each + at) for at in range(0, each, request) for i, fd in enumerate(fds)
        ]
        try:
            with ThreadPoolExecutor(self._way.threads) as pool:
                shares = [places[i :: self._way.threads] for i in range(self._way.threads)]
                for future in [
                    pool.submit(self._share, i, share, target) for i, share in enumerate(shares)
                ]:
                    future.result()
            torch.cuda.synchronize()
        finally:
            for fd in fds:
                os.close(fd)
        return time.perf_counter() - started

    def _share(self, thread: int, places: list[tuple[int, int, int]], target: torch.Tensor) -> None:
        """Read into one buffer while the other is being copied."""
        request = self._way.request_bytes
        copied = [torch.cuda.Event() for _ in range(self._slots)]
        with torch.cuda.stream(self._streams[thread]):
            for i, (fd, offset, to) in enumerate(places):
                slot = i % self._slots
                copied[slot].synchronize()
                buffer = self._pinned[thread, slot]
                if os.preadv(fd, [memoryview(buffer.numpy())], offset) != request:
                    raise OSError(f"short read at {offset}")
                target[to : to + request].copy_(buffer, non_blocking=True)
                copied[slot].record()
