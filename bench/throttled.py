"""A folder behind a slow line: what is written to it takes as long as it would over so many bytes a
second, by all files together. For benchmarks: `slow+200://path` takes 200 MB a second.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from laststep.storage.store import FileWriting

SCHEME = "slow"


class Line:
    """Gives out time slots one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, size_bytes: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = end = begin + size_bytes / self._bytes_per_s
        time.sleep(max(end - time.monotonic(), 0))


class SlowWriting:
    """A file at the other end of the line."""

    def __init__(self, writer: FileWriting, line: Line) -> None:
        self._writer = writer
        self._line = line
        self.alignment_bytes = writer.alignment_bytes

    def write_at(self, offset: int, data: memoryview) -> None:
        self._line.carry(len(data))
        self._writer.write_at(offset, data)

    def finish(self, size_bytes: int) -> None:
        self._writer.finish(size_bytes)

    def close(self) -> None:
        self._writer.close()


class SlowStore(DirectoryStore):
    """A folder that is written to over a line."""

    def __init__(self, url: str) -> None:
        rate, _, path = url.partition("://")[2].partition("/")
        super().__init__(f"/{path}")
        self._url = url
        self._line = Line(float(rate) * 1e6)

    @property
    def url(self) -> str:
        return self._url

    def open_writer(self, name: str, *, expected_bytes: int) -> SlowWriting:  # type: ignore[override]
        return SlowWriting(super().open_writer(name, expected_bytes=expected_bytes), self._line)


def url_of(path: object, mb_per_s: float) -> str:
    """The folder at that path, behind a line."""
    return f"{SCHEME}://{mb_per_s:g}{path}"
