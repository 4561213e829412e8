"""Spare device memory, and the side streams for copies.

Knows nothing of saves. CUDA only; every function is safe to call on a machine without it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def spare_bytes(device: str, margin_bytes: int) -> int:
    """Return the device memory that is free at the peak so far, minus a margin. The caching
    allocator keeps the memory of its peak reserved, so what the driver reports as free is free at
    that peak. If the allocator has returned memory since, the difference is subtracted."""
    free, _total = torch.cuda.mem_get_info(device)
    # The nested form: the flat one sorts hundreds of entries, while training waits.
    reserved: dict[str, int] = torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"][
        "all"
    ]
    return max(free - (reserved["peak"] - reserved["current"]) - margin_bytes, 0)


class SideStreams:
    """One copy stream per device, separate from every stream that training uses."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._filling: dict[str, torch.cuda.Stream] = {}

    def stream(self, device: str) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device=device)
        return self._streams[device]

    def filling(self, device: str) -> torch.cuda.Stream:
        """Return a second stream for short kernels that copies on the first wait for. It has
        priority over training; otherwise the bus would idle."""
        if device not in self._filling:
            self._filling[device] = torch.cuda.Stream(device=device, priority=-1)
        return self._filling[device]

    def both(self, device: str) -> tuple[torch.cuda.Stream, ...]:
        """Return both streams of a device."""
        return self.stream(device), self.filling(device)


def record(
    stream: torch.cuda.Stream, *, timing: bool = False, blocking: bool = True
) -> torch.cuda.Event:
    """Record an event on a stream; waiting for it on the host sleeps instead of spinning."""
    event = torch.cuda.Event(enable_timing=timing, blocking=blocking)
    event.record(stream)
    return event


class CopyStreams:
    """Side streams for copies into tensors on these devices; only CUDA devices get one."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = SideStreams()
        cuda = [device for device in set(devices) if device.type == "cuda"]
        self._streams = {device: streams.stream(str(device)) for device in cuda}
        self.follow()

    def follow(self) -> None:
        """Make further copies wait for work that training has enqueued."""
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def lead(self) -> None:
        """Make later work of training wait for the copies."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    @contextlib.contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        """Copy to a device inside this block; the copies have ended when it exits. Several threads
        may be inside at once."""
        stream = self._streams.get(device)
        if stream is None:
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
            event = record(stream)
        event.synchronize()
