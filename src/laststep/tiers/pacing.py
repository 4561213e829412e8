"""How fast, and how long: the two things that whoever has something copied can say meanwhile.

Both hold for all threads of a copy together. A wait for bandwidth ends at once where it is stopped.
"""

from __future__ import annotations

import threading
import time

from laststep.errors import Aborted


class Pacing:
    """Asked before each chunk. `bytes_per_s` is the most that is moved, None without a limit;
    `stop` may be set by any thread."""

    def __init__(
        self, *, bytes_per_s: float | None = None, stop: threading.Event | None = None
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._stop = stop or threading.Event()
        self._mutex = threading.Lock()
        self._free_s = 0.0  # when the next byte may go

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may go; `Aborted` where it was stopped."""
        if self._bytes_per_s is not None:
            with self._mutex:
                now_s = time.monotonic()
                begin_s = max(self._free_s, now_s)
                self._free_s = begin_s + size_bytes / self._bytes_per_s
            self._stop.wait(begin_s - now_s)
        self.check()

    def check(self) -> None:
        """`Aborted` where it was stopped."""
        if self._stop.is_set():
            raise Aborted("the copy was stopped", remedy="copy again: it goes on from there")
