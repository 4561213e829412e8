"""Read planned ranges of stored files through slots, verify every block, deliver the bytes.

Knows nothing of what the bytes mean, nor of torch. Each of several threads takes one range after
the other through a slot of its own: while some read, as many verify (`read/blocks.py`) and deliver.
What a reader has in memory of its own is verified and delivered from there, where the room allows
that. The first error stops all of them. Whatever ends a read, an interrupt of the calling thread
too, no thread of it touches a slot or a target after `read_all` has returned or raised.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from laststep.plan.reads import Read
from laststep.process import signals
from laststep.process import threads as threads_of
from laststep.read.blocks import Extent, refuse

if TYPE_CHECKING:
    from laststep.read.blocks import Readable
    from laststep.read.files import DataFile

_log = logging.getLogger(__name__)


class Room(Protocol):
    """Where reads land: the pool, or memory that a restore has for itself."""

    lands_all: bool
    """Whether bytes that lie in memory have to come here too, because a device reads them here."""

    def lease(self, timeout_s: float | None = None) -> int | None: ...

    def view(self, slot: int) -> memoryview: ...

    def release(self, slot: int) -> None: ...


_LOOK_S = 0.2
"""How often one who waits looks by itself whether another has failed, or all is done."""

Deliver = Callable[[Read, memoryview], None]


def read_all(
    files: Sequence[DataFile], reads: Sequence[Read], room: Room, deliver: Deliver, *, threads: int
) -> int:
    """Carry out all reads, so many at a time; `deliver(read, data)` is called on the reading
    threads with verified bytes, which are gone when it returns. Returns the number of bytes read.
    Raises the first error."""
    pipeline = _Pipeline(files, reads, room, deliver, threads)
    # Nobody waits for memory: one thread for each core does all there is to do.
    stored = any(not files[number].in_memory for number in {read.file for read in reads})
    workers = [
        threading.Thread(target=pipeline.run, name=f"laststep-read-{n}", daemon=True)
        for n in range(min((1 + stored) * threads, len(reads)))
    ]
    try:
        for worker in workers:
            threads_of.start(worker)
        pipeline.wait()
    finally:
        pipeline.end(workers)
    if pipeline.errors:
        raise pipeline.errors[0]
    return sum(read.stop - read.start for read in reads)


class _Pipeline:
    """Some threads keep the disk busy, the others verify and copy. Slots bound the memory.

    A thread keeps a read from its beginning to its end. Handing slots from readers to verifiers
    woke all who waited for one, each time: 16 of each, out of memory, waited for the GIL for three
    quarters of their time.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        reads: Sequence[Read],
        room: Room,
        deliver: Deliver,
        threads: int,
    ) -> None:
        self.errors: list[BaseException] = []
        self._files = files
        self._room = room
        self._deliver = deliver
        self._todo: queue.SimpleQueue[Read] = queue.SimpleQueue()
        for read in reads:
            self._todo.put(read)
        self._reading = threading.Semaphore(threads)
        self._lock = threading.Lock()  # guards the three below
        self._left = len(reads)
        self._inside = 0
        self._stopped = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    # On the calling thread

    def wait(self) -> None:
        """Until everything was delivered or something failed."""
        while self._left and not self._stopped:
            self._doze()
            signals.let_in()

    def end(self, workers: Sequence[threading.Thread]) -> None:
        """Stop what still runs, and wait until no thread is inside any more, come what may.

        The threads write into the pool and into live tensors, which the caller may free or read as
        soon as this is over. So an exception that a signal's handler raises meanwhile has to wait.
        Who is inside is counted here: a `join` that was interrupted takes its thread for ended
        (CPython 3.11), and an interrupted `start` does not say whether there is a thread.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                if interrupt is not None:
                    _log.warning("%r has to wait for reads that are under way", interrupt)
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
        # The counts tell what is so, a token only wakes: an interrupt may have taken it along.
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=_LOOK_S)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True  # from here on nobody comes in
        self._wake.put(None)

    # On the workers

    def run(self) -> None:
        """Carry out one read after the other, until there are none left or something failed."""
        with self._lock:
            if self._stopped:
                return
            self._inside += 1
        try:
            while not self._stopped:
                self._carry_out(self._todo.get_nowait())
                with self._lock:
                    self._left -= 1
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again by read_all)
            self.errors.append(error)
            self._stop()
        finally:
            with self._lock:
                self._inside -= 1
            self._wake.put(None)

    def _carry_out(self, read: Read) -> None:
        extent = self._files[read.file].blocks(read.start, read.stop)
        there = self._in_place(extent)
        if there is not None:
            self._hand_over(read, there)
            return
        slot = self._lease()
        if slot is None:
            return
        try:
            data = self._room.view(slot)
            with self._reading:
                got = 0 if self._stopped else extent.fill(data)
            if not self._stopped:
                refuse(extent.verify(data, got))
                self._hand_over(read, data)
        finally:
            self._room.release(slot)

    def _in_place(self, extent: Readable) -> memoryview | None:
        """All of it in memory of its reader, where it may stay there and is right; else it is read,
        and what is wrong is told."""
        if self._room.lands_all or not isinstance(extent, Extent):
            return None
        with self._reading:
            there = extent.in_place()
        return there if there is not None and extent.is_right(there) else None

    def _hand_over(self, read: Read, data: memoryview) -> None:
        if not self._stopped:
            self._deliver(read, data)

    def _lease(self) -> int | None:
        while not self._stopped:
            slot = self._room.lease(_LOOK_S)
            if slot is not None:
                return slot
        return None
