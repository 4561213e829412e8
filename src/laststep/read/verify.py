"""Check every byte of a stored checkpoint against its digests, and list all that is damaged.

Reads past the page cache where the store can, so what is checked is what is stored. Knows nothing
of torch, of lineage or of what a person is shown. Damage is a value, never an error: one bad block
hides no other. What raises is a place that cannot be asked: no such checkpoint, one that is
deleted meanwhile, a store that may answer later. Files are opened, some at a time, and headers
checked on the calling thread; chunks of data are read by `threads` workers, each of which owns one
buffer while it reads into it.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.catalog import decision, groups
from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, digest
from laststep.errors import Corrupt, NotFound, StorageFailed
from laststep.format import manifest
from laststep.format.group import GROUPS_FOLDER
from laststep.format.header import Header, decode_header, region_bytes_of
from laststep.read.entries import item_of_object, object_text, stored_in
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES, MANIFEST_NAME

if TYPE_CHECKING:
    from laststep.storage.store import Reader, Store

_MAX_TOUCHED = 100
_OPEN_FILES = 256
"""So many are open at a time: a job of many ranks wrote more than a process may have."""

Progress = Callable[[int, int], None]
"""Told the bytes checked so far and the bytes that there are; called by any of the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not as it was written: where it lies, what its digest says, what is there.

    `start` and `stop` are bytes that the file has: of one that is too short, what is missing behind
    its end is one damage ("size"), which begins and stops there. `touches` names what lies, or
    should lie, there: tensors by their full names, of a part also which (`model/w[0:320, 0:300]`),
    of what each rank has for itself also whose.
    """

    file: str
    what: str
    start: int
    stop: int
    expected: str
    found: str
    touches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was read, and all damage; `unchecked_bytes` are there, but their digests are lost."""

    files: int
    blocks: int
    bytes: int
    damage: tuple[Damage, ...]
    unchecked_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Bytes of one file whose digests are known: whole blocks, or one object."""

    file: str
    reader: Reader
    start: int
    stop: int
    digests: bytes
    header_bytes: int
    header: Header
    object_name: str | None = None

    @property
    def there_bytes(self) -> int:
        """How much of it is there: a file that is too short may end within it, or before it."""
        return max(0, min(self.stop, self.reader.size_bytes) - self.start)


@dataclass(slots=True)
class _Findings:
    """What is known so far; only `_Check` and, under its mutex, the workers add to it."""

    damage: list[Damage] = field(default_factory=list)
    files: int = 0
    blocks: int = 0
    bytes: int = 0
    unchecked_bytes: int = 0


def verify_checkpoint(
    store: Store, folder: str, *, threads: int = 4, progress: Progress | None = None
) -> VerifyReport:
    """Read all of the checkpoint in `folder` and compare it with its digests.

    `NotFound` where there is no committed checkpoint, or none any more.
    """
    check = _Check(store, folder, threads, progress)
    check.all()
    found = check.findings
    if found.damage:
        gone = decision.deleted(store, folder)
        if gone is not None:
            raise gone
    return VerifyReport(
        files=found.files,
        blocks=found.blocks,
        bytes=found.bytes,
        damage=tuple(sorted(found.damage, key=lambda d: (d.file, d.start, d.what))),
        unchecked_bytes=found.unchecked_bytes,
    )


class _Check:
    """One verification; readers stay open until its stack closes."""

    def __init__(self, store: Store, folder: str, threads: int, progress: Progress | None) -> None:
        self._store = store
        self._folder = folder
        self._threads = threads
        self._progress = progress
        self._total_bytes = 0
        self._per_rank: frozenset[str] = frozenset()
        self._rank_of: dict[str, int] = {}
        """Who wrote each file, where a manifest says so."""
        self._stack = ExitStack()
        self._mutex = threading.Lock()
        self.findings = _Findings()

    # On the calling thread

    def all(self) -> None:
        """Check manifests, headers and data, some files at a time."""
        with self._stack:
            files = self._files()
        self._total_bytes += self.findings.bytes
        self._tell()
        for at in range(0, len(files), _OPEN_FILES):
            with self._stack:
                some = files[at : at + _OPEN_FILES]
                self._read_all([part for name, record in some for part in self._file(name, record)])

    def _files(self) -> list[tuple[str, manifest.FileRecord | None]]:
        """The data files, and what the manifests say of them."""
        commit = self._manifest()
        if commit is None:
            # Nothing vouches for the headers, but they still vouch for the data.
            return self._files_there()
        records = list(commit.files)
        there = self._store.list(f"{self._folder}/{GROUPS_FOLDER}") if commit.groups else []
        sizes = {f"{GROUPS_FOLDER}/{entry.name}": entry.size_bytes for entry in there}
        for group in commit.groups:
            records += self._group(commit, group, sizes.get(group.name, 0))
        self._total_bytes = sum(record.size_bytes for record in records)
        if commit.ranks > 1:
            self._per_rank = frozenset(item.name for item in commit.items if item.per_rank)
            self._rank_of = {record.name: record.rank for record in records}
        return [(record.name, record) for record in records]

    def _files_there(self) -> list[tuple[str, manifest.FileRecord | None]]:
        found: list[tuple[str, manifest.FileRecord | None]] = []
        here = self._store.list(self._folder)
        inner = [entry.name for entry in here if entry.is_folder]
        places = [("", here)]
        places += [(f"{one}/", self._store.list(f"{self._folder}/{one}")) for one in inner]
        for place, entries in places:
            for entry in entries:
                if entry.name.endswith(".safetensors") and not entry.is_folder:
                    found.append((place + entry.name, None))
                    self._total_bytes += entry.size_bytes
        return found

    def _group(
        self, commit: manifest.Commit, record: manifest.GroupRecord, there_bytes: int
    ) -> tuple[manifest.FileRecord, ...]:
        """The files of a group of ranks; none, and damage, where its manifest is not sound."""
        try:
            files = groups.read(self._store, self._folder, commit, record).files
        except (Corrupt, StorageFailed) as error:
            if isinstance(error, StorageFailed) and error.transient:
                raise
            self.findings.unchecked_bytes += record.size_bytes
            found = error.found or "no such file"
            self._add(record.name, "group manifest", 0, there_bytes, error.expected, found)
            return ()
        self.findings.files += 1
        self.findings.bytes += there_bytes
        return files

    def _manifest(self) -> manifest.Commit | None:
        name = f"{self._folder}/{MANIFEST_NAME}"
        where = f"{self._store.url}/{name}"
        try:
            reader = self._store.open_reader(name)
        except NotFound:
            raise NotFound(
                "there is no committed checkpoint",
                where=f"{self._store.url}/{self._folder}",
                expected=f"a {MANIFEST_NAME}",
                remedy="`laststep ls` lists the checkpoints of a run",
            ) from None
        self._stack.callback(reader.close)
        data = bytearray(reader.size_bytes)
        if self._read(MANIFEST_NAME, "manifest", reader, 0, memoryview(data)) is None:
            return None
        self.findings.files += 1
        self.findings.bytes += len(data)
        try:
            decided = manifest.decode(bytes(data), where=where)
        except Corrupt as error:
            self._add(MANIFEST_NAME, "manifest", 0, len(data), error.expected, error.found)
            return None
        if isinstance(decided, manifest.Abort):
            raise NotFound(
                "there is no checkpoint: the attempt was aborted",
                where=f"{self._store.url}/{self._folder}",
                found=decided.reason,
            )
        return decided

    def _file(self, name: str, record: manifest.FileRecord | None) -> list[_Range]:
        """Check one file's size and header; the ranges that its header vouches for."""
        wanted_bytes = 0 if record is None else record.size_bytes
        try:
            reader = self._store.open_reader(f"{self._folder}/{name}")
        except NotFound:
            self._add(name, "missing file", 0, 0, f"{wanted_bytes} bytes", "no such file")
            return []
        self._stack.callback(reader.close)
        self.findings.files += 1
        there_bytes = reader.size_bytes
        header_bytes = self._header_bytes(name, reader, record)
        region = bytearray(header_bytes)
        got = self._read(name, "header", reader, 0, memoryview(region))
        header = None
        if got is not None:
            self.findings.bytes += got
            size_bytes = there_bytes if record is None else wanted_bytes
            header = self._header(name, memoryview(region)[:got], record, size_bytes)
        if record is not None and there_bytes != wanted_bytes:
            self._add_size(name, there_bytes, wanted_bytes, header, header_bytes)
        if header is None:
            self.findings.unchecked_bytes += max(0, there_bytes - header_bytes)
            return []
        return list(_ranges(name, reader, header, header_bytes))

    def _add_size(
        self, name: str, there_bytes: int, wanted_bytes: int, header: Header | None, data_at: int
    ) -> None:
        expected = f"{wanted_bytes} bytes"
        if there_bytes > wanted_bytes:
            found = f"{there_bytes} bytes: the file is too long"
            self._add(name, "size", wanted_bytes, there_bytes, expected, found)
            return
        lost: tuple[str, ...] = ()
        if header is not None:
            lost = self._touched(name, header, there_bytes - data_at, wanted_bytes - data_at)
        found = f"{there_bytes} bytes: the file is too short"
        self._add(name, "size", there_bytes, there_bytes, expected, found, lost)

    def _header_bytes(self, name: str, reader: Reader, record: manifest.FileRecord | None) -> int:
        if record is not None:
            return record.header_bytes
        prefix = bytearray(8)
        reader.read_into(0, memoryview(prefix))
        try:
            return region_bytes_of(bytes(prefix), size_bytes=reader.size_bytes, where=name)
        except Corrupt as error:
            self._add(name, "header", 0, min(8, reader.size_bytes), error.expected, error.found)
            return 0

    def _header(
        self, name: str, region: memoryview, record: manifest.FileRecord | None, size_bytes: int
    ) -> Header | None:
        """The header, if the manifest or else its own soundness says that it can be believed."""
        if record is not None:
            found = f"{DIGEST_NAME}:{digest(region).hex()}"
            if found != record.header_digest:
                # The region as far as it goes: a short file may end within it.
                self._add(name, "header", 0, len(region), record.header_digest, found)
                return None
        elif not len(region):
            return None
        try:
            return decode_header(region, data_bytes=size_bytes - len(region), where=name)
        except Corrupt as error:
            self._add(name, "header", 0, len(region), error.expected, error.found)
            return None

    # On the workers

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.findings.bytes, max(self._total_bytes, self.findings.bytes))

    def _read_all(self, ranges: list[_Range]) -> None:
        """Read every range and compare; the first error that is no damage is raised at the end."""
        ranges = [part for part in ranges if part.there_bytes or part.start == part.stop]
        with _buffers(self._threads) as buffers, ThreadPoolExecutor(self._threads) as workers:

            def work(part: _Range) -> None:
                self._compare(part, buffers)
                with self._mutex:
                    self.findings.bytes += part.there_bytes
                    if part.object_name is None:
                        self.findings.blocks += -(-part.there_bytes // BLOCK_BYTES)
                    self._tell()

            for done in [workers.submit(work, part) for part in ranges]:
                done.result()

    def _compare(self, part: _Range, buffers: queue.SimpleQueue[memoryview]) -> None:
        size_bytes = part.stop - part.start
        lent = buffers.get() if size_bytes <= CHUNK_BYTES else None
        try:
            view = memoryview(bytearray(size_bytes)) if lent is None else lent[:size_bytes]
            what = "data" if part.object_name is None else f"object {part.object_name}"
            got = self._read(part.file, what, part.reader, part.start, view)
            if got is None:
                return
            if part.object_name is not None:
                self._check(part, what, part.start, part.stop, view[:got], part.digests)
                return
            first = (part.start - part.header_bytes) // BLOCK_BYTES
            # Blocks behind the end of a short file are not there: its size was damage already.
            for number in range(-(-part.there_bytes // BLOCK_BYTES)):
                at = number * BLOCK_BYTES
                stop = min(part.stop, part.start + at + BLOCK_BYTES)
                expected = part.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                block = view[: max(got, at)][at : at + BLOCK_BYTES]
                self._check(part, f"block {first + number}", part.start + at, stop, block, expected)
        finally:
            if lent is not None:
                buffers.put(lent)

    def _check(
        self, part: _Range, what: str, start: int, stop: int, data: memoryview, expected: bytes
    ) -> None:
        found = digest(data)
        if found == expected and len(data) == stop - start:
            return
        text = found.hex()
        if len(data) != stop - start:
            text = f"only {len(data)} of {stop - start} bytes: the file is too short"
        data_at = part.header_bytes
        touches = self._touched(part.file, part.header, start - data_at, stop - data_at)
        self._add(part.file, what, start, start + len(data), expected.hex(), text, touches)

    def _touched(self, file: str, header: Header, start: int, stop: int) -> tuple[str, ...]:
        """What lies in a range of a file's data, at most so many."""
        stored = [
            stored_in(header, one)
            for one in header.tensors
            if one.start < stop and start < one.stop
        ]
        objects = [one.name for one in header.objects if one.start < stop and start < one.stop]
        found = [one.text + self._whose(file, one.item) for one in stored[:_MAX_TOUCHED]]
        found += [object_text(one) + self._whose(file, item_of_object(one)) for one in objects]
        return tuple(found[:_MAX_TOUCHED])

    def _whose(self, file: str, item: str | None) -> str:
        """The rank that has it for itself, as the end of a text."""
        return f" of rank {self._rank_of[file]}" if item in self._per_rank else ""

    def _read(
        self, file: str, what: str, reader: Reader, start: int, into: memoryview
    ) -> int | None:
        """How many bytes could be read; None, and damage, where the device failed for good."""
        try:
            return reader.read_into(start, into)
        except StorageFailed as error:
            if error.transient:
                raise
            stop = min(start + len(into), reader.size_bytes)
            self._add(file, what, start, stop, "readable bytes", error.found)
            return None

    def _add(
        self,
        file: str,
        what: str,
        start: int,
        stop: int,
        expected: str | None,
        found: str | None,
        touches: tuple[str, ...] = (),
    ) -> None:
        damage = Damage(
            file=file,
            what=what,
            start=start,
            stop=stop,
            expected=expected or "what was written",
            found=found or "something else",
            touches=touches,
        )
        with self._mutex:
            self.findings.damage.append(damage)


def _ranges(name: str, reader: Reader, header: Header, header_bytes: int) -> Iterator[_Range]:
    """All data of a file, in chunks of whole blocks and single objects."""

    def part(start: int, stop: int, digests: bytes, object_name: str | None = None) -> _Range:
        return _Range(
            file=name,
            reader=reader,
            start=header_bytes + start,
            stop=header_bytes + stop,
            digests=digests,
            header_bytes=header_bytes,
            header=header,
            object_name=object_name,
        )

    for start in range(0, header.tensor_bytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, header.tensor_bytes)
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        yield part(start, stop, header.blocks[first * DIGEST_BYTES : last * DIGEST_BYTES])
    for stored in header.objects:
        yield part(stored.start, stored.stop, stored.digest, stored.name)


@contextmanager
def _buffers(count: int) -> Iterator[queue.SimpleQueue[memoryview]]:
    """Page-aligned buffers of a chunk each, so that direct reads land in them uncopied."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(count):
        # Not closed by hand: a view that an error still holds would forbid it.
        buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES)))
    yield buffers
