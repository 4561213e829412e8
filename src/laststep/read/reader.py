"""Read planned ranges of stored files through slots, verify every block, deliver the bytes.

Knows nothing of what the bytes mean, nor of torch. Several threads read, each into a slot of its
own, and as many verify behind them (`read/blocks.py`). The first error stops all of them. Whatever
ends a read, an interrupt of the calling thread too, no thread of it touches a slot or a target
after `read_all` has returned or raised.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from laststep.plan.load import Read
from laststep.process import interrupts
from laststep.process import threads as threads_of
from laststep.read.blocks import refuse

if TYPE_CHECKING:
    from laststep.read.blocks import Readable
    from laststep.read.files import DataFile

_log = logging.getLogger(__name__)


class Room(Protocol):
    """Where reads land: the pool, or memory that a restore has for itself."""

    def lease(self, timeout_s: float | None = None) -> int | None: ...

    def view(self, slot: int) -> memoryview: ...

    def release(self, slot: int) -> None: ...


_LOOK_S = 0.2
"""How often one who waits looks by itself whether another has failed, or all is done."""

Deliver = Callable[[Read, int], None]


def read_all(
    files: Sequence[DataFile], reads: Sequence[Read], room: Room, deliver: Deliver, *, threads: int
) -> int:
    """Carry out all reads; `deliver(read, slot)` is called on the reading threads with verified
    bytes, which are gone when it returns. Returns the number of bytes read. Raises the first
    error."""
    pipeline = _Pipeline(files, reads, room, deliver)
    readers = min(threads, len(reads))
    jobs = [pipeline.read] * readers + [pipeline.deliver] * readers
    workers = [
        threading.Thread(target=pipeline.run, args=(job,), name=f"laststep-read-{n}", daemon=True)
        for n, job in enumerate(jobs)
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
    """Readers keep the disk busy; deliverers verify and copy behind them. Slots bound the queue."""

    def __init__(
        self, files: Sequence[DataFile], reads: Sequence[Read], room: Room, deliver: Deliver
    ) -> None:
        self.errors: list[BaseException] = []
        self._files = files
        self._room = room
        self._deliver = deliver
        self._todo: queue.SimpleQueue[Read] = queue.SimpleQueue()
        for read in reads:
            self._todo.put(read)
        self._landed: queue.SimpleQueue[tuple[Read, int, int] | None] = queue.SimpleQueue()
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
            interrupts.let_in()

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
        self._release_rest()
        if interrupt is not None:
            raise interrupt

    def _doze(self) -> None:
        # The counts tell what is so, a token only wakes: an interrupt may have taken it along.
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=_LOOK_S)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True  # from here on nobody comes in
        self._landed.put(None)
        self._wake.put(None)

    def _release_rest(self) -> None:
        """After all threads have ended: slots of reads that nobody took, because one failed."""
        while not self._landed.empty():
            landed = self._landed.get()
            if landed is not None:
                self._room.release(landed[1])

    # On the workers

    def run(self, job: Callable[[], None]) -> None:
        """Do a job, unless it is all over by now."""
        with self._lock:
            if self._stopped:
                return
            self._inside += 1
        try:
            job()
        finally:
            with self._lock:
                self._inside -= 1
            self._wake.put(None)

    def read(self) -> None:
        """Read one range after the other, each into a slot, until there are none left."""
        while not self._stopped:
            try:
                read = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                slot = self._lease()
                if slot is None:
                    return
                try:
                    got = self._extent(read).fill(self._room.view(slot))
                except BaseException:
                    self._room.release(slot)
                    raise
                self._landed.put((read, slot, got))
            except BaseException as error:  # noqa: BLE001 (raised again by read_all)
                self._fail(error)

    def deliver(self) -> None:
        """Verify what has landed and deliver it, until everything was or something failed."""
        while (landed := self._landed.get()) is not None:
            read, slot, got = landed
            try:
                if not self._stopped:
                    refuse(self._extent(read).verify(self._room.view(slot), got))
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

    def _extent(self, read: Read) -> Readable:
        return self._files[read.file].blocks(read.start, read.stop)

    def _lease(self) -> int | None:
        while not self._stopped:
            slot = self._room.lease(_LOOK_S)
            if slot is not None:
                return slot
        return None

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self._stop()
