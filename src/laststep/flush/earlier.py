"""Blocks as they were written before, kept in memory so that later ones can be coded against them.

Bounded: where there is no room, nothing more is kept, and blocks of a file for which it did not pay
are let go.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple

_TRIED_BLOCKS = 64
"""After so many tries it is known whether keeping the blocks of a file pays."""
_LEAST_PAID = 0.25


class KeptBlock(NamedTuple):
    """A block, and the digest by which it is known again."""

    digest: bytes
    data: bytes


class Earlier:
    """The memory of one flusher."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._kept: dict[str, dict[int, KeptBlock]] = {}
        self._tried: Counter[str] = Counter()
        self._paid: Counter[str] = Counter()

    def find(self, file: str, number: int, digest: bytes) -> memoryview | None:
        """That block of a file, if it is here with just that content."""
        kept = self._kept.get(file, {}).get(number)
        return None if kept is None or kept.digest != digest else memoryview(kept.data)

    def has(self, file: str) -> bool:
        """Whether any block of that file is here."""
        return bool(self._kept.get(file))

    def keep(self, file: str, number: int, digest: bytes, data: memoryview) -> None:
        """Keep a block in place of what was here of it; or not, where there is no room for it."""
        with self._lock:
            blocks = self._kept.setdefault(file, {})
            before = blocks.pop(number, None)
            self._bytes -= 0 if before is None else len(before.data)
            if self._bytes + len(data) > self._most_bytes or not self._pays(file):
                return
            self._bytes += len(data)
            blocks[number] = KeptBlock(digest, bytes(data))

    def tried(self, file: str, *, paid: bool) -> None:
        """A block was, or was not, smaller for the one that was kept."""
        with self._lock:
            self._tried[file] += 1
            self._paid[file] += paid
            if not self._pays(file):
                self._drop(file)

    def forget(self, file: str) -> None:
        """Its tensors are others now."""
        with self._lock:
            self._drop(file)
            self._tried.pop(file, None)
            self._paid.pop(file, None)

    def _pays(self, file: str) -> bool:
        tried = self._tried[file]
        return tried < _TRIED_BLOCKS or self._paid[file] >= _LEAST_PAID * tried

    def _drop(self, file: str) -> None:
        self._bytes -= sum(len(kept.data) for kept in self._kept.pop(file, {}).values())
