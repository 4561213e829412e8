"""Device memory for staged copies: reserved early, never at training's expense.

A separate memory pool keeps training's allocations from fragmenting the reserve, so that a save
finds one block and does not wait for cudaMalloc, which synchronises the device. The allocator falls
back on this pool when training runs out of memory: reserved but unused memory serves any request
that fits, and the next save uses what is left.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from laststep.capture.device import spare_bytes
from laststep.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)


class DeviceShort(StorageError):
    """Less device memory was available than reported."""


class DeviceStaging:
    """Staging memory of one device. Used only on the training thread."""

    def __init__(self, device: str, margin_bytes: int) -> None:
        self._device = device
        self._margin = margin_bytes
        self._set_aside = 0
        self._out = 0
        self._pool = _make_pool()

    def set_aside(self, size_bytes: int) -> bool:
        """Take memory from the driver now, if it is spare, and keep it in the pool. Return whether
        that much is available."""
        if size_bytes <= self._set_aside:
            return True
        if spare_bytes(self._device, self._margin) < size_bytes:
            return False
        if self._pool is None:
            return True
        try:
            with self._from_pool():
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return False
        self._set_aside = size_bytes
        return True

    def room(self) -> int:
        """Return the bytes that may be taken now without affecting training."""
        return self._room(self._margin)

    def room_for_little(self) -> int:
        """Return the same for small requests, which may use the margin."""
        return self._room(0)

    def _room(self, margin_bytes: int) -> int:
        return spare_bytes(self._device, margin_bytes) + max(self._set_aside - self._out, 0)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a byte buffer on the current stream; return it with `give_back`."""
        try:
            with self._from_pool():
                buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
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

    @contextlib.contextmanager
    def _from_pool(self) -> Iterator[None]:
        if self._pool is None:
            yield
            return
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            yield


def _make_pool() -> torch.cuda.MemPool | None:
    try:
        return torch.cuda.MemPool(use_on_oom=True)
    except TypeError:
        log.debug("this torch has no memory pools that training can fall back on")
        return None
