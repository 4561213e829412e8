"""Write one data file: blocks and objects of any length, the header last.

What all images share. Knows nothing of what a file holds, of other files or of commits.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from laststep.codecs.digests import digest_text
from laststep.format.header import encode_header
from laststep.format.manifest import FileRecord
from laststep.terms import ALIGN_BYTES, align_up

if TYPE_CHECKING:
    from laststep.format.header import Header
    from laststep.storage.store import FileWriting

Objects = list[tuple[str, bytes]]
OpenWriter = Callable[[str, int], "FileWriting"]
"""Begins a file of that name within the store, with the bytes that are expected."""

_APPENDED_BYTES = 4 << 20


class Appender:
    """Puts bytes of any length one behind the other, and writes them in aligned pieces. Several
    threads may append at once: each piece is written by the one that filled it."""

    def __init__(self, writer: FileWriting, at: int) -> None:
        """`at` is where the first byte goes in the file, a multiple of the alignment."""
        self._writer = writer
        self._at = at
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []
        self._piece = mmap.mmap(-1, _APPENDED_BYTES)
        self._filled = 0
        self.size_bytes = 0
        """How much has been appended."""

    def append(self, data: bytes | memoryview) -> int:
        """Append all of it; where it begins, counted from the first byte."""
        full: list[tuple[int, mmap.mmap]] = []
        with self._lock:
            start = self.size_bytes
            left = memoryview(data)
            while left:
                count = min(len(left), _APPENDED_BYTES - self._filled)
                self._piece[self._filled : self._filled + count] = left[:count]
                left = left[count:]
                self._filled += count
                self.size_bytes += count
                if self._filled == _APPENDED_BYTES:
                    full.append((self._at + self.size_bytes - _APPENDED_BYTES, self._piece))
                    self._piece = (
                        self._spare.pop() if self._spare else mmap.mmap(-1, _APPENDED_BYTES)
                    )
                    self._filled = 0
        for offset, piece in full:
            self._write(offset, piece, _APPENDED_BYTES)
            with self._lock:
                self._spare.append(piece)
        return start

    def finish(self) -> None:
        """Write what is left. Nothing may be appended after this."""
        offset = self._at + self.size_bytes - self._filled
        self._write(offset, self._piece, align_up(self._filled, self._writer.alignment_bytes))
        self._spare.clear()

    def _write(self, offset: int, piece: mmap.mmap, size: int) -> None:
        with memoryview(piece) as view, view[:size] as used:
            if size:
                self._writer.write_at(offset, used)


def sealed(writer: FileWriting, name: str, header: Header, region_bytes: int) -> FileRecord:
    """Write the header of a file of which all else is written, and make it durable."""
    region = encode_header(header, region_bytes=region_bytes)
    write_aligned(writer, 0, region)
    own = [entry.stop for entry in header.objects if entry.file == 0]
    size = region_bytes + (own[-1] if own else header.held_bytes)
    writer.finish(size)
    return FileRecord(
        name=name, size_bytes=size, header_bytes=region_bytes, header_digest=digest_text(region),
        lossy=tuple(sorted(set(header.lossy.values()))),
    )  # fmt: skip


def write_aligned(writer: FileWriting, offset: int, data: bytes) -> None:
    """Write bytes from ordinary memory through a page-aligned copy."""
    with mmap.mmap(-1, align_up(max(len(data), 1), ALIGN_BYTES)) as buffer:
        buffer[: len(data)] = data
        whole = align_up(len(data), writer.alignment_bytes)
        with memoryview(buffer) as view, view[:whole] as used:
            writer.write_at(offset, used)
