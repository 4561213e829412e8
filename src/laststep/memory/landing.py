"""Host memory that a restore reads through where nothing is pinned: little, its own, in huge pages.

Reads past the page cache go to the disk in requests of some hundred pieces at most, and a page that
lies by itself is a piece. Into small pages a virtual disk gave 1.1 to 3.5 GB/s, as it happened,
into huge ones 2.7 to 3.9. Shared memory, which the pool is, mostly has none: what systems allow by
default are private ones. A slot is small and used again at once, so that its bytes are still in the
caches when they are verified and copied, and few pages are touched for the first time, which would
take as long as reading them.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Self

from laststep.errors import StorageFailed
from laststep.memory.shared import Mapping
from laststep.memory.slots import Slots
from laststep.process.kernel import HUGE_PAGE_BYTES, prefer_huge_pages

if TYPE_CHECKING:
    from types import TracebackType

SLOT_BYTES = 4 << 20
REMOTE_SLOT_BYTES = 8 << 20
"""What is read from a server at once, which a request costs more than a disk. It mostly stays in
memory of the client (`store.InPlace`), and the slot is never touched."""


def _reserved(size_bytes: int) -> Mapping:
    try:
        return Mapping(-1, size_bytes)
    except (OSError, MemoryError) as error:
        raise StorageFailed(
            "cannot reserve memory to read into", expected=f"{size_bytes} bytes", found=str(error),
            remedy="free memory, or raise the limit of the process (`ulimit -v`)",
        ) from error  # fmt: skip


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
