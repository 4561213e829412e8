"""Read planned chunks of stored files through slots, verify every block, and deliver the bytes.

Knows neither the meaning of the bytes nor torch. Bytes that a file's reader already has in memory
are verified and delivered from there, if the room allows that. The first error stops all threads.
However a read ends, also by an interrupt of the calling thread, none of its threads touches a slot
or a target after `read_all` has returned or raised.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from laststep.constants import ALIGN_BYTES, CHUNK_BYTES, align_up
from laststep.plan.reads import Chunk
from laststep.process import signals
from laststep.process.system import huge_pages
from laststep.process.threads import Worker, WorkerPool
from laststep.read.blocks import MANY_LAYOUTS, refuse

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from concurrent.futures import Future

    from laststep.read.blocks import BlockReader, Damage, Extent, LayoutBlocks

_log = logging.getLogger(__name__)


class Room(Protocol):
    """Memory that data is read into: the pool, or the read buffers of a restore."""

    slot_bytes: int
    lands_all: bool
    """True if bytes in memory must be copied here, because a device reads from here."""

    def lease(self, timeout_s: float | None = None) -> int | None: ...

    def view(self, slot: int) -> memoryview: ...

    def release(self, slot: int) -> None: ...


_LOOK_S = 0.2
"""Interval at which a waiting thread checks whether another has failed or everything is done."""

Deliver = Callable[[Chunk, memoryview], None]
_FILE = operator.attrgetter("file")


def read_all(
    files: Sequence[LayoutBlocks],
    reads: Sequence[Chunk],
    room: Room,
    deliver: Deliver,
    *,
    threads: int,
) -> int:
    """Carry out all reads, return the bytes read, and raise the first error. `deliver(read, data)`
    is called on the reading threads with verified bytes, which are valid only until it returns."""
    pipeline = _Pipeline(files, reads, room, deliver, threads)
    workers: list[Worker] = []
    try:
        for number in range(min(pipeline.threads, len(reads))):
            workers.append(Worker(f"read-{number}", pipeline.run))
            workers[-1].start()
        pipeline.wait()
    finally:
        pipeline.end(workers)
    if pipeline.errors:
        raise pipeline.errors[0]
    return pipeline.read_bytes


class _Pipeline:
    """Some threads keep the disk busy while the others verify and copy. Slots bound the memory.

    A thread carries a read from start to end. When slots were handed from readers to verifiers,
    each hand-over woke every waiting thread: with 16 of each, reading from memory, threads spent
    three quarters of their time waiting for the GIL.
    """

    def __init__(
        self,
        files: Sequence[LayoutBlocks],
        reads: Sequence[Chunk],
        room: Room,
        deliver: Deliver,
        threads: int,
    ) -> None:
        self.errors: list[BaseException] = []
        self.read_bytes = 0
        self.threads = threads
        """Number of threads: as many again if reads may wait, which those from memory never do."""
        self._files = files
        self._room = room
        self._deliver = deliver
        self._todo: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._left_of: Counter[BlockReader] = Counter()
        for read in reads:
            self._todo.put(read)
            self._left_of[files[read.file].reader] += 1
        for number in set(map(_FILE, reads)):
            if not files[number].in_memory:
                self.threads = 2 * threads
        self._reading = threading.Semaphore(threads)
        self._lock = threading.Lock()  # guards all counters
        self._left = len(reads)
        self._inside = 0
        self._stopped = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    # On the calling thread

    def wait(self) -> None:
        """Wait until everything was delivered or an error occurred."""
        while self._left and not self._stopped:
            self._doze()
            signals.check_signals()

    def end(self, workers: Sequence[Worker]) -> None:
        """Stop the remaining reads, and wait until no thread is inside `run`, whatever happens.

        The threads write into the pool and into live tensors, which the caller may free or read as
        soon as this returns. So an exception raised by a signal handler meanwhile has to wait.
        Threads inside are counted here because an interrupted `join` treats its thread as ended
        (CPython 3.11), and after an interrupted `start` it is unknown whether there is a thread.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                if interrupt is not None:
                    _log.warning("%r has to wait for reads that are in progress", interrupt)
                self._stop()
                while self._inside:
                    self._doze()
                for worker in workers:
                    if worker.is_alive():
                        worker.join()
                break
            except BaseException as error:  # noqa: BLE001 (raised again below)
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _doze(self) -> None:
        # Only the counters are reliable. A token merely wakes, and an interrupt may have lost it.
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=_LOOK_S)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True  # from here on no thread enters `run`
        self._wake.put(None)

    # On the workers

    def run(self) -> None:
        """Carry out reads until there are none left or an error occurred."""
        with self._lock:
            if self._stopped:
                return
            self._inside += 1
        try:
            while not self._stopped:
                read = self._todo.get_nowait()
                self._carry_out(read)
                reader = self._files[read.file].reader
                with self._lock:
                    self.read_bytes += read.stop - read.start
                    self._left -= 1
                    self._left_of[reader] -= 1
                    is_over = not self._left_of[reader]
                if is_over and len(self._files) > MANY_LAYOUTS:
                    reader.release()
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again by read_all)
            self.errors.append(error)
            self._stop()
        finally:
            with self._lock:
                self._inside -= 1
            self._wake.put(None)

    def _carry_out(self, read: Chunk) -> None:
        extent = self._files[read.file].blocks(read.start, read.stop)
        if not self._room.lands_all:
            # Deliver from the reader's memory what is there and intact; else read it as usual, and
            # report any damage.
            with self._reading:
                in_memory = extent.in_place()
            if in_memory is not None and extent.is_right(in_memory):
                if not self._stopped:
                    self._deliver(read, in_memory)
                return
        slot = None
        while slot is None:
            if self._stopped:
                return
            slot = self._room.lease(_LOOK_S)
        try:
            data = self._room.view(slot)
            lost: list[Damage] = []
            with self._reading:
                if not self._stopped:
                    lost = extent.fill(data)
            if not self._stopped:
                refuse(extent.verify(data, lost))
            if not self._stopped:
                self._deliver(read, data)
        finally:
            self._room.release(slot)


def read_ahead(
    extents: Iterable[Extent], *, threads: int, buffer_bytes: int = CHUNK_BYTES
) -> Generator[tuple[memoryview, list[Damage]], None, None]:
    """Yield each extent's bytes, valid until the next iteration, and its damage, while threads read
    on. An extent larger than `buffer_bytes` gets a buffer of its own."""
    spare: list[memoryview] = []
    ahead: deque[tuple[int, memoryview, Future[list[Damage]]]] = deque()
    with WorkerPool("ahead", threads) as workers:
        try:
            for extent in itertools.chain(extents, itertools.repeat(None, threads)):
                if extent is not None:
                    size = extent.size_bytes
                    room = max(buffer_bytes, align_up(size, ALIGN_BYTES))
                    buffer = spare.pop() if spare and room == buffer_bytes else huge_pages(room)
                    ahead.append((size, buffer, workers.submit(extent.read, buffer)))
                if len(ahead) > threads or (extent is None and ahead):
                    size, buffer, damage = ahead.popleft()
                    yield buffer[:size], damage.result()
                    if len(buffer) == buffer_bytes:
                        spare.append(buffer)
        finally:
            for _, _, damage in ahead:
                damage.cancel()
