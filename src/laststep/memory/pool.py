"""The host memory that captures land in and flushes read from: shared, capped, ready ahead of time.

Owns the memory file, its mapping and its registration with CUDA. A thread of its own makes memory
ready, populated, and pinned where a GPU is used. Pinning holds a lock of the driver that launches
need too, and one call right after the other starves them: so it goes slot by slot, with pauses,
unless training waits for the memory anyway. Slots are leased by whoever fills them and released
when the flusher has written them; memory beyond what was asked for is made ready only when somebody
waits, and never past the cap. Where there is no more, the pool goes on with what it has, and each
save and each restore tries again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import torch

from laststep.errors import LaststepError, StorageError, UsageError
from laststep.memory import segments as memory
from laststep.memory.slots import REMOTE_SLOT_BYTES, SLOT_BYTES, Landing, Slots
from laststep.process import threads
from laststep.terms import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

log = logging.getLogger(__name__)

_STEP_SLOTS = (64 << 20) // CHUNK_BYTES
_PIECE_BYTES = CHUNK_BYTES // 2
"""What one thread makes pages of; so many do at once, where memory is pinned."""
_MAKERS = _STEP_SLOTS * CHUNK_BYTES // _PIECE_BYTES
_PIN_PAUSE_S = 0.008
"""Measured on an H200, with training that is bound by its launches: pinning 3 GB in steps of 16 MiB
without a pause held it up by 150 ms, with this one by nothing that could be told from noise."""


def _reserved(size_bytes: int, fd: int = -1) -> tuple[int, memory.Mapping]:
    """Room for the pool, of which nothing is used yet; in a file that is there, or in a new one."""
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
    """A capped set of slots of CHUNK_BYTES each, in memory shared with the flusher.

    A slot is written by whoever has leased it, until it is sealed for the flusher.
    """

    slot_bytes = CHUNK_BYTES
    lands_all = True
    guarded: ClassVar[bool] = False
    """For tests: the memory of a slot is read-only from its sealing until its next lease. A process
    that writes past the end of its slot, into one of the flusher's, dies and spoils no other save.
    This does not stop writes through the pool's file, so `land` checks for itself. A device that
    writes into pinned memory goes unnoticed."""

    def __init__(self, cap_bytes: int, *, pinned: bool, fd: int = -1) -> None:
        """`fd` is of a file in shared memory of that length; without one, memory of its own."""
        self.cap_slots = max(cap_bytes // CHUNK_BYTES, 1)
        self.cap_bytes = self.cap_slots * CHUNK_BYTES
        self.fd, self._mapping = _reserved(self.cap_bytes, fd)
        self.slots = Slots()
        self._bytes = torch.frombuffer(self._mapping.view, dtype=torch.uint8)
        self._pinned = pinned
        self._registered: list[int] = []
        self._pageable: list[int] = []
        """Slots that are ready and not pinned; only the growing thread uses this."""
        self._makers: ThreadPoolExecutor | None = None
        self._making: dict[int, list[Future[None]]] = {}
        """The pages of slots that are being made; only the growing thread uses both."""
        self._pinned_at_s = 0.0
        self._wanted = 0
        self._ready = 0
        self._told_short: int | None = None
        """How many slots were ready when the log last said that there is no more memory."""
        self.tell_slots: Callable[[int], None] = _tell_nobody
        """Called on the growing thread with the number of slots, where there is no memory for more,
        and when it has grown after that."""
        self._taken: Callable[[], int] = int
        """How much of the cap others have, for now; asked on the growing thread."""
        self._least = self.cap_slots
        self._hurried = 0
        """How many slots are to be ready without pauses."""
        self._urgent = 0
        """How many wait for memory and keep training waiting."""
        self._resting_at: int | None = None
        self._closed = False
        self._pid = os.getpid()
        self._guards = self.guarded
        self._sealed: set[int] = set()
        """The slots that are read-only, in a pool with guards."""
        self._changed = threading.Condition()
        self._grower = threading.Thread(target=self._grow, name="laststep-pool", daemon=True)
        threads.start(self._grower)

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

    def want(self, size_bytes: int, *, without_pauses: bool = False) -> None:
        """Have at least this much memory made ready in the background, within the cap; without
        pauses where a save that finds it missing would cost training more."""
        with self._changed:
            self._hope()
            self._wanted = min(max(self._wanted, -(-size_bytes // CHUNK_BYTES)), self.cap_slots)
            if without_pauses:
                self._hurried = self._wanted
            self._changed.notify_all()

    def share(self, taken: Callable[[], int], *, least_bytes: int) -> None:
        """What that tells, in bytes, counts against the cap: beyond `least_bytes` no more is made
        ready than is left of it. Each save and each restore asks again."""
        with self._changed:
            self._taken, self._least = taken, -(-least_bytes // CHUNK_BYTES) + _STEP_SLOTS

    def pin(self) -> None:
        """Have the memory pinned from now on, and what is ready already in the background: a device
        has turned up that nobody expected at construction."""
        with self._changed:
            self._pinned = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self, threads: int, *, remote: bool = False) -> Iterator[Pool | Landing]:
        """Give a restore, which reads with so many threads, room to read into. Memory that is
        pinned is what a device needs: this pool's, of which only so much is made ready, without
        pauses, because nobody trains meanwhile. Else the pool rests, and leaves the cores to it."""
        with self._changed:
            self._hope()
            pinned = self._pinned
            self._resting_at = 2 * threads if pinned else 0
        try:
            if pinned:
                yield self
            else:
                size = REMOTE_SLOT_BYTES if remote else SLOT_BYTES
                with Landing(min(threads, self.cap_bytes // (2 * size)), size) as room:
                    yield room
        finally:
            with self._changed:
                self._resting_at = None
                self._changed.notify_all()

    def wait_ready(self) -> None:
        """Wait until all memory that was asked for is ready."""
        with self._changed:
            while self._ready < self._wanted and not self._closed:
                self._changed.wait()

    def lease(
        self, timeout_s: float | None = None, *, for_save: bool = False, urgent: bool = False
    ) -> int | None:
        """A free slot; more memory is made ready if there is none and the cap allows it, at once
        if it is urgent."""
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
        """Up to `count` slots that are free right now, unless others wait for them."""
        slots = self.slots.lease_more(count)
        for slot in slots:
            self._opened(slot)
        return slots

    def seal(self, slots: Iterable[int]) -> None:
        """Note that nobody writes into these slots any more: they are about to be handed over."""
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

    def land(self, slot: int, at: int, ranges: Sequence[tuple[int, int]]) -> bool:
        """Copy memory of the host, ranges of (address, bytes), one behind the other into a slot.
        Returns False where some of that memory is gone; the slot may then hold anything."""
        size = sum(length for _, length in ranges)
        if at < 0 or at + size > CHUNK_BYTES:
            raise UsageError(
                "a copy does not fit into its slot",
                expected=f"{CHUNK_BYTES} bytes",
                found=f"{size} at {at}",
            )
        if slot in self._sealed:
            raise UsageError(
                "a copy goes into a slot that was handed over",
                found=f"slot {slot}",
                expected="a slot that is leased",
            )
        return memory.write_from(self.fd, slot * CHUNK_BYTES + at, ranges)

    def close(self) -> None:
        """Stop growing and unpin. The memory itself goes with the last reference to it. In a forked
        child there is nothing to end: all of it is the parent's."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._grower.join()
        if self._makers is not None:
            self._makers.shutdown()
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
                # Pages of several slots at once where that is done by several threads; else one by
                # one, so that a restore that begins meanwhile has the cores soon.
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
            except Exception as error:  # noqa: BLE001 (whatever it is, saves must hear of it)
                self._give_up(error)

    def _late(self) -> bool:
        """Whether there are slots that became ready before they were to be pinned."""
        return self._pinned and bool(self._pageable)

    def _goal(self) -> int:
        """How many slots are to be ready now; with the lock held."""
        return self._wanted if self._resting_at is None else min(self._wanted, self._resting_at)

    def _check_shared(self, slots: int) -> None:
        """`MemoryError` where so many are not to be had of the cap for now."""
        if slots <= self._least:
            return
        taken = self._taken()
        if slots > self.cap_bytes // CHUNK_BYTES - -(-taken // CHUNK_BYTES):
            raise MemoryError(f"an earlier start has {taken} bytes, until this one has committed")

    def _make_pages(self, first: int, count: int) -> None:
        if not self._pinned:
            for start in range(first * CHUNK_BYTES, (first + count) * CHUNK_BYTES, CHUNK_BYTES):
                # In two steps: beside training on all cores this takes half as much from it.
                self._mapping.allocate(start, CHUNK_BYTES)
                self._mapping.populate(start, CHUNK_BYTES)
            return
        # Where there is a GPU there are cores: zero the pages of several slots at once. In one
        # step: the first of two is done for one slot after the other, whoever asks for it. Those
        # of the next step are made while this one's are pinned, with pauses.
        if self._makers is None:
            self._makers = ThreadPoolExecutor(_MAKERS, thread_name_prefix="laststep-populate")
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
        """Wait after the last pinning so that launches get through, unless nobody trains, or
        training waits for memory."""
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
        """Go on with the memory there is; only a pool without any memory is an error."""
        self._making.clear()
        if self._pinned:
            self._pageable.clear()  # what cannot be pinned now stays as it is
        with self._changed:
            self._wanted = self.cap_slots = ready = self._ready
            if ready == 0:
                self.slots.fail(_no_memory(error))
            self._changed.notify_all()
        self.tell_slots(ready)
        if ready != self._told_short:
            self._told_short = ready
            log.warning("the pool stays at %d bytes: %s", ready * CHUNK_BYTES, error)

    def _hope(self) -> None:
        """Try again to grow where that failed: memory may be free by now. With the lock held."""
        if self.cap_slots == 0:
            # Some who wait may not have heard of the failure yet: they need another try, or another
            # error.
            self._wanted = 1
            self.slots.fail(None)
        self.cap_slots = self.cap_bytes // CHUNK_BYTES
        self._changed.notify_all()


def _tell_nobody(slots: int) -> None:
    """Nobody wants to know."""


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
