"""Hand out the slots of the pool: track their holders and serve waiters in order.

Does not manage memory, except for read buffers. A slot is either free or leased; the set of free
slots is stored explicitly, so that a full pool cannot be mistaken for an empty one. Waiters are
served in order of arrival. Thread-safe; `fail` and `lose_flusher` wake waiters with the error that
makes waiting pointless.

`ReadBuffers` are memory of a restore itself, in huge pages, for when the pool is not pinned.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Self

from laststep.errors import LaststepError, StorageError, UsageError
from laststep.memory.segments import Mapping
from laststep.process import signals
from laststep.process.system import HUGE_PAGE_BYTES, prefer_huge_pages

if TYPE_CHECKING:
    from types import TracebackType


class Filled(NamedTuple):
    """Bytes of a file's tensor area that a slot holds."""

    file: int
    start: int
    size_bytes: int
    slot: int


class Slots:
    """The free and the leased slots of a pool; slots are added as their memory becomes ready."""

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._leased: set[int] = set()
        self._reading: set[int] = set()
        """Slots leased by a restore, which returns them itself, with or without a flusher."""
        self._waiting: deque[object] = deque()
        self._error: LaststepError | None = None
        self._lost: LaststepError | None = None
        self._changed = threading.Condition()

    @property
    def total(self) -> int:
        with self._changed:
            return len(self._free) + len(self._leased)

    @property
    def free(self) -> int:
        with self._changed:
            return len(self._free)

    @property
    def waiting(self) -> int:
        with self._changed:
            return len(self._waiting)

    def add(self, slots: range) -> None:
        """Add slots whose memory is ready."""
        with self._changed:
            known = self._leased.union(self._free)
            if known.intersection(slots):
                raise UsageError("slots were added twice", found=str(slots))
            self._free.extend(slots)
            self._changed.notify_all()

    def lease(self, timeout_s: float | None = None, *, for_save: bool = False) -> int | None:
        """Return the next free slot, waiting in order of arrival; None on timeout. Raise the error
        of `fail` or `lose_flusher` if waiting is pointless."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        try:
            while True:
                with self._changed:
                    if self._free and self._waiting[0] is ticket:
                        slot = self._free.pop()  # the one freed last is still in the CPU caches
                        self._leased.add(slot)
                        if not for_save:
                            self._reading.add(slot)
                        return slot
                    self._check(for_save=for_save)
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return None
                    self._changed.wait(signals.look_within(left))
                signals.check_signals()  # without the lock, since a handler may wait for it
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def lease_more(self, count: int) -> list[int]:
        """Return up to `count` slots that are free right now, unless other threads wait for
        them."""
        with self._changed:
            count = 0 if self._waiting else min(count, len(self._free))
            taken = [self._free.pop() for _ in range(count)]
            self._leased.update(taken)
            return taken

    def release(self, slots: list[int]) -> None:
        """Return leased slots. Raise `UsageError` for one that is not leased, rather than freeing
        it twice."""
        with self._changed:
            for slot in slots:
                if slot not in self._leased:
                    raise UsageError("released a slot that is not leased", found=str(slot))
                self._leased.remove(slot)
                self._reading.discard(slot)
                self._free.append(slot)
            self._changed.notify_all()

    def fail(self, error: LaststepError | None) -> None:
        """Raise `error` for all waiters, present and future: there is no memory. None clears it."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def lose_flusher(self, error: LaststepError) -> None:
        """Slots that were handed over will not return: saves that wait, or will wait, get `error`.
        A restore continues with the remaining slots, and gets the error only if there are none."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def reset(self, kept: frozenset[int] = frozenset()) -> None:
        """Free all slots except `kept`, which belong to the new flusher. Call only when nobody
        holds or waits for slots. Does not clear an error of `fail`."""
        with self._changed:
            self._free.extend(sorted(self._leased - kept))
            self._leased &= kept
            self._reading.clear()
            self._lost = None
            self._changed.notify_all()

    def _check(self, *, for_save: bool) -> None:
        """Raise the error that makes waiting pointless, if there is one. Requires the lock."""
        if self._error is not None:
            raise self._error
        if self._lost is not None and (for_save or (self._leased and not self._reading)):
            raise self._lost


SLOT_BYTES = 4 << 20
REMOTE_SLOT_BYTES = 8 << 20
"""Read size for a server, where a request costs more than on a disk. The data usually stays in the
client's memory (`store.InPlace`), and the slot is never touched."""


def _reserved(size_bytes: int) -> Mapping:
    try:
        return Mapping(-1, size_bytes)
    except (OSError, MemoryError) as error:
        raise StorageError(
            "cannot reserve memory to read into",
            expected=f"{size_bytes} bytes",
            found=str(error),
            remedy="free memory, or raise the limit of the process (`ulimit -v`)",
        ) from error


def huge_pages(size_bytes: int) -> memoryview:
    """Return an aligned buffer in huge pages, for readers that need no slots; freed with its last
    view."""
    mapped = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    prefer_huge_pages(address, len(mapped))
    first = -address % HUGE_PAGE_BYTES
    return memoryview(mapped)[first : first + size_bytes]


class ReadBuffers:
    """Slots to read into, two per thread, until it is closed."""

    lands_all = False

    def __init__(self, threads: int, slot_bytes: int = SLOT_BYTES) -> None:
        self.slot_bytes = slot_bytes
        self._mapping = _reserved(2 * threads * slot_bytes + HUGE_PAGE_BYTES)
        self._first = -self._mapping.address % HUGE_PAGE_BYTES
        self._slots = Slots()
        self._slots.add(range(2 * threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mapping.close()

    def lease(self, timeout_s: float | None = None) -> int | None:
        """Return a free slot; None on timeout."""
        return self._slots.lease(timeout_s)

    def release(self, slot: int) -> None:
        self._slots.release([slot])

    def view(self, slot: int) -> memoryview:
        """Return a slot as bytes."""
        return self._mapping.view[self._at(slot) : self._at(slot + 1)]

    def _at(self, slot: int) -> int:
        return self._first + slot * self.slot_bytes
