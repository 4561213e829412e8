"""The host memory that captures land in and flushes read from: shared, capped, ready ahead of time.

Owns the memory file, its mapping and its registration with CUDA. A thread of its own makes memory
ready (populated, and pinned where a GPU is used) in steps of at most 64 MiB, because pinning holds
driver-wide locks: at 20 GB/s a step keeps launches waiting for some 3 ms. Slots are leased by
whoever fills them and released when the flusher has written them; memory beyond what was asked for
is made ready only when somebody waits, and never past the cap.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

import torch

from laststep.engine import memory
from laststep.engine.slots import Slots
from laststep.errors import LaststepError, StorageFailed
from laststep.terms import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_STEP_SLOTS = (64 << 20) // CHUNK_BYTES


class Pool:
    """A capped set of slots of CHUNK_BYTES each, in memory shared with the flusher."""

    def __init__(self, cap_bytes: int, *, pinned: bool) -> None:
        self.cap_slots = max(cap_bytes // CHUNK_BYTES, 1)
        self.cap_bytes = self.cap_slots * CHUNK_BYTES
        self.fd = memory.create(self.cap_bytes)
        self.slots = Slots()
        self._mapping = memory.Mapping(self.fd, self.cap_bytes)
        self._bytes = torch.frombuffer(self._mapping.view, dtype=torch.uint8)
        self._pinned = pinned
        self._registered: list[int] = []
        self._wanted = 0
        self._ready = 0
        self._resting_at: int | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._grower = threading.Thread(target=self._grow, name="laststep-pool", daemon=True)
        self._grower.start()

    @property
    def ready_bytes(self) -> int:
        """Host memory that the pool uses now."""
        with self._changed:
            return self._ready * CHUNK_BYTES

    @property
    def room_bytes(self) -> int:
        """What could be leased now: free slots, and memory that the cap still allows."""
        with self._changed:
            growth = self.cap_slots - self._ready
        return (self.slots.free + growth) * CHUNK_BYTES

    def want(self, size_bytes: int) -> None:
        """Have at least this much memory made ready in the background, within the cap."""
        with self._changed:
            self._wanted = min(max(self._wanted, -(-size_bytes // CHUNK_BYTES)), self.cap_slots)
            self._changed.notify_all()

    @contextlib.contextmanager
    def at_rest(self, enough_slots: int = 16) -> Iterator[None]:
        """Make no more memory ready than a restore needs, which would rather have the cores."""
        with self._changed:
            self._resting_at = enough_slots
        try:
            yield
        finally:
            with self._changed:
                self._resting_at = None
                self._changed.notify_all()

    def wait_ready(self) -> None:
        """Wait until all memory that was asked for is ready."""
        with self._changed:
            while self._ready < self._wanted and not self._closed:
                self._changed.wait()

    def lease(self, timeout_s: float | None = None) -> int | None:
        """A free slot; more memory is made ready if there is none and the cap allows it."""
        if self.slots.free == 0:
            with self._changed:
                if self._ready == self._wanted < self.cap_slots:
                    self._wanted = min(self._wanted + _STEP_SLOTS, self.cap_slots)
                    self._changed.notify_all()
        return self.slots.lease(timeout_s)

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self.slots.release([slot])

    def memory(self) -> memoryview:
        """All of it, for a flusher in this process."""
        return self._mapping.view

    def view(self, slot: int) -> memoryview:
        """A slot as bytes."""
        return self._mapping.view[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]

    def tensor(self, slot: int) -> torch.Tensor:
        """A slot as a tensor of bytes."""
        return self._bytes[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]

    def close(self) -> None:
        """Stop growing and unpin. The memory itself goes with the last reference to it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._grower.join()
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()
        os.close(self.fd)

    def _grow(self) -> None:
        while True:
            with self._changed:
                while self._ready >= self._goal() and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                first, left = self._ready, self._goal() - self._ready
                count = min(_STEP_SLOTS, left)
            try:
                self._make_ready(first, count)
            except Exception as error:  # noqa: BLE001 (whatever it is, saves must hear of it)
                self._give_up(error)
                return
            self.slots.add(range(first, first + count))
            with self._changed:
                self._ready += count
                self._changed.notify_all()

    def _goal(self) -> int:
        """How many slots are to be ready now; with the lock held."""
        return self._wanted if self._resting_at is None else min(self._wanted, self._resting_at)

    def _make_ready(self, first: int, count: int) -> None:
        start, size = first * CHUNK_BYTES, count * CHUNK_BYTES
        self._mapping.populate(start, size)
        if self._pinned:
            address = self._mapping.address + start
            code = torch.cuda.cudart().cudaHostRegister(address, size, 0)
            if int(code) != 0:
                raise StorageFailed(
                    "cannot pin host memory for the device",
                    expected=f"{size} more bytes",
                    found=f"CUDA error {int(code)} after {self.ready_bytes} bytes",
                    remedy="lower host_memory_bytes or raise the limit of locked memory",
                )
            self._registered.append(address)

    def _give_up(self, error: Exception) -> None:
        """Go on with the memory there is; only a pool without any memory is an error."""
        log.warning("the pool stays at %d bytes: %s", self.ready_bytes, error)
        with self._changed:
            self._wanted = self.cap_slots = self._ready
            self._changed.notify_all()
        if self._ready == 0:
            if not isinstance(error, LaststepError):
                error = StorageFailed("no host memory", found=str(error))
            self.slots.fail(error)
