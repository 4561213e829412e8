"""Read planned ranges of stored files through the pool, verify every block, deliver the bytes.

Knows nothing of what the bytes mean, nor of torch. Several threads read, each into a slot of its
own; a block whose digest is wrong is read a second time before it counts as damage. The first error
stops all of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from laststep.codecs.digests import DIGEST_BYTES, block_digests
from laststep.errors import Corrupt
from laststep.plan.load import Read
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from laststep.storage.store import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """A file to read from: its data start at `data_at`, `blocks` are its blocks' digests."""

    reader: Reader
    data_at: int
    blocks: bytes
    where: str


class Room(Protocol):
    """Where reads land: the pool."""

    def lease(self, timeout_s: float | None = None) -> int | None: ...

    def view(self, slot: int) -> memoryview: ...

    def release(self, slot: int) -> None: ...


_LOOK_S = 0.2
"""How often a reader that waits for room looks whether another has failed."""

Deliver = Callable[[Read, int], None]


def read_all(
    files: Sequence[ReadFile], reads: Sequence[Read], room: Room, deliver: Deliver, *, threads: int
) -> int:
    """Carry out all reads; `deliver(read, slot)` is called on the reading threads with verified
    bytes, which are gone when it returns. Returns the number of bytes read. Raises the first
    error."""
    pipeline = _Pipeline(files, reads, room, deliver)
    readers = min(threads, len(reads))
    jobs = [pipeline.read] * readers + [pipeline.deliver] * readers
    workers = [
        threading.Thread(target=job, name=f"laststep-read-{n}", daemon=True)
        for n, job in enumerate(jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    pipeline.release_rest()
    if pipeline.errors:
        raise pipeline.errors[0]
    return sum(read.stop - read.start for read in reads)


class _Pipeline:
    """Readers keep the disk busy; deliverers verify and copy behind them. Slots bound the queue."""

    def __init__(
        self, files: Sequence[ReadFile], reads: Sequence[Read], room: Room, deliver: Deliver
    ) -> None:
        self.errors: list[BaseException] = []
        self._files = files
        self._room = room
        self._deliver = deliver
        self._todo: queue.SimpleQueue[Read] = queue.SimpleQueue()
        for read in reads:
            self._todo.put(read)
        self._left = len(reads)
        self._landed: queue.SimpleQueue[tuple[Read, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def read(self) -> None:
        """Read one range after the other, each into a slot, until there are none left."""
        while not self._stop.is_set():
            try:
                read = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                slot = self._lease()
                if slot is None:
                    return
                try:
                    _fill(self._files[read.file], read, self._room.view(slot))
                except BaseException:
                    self._room.release(slot)
                    raise
                self._landed.put((read, slot))
            except BaseException as error:  # noqa: BLE001 (raised again by read_all)
                self._fail(error)

    def deliver(self) -> None:
        """Verify what has landed and deliver it, until everything was or something failed."""
        while (landed := self._landed.get()) is not None:
            read, slot = landed
            try:
                if not self._stop.is_set():
                    _verify(self._files[read.file], read, self._room.view(slot))
                    self._deliver(read, slot)
            except BaseException as error:  # noqa: BLE001 (raised again by read_all)
                self._fail(error)
            finally:
                self._room.release(slot)
            with self._lock:
                self._left -= 1
                done = self._left == 0
            if done:
                break
        self._landed.put(None)  # wakes the next deliverer, which does the same

    def release_rest(self) -> None:
        """After all threads have ended: slots of reads that nobody took, because one failed."""
        while not self._landed.empty():
            landed = self._landed.get()
            if landed is not None:
                self._room.release(landed[1])

    def _lease(self) -> int | None:
        while not self._stop.is_set():
            slot = self._room.lease(_LOOK_S)
            if slot is not None:
                return slot
        return None

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self._stop.set()
        self._landed.put(None)


def _fill(file: ReadFile, read: Read, into: memoryview) -> None:
    size = read.stop - read.start
    got = file.reader.read_into(file.data_at + read.start, into[: align_up(size, ALIGN_BYTES)])
    if got < size:
        raise Corrupt(
            "a data file ends too early", where=file.where, expected=f"{read.stop} bytes of data"
        )


def _verify(file: ReadFile, read: Read, image: memoryview) -> None:
    """Every block's digest; a wrong one is read a second time before it counts as damage."""
    size = read.stop - read.start
    expected = file.blocks[
        read.start // BLOCK_BYTES * DIGEST_BYTES : -(-read.stop // BLOCK_BYTES) * DIGEST_BYTES
    ]
    if block_digests(image[:size]) == expected:
        return
    _fill(file, read, image)
    found = block_digests(image[:size])
    if found != expected:
        raise _damage(file, read, expected, found)


def _damage(file: ReadFile, read: Read, expected: bytes, found: bytes) -> Corrupt:
    for block in range(len(expected) // DIGEST_BYTES):
        part = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
        if expected[part] != found[part]:
            number = read.start // BLOCK_BYTES + block
            start = file.data_at + number * BLOCK_BYTES
            return Corrupt(
                "stored bytes have changed",
                where=f"{file.where}, block {number} (bytes {start}-{start + BLOCK_BYTES})",
                expected=f"digest {expected[part].hex()}", found=found[part].hex(),
                remedy="`laststep verify` lists all damage",
            )  # fmt: skip
    return Corrupt("stored bytes have changed", where=file.where)
