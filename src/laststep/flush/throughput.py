"""How fast a store takes bytes, and how many cores have nothing to do: measured, never assumed.

Knows nothing of what is written.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.storage.store import FileWriting

_LEAST_BYTES = 32 << 20
"""Less tells of a store how long it takes to answer, not how fast it is."""
_FORGET = 0.5
"""What earlier saves count beside the newest."""


class Throughput:
    """Bytes, and the time in which at least one write or sync was under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    @contextmanager
    def busy(self, size_bytes: int) -> Iterator[None]:
        """While so many bytes are written."""
        with self._lock:
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._bytes += size_bytes
                if not self._under_way:
                    self._busy_s += self._clock() - self._since

    def begin_save(self) -> None:
        """What was measured before counts less from now on, if enough is left to tell."""
        with self._lock:
            if self._bytes * _FORGET >= _LEAST_BYTES:
                self._bytes *= _FORGET
                self._busy_s *= _FORGET

    @property
    def bytes_per_s(self) -> float | None:
        """None while too little was written to tell."""
        with self._lock:
            if self._bytes < _LEAST_BYTES or self._busy_s <= 0:
                return None
            return self._bytes / self._busy_s


class TimedWriting:
    """A file that is written as another is, and timed."""

    def __init__(self, writer: FileWriting, throughput: Throughput) -> None:
        self._writer = writer
        self._throughput = throughput
        self.alignment_bytes = writer.alignment_bytes

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._throughput.busy(len(data)):
            self._writer.write_at(offset, data)

    def finish(self, size_bytes: int) -> None:
        with self._throughput.busy(0):
            self._writer.finish(size_bytes)

    def close(self) -> None:
        self._writer.close()


class IdleCores:
    """How many of the cores that this process may use had nothing to do since the last look."""

    def __init__(self, read: Callable[[], tuple[int, int]] | None = None) -> None:
        self._read = read or _ticks
        self._last = self._read()
        self._idle = 0.0

    def look(self) -> float:
        """Between the two last looks that were far enough apart."""
        idle, every = self._read()
        past = every - self._last[1]
        if past > 0:
            cores = len(os.sched_getaffinity(0))
            self._idle = cores * (idle - self._last[0]) / past
            self._last = idle, every
        return self._idle


def _ticks() -> tuple[int, int]:
    """The ticks of all cores in which they were idle or waited for a disk, and all of them."""
    try:
        with open("/proc/stat", "rb") as file:  # noqa: PTH123 (pathlib takes long to import)
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return ticks[3] + ticks[4], sum(ticks)
