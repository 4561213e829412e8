"""Bring the data files of one checkpoint to another store: by a link, or chunk by chunk.

What lies there already, of a copy that was interrupted, is read and kept if it is right. Several
threads each have one chunk in memory, and what it takes to decode a block. The first error ends
all; nothing is published here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.errors import Corrupt
from laststep.process.workers import Workers
from laststep.read.files import OpenIndex
from laststep.read.stored import files_to_copy
from laststep.tiers.file_pass import FilePass
from laststep.tiers.pacing import Pacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.format.index import Index
    from laststep.read.stored import FileToCopy
    from laststep.storage.store import Store
    from laststep.tiers.file_pass import FileChunk
    from laststep.tiers.links import Links

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
        """Read a file that is at the target already; one that is wrong goes."""
        name, target = f"{self._folder}/{file.file.name}", self._route.target
        if self._there[file.file.name] == file.file.size_bytes:
            done_bytes = self._done_bytes
            with closing(target.open_reader(name)) as reader:
                try:
                    self._run([FilePass(file, reader, self._route.pacing)])
                    return True
                except Corrupt:
                    self._done_bytes = done_bytes
        target.delete(name)
        return False

    def _pass(self, file: FileToCopy) -> FilePass:
        name, size = f"{self._folder}/{file.file.name}", file.file.size_bytes
        target = self._route.target
        return FilePass(
            file, file.reader, self._route.pacing,
            lambda: target.open_writer(name, expected_bytes=size),
        )  # fmt: skip

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
