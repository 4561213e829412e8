"""Device memory for staged copies, and the side streams on which copies run.

Knows nothing of saves. CUDA only; importing it is safe on a machine without.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from laststep.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def spare_bytes(device: str, margin_bytes: int) -> int:
    """Return the device memory that is free at the peak so far, minus a margin. The caching
    allocator keeps the memory of its peak reserved, unless it has returned some since."""
    free, _total = torch.cuda.mem_get_info(device)
    # The nested form: the flat one sorts hundreds of entries, while training waits.
    reserved = torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]
    size: int = free - (reserved["peak"] - reserved["current"]) - margin_bytes
    return max(size, 0)


class DeviceShort(StorageError):
    """Less device memory was available than reported."""


class DeviceStaging:
    """Staging memory of one device: reserved early, never at training's expense.

    A memory pool of its own keeps training's allocations from fragmenting the reserve, so that a
    save finds one block and does not wait for cudaMalloc, which synchronises the device. When
    training runs out of memory, the allocator falls back on this pool, and the next save uses what
    is left. Used only on the training thread, but for `give_back`.
    """

    def __init__(self, device: str, margin_bytes: int) -> None:
        self._device = device
        self._margin = margin_bytes
        self._set_aside = 0
        self._out = 0
        self._pool = torch.cuda.MemPool(use_on_oom=True)

    def set_aside(self, size_bytes: int) -> bool:
        """Take spare memory from the driver now; return whether that much is available."""
        if size_bytes <= self._set_aside:
            return True
        if spare_bytes(self._device, self._margin) < size_bytes:
            return False
        try:
            self._allocate(size_bytes)
        except torch.OutOfMemoryError:
            return False
        self._set_aside = size_bytes
        return True

    def room(self, *, with_margin: bool = False) -> int:
        """Return the bytes that may be taken now; small requests may use the margin too."""
        margin = 0 if with_margin else self._margin
        return spare_bytes(self._device, margin) + max(self._set_aside - self._out, 0)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a byte buffer on the current stream; return it with `give_back`."""
        try:
            buffer = self._allocate(size_bytes)
        except torch.OutOfMemoryError as error:
            raise DeviceShort(
                "device memory is short for what must be copied at once",
                where=self._device,
                expected=f"{size_bytes} bytes",
                found=str(error).split(".")[0],
                remedy="free device memory, or make large buffers and strided tensors contiguous "
                "parameters",
            ) from error
        self._out += size_bytes
        self._set_aside = max(self._set_aside, self._out)
        return buffer

    def forget(self) -> None:
        """Stop counting on the reserve, which training has taken."""
        self._set_aside = 0

    def give_back(self, size_bytes: int) -> None:
        """Return a buffer after it was released; any thread may call it."""
        self._out -= size_bytes

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)


class SideStreams:
    """Two streams per device, separate from every stream that training uses."""

    def __init__(self) -> None:
        self._copying: dict[str, torch.cuda.Stream] = {}
        self._filling: dict[str, torch.cuda.Stream] = {}

    def stream(self, device: str) -> torch.cuda.Stream:
        if device not in self._copying:
            self._copying[device] = torch.cuda.Stream(device=device)
        return self._copying[device]

    def filling(self, device: str) -> torch.cuda.Stream:
        """Return the stream for short kernels that copies on the first wait for. Its priority over
        training keeps the bus from idling."""
        if device not in self._filling:
            self._filling[device] = torch.cuda.Stream(device=device, priority=-1)
        return self._filling[device]

    def both(self, device: str) -> tuple[torch.cuda.Stream, ...]:
        return self.stream(device), self.filling(device)


def record(stream: torch.cuda.Stream, *, timing: bool = False) -> torch.cuda.Event:
    """Record an event on a stream; waiting for it on the host sleeps instead of spinning."""
    event = torch.cuda.Event(enable_timing=timing, blocking=True)
    event.record(stream)
    return event


class CopyStreams:
    """Side streams for copies into tensors on CUDA devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        cuda = {device for device in devices if device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device=device) for device in cuda}
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
        """Copy to a device inside this block, on any thread; the copies end before it exits."""
        stream = self._streams.get(device)
        if stream is None:
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
            event = record(stream)
        event.synchronize()
