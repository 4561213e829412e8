"""Transfer data files to an object store and back.

An upload runs front to back, and several threads write nearly in that order. A write that comes too
early is copied and kept until its turn: in memory up to a limit, on the local disk beyond it. So no
thread ever waits for a write that another thread may not have started, and a slow server slows down
only the thread whose bytes are being sent. The object is not visible before `finish`. This module
knows nothing about folders.
"""

from __future__ import annotations

import os
import tempfile
import threading
from typing import IO, TYPE_CHECKING

from laststep.errors import LaststepError, StorageError, UsageError
from laststep.process.system import HUGE_PAGE_BYTES, huge_pages
from laststep.storage.bucket import Missing
from laststep.storage.files import failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.process.threads import WorkerPool
    from laststep.storage.bucket import Bucket, Upload

PART_BYTES = 8 << 20
"""Large enough to amortize a request, small enough to send a slot as several parts at once."""
EARLY_BYTES = 64 << 20
"""Limit on the early writes that one file keeps in memory."""
MOST_PARTS = 10_000
"""S3's limit on the parts of one upload."""
_MIB = 1 << 20


def part_bytes_of(expected_bytes: int) -> int:
    """Return the part size for a file that may become a quarter larger than expected."""
    needed = -(-expected_bytes * 5 // (4 * MOST_PARTS * _MIB)) * _MIB
    return max(PART_BYTES, needed)


def _copied(data: memoryview) -> bytes | memoryview:
    """Return a copy that nobody else changes: obstore sends from it later."""
    if data.nbytes < HUGE_PAGE_BYTES:
        return bytes(data)
    copy = huge_pages(data.nbytes)
    copy[:] = data
    return copy


class _EarlyWrites:
    """Writes that came before their turn, by offset."""

    def __init__(self) -> None:
        self._kept: dict[int, bytes | memoryview | int] = {}
        """The bytes, or their number if they are on disk, at their own offset in a file."""
        self._memory_bytes = 0
        self._file: IO[bytes] | None = None

    def add(self, offset: int, data: memoryview) -> None:
        if self._memory_bytes + data.nbytes <= EARLY_BYTES:
            self._kept[offset] = _copied(data)
            self._memory_bytes += data.nbytes
            return
        done = 0
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="laststep-")  # noqa: SIM115
            while done < data.nbytes:
                with data[done:] as rest:
                    done += os.pwrite(self._file.fileno(), rest, offset + done)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise failed("keep bytes that are uploaded later", folder, error) from error
        self._kept[offset] = data.nbytes

    def next(self) -> int | None:
        """Return the smallest offset; None if there are no early writes."""
        return min(self._kept, default=None)

    def take(self, offset: int) -> bytes | memoryview | None:
        """Remove and return the write at that offset; None if there is none."""
        kept = self._kept.pop(offset, None)
        if isinstance(kept, int):
            return None if self._file is None else os.pread(self._file.fileno(), kept, offset)
        if kept is not None:
            self._memory_bytes -= len(kept)
        return kept

    def clear(self) -> None:
        self._kept.clear()
        if self._file is not None:
            self._file.close()


class ObjectWriter:
    """A new file, see `store.FileWriting`. One that fits a part is put if its name is free."""

    alignment_bytes = 1

    def __init__(
        self, bucket: Bucket, key: str, *, expected_bytes: int, settle: Callable[[], None]
    ) -> None:
        """`settle` checks, once the object is created, that its folder still exists."""
        self._bucket, self._key, self._settle = bucket, key, settle
        self._part_bytes = part_bytes_of(expected_bytes)
        self._mutex = threading.RLock()
        self._early = _EarlyWrites()
        self._first: list[bytes | memoryview] = []
        """The start of the file, until it exceeds one part."""
        self._sent_bytes = 0
        self._upload: Upload | None = None
        self._error: LaststepError | None = None
        self._is_open = True

    def write_at(self, offset: int, data: memoryview) -> None:
        """Send `data` and the early writes that follow it; or keep a copy if it is early itself."""
        # Release views explicitly: see `FileWriter.write_at`.
        with data.cast("B") as flat, self._mutex:
            self._check_open("write")
            if offset < self._sent_bytes:
                raise UsageError(
                    "refused to write bytes that have been sent",
                    where=self._bucket.where(self._key),
                    expected=f"an offset from {self._sent_bytes} on",
                    found=f"offset {offset}",
                )
            if offset > self._sent_bytes:
                self._early.add(offset, flat)
                return
            self._send(_copied(flat))

    def _send(self, data: bytes | memoryview) -> None:
        piece: bytes | memoryview | None = data
        while piece is not None:
            self._send_one(piece)
            piece = self._early.take(self._sent_bytes)

    def _send_one(self, data: bytes | memoryview) -> None:
        self._sent_bytes += len(data)
        try:
            if self._sent_bytes > MOST_PARTS * self._part_bytes:
                raise StorageError(
                    "a file is too large to be uploaded",
                    where=self._bucket.where(self._key),
                    expected=f"at most {MOST_PARTS} parts of {self._part_bytes} bytes",
                    found=f"{self._sent_bytes} bytes",
                    remedy="save from more ranks, or without compression",
                )
            if self._upload is not None:
                self._upload.write(data)
                return
            self._first.append(data)
            if self._sent_bytes > self._part_bytes:
                first, self._first = self._first, []
                data = first[0] if len(first) == 1 else b"".join(first)
                self._upload = self._bucket.upload(self._key, data, self._part_bytes)
        except LaststepError as error:
            self._error = error
            raise

    def finish(self, size_bytes: int) -> None:
        """Complete the object with exactly that size; ranges that were never written are zeros."""
        with self._mutex:
            self._check_open("finish")
            try:
                if self._error is not None:
                    raise self._error
                self._fill(size_bytes)
                if self._upload is not None:
                    self._upload.finish()
                    self._upload = None
                elif self._bucket.create(self._key, b"".join(self._first)[:size_bytes]) is None:
                    raise self._bucket.taken(self._key)
            finally:
                self.close()
        self._settle()

    def _fill(self, size_bytes: int) -> None:
        """Send the remaining early writes, with zeros in the gaps, up to that size."""
        while self._sent_bytes < size_bytes:
            until = min(self._early.next() or size_bytes, size_bytes)
            self._send(bytes(min(PART_BYTES, until - self._sent_bytes)))
        if self._upload is not None and self._sent_bytes > size_bytes:
            raise UsageError(
                "cannot cut a file that has been sent",
                where=self._bucket.where(self._key),
                expected=f"{self._sent_bytes} bytes",
                found=f"{size_bytes} bytes",
            )

    def close(self) -> None:
        """Abandon the file unless it is finished."""
        with self._mutex:
            self._is_open = False
            self._early.clear()
            if self._upload is not None:
                self._upload.abort()
                self._upload = None

    def _check_open(self, operation: str) -> None:
        if not self._is_open:
            raise UsageError(
                f"cannot {operation} a file that has been closed",
                where=self._bucket.where(self._key),
            )


class ObjectReader:
    """A data file; see `store.FileReading`."""

    alignment_bytes = 1
    at_hand = False

    def __init__(self, bucket: Bucket, key: str, size_bytes: int, pool: WorkerPool) -> None:
        self.size_bytes = size_bytes
        self._bucket, self._key, self._pool = bucket, key, pool

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`, with several concurrent requests if it is large. All of them
        have ended on return, even after an error, because they use the caller's memory."""
        with into.cast("B") as flat:
            want = max(0, min(flat.nbytes, self.size_bytes - offset))

            def fetch(start: int) -> None:
                size = min(PART_BYTES, want - start)
                with (
                    flat[start : start + size] as piece,
                    self.in_place(offset + start, size) as got,
                ):
                    piece[:] = got

            starts, under_way = range(0, want, PART_BYTES), []
            try:
                for start in starts[1:]:
                    under_way.append(self._pool.submit(fetch, start))  # noqa: PERF401 (may raise)
            except StorageError:
                pass  # no thread can be started: do the rest here
            try:
                for start in (*starts[:1], *starts[1 + len(under_way) :]):
                    fetch(start)
            finally:
                errors = [error for task in under_way if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        return want

    def in_place(self, offset: int, size_bytes: int) -> memoryview:
        """Return the client's own buffer, filled by one request: see `store.InPlace`."""
        try:
            return self._bucket.read_range(self._key, offset, size_bytes)
        except Missing:
            raise self._bucket.absent(self._key) from None

    def close(self) -> None:
        pass
