"""A store that is no folder: files in a dict of this process, as a third party might write one."""

from __future__ import annotations

import threading
import time

from laststep.errors import Corrupt, Exists, NotFound, Usage
from laststep.storage.store import Lock, Store, StoreEntry, check_name

_mutex = threading.RLock()
_locks: dict[str, set[int]] = {}
files: dict[str, tuple[bytearray | None, float]] = {}
"""By their URLs: the bytes of a file, or None for a folder, and when it was made."""


class MemoryWriter:
    alignment_bytes = 1

    def __init__(self, data: bytearray, where: str) -> None:
        self._data: bytearray | None = data
        self._where = where

    def write_at(self, offset: int, data: memoryview) -> None:
        file = self._open()
        if len(file) < offset + data.nbytes:
            file.extend(bytes(offset + data.nbytes - len(file)))
        file[offset : offset + data.nbytes] = data

    def finish(self, size_bytes: int) -> None:
        del self._open()[size_bytes:]
        self._data = None

    def close(self) -> None:
        self._data = None

    def _open(self) -> bytearray:
        if self._data is None:
            raise Usage("cannot write to a file that has been closed", where=self._where)
        return self._data


class MemoryReader:
    alignment_bytes = 1

    def __init__(self, data: bytearray) -> None:
        self._data = bytes(data)
        self.size_bytes = len(data)

    def read_into(self, offset: int, into: memoryview) -> int:
        found = self._data[offset : offset + into.nbytes]
        into[: len(found)] = found
        return len(found)

    def close(self) -> None:
        pass


class MemoryLock(Lock):
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
    """Ten methods and a URL; the eleventh is for marks, which a store may do without."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def list(self, folder: str) -> list[StoreEntry]:
        above = f"{self._at(folder) if folder else self._url}/"
        with _mutex:
            found = [(url[len(above) :], *files[url]) for url in files if url.startswith(above)]
        return [
            StoreEntry(
                name=name, is_folder=data is None, size_bytes=len(data or b""), modified_s=made
            )
            for name, data, made in sorted(found)
            if "/" not in name
        ]

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        data = self._file(name)
        if len(data) > limit_bytes:
            raise Corrupt("a file is too large", where=self._at(name))
        return bytes(data)

    def create(self, name: str, data: bytes) -> None:
        self._add(name, bytearray(data))

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        above = check_name(name).rpartition("/")[0]
        if parents and above and self._at(above) not in files:
            self.make_folder(above)
        self._add(name, None)

    def delete(self, name: str) -> None:
        files.pop(self._at(name), None)

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        at = self._at(name)
        with _mutex:
            for url in [url for url in files if url == at or url.startswith(f"{at}/")]:
                del files[url]

    def open_writer(self, name: str, *, expected_bytes: int) -> MemoryWriter:
        data = bytearray()
        self._add(name, data)
        return MemoryWriter(data, self._at(name))

    def open_reader(self, name: str, *, cached: bool = False) -> MemoryReader:
        return MemoryReader(self._file(name))

    def lock(self, name: str) -> MemoryLock:
        with _mutex:
            if self.is_locked(name):
                raise Exists("the lock is held", where=self._at(name))
            if self._at(name) not in files:
                self.create(name, b"")
            return MemoryLock(self._at(name))

    def is_locked(self, name: str) -> bool:
        return self._at(name) in _locks

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        return tuple((place, place) for place in sorted(_locks.get(self._at(name), ())))

    def _at(self, name: str) -> str:
        return f"{self._url}/{check_name(name)}"

    def _file(self, name: str) -> bytearray:
        data, _ = files.get(self._at(name), (None, 0.0))
        if data is None:
            raise NotFound("there is no such file", where=self._at(name))
        return data

    def _add(self, name: str, data: bytearray | None) -> None:
        at = self._at(name)
        above = name.rpartition("/")[0]
        with _mutex:
            if above and files.get(self._at(above), (b"", 0.0))[0] is not None:
                raise NotFound("there is no such folder", where=at)
            if at in files:
                raise Exists("the name is taken", where=at)
            files[at] = data, time.time()
