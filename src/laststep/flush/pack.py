"""The pack file of a save: blocks that are not part of a data file, stored back to back.

Blocks may arrive in any order and from several threads at once. The file is created with the first
block.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

from laststep.constants import align_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.storage.store import FileWriting

_PIECE_BYTES = 4 << 20


class PackWriter:
    """Appends blocks of any length and writes them in aligned pieces; each piece is written by the
    thread that filled it."""

    def __init__(self, open_writer: Callable[[], FileWriting]) -> None:
        self._open_writer = open_writer
        self._writer: FileWriting | None = None
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []
        self._piece: mmap.mmap | None = None
        self._filled = 0
        self.size_bytes = 0
        """Number of bytes appended."""

    def append(self, data: bytes | memoryview) -> int:
        """Append all of `data` and return its offset in the file."""
        full: list[tuple[int, mmap.mmap]] = []
        with self._lock:
            writer = self._opened()
            start = self.size_bytes
            left = memoryview(data)
            while left:
                piece = self._piece
                if piece is None:
                    piece = self._spare.pop() if self._spare else mmap.mmap(-1, _PIECE_BYTES)
                    self._piece, self._filled = piece, 0
                count = min(len(left), _PIECE_BYTES - self._filled)
                piece[self._filled : self._filled + count] = left[:count]
                left = left[count:]
                self._filled += count
                self.size_bytes += count
                if self._filled == _PIECE_BYTES:
                    full.append((self.size_bytes - _PIECE_BYTES, piece))
                    self._piece, self._filled = None, 0
        for offset, piece in full:
            _write(writer, offset, piece, _PIECE_BYTES)
            with self._lock:
                self._spare.append(piece)
        return start

    def _opened(self) -> FileWriting:
        if self._writer is None:
            self._writer = self._open_writer()
        return self._writer

    def finish(self) -> None:
        """Write the last piece and make the file durable, if there is one."""
        self._spare.clear()
        if self._writer is None:
            return
        if self._piece is not None:
            size = align_up(self._filled, self._writer.alignment_bytes)
            _write(self._writer, self.size_bytes - self._filled, self._piece, size)
        self._writer.finish(self.size_bytes)

    def close(self) -> None:
        """Close the file; does nothing to a finished one."""
        if self._writer is not None:
            self._writer.close()


def _write(writer: FileWriting, offset: int, piece: mmap.mmap, size: int) -> None:
    with memoryview(piece) as view, view[:size] as used:
        writer.write_at(offset, used)
