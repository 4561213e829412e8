"""Bring the data files of one checkpoint to another store: by a link, or chunk by chunk.

What lies there already, of a copy that was interrupted, is read and kept if it is right. Several
threads each have one chunk in memory, and what it takes to decode a block. The first error ends
all; nothing is published here.

A file that the target has in another checkpoint is linked. Bandwidth and a stop hold for all
threads of a copy together.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import FileId, file_id, read_indexes
from laststep.catalog.listing import Scanner
from laststep.codecs.digests import digest
from laststep.errors import AbortedError, CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format.manifest import DAMAGE_REMEDY, Commit
from laststep.process.threads import Workers
from laststep.read.blocks import refuse
from laststep.read.files import OpenIndex
from laststep.read.stored import files_to_copy
from laststep.terms import ALIGN_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.format.index import Index, StoredFile
    from laststep.read.stored import FileToCopy, StoredRange
    from laststep.storage.store import FileReading, FileWriting, Store


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
        """Wait until so many bytes may go; `AbortedError` where it was stopped."""
        if self._bytes_per_s is not None:
            with self._mutex:
                now_s = time.monotonic()
                begin_s = max(self._free_s, now_s)
                self._free_s = begin_s + size_bytes / self._bytes_per_s
            self._stop.wait(begin_s - now_s)
        self.check()

    def check(self) -> None:
        """`AbortedError` where it was stopped."""
        if self._stop.is_set():
            raise AbortedError("the copy was stopped", remedy="copy again: it goes on from there")


class Links:
    """The files of the checkpoints at the target that others may share."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[FileId, str] = {}
        self._looked_into: set[str] = set()
        self._looked = False
        self._works = True

    def link(self, file: StoredFile, folder: str) -> bool:
        """Give a file that is there a name in this folder too; False where there is none, or the
        store has no links."""
        self._look(file)
        place = self._places.get(file_id(file, folder))
        if place is None or not self._works:
            return False
        try:
            self._works = self._store.link(place, f"{folder}/{file.name}")
        except NotFoundError:  # deleted meanwhile
            return False
        return self._works

    def add(self, folder: str, files: Iterable[StoredFile]) -> None:
        """Note the files of a checkpoint that is committed."""
        self._looked_into.add(folder)
        for file in files:
            self._places.setdefault(file_id(file, folder), f"{folder}/{file.name}")

    def _look(self, file: StoredFile) -> None:
        """Look once through the checkpoints that share anything; and into that for which the file
        was written, which may share nothing that it knows of."""
        if not self._looked:
            self._looked = True
            for name in Scanner(self._store).names():
                self._add_stored(name.folder, only_sharing=True)
        if file.origin and file.origin not in self._looked_into:
            self._add_stored(file.origin, only_sharing=False)

    def _add_stored(self, folder: str, *, only_sharing: bool) -> None:
        with contextlib.suppress(LaststepError):  # what cannot be read shares nothing
            decided = decision.read(self._store, folder)
            if isinstance(decided, Commit) and (decided.shared_bytes or not only_sharing):
                with contextlib.suppress(CorruptError, NotFoundError):
                    for index in read_indexes(self._store, folder, decided):
                        self.add(folder, index.files)


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
        except StorageError as error:
            if not error.device_failed:
                raise
            # A device that fails has damaged this file, and not the others.
            raise CorruptError(
                "a data file cannot be read",
                where=self.file.where,
                found=error.found,
                remedy=DAMAGE_REMEDY,
            ) from error
        if start + got < stop:
            raise CorruptError(
                "a data file is too short",
                where=self.file.where,
                expected=f"at least {stop} bytes",
                found=f"{start + got} bytes",
                remedy=DAMAGE_REMEDY,
            )

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
            error = StorageError(
                "the same bytes were read twice, and differ",
                where=self.file.where,
                found=f"other bytes from {start} to {start + len(part)}",
                remedy="copy again; `laststep verify` says whether they are damaged",
            )
            error.transient = True
            raise error


def _buffer(size: int) -> memoryview:
    """Memory of this thread, page-aligned, used again for each chunk."""
    kept: memoryview | None = getattr(_of_thread, "buffer", None)
    if kept is None or len(kept) < size:
        kept = memoryview(mmap.mmap(-1, align_up(max(size, CHUNK_BYTES), ALIGN_BYTES)))
        _of_thread.buffer = kept
    return kept


Progress = Callable[[int, int], None]
"""Told the bytes of data files that are done, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRoute:
    """From where to where, by how many threads, and how fast."""

    source: Store
    target: Store
    threads: int = 4
    pacing: Pacing = field(default_factory=Pacing)
    progress: Progress | None = None


@dataclass(slots=True)
class Moved:
    """What became of the data files of a checkpoint, in bytes."""

    copied_bytes: int = 0
    linked_bytes: int = 0
    kept_bytes: int = 0
    """Of an earlier copy that was interrupted."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.copied_bytes + other.copied_bytes,
            self.linked_bytes + other.linked_bytes,
            self.kept_bytes + other.kept_bytes,
        )


class Bringing:
    """The data files of some ranks of one checkpoint on their way; `there` are the sizes of those
    that lie in its folder at the target."""

    def __init__(
        self,
        route: CopyRoute,
        links: Links,
        folder: str,
        indexes: Sequence[Index],
        there: Mapping[str, int],
    ) -> None:
        self._route = route
        self._links = links
        self._folder = folder
        self._indexes = indexes
        self._there = there
        self._total_bytes = sum(index.size_bytes for index in indexes)
        self._done_bytes = 0
        self._moved = Moved()
        self._halt = threading.Event()
        self._mutex = threading.Lock()

    def all(self) -> Moved:
        """Bring all of them, rank by rank."""
        for index in self._indexes:
            with closing(OpenIndex(self._route.source, self._folder, index)) as opened:
                self._bring(files_to_copy(opened.sound()))
        return self._moved

    def _bring(self, files: Iterable[FileToCopy]) -> None:
        missing = []
        for file in files:
            size = file.file.size_bytes
            is_there = file.file.name in self._there
            if is_there and self._is_right(file):
                self._moved.kept_bytes += size
            elif not is_there and self._links.link(file.file, self._folder):
                self._moved.linked_bytes += size
                self._tell(size)
            else:
                self._moved.copied_bytes += size
                missing.append(file)
        self._run([self._pass(file) for file in missing])

    def _is_right(self, file: FileToCopy) -> bool:
        """Read a file that is at the target already; one that is wrong goes. So does one of which
        not every byte is verified: it may have holes there, and other checkpoints may link it."""
        name, target = f"{self._folder}/{file.file.name}", self._route.target
        if self._there[file.file.name] == file.file.size_bytes and file.is_covered():
            done_bytes = self._done_bytes
            with closing(target.open_reader(name)) as reader:
                try:
                    self._run([FilePass(file, reader, self._route.pacing)])
                    return True
                except CorruptError:
                    self._done_bytes = done_bytes
        target.delete(name)
        return False

    def _pass(self, file: FileToCopy) -> FilePass:
        name, size = f"{self._folder}/{file.file.name}", file.file.size_bytes
        target = self._route.target
        return FilePass(
            file,
            file.reader,
            self._route.pacing,
            lambda: target.open_writer(name, expected_bytes=size),
        )

    def _run(self, passes: Sequence[FilePass]) -> None:
        """Do all chunks of all these files. Whatever ends it, no thread works after that."""
        todo = [(one, chunk) for one in passes for chunk in one.chunks]
        threads = min(self._route.threads, len(todo))
        if not threads:
            return
        self._halt.clear()
        rest = iter(todo)
        try:
            with Workers(threads, "laststep-tier") as workers:
                try:
                    for work in [workers.submit(self._work, rest) for _ in range(threads)]:
                        work.result()
                finally:
                    self._halt.set()
        finally:
            for one in passes:
                one.close()

    def _work(self, rest: Iterator[tuple[FilePass, FileChunk]]) -> None:
        """On each thread: one chunk after the other."""
        try:
            while not self._halt.is_set():
                with self._mutex:
                    taken = next(rest, None)
                if taken is None:
                    return
                file, chunk = taken
                self._tell(file.take(chunk))
        except BaseException:
            self._halt.set()
            raise

    def _tell(self, size: int) -> None:
        with self._mutex:
            self._done_bytes += size
            if self._route.progress is not None:
                self._route.progress(self._done_bytes, self._total_bytes)
