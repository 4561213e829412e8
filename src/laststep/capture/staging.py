"""Memory on a device that staged copies land in: set aside early, never in training's way.

A memory pool of its own keeps what is set aside from being split up by training's allocations, so
that a save finds one block and does not wait for cudaMalloc, which waits for the device. The pool
is one that the allocator falls back on when training runs out of memory: what is set aside and not
in use serves any request that fits into it, and the next save does with what is left.
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
    """There was less device memory than there seemed to be."""


class DeviceStaging:
    """Staging memory of one device. Used on the training thread only."""

    def __init__(self, device: str, margin_bytes: int) -> None:
        self._device = device
        self._margin = margin_bytes
        self._set_aside = 0
        self._out = 0
        self._pool = _make_pool()

    def set_aside(self, size_bytes: int) -> bool:
        """Take memory from the driver now, if it is spare, and keep it in the pool. Returns whether
        there is so much to count on."""
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
        """Bytes that may be taken now without training missing them."""
        return self._room(self._margin)

    def room_for_little(self) -> int:
        """The same for a little memory, which may be out of the margin."""
        return self._room(0)

    def _room(self, margin_bytes: int) -> int:
        return spare_bytes(self._device, margin_bytes) + max(self._set_aside - self._out, 0)

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer of bytes, on the current stream; give it back with `give_back`."""
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
        """Training has taken what was set aside: count on none of it."""
        self._set_aside = 0

    def give_back(self, size_bytes: int) -> None:
        """The buffer has been let go of; it may be called from any thread."""
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
