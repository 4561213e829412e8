"""The host memory that captures are copied into and flushes read from, and its slots.

A background thread of `Pool` prepares memory: it populates the pages, and pins them if a GPU is
used. Pinning holds a driver lock that kernel launches need too, and back-to-back calls starve them,
so it pins slot by slot with pauses, unless training waits for the memory anyway. A slot is leased
by the code that fills it and released when the flusher has written it. More memory than requested
is prepared only when a thread waits for it, and never past the limit. If there is none, the pool
continues with what it has, and each save and each restore tries again to grow it.

`ReadBuffers` are memory of a restore itself, for when the pool is not pinned. torch is imported
late: the flusher and the command line use this module too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Self

from laststep.constants import CHUNK_BYTES
from laststep.errors import LaststepError, StorageError, UsageError
from laststep.memory import segments as memory
from laststep.process import signals
from laststep.process.system import HUGE_PAGE_BYTES
from laststep.process.threads import Worker, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import torch

log = logging.getLogger(__name__)

_STEP_SLOTS = (64 << 20) // CHUNK_BYTES
_PIECE_BYTES = CHUNK_BYTES // 2
"""Size of the piece that one thread populates; for pinned memory, `_MAKERS` do so at once."""
_MAKERS = _STEP_SLOTS * CHUNK_BYTES // _PIECE_BYTES
_PIN_PAUSE_S = 0.008
"""Measured on an H200 with launch-bound training: pinning 3 GB in steps of 16 MiB without a pause
delayed it by 150 ms; with this pause the delay was within noise."""
_NEVER = sys.maxsize
SLOT_BYTES = 4 << 20
REMOTE_SLOT_BYTES = 8 << 20
"""Read size for a server, where a request costs more than on a disk. The data usually stays in the
client's memory (`store.InPlace`), and the slot is never touched."""


class Filled(NamedTuple):
    """Bytes of a file's tensor area that a slot holds."""

    file: int
    start: int
    size_bytes: int
    slot: int


class Slots:
    """The free and the leased slots of a pool. Waiters are served in order of arrival, and woken by
    `fail` and `lose_flusher` with the error that makes waiting pointless. Thread-safe."""

    def __init__(self) -> None:
        self.free: deque[int] = deque()
        """May be measured without the lock, but not changed."""
        self._leased: set[int] = set()
        self._reading: set[int] = set()
        """Slots leased by a restore, which returns them itself, with or without a flusher."""
        self._waiting: deque[object] = deque()
        self._error: LaststepError | None = None
        self._lost: LaststepError | None = None
        self._changed = threading.Condition()

    def add(self, slots: range) -> None:
        with self._changed:
            if self._leased.union(self.free).intersection(slots):
                raise UsageError("slots were added twice", found=str(slots))
            self.free.extend(slots)
            self._changed.notify_all()

    def lease(self, timeout_s: float | None = None, *, for_save: bool = False) -> int | None:
        """Return the next free slot; None on timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        try:
            while True:
                with self._changed:
                    if self.free and self._waiting[0] is ticket:
                        slot = self.free.pop()  # the one freed last is still in the CPU caches
                        self._leased.add(slot)
                        if not for_save:
                            self._reading.add(slot)
                        return slot
                    if self._error is not None:
                        raise self._error
                    if self._lost is not None and (
                        for_save or (self._leased and not self._reading)
                    ):
                        raise self._lost
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
        """Return up to `count` slots that are free now, unless other threads wait for them."""
        with self._changed:
            taken: list[int] = []
            while self.free and len(taken) < count and not self._waiting:
                taken.append(self.free.pop())
            self._leased.update(taken)
            return taken

    def release(self, *slots: int) -> None:
        """Return leased slots. Raise `UsageError` for one that is not leased."""
        with self._changed:
            for slot in slots:
                if slot not in self._leased:
                    raise UsageError("released a slot that is not leased", found=str(slot))
                self._leased.remove(slot)
                self._reading.discard(slot)
                self.free.append(slot)
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
        """Free all slots except `kept`, which belong to the new flusher, when nobody holds or waits
        for slots. Does not clear an error of `fail`."""
        with self._changed:
            self.free.extend(sorted(self._leased - kept))
            self._leased &= kept
            self._reading.clear()
            self._lost = None
            self._changed.notify_all()


class Pool:
    """A limited set of slots of CHUNK_BYTES each, in memory shared with the flusher. A slot may be
    written by the code that leased it, until it is handed over to the flusher."""

    slot_bytes = CHUNK_BYTES
    lands_all = True

    def __init__(self, cap_bytes: int, *, pinned: bool, fd: int = -1) -> None:
        """Take over `fd`, a shared memory file of that length; without one, create one."""
        self.cap_slots = max(cap_bytes // CHUNK_BYTES, 1)
        self.cap_bytes = self.cap_slots * CHUNK_BYTES
        self.fd, self._mapping = _reserved(self.cap_bytes, fd)
        self.memory = self._mapping.view
        """All of it, for a flusher in this process."""
        self.slots = Slots()
        self._pinned = pinned
        self._registered: list[int] = []
        self._pageable: list[int] = []
        """Slots that are ready but not pinned; used only by the growing thread."""
        self._makers: WorkerPool | None = None
        self._making: dict[int, list[Future[None]]] = {}
        """Pending page population by slot; used, like `_makers`, only by the growing thread."""
        self._pinned_at_s = 0.0
        self._wanted = self._ready = 0
        """Numbers of slots."""
        self._told_short: int | None = None
        """Number of ready slots when a lack of memory was last logged."""
        self.tell_slots: Callable[[int], None] = lambda _slots: None
        """Called on the growing thread with the number of slots when there is no memory for more,
        and when the pool has grown after that."""
        self._taken: Callable[[], int] = int
        """Returns the bytes of the limit that others hold for now; called on the growing thread."""
        self._least = self.cap_slots
        self._hurried = 0
        """Number of slots to make ready without pauses."""
        self._urgent = 0
        """Number of waiters that keep training waiting."""
        self._resting_at = _NEVER
        """Number of ready slots at which the pool stops growing during a restore."""
        self._closed = False
        self._pid = os.getpid()
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
        return (len(self.slots.free) + growth) * CHUNK_BYTES

    def want(self, size_bytes: int, *, without_pauses: bool = False) -> None:
        """Prepare at least this much memory in the background, within the limit, also after a
        failure; `without_pauses` if a save that lacks it would cost training more than the pauses
        save."""
        with self._changed:
            if self.cap_slots == 0:
                # Some waiters may not have received the failure yet: they need another try or
                # another error.
                self._wanted = 1
                self.slots.fail(None)
            self.cap_slots = self.cap_bytes // CHUNK_BYTES
            self._wanted = min(max(self._wanted, -(-size_bytes // CHUNK_BYTES)), self.cap_slots)
            if without_pauses:
                self._hurried = self._wanted
            self._changed.notify_all()

    def share(self, taken: Callable[[], int], *, least_bytes: int) -> None:
        """Count the bytes that `taken` returns against the limit: beyond `least_bytes`, the pool
        grows only into the remainder."""
        with self._changed:
            self._taken, self._least = taken, -(-least_bytes // CHUNK_BYTES) + _STEP_SLOTS

    def pin(self) -> None:
        """Pin memory from now on, and in the background what is ready: a device has appeared."""
        with self._changed:
            self._pinned = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self, threads: int, *, remote: bool = False) -> Iterator[Pool | ReadBuffers]:
        """Provide memory for a restore that reads with `threads` threads: this pool if it is
        pinned, as a device needs, and grows meanwhile to at most two slots per thread, without
        pauses because nothing trains. Otherwise separate read buffers; the pool then stops growing,
        to leave the cores to the restore."""
        with self._changed:
            pinned = self._pinned
            self._resting_at = 2 * threads if pinned else 0
        try:
            self.want(0)
            if pinned:
                yield self
            else:
                size = REMOTE_SLOT_BYTES if remote else SLOT_BYTES
                with ReadBuffers(min(threads, self.cap_bytes // (2 * size)), size) as room:
                    yield room
        finally:
            with self._changed:
                self._resting_at = _NEVER
                self._changed.notify_all()

    def lease(
        self, timeout_s: float | None = None, *, for_save: bool = False, urgent: bool = False
    ) -> int | None:
        """Return a free slot, growing if need be, without pauses if `urgent`; None on timeout."""
        if self.slots.free:
            return self.slots.lease(timeout_s, for_save=for_save)
        with self._changed:
            if self._ready == self._wanted < self.cap_slots:
                self._wanted = min(self._wanted + _STEP_SLOTS, self.cap_slots)
            self._urgent += urgent
            self._changed.notify_all()
        try:
            return self.slots.lease(timeout_s, for_save=for_save)
        finally:
            with self._changed:
                self._urgent -= urgent

    def release(self, slot: int) -> None:
        self.slots.release(slot)

    def view(self, slot: int) -> memoryview:
        return self.memory[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]

    def tensor(self, slot: int) -> torch.Tensor:
        import torch

        start = slot * CHUNK_BYTES
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=CHUNK_BYTES, offset=start)

    def land(self, slot: int, at: int, ranges: Sequence[tuple[int, int]]) -> bool:
        """Copy host memory, given as ranges of (address, bytes), back to back into a slot. Return
        False, with undefined contents of the slot, if some of that memory has been freed."""
        size = sum(length for _, length in ranges)
        if at < 0 or at + size > CHUNK_BYTES:
            raise UsageError(
                "a copy does not fit into its slot",
                expected=f"{CHUNK_BYTES} bytes",
                found=f"{size} at {at}",
            )
        return memory.write_from(self.fd, slot * CHUNK_BYTES + at, ranges)

    def close(self) -> None:
        """Stop growing and unpin; the memory is freed with the last reference to it. Does nothing
        in a forked child: the parent owns everything."""
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
        if self._registered:
            import torch

            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._mapping.close()
        os.close(self.fd)

    # -- on the growing thread -------------------------------------------------------------------

    def _grow(self) -> None:
        while True:
            with self._changed:
                while True:
                    # Some slots became ready before pinning was requested.
                    late = self._pinned and bool(self._pageable)
                    goal = min(self._wanted, self._resting_at)
                    if self._closed or late or self._ready < goal:
                        break
                    self._changed.wait()
                if self._closed:
                    return
                # Several slots at once if several threads populate them; else one at a time, so
                # that a restore that starts meanwhile soon gets the cores.
                step = _STEP_SLOTS if self._pinned else 1
                first, count = self._ready, min(step, goal - self._ready)
            try:
                if late:
                    self._pin(self._pageable.pop())
                    continue
                self._make_pages(first, count)
                for slot in range(first, first + count):
                    if self._pinned:
                        self._pin(slot)
                    else:
                        self._pageable.append(slot)
                    self.slots.add(range(slot, slot + 1))
                    with self._changed:
                        self._ready += 1
                        self._changed.notify_all()
                if self._told_short is not None:
                    self.tell_slots(first + count)
            except Exception as error:  # noqa: BLE001 (waiting saves must get any error)
                self._give_up(error)

    def _make_pages(self, first: int, count: int) -> None:
        """Populate these slots. Raise `MemoryError` if the limit does not allow them for now."""
        taken = self._taken() if first + count > self._least else 0
        if first + count > self.cap_bytes // CHUNK_BYTES - -(-taken // CHUNK_BYTES):
            raise MemoryError(f"an earlier job instance holds {taken} bytes until this one commits")
        if not self._pinned:
            # In two steps: next to training on all cores, this costs training half as much.
            self._mapping.allocate(first * CHUNK_BYTES, count * CHUNK_BYTES)
            self._mapping.populate(first * CHUNK_BYTES, count * CHUNK_BYTES)
            return
        # A machine with a GPU has cores to spare: zero the pages of several slots at once. In one
        # step, because the kernel serialises `allocate` between threads. The pages of the next
        # batch are made while this one is pinned, with pauses.
        if self._makers is None:
            self._makers = WorkerPool("populate", _MAKERS)
        with self._changed:
            goal = min(self._wanted, self._resting_at)
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

    def _pin(self, slot: int) -> None:
        """Pin a slot, after a pause so that kernel launches get through, unless nothing trains or
        training waits for memory."""
        left = self._pinned_at_s + _PIN_PAUSE_S - time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._resting_at < _NEVER
                    or self._urgent > 0
                    or self._ready < self._hurried
                ),
                left,
            )
        import torch

        address = self._mapping.address + slot * CHUNK_BYTES
        code = int(torch.cuda.cudart().cudaHostRegister(address, CHUNK_BYTES, 0))
        if code != 0:
            raise StorageError(
                "cannot pin host memory for the device",
                expected=f"{CHUNK_BYTES} more bytes",
                found=f"CUDA error {code} after {self.ready_bytes} bytes",
                remedy="lower host_memory_bytes or raise the limit of locked memory",
            )
        self._registered.append(address)
        self._pinned_at_s = time.monotonic()

    def _give_up(self, error: Exception) -> None:
        """Stop growing; only a pool without any memory is an error."""
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


def _reserved(size_bytes: int, fd: int) -> tuple[int, memory.Mapping]:
    """Reserve address space, not memory, in the file `fd` or a new one; close `fd` on failure."""
    try:
        fd = memory.create(size_bytes) if fd < 0 else fd
        return fd, memory.Mapping(fd, size_bytes)
    except (OSError, MemoryError) as error:
        if fd >= 0:
            os.close(fd)
        raise StorageError(
            "cannot reserve memory for saves and restores",
            expected=f"{size_bytes} bytes",
            found=str(error),
            remedy="pass a smaller host_memory_bytes=…, or raise the limits of the process "
            "(`ulimit -v`, `ulimit -n`, `ulimit -f`: shared memory counts as a file)",
        ) from error


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


class ReadBuffers(Slots):
    """Slots in huge pages to read into, two per thread, until it is closed."""

    lands_all = False

    def __init__(self, threads: int, slot_bytes: int = SLOT_BYTES) -> None:
        self.slot_bytes = slot_bytes
        size_bytes = 2 * threads * slot_bytes + HUGE_PAGE_BYTES
        try:
            self._mapping = memory.Mapping(-1, size_bytes)
        except (OSError, MemoryError) as error:
            raise StorageError(
                "cannot reserve memory to read into",
                expected=f"{size_bytes} bytes",
                found=str(error),
                remedy="free memory, or raise the limit of the process (`ulimit -v`)",
            ) from error
        self._first = -self._mapping.address % HUGE_PAGE_BYTES
        super().__init__()
        self.add(range(2 * threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapping.close()

    def view(self, slot: int) -> memoryview:
        at = self._first + slot * self.slot_bytes
        return self._mapping.view[at : at + self.slot_bytes]
