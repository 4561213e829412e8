"""A store in the memory of this process, for tests: `memory://name`.

All stores of a process with the same URL share their files. No other process sees them, so a
`Checkpointer` needs `flush="thread"`. They are gone when the process exits, or after `clear`.
"""

from __future__ import annotations

import threading
import time

import msgspec

from laststep.errors import AlreadyExistsError, NotFoundError, UsageError
from laststep.storage.store import Lock, Store, StoreEntry, check_name, too_large

__all__ = ["MemoryStore", "clear"]


class _MemoryFile(msgspec.Struct, frozen=True):
    """The bytes of a file, which may have several names; `data` is None for a folder."""

    data: bytearray | None
    made_s: float = msgspec.field(default_factory=time.time)


_mutex = threading.RLock()
_files: dict[str, _MemoryFile] = {}
"""Files and folders by URL."""
_locks: dict[str, set[int]] = {}
"""Held locks by URL, with the places that are marked."""


def clear(url: str = "memory://") -> None:
    """Delete everything in the store of that URL; by default in all of them."""
    below = url if url.endswith("/") else f"{url}/"
    with _mutex:
        for name in [name for name in _files if name == url or name.startswith(below)]:
            del _files[name]


class _MemoryWriter:
    alignment_bytes = 1

    def __init__(self, data: bytearray, where: str) -> None:
        self._data: bytearray | None = data
        self._where = where

    def write_at(self, offset: int, data: memoryview) -> None:
        with _mutex:
            file = self._open()
            file.extend(bytes(max(0, offset + data.nbytes - len(file))))
            file[offset : offset + data.nbytes] = data.cast("B")

    def finish(self, size_bytes: int) -> None:
        with _mutex:
            file = self._open()
            del file[size_bytes:]
            file.extend(bytes(size_bytes - len(file)))
            self._data = None

    def close(self) -> None:
        self._data = None

    def _open(self) -> bytearray:
        if self._data is None:
            raise UsageError("cannot write to a file that has been closed", where=self._where)
        return self._data


class _MemoryReader:
    alignment_bytes = 1

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, into: memoryview) -> int:
        with _mutex, memoryview(self._data) as data:
            found = data[offset : min(offset + into.nbytes, self.size_bytes)]
            into.cast("B")[: len(found)] = found
            return len(found)

    def close(self) -> None:
        pass


class _MemoryLock(Lock):
    def __init__(self, url: str) -> None:
        self._url = url
        self._marks = _locks[url] = set()

    def mark(self, place: int) -> None:
        self._marks.add(place)

    def clear(self, place: int) -> None:
        self._marks.discard(place)

    def close(self) -> None:
        if _locks.get(self._url) is self._marks:
            del _locks[self._url]


class MemoryStore(Store):
    """The files of this process below one URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def locks_tell(self) -> bool:
        return True

    def list(self, folder: str) -> list[StoreEntry]:
        above = f"{self._at(folder) if folder else self._url}/"
        entries = []
        with _mutex:
            for url, file in sorted(_files.items()):
                name = url.removeprefix(above)
                if url.startswith(above) and "/" not in name:
                    entries.append(
                        StoreEntry(
                            name=name,
                            is_folder=file.data is None,
                            size_bytes=len(file.data or b""),
                            modified_s=file.made_s,
                        )
                    )
        return entries

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        with _mutex:
            data = self._file(name)
            if len(data) > limit_bytes:
                raise too_large(self._at(name), limit_bytes, len(data))
            return bytes(data)

    def create(self, name: str, data: bytes) -> None:
        self._add(name, _MemoryFile(bytearray(data)))

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        above = check_name(name).rpartition("/")[0]
        with _mutex:
            if parents and above and self._at(above) not in _files:
                self.make_folder(above)
            self._add(name, _MemoryFile(None))

    def delete(self, name: str) -> None:
        with _mutex:
            _files.pop(self._at(name), None)

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        clear(self._at(name))

    def open_writer(self, name: str, *, expected_bytes: int) -> _MemoryWriter:
        data = bytearray()
        self._add(name, _MemoryFile(data))
        return _MemoryWriter(data, self._at(name))

    def link(self, name: str, new: str) -> bool:
        with _mutex:
            self._file(name)
            self._add(new, _files[self._at(name)])
        return True

    def open_reader(self, name: str, *, cached: bool = False) -> _MemoryReader:
        with _mutex:
            return _MemoryReader(self._file(name))

    def lock(self, name: str) -> _MemoryLock:
        with _mutex:
            if self.is_locked(name):
                raise AlreadyExistsError("the lock is held", where=self._at(name))
            if self._at(name) not in _files:
                self.create(name, b"")
            return _MemoryLock(self._at(name))

    def is_locked(self, name: str) -> bool:
        return self._at(name) in _locks

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        return tuple((place, place) for place in sorted(_locks.get(self._at(name), ())))

    def _at(self, name: str) -> str:
        return f"{self._url}/{check_name(name)}"

    def _file(self, name: str) -> bytearray:
        file = _files.get(self._at(name))
        if file is None or file.data is None:
            raise NotFoundError("there is no such file", where=self._at(name))
        return file.data

    def _add(self, name: str, file: _MemoryFile) -> None:
        at, above = self._at(name), name.rpartition("/")[0]
        with _mutex:
            folder = _files.get(self._at(above)) if above else _MemoryFile(None)
            if folder is None or folder.data is not None:
                raise NotFoundError("there is no such folder", where=at)
            if at in _files:
                raise AlreadyExistsError("the name is taken", where=at)
            _files[at] = file
