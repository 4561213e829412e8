"""Reading that is interrupted: no reader is left behind that could still write into the pool."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from laststep.constants import CHUNK_BYTES
from laststep.errors import StorageError
from laststep.plan.reads import Chunk, plan_chunks
from laststep.read.reader import _Pipeline, read_all
from read.sources import blocks_over, bytes_wanted
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.read.blocks import LayoutBlocks

CHUNKS = 6


class Room:
    """A few slots, and how many of them are out."""

    lands_all = True
    slot_bytes = CHUNK_BYTES

    def __init__(self, slots: int = 3) -> None:
        self._maps = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(slots)]
        self._free = list(range(slots))
        self._changed = threading.Condition()

    @property
    def leased(self) -> int:
        return len(self._maps) - len(self._free)

    def lease(self, timeout_s: float | None = None) -> int | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                return None
            return self._free.pop()

    def view(self, slot: int) -> memoryview:
        return memoryview(self._maps[slot])

    def release(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()


class SlowReader:
    """A store's reader that stands still in the midst of a read until it is let go."""

    alignment_bytes = 1
    size_bytes = CHUNKS * CHUNK_BYTES

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.go = threading.Event()
        self.ended = 0
        self._lock = threading.Lock()

    def read_into(self, offset: int, into: memoryview) -> int:
        self.reading.set()
        assert self.go.wait(PATIENCE_S)
        into[:] = bytes(len(into))
        with self._lock:
            self.ended += 1
        return len(into)

    def close(self) -> None:
        pass


@pytest.fixture
def slow() -> Iterator[SlowReader]:
    reader = SlowReader()
    yield reader
    reader.go.set()


def zeros(reader: SlowReader) -> tuple[list[LayoutBlocks], list[Chunk]]:
    """A file of zeros, and the reads of all of it."""
    size = reader.size_bytes
    files = [blocks_over(bytes(size), f=reader)]
    return files, plan_chunks([bytes_wanted(0, size)], {0: size})


def readers_alive() -> list[str]:
    """By the system's own count: `Thread.is_alive` is wrong after an interrupted join."""
    ids = {thread.native_id: thread.name for thread in threading.enumerate()}
    alive = {int(entry.name) for entry in Path("/proc/self/task").iterdir()}
    return [name for number, name in ids.items() if number in alive and "laststep-read" in name]


class CtrlC:
    """Within `armed()` Ctrl-C raises, as it always does; elsewhere it harms nobody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inside = False
        self._handled = threading.Semaphore(0)
        self._stopped = threading.Event()
        stop = _Pipeline._stop

        def stopped(pipeline: _Pipeline) -> None:
            stop(pipeline)
            self._stopped.set()

        monkeypatch.setattr(_Pipeline, "_stop", stopped)

    def handle(self, _number: int, _frame: object) -> None:
        self._handled.release()
        if self._inside:
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def press_when(self, reading: threading.Event, then: Callable[[], None]) -> threading.Thread:
        """Press while a read is under way, again once reading is being ended for that, and let the
        read go only after both."""

        def press() -> None:
            assert reading.wait(PATIENCE_S)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                assert self._handled.acquire(timeout=PATIENCE_S)
                assert self._stopped.wait(PATIENCE_S)
            then()

        thread = threading.Thread(target=press)
        thread.start()
        return thread


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[CtrlC]:
    made = CtrlC(monkeypatch)
    before = signal.signal(signal.SIGINT, made.handle)
    yield made
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_only_after_every_read_has_ended(
    slow: SlowReader, ctrl_c: CtrlC
) -> None:
    room = Room()
    files, reads = zeros(slow)
    delivered: list[Chunk] = []
    presser = ctrl_c.press_when(slow.reading, slow.go.set)
    with pytest.raises(KeyboardInterrupt), ctrl_c.armed():
        read_all(files, reads, room, lambda read, data: delivered.append(read), threads=2)
    assert slow.go.is_set(), "the interrupt left while reads into the pool were under way"
    ended = slow.ended
    assert room.leased == 0
    assert delivered == []
    assert readers_alive() == []
    presser.join()
    assert slow.ended == ended <= 2
    assert room.leased == 0


def test_an_interrupt_while_readers_wait_for_room_leaves_too(
    slow: SlowReader, ctrl_c: CtrlC
) -> None:
    room = Room(slots=1)
    (taken,) = (room.lease(),)
    files, reads = zeros(slow)
    waiting = threading.Event()
    lease = room.lease

    def seen(timeout_s: float | None = None) -> int | None:
        waiting.set()
        return lease(timeout_s)

    room.lease = seen  # type: ignore[method-assign]
    presser = ctrl_c.press_when(waiting, slow.go.set)
    with pytest.raises(KeyboardInterrupt), ctrl_c.armed():
        read_all(files, reads, room, lambda read, data: None, threads=2)
    presser.join()
    assert readers_alive() == []
    assert (room.leased, slow.ended) == (1, 0)
    room.release(taken)


def test_a_thread_that_cannot_be_started_stops_those_that_were(
    slow: SlowReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room()
    files, reads = zeros(slow)
    start = threading.Thread.start
    refused = threading.Event()
    started: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            assert slow.reading.wait(PATIENCE_S)
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def let_go() -> None:
        assert refused.wait(PATIENCE_S)
        threading.Event().wait(0.2)  # for an error that does not wait for the reader to leave
        slow.go.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StorageError, match="can't start new thread"):
        read_all(files, reads, room, lambda read, data: None, threads=2)
    assert slow.ended == 1
    assert room.leased == 0
    assert readers_alive() == []
    letting_go.join()
