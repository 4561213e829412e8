"""Pools whose slots are read-only from their hand-over to the flusher until their next lease.

A process that writes past the end of its slot, into one of the flusher's, dies instead of spoiling
another save. Writes through the pool's file are not stopped by the kernel, so `land` is checked.
Writes by a device into pinned memory are not noticed.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

from laststep import running
from laststep.capture.mover import Mover
from laststep.constants import CHUNK_BYTES
from laststep.errors import UsageError
from laststep.memory.pool import Pool, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _GuardedSlots(Slots):
    def __init__(self, pool: GuardedPool) -> None:
        super().__init__()
        self._pool = pool

    def add(self, slots: range) -> None:
        self._pool.seal(slots)
        super().add(slots)

    def lease(self, timeout_s: float | None = None, *, for_save: bool = False) -> int | None:
        slot = super().lease(timeout_s, for_save=for_save)
        if slot is not None:
            self._pool.unseal([slot])
        return slot

    def lease_more(self, count: int) -> list[int]:
        slots = super().lease_more(count)
        self._pool.unseal(slots)
        return slots


class GuardedPool(Pool):
    """A pool that knows which of its slots were handed over."""

    def __init__(self, cap_bytes: int, *, pinned: bool, fd: int = -1) -> None:
        super().__init__(cap_bytes, pinned=pinned, fd=fd)
        self._sealed: set[int] = set()
        self.slots = _GuardedSlots(self)

    def seal(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._protect(slot, mmap.PROT_READ)
            self._sealed.add(slot)

    def unseal(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._protect(slot, mmap.PROT_READ | mmap.PROT_WRITE)
            self._sealed.discard(slot)

    def land(self, slot: int, at: int, ranges: Sequence[tuple[int, int]]) -> bool:
        if slot in self._sealed:
            raise UsageError("cannot copy into a slot that was handed over", found=f"slot {slot}")
        return super().land(slot, at, ranges)

    def _protect(self, slot: int, allowed: int) -> None:
        address = self._mapping.address + slot * CHUNK_BYTES
        assert _libc.mprotect(address, CHUNK_BYTES, allowed) == 0


def guard_slots(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Guard the slots of all pools that Checkpointers of this process make from now on; `replace`
    may be monkeypatch's `setattr`."""
    hand_over = Mover.hand_over

    def sealed(mover: Mover, job: Any, batch: Any, events: Any) -> None:
        for event in events:
            event.synchronize()
        assert isinstance(mover._pool, GuardedPool)
        mover._pool.seal(slot for _, slot in batch)
        hand_over(mover, job, batch, [])

    replace(running, "Pool", GuardedPool)
    replace(Mover, "hand_over", sealed)
