"""Go through one data file, chunk by chunk: read, verify, and write it elsewhere.

Any thread takes any chunk. Chunks begin where those of a save do, so the blocks of most files lie
within one. A range that reaches beyond its chunk is verified by the chunk that it begins in, which
reads on; what later chunks then read of it themselves has to be the same. Without a writer a file
is only read: so it is found whether what an interrupted copy left is right.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.codecs.digests import digest
from laststep.errors import Corrupt, StorageFailed
from laststep.format.envelope import DAMAGE_REMEDY
from laststep.read.blocks import refuse
from laststep.terms import ALIGN_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.read.stored import FileToCopy, StoredRange
    from laststep.storage.store import FileReading, FileWriting
    from laststep.tiers.pacing import Pacing

_of_thread = threading.local()


@dataclass(slots=True, kw_only=True)
class FileChunk:
    """Bytes [start, stop) of a file; the ranges that begin in it, and where one that began earlier
    ends."""

    start: int
    stop: int
    ranges: list[StoredRange] = field(default_factory=list)
    earlier_stop: int = 0


def chunks_of(file: FileToCopy) -> list[FileChunk]:
    """The header, which is a chunk of its own, and the data."""
    size, data_at = file.file.size_bytes, file.header_bytes
    starts = [*range(0, data_at, max(data_at, 1)), *range(data_at, size, CHUNK_BYTES)]
    chunks = [
        FileChunk(start=start, stop=stop)
        for start, stop in zip(starts, [*starts[1:], size], strict=True)
    ]
    for part in file.ranges.values():
        behind = max(0, part.start - data_at) // CHUNK_BYTES
        number = min(behind + (data_at > 0 and part.start >= data_at), len(chunks) - 1)
        chunks[number].ranges.append(part)
        for later in chunks[number + 1 :]:
            if part.stop <= later.start:
                break
            later.earlier_stop = max(later.earlier_stop, min(part.stop, later.stop))
    return chunks


class FilePass:
    """One file on its way. `reader` is where it is read: of the original, or of what is there."""

    def __init__(
        self,
        file: FileToCopy,
        reader: FileReading,
        pacing: Pacing,
        open_writer: Callable[[], FileWriting] | None = None,
    ) -> None:
        self.file = file
        self.chunks = chunks_of(file)
        self._reader = reader
        self._pacing = pacing
        self._open_writer = open_writer
        self._writer: FileWriting | None = None
        self._left = len(self.chunks)
        self._seen: dict[int, bytes] = {}
        self._mutex = threading.Lock()

    def take(self, chunk: FileChunk) -> int:
        """Do one chunk, each once, and with the last one make the file durable; its bytes."""
        size = chunk.stop - chunk.start
        self._pacing.take(size)
        stop = max([chunk.stop, *(part.stop for part in chunk.ranges)])
        view = _buffer(stop - chunk.start)
        self._read(chunk.start, stop, view)
        for part in chunk.ranges:
            own = view[part.start - chunk.start : part.stop - chunk.start]
            refuse(part.verify(own, self._reader))
        self._compare(chunk, stop, view)
        if self._open_writer is not None:
            writer = self._opened(self._open_writer)
            padded = align_up(size, writer.alignment_bytes)
            writer.write_at(chunk.start, view[:padded])
        with self._mutex:
            self._left -= 1
            is_last = self._left == 0
        if is_last and self._writer is not None:
            self._writer.finish(self.file.file.size_bytes)
        return size

    def close(self) -> None:
        """Let go of the file; one that is not whole is left as it is."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self, open_writer: Callable[[], FileWriting]) -> FileWriting:
        with self._mutex:
            if self._writer is None:
                self._writer = open_writer()
            return self._writer

    def _read(self, start: int, stop: int, view: memoryview) -> None:
        try:  # up to a whole page: a direct read of these is not copied
            got = self._reader.read_into(start, view[: align_up(stop - start, ALIGN_BYTES)])
        except StorageFailed as error:
            if not error.device_failed:
                raise
            # A device that fails has damaged this file, and not the others.
            raise Corrupt(
                "a data file cannot be read", where=self.file.where, found=error.found,
                remedy=DAMAGE_REMEDY,
            ) from error  # fmt: skip
        if start + got < stop:
            raise Corrupt(
                "a data file is too short", where=self.file.where,
                expected=f"at least {stop} bytes", found=f"{start + got} bytes",
                remedy=DAMAGE_REMEDY,
            )  # fmt: skip

    def _compare(self, chunk: FileChunk, stop: int, view: memoryview) -> None:
        """What two chunks have read has to be the same: only one of them has verified it."""
        if chunk.earlier_stop:
            self._agree(chunk.start, view[: chunk.earlier_stop - chunk.start])
        at = chunk.stop
        while at < stop:  # chunks of data are all of one size, but for the last
            end = min(at + CHUNK_BYTES, stop)
            self._agree(at, view[at - chunk.start : end - chunk.start])
            at = end

    def _agree(self, start: int, part: memoryview) -> None:
        found = digest(part)
        with self._mutex:
            other = self._seen.setdefault(start, found)
        if other != found:
            error = StorageFailed(
                "the same bytes were read twice, and differ", where=self.file.where,
                found=f"other bytes from {start} to {start + len(part)}",
                remedy="copy again; `laststep verify` says whether they are damaged",
            )  # fmt: skip
            error.transient = True
            raise error


def _buffer(size: int) -> memoryview:
    """Memory of this thread, page-aligned, used again for each chunk."""
    kept: memoryview | None = getattr(_of_thread, "buffer", None)
    if kept is None or len(kept) < size:
        kept = memoryview(mmap.mmap(-1, align_up(max(size, CHUNK_BYTES), ALIGN_BYTES)))
        _of_thread.buffer = kept
    return kept
