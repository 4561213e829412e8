"""The host memory that captures are copied into and flushes read from: shared, limited, prepared
ahead of time.

Owns the memory file, its mapping and its registration with CUDA. A background thread prepares
memory: it populates the pages, and pins them if a GPU is used. Pinning holds a driver lock that
kernel launches need too, and back-to-back calls starve them, so it pins slot by slot with pauses,
unless training waits for the memory anyway. A slot is leased by the code that fills it and released
when the flusher has written it. Memory beyond the requested amount is prepared only when a thread
waits for it, and never past the limit. If no more memory is available, the pool continues with what
it has, and each save and each restore tries again to grow it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import torch

from laststep.constants import CHUNK_BYTES
from laststep.errors import LaststepError, StorageError, UsageError
from laststep.memory import segments as memory
from laststep.memory.slots import REMOTE_SLOT_BYTES, SLOT_BYTES, ReadBuffers, Slots
from laststep.process.threads import Worker, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

log = logging.getLogger(__name__)

_STEP_SLOTS = (64 << 20) // CHUNK_BYTES
_PIECE_BYTES = CHUNK_BYTES // 2
"""Size of the piece that one thread populates; `_MAKERS` threads do so at once if memory is
pinned."""
_MAKERS = _STEP_SLOTS * CHUNK_BYTES // _PIECE_BYTES
_PIN_PAUSE_S = 0.008
"""Measured on an H200 with launch-bound training: pinning 3 GB in steps of 16 MiB without a pause
delayed it by 150 ms; with this pause the delay was within noise."""


def _reserved(size_bytes: int, fd: int = -1) -> tuple[int, memory.Mapping]:
    """Reserve address space for the pool without using memory yet, in the file `fd` or a new one.
    Return the descriptor and the mapping. Raise `StorageError` if that fails, after closing
    `fd`."""
    try:
        fd = memory.create(size_bytes) if fd < 0 else fd
        return fd, memory.Mapping(fd, size_bytes)
    except (OSError, MemoryError) as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(
                "cannot open a file of shared memory for saves and restores",
                found=str(error),
                remedy="close files, or raise the limit on open files (`ulimit -n`)",
            ) from error
        raise StorageError(
            "cannot reserve memory for saves and restores",
            expected=f"{size_bytes} bytes",
            found=str(error),
            remedy="pass a smaller host_memory_bytes=…, or raise the limits of "
            "the process (`ulimit -v`, `ulimit -f`: shared memory counts as a file)",
        ) from error


class Pool:
    """A limited set of slots of CHUNK_BYTES each, in memory shared with the flusher.

    A slot may be written by the code that leased it, until it is sealed for the flusher.
    """

    slot_bytes = CHUNK_BYTES
    lands_all = True
    guarded: ClassVar[bool] = False
    """For tests: make the memory of a slot read-only from its sealing until its next lease. A
    process that writes past the end of its slot, into one of the flusher's, then dies instead of
    corrupting another save. Writes through the pool's file are not stopped, so `land` checks for
    itself. Writes by a device into pinned memory are not detected."""

    def __init__(self, cap_bytes: int, *, pinned: bool, fd: int = -1) -> None:
        """`fd` is a shared memory file of that length; without one, the pool creates its own. The
        pool owns `fd`."""
        self.cap_slots = max(cap_bytes // CHUNK_BYTES, 1)
        self.cap_bytes = self.cap_slots * CHUNK_BYTES
        self.fd, self._mapping = _reserved(self.cap_bytes, fd)
        self.slots = Slots()
        self._bytes = torch.frombuffer(self._mapping.view, dtype=torch.uint8)
        self._pinned = pinned
        self._registered: list[int] = []
        self._pageable: list[int] = []
        """Slots that are ready but not pinned; used only by the growing thread."""
        self._makers: WorkerPool | None = None
        self._making: dict[int, list[Future[None]]] = {}
        """Pending page population by slot; this and `_makers` are used only by the growing
        thread."""
        self._pinned_at_s = 0.0
        self._wanted = 0
        self._ready = 0
        self._told_short: int | None = None
        """Number of ready slots when a lack of memory was last logged."""
        self.tell_slots: Callable[[int], None] = _tell_nobody
        """Called on the growing thread with the number of slots when there is no memory for more,
        and when the pool has grown after that."""
        self._taken: Callable[[], int] = int
        """Returns the bytes of the limit that others hold for now; called on the growing thread."""
        self._least = self.cap_slots
        self._hurried = 0
        """Number of slots to make ready without pauses."""
        self._urgent = 0
        """Number of waiters that keep training waiting."""
        self._resting_at: int | None = None
        self._closed = False
        self._pid = os.getpid()
        self._guards = self.guarded
        self._sealed: set[int] = set()
        """The slots that are read-only, if the pool is guarded."""
        self._changed = threading.Condition()
        self._grower = Worker("pool", self._grow).start()

    @property
    def ready_bytes(self) -> int:
        """Host memory that the pool uses now."""
        with self._changed:
            return self._ready * CHUNK_BYTES

    @property
    def room_bytes(self) -> int:
        """Bytes that could be leased now: free slots, and memory that the limit still allows."""
        with self._changed:
            growth = self.cap_slots - self._ready
        return (self.slots.free + growth) * CHUNK_BYTES

    def want(self, size_bytes: int, *, without_pauses: bool = False) -> None:
        """Prepare at least this much memory in the background, within the limit. `without_pauses`
        is for cases where a save that lacks the memory would cost training more than the pauses
        save."""
        with self._changed:
            self._retry_growth()
            self._wanted = min(max(self._wanted, -(-size_bytes // CHUNK_BYTES)), self.cap_slots)
            if without_pauses:
                self._hurried = self._wanted
            self._changed.notify_all()

    def share(self, taken: Callable[[], int], *, least_bytes: int) -> None:
        """Count the bytes that `taken` returns against the limit: beyond `least_bytes`, the pool
        grows only into the remainder. Each save and each restore checks again."""
        with self._changed:
            self._taken, self._least = taken, -(-least_bytes // CHUNK_BYTES) + _STEP_SLOTS

    def pin(self) -> None:
        """Pin memory from now on, and pin the ready memory in the background: a device has appeared
        that was not expected at construction."""
        with self._changed:
            self._pinned = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self, threads: int, *, remote: bool = False) -> Iterator[Pool | ReadBuffers]:
        """Provide memory for a restore that reads with `threads` threads. If the pool is pinned, as
        a device needs, yield this pool. Until the restore is over, it grows to at most two slots
        per thread, without pauses because nothing trains meanwhile. Otherwise yield separate read
        buffers, and stop the pool's growth to leave the cores to the restore."""
        with self._changed:
            self._retry_growth()
            pinned = self._pinned
            self._resting_at = 2 * threads if pinned else 0
        try:
            if pinned:
                yield self
            else:
                size = REMOTE_SLOT_BYTES if remote else SLOT_BYTES
                with ReadBuffers(min(threads, self.cap_bytes // (2 * size)), size) as room:
                    yield room
        finally:
            with self._changed:
                self._resting_at = None
                self._changed.notify_all()

    def wait_ready(self) -> None:
        """Wait until all requested memory is ready."""
        with self._changed:
            while self._ready < self._wanted and not self._closed:
                self._changed.wait()

    def lease(
        self, timeout_s: float | None = None, *, for_save: bool = False, urgent: bool = False
    ) -> int | None:
        """Return a free slot; None on timeout. If none is free and the limit allows it, the pool
        grows, without pauses if `urgent`."""
        if self.slots.free:
            return self._opened(self.slots.lease(timeout_s, for_save=for_save))
        with self._changed:
            if self._ready == self._wanted < self.cap_slots:
                self._wanted = min(self._wanted + _STEP_SLOTS, self.cap_slots)
            self._urgent += urgent
            self._changed.notify_all()
        try:
            return self._opened(self.slots.lease(timeout_s, for_save=for_save))
        finally:
            with self._changed:
                self._urgent -= urgent

    def lease_more(self, count: int) -> list[int]:
        """Return up to `count` slots that are free right now, unless other threads wait for
        them."""
        slots = self.slots.lease_more(count)
        for slot in slots:
            self._opened(slot)
        return slots

    def seal(self, slots: Iterable[int]) -> None:
        """Declare that nothing writes into these slots any more: they are about to be handed
        over."""
        if self._guards:
            for slot in slots:
                self._mapping.protect(slot * CHUNK_BYTES, CHUNK_BYTES, writable=False)
                self._sealed.add(slot)

    def _opened(self, slot: int | None) -> int | None:
        if self._guards and slot is not None:
            self._mapping.protect(slot * CHUNK_BYTES, CHUNK_BYTES, writable=True)
            self._sealed.discard(slot)
        return slot

    def release(self, slot: int) -> None:
        self.slots.release([slot])

    def memory(self) -> memoryview:
        """Return the whole memory, for a flusher in this process."""
        return self._mapping.view

    def view(self, slot: int) -> memoryview:
        """Return a slot as bytes."""
        return self._mapping.view[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]

    def tensor(self, slot: int) -> torch.Tensor:
        """Return a slot as a tensor of bytes."""
        return self._bytes[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]

    def land(self, slot: int, at: int, ranges: Sequence[tuple[int, int]]) -> bool:
        """Copy host memory, given as ranges of (address, bytes), back to back into a slot. Return
        False if some of that memory has been freed; the contents of the slot are then undefined.
        Raise `UsageError` if the ranges do not fit or the slot is sealed."""
        size = sum(length for _, length in ranges)
        if at < 0 or at + size > CHUNK_BYTES:
            raise UsageError(
                "a copy does not fit into its slot",
                expected=f"{CHUNK_BYTES} bytes",
                found=f"{size} at {at}",
            )
        if slot in self._sealed:
            raise UsageError(
                "cannot copy into a slot that was handed over",
                found=f"slot {slot}",
                expected="a slot that is leased",
            )
        return memory.write_from(self.fd, slot * CHUNK_BYTES + at, ranges)

    def close(self) -> None:
        """Stop growing and unpin. The memory itself is freed with the last reference to it. Does
        nothing in a forked child: the parent owns everything."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._grower.join()
        if self._makers is not None:
            self._makers.close()
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()
        os.close(self.fd)

    def _grow(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._late() or self._ready < self._goal()):
                    self._changed.wait()
                if self._closed:
                    return
                late = self._late()
                # Several slots at once if several threads populate them; else one at a time, so
                # that a restore that starts meanwhile soon gets the cores.
                step = _STEP_SLOTS if self._pinned else 1
                first, count = self._ready, min(step, self._goal() - self._ready)
            try:
                if late:
                    self._pause()
                    self._pin(self._pageable.pop())
                    continue
                self._check_shared(first + count)
                self._make_pages(first, count)
                for slot in range(first, first + count):
                    if self._pinned:
                        self._pause()
                        self._pin(slot)
                    else:
                        self._pageable.append(slot)
                    self._add(slot)
                if self._told_short is not None:
                    self.tell_slots(first + count)
            except Exception as error:  # noqa: BLE001 (waiting saves must get any error)
                self._give_up(error)

    def _late(self) -> bool:
        """Return True if some slots became ready before pinning was requested."""
        return self._pinned and bool(self._pageable)

    def _goal(self) -> int:
        """Return the number of slots to make ready now. Requires the lock."""
        return self._wanted if self._resting_at is None else min(self._wanted, self._resting_at)

    def _check_shared(self, slots: int) -> None:
        """Raise `MemoryError` if the limit does not allow that number of slots for now."""
        if slots <= self._least:
            return
        taken = self._taken()
        if slots > self.cap_bytes // CHUNK_BYTES - -(-taken // CHUNK_BYTES):
            raise MemoryError(f"an earlier job instance holds {taken} bytes until this one commits")

    def _make_pages(self, first: int, count: int) -> None:
        if not self._pinned:
            for start in range(first * CHUNK_BYTES, (first + count) * CHUNK_BYTES, CHUNK_BYTES):
                # In two steps: next to training on all cores, this costs training half as much.
                self._mapping.allocate(start, CHUNK_BYTES)
                self._mapping.populate(start, CHUNK_BYTES)
            return
        # A machine with a GPU has cores to spare: zero the pages of several slots at once. In one
        # step, because the kernel serialises `allocate` between threads. The pages of the next
        # batch are made while this one is pinned, with pauses.
        if self._makers is None:
            self._makers = WorkerPool("populate", _MAKERS)
        with self._changed:
            goal = self._goal()
        for slot in range(first, max(min(first + 2 * count, goal), first + count)):
            if slot not in self._making:
                starts = range(slot * CHUNK_BYTES, (slot + 1) * CHUNK_BYTES, _PIECE_BYTES)
                self._making[slot] = [
                    self._makers.submit(self._mapping.populate, start, _PIECE_BYTES)
                    for start in starts
                ]
        for slot in range(first, first + count):
            for made in self._making.pop(slot):
                made.result()

    def _pause(self) -> None:
        """Pause after the last pinning so that kernel launches get through; not if nothing trains
        or training waits for memory."""
        left = self._pinned_at_s + _PIN_PAUSE_S - time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._resting_at is not None
                    or self._urgent > 0
                    or self._ready < self._hurried
                ),
                left,
            )

    def _pin(self, slot: int) -> None:
        address = self._mapping.address + slot * CHUNK_BYTES
        code = torch.cuda.cudart().cudaHostRegister(address, CHUNK_BYTES, 0)
        if int(code) != 0:
            raise StorageError(
                "cannot pin host memory for the device",
                expected=f"{CHUNK_BYTES} more bytes",
                found=f"CUDA error {int(code)} after {self.ready_bytes} bytes",
                remedy="lower host_memory_bytes or raise the limit of locked memory",
            )
        self._registered.append(address)
        self._pinned_at_s = time.monotonic()

    def _add(self, slot: int) -> None:
        self.seal([slot])
        self.slots.add(range(slot, slot + 1))
        with self._changed:
            self._ready += 1
            self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        """Stop growing and continue with the present memory; only a pool without any memory is an
        error."""
        self._making.clear()
        if self._pinned:
            self._pageable.clear()  # slots that cannot be pinned now stay pageable
        with self._changed:
            self._wanted = self.cap_slots = ready = self._ready
            if ready == 0:
                self.slots.fail(_no_memory(error))
            self._changed.notify_all()
        self.tell_slots(ready)
        if ready != self._told_short:
            self._told_short = ready
            log.warning("the pool stays at %d bytes: %s", ready * CHUNK_BYTES, error)

    def _retry_growth(self) -> None:
        """Try again to grow after a failure: memory may be free by now. Requires the lock."""
        if self.cap_slots == 0:
            # Some waiters may not have received the failure yet: they need another try or another
            # error.
            self._wanted = 1
            self.slots.fail(None)
        self.cap_slots = self.cap_bytes // CHUNK_BYTES
        self._changed.notify_all()


def _tell_nobody(slots: int) -> None:
    """Default for `tell_slots`."""


def _no_memory(error: Exception) -> LaststepError:
    if isinstance(error, LaststepError):
        return error
    return StorageError(
        "there is no memory for saves and restores",
        expected=f"{CHUNK_BYTES} bytes or more",
        found=str(error) or repr(error),
        remedy="free memory of this machine, or raise the limit "
        "of its container or job; the next save or restore tries again",
    )
