"""Hand out the slots of the pool: who holds which, in which order they are waited for.

Knows nothing of memory. A slot is free or leased, never both; the set of free slots is kept as
such, so that a full pool cannot be mistaken for an empty one. Waiters are served in order of
arrival. Thread-safe; `fail` and `lose_flusher` wake waiters with the error that made their waiting
pointless.

A landing is memory that a restore has for itself, in huge pages, where no pinned pool is at hand.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from laststep.errors import LaststepError, StorageError, UsageError
from laststep.memory.segments import Mapping
from laststep.process import signals
from laststep.process.system import HUGE_PAGE_BYTES, prefer_huge_pages

if TYPE_CHECKING:
    from types import TracebackType


class Slots:
    """The free and the leased slots of a pool; slots are added as their memory becomes ready."""

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._leased: set[int] = set()
        self._reading: set[int] = set()
        """Leased, and not for a save: whoever has them gives them back, flusher or not."""
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
        """New slots whose memory is ready."""
        with self._changed:
            known = self._leased.union(self._free)
            if known.intersection(slots):
                raise UsageError("slots were added twice", found=str(slots))
            self._free.extend(slots)
            self._changed.notify_all()

    def lease(self, timeout_s: float | None = None, *, for_save: bool = False) -> int | None:
        """The next free slot, waiting for it in order of arrival; None when the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        try:
            while True:
                with self._changed:
                    if self._free and self._waiting[0] is ticket:
                        slot = self._free.pop()  # freed last: its memory is still in the caches
                        self._leased.add(slot)
                        if not for_save:
                            self._reading.add(slot)
                        return slot
                    self._check(for_save=for_save)
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return None
                    self._changed.wait(signals.look_within(left))
                signals.let_in()  # without the lock: who knows what a handler waits for
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def lease_more(self, count: int) -> list[int]:
        """Up to `count` slots that are free right now, unless others wait for them."""
        with self._changed:
            count = 0 if self._waiting else min(count, len(self._free))
            taken = [self._free.pop() for _ in range(count)]
            self._leased.update(taken)
            return taken

    def release(self, slots: list[int]) -> None:
        """Give leased slots back; one that is not leased is an error, not a second free slot."""
        with self._changed:
            for slot in slots:
                if slot not in self._leased:
                    raise UsageError("a slot was released that nobody holds", found=str(slot))
                self._leased.remove(slot)
                self._reading.discard(slot)
                self._free.append(slot)
            self._changed.notify_all()

    def fail(self, error: LaststepError | None) -> None:
        """Raise `error` for all who wait, now or later: there is no memory. None: it may come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def lose_flusher(self, error: LaststepError) -> None:
        """What was handed over does not come back: saves that wait, or will, get `error`. A restore
        goes on with what is left, and gets it only where nothing is."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def reset(self, kept: frozenset[int] = frozenset()) -> None:
        """Make all slots free again but for those that are kept, for a new flusher, which has them
        then; only when nobody holds or waits for any. It brings no memory where there is none."""
        with self._changed:
            self._free.extend(sorted(self._leased - kept))
            self._leased &= kept
            self._reading.clear()
            self._lost = None
            self._changed.notify_all()

    def _check(self, *, for_save: bool) -> None:
        """Raise why it is pointless to wait, if it is; with the lock held."""
        if self._error is not None:
            raise self._error
        if self._lost is not None and (for_save or (self._leased and not self._reading)):
            raise self._lost


SLOT_BYTES = 4 << 20
REMOTE_SLOT_BYTES = 8 << 20
"""What is read from a server at once, which a request costs more than a disk. It mostly stays in
memory of the client (`store.InPlace`), and the slot is never touched."""


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
    """A buffer to read into, aligned, for those who need no slots; it goes with its last view."""
    mapped = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    prefer_huge_pages(address, len(mapped))
    first = -address % HUGE_PAGE_BYTES
    return memoryview(mapped)[first : first + size_bytes]


class Landing:
    """Slots to read into, two for each of so many threads, until it is closed."""

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
        """A free slot; None when the time is up."""
        return self._slots.lease(timeout_s)

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._slots.release([slot])

    def view(self, slot: int) -> memoryview:
        """A slot as bytes."""
        return self._mapping.view[self._at(slot) : self._at(slot + 1)]

    def _at(self, slot: int) -> int:
        return self._first + slot * self.slot_bytes
