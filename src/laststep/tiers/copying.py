"""Copy committed checkpoints of a run from one store to another, verified and in bounded memory.

A copy has the name and the bytes of its original: data files, indexes and, created last,
`manifest.json`. Until then its folder is an attempt that contains a file `copying.lock`; no reader
considers it a checkpoint and no writer cleans it up while it may be resumed. A repeated copy keeps
the correct files that are already there. A file that the target has in another checkpoint is
linked. A partial copy, with only some items, has indexes and a manifest of its own.

Each of several threads holds one chunk in memory, plus the memory to decode a block; the rate limit
and the stop event apply to all threads together. The first error ends a copy. Knows nothing of
torch or retention. A `Copier` is used by one thread.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog import attempt as attempts
from laststep.catalog import run, terms
from laststep.catalog.instances import ending_name
from laststep.catalog.listing import Scanner
from laststep.catalog.retention import FileId, file_id
from laststep.constants import ALIGN_BYTES, CHUNK_BYTES, align_up
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.plan.files import is_partial, omitted_items_of, only_items, partial_of
from laststep.process.threads import WorkerPool
from laststep.read.blocks import BlockReader, file_ranges, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from laststep.read.blocks import FileRanges, StoredRange
    from laststep.storage.store import FileReading, FileWriting, Lock, Store

_log = logging.getLogger(__name__)
_of_thread = threading.local()

Progress = Callable[[int, int], None]
"""Called with the bytes of data files that are done, and the total."""
_RESUMES = "copy again: it resumes there"


class Pacing:
    """Limits the rate of copying, and can stop it: any thread may set `stop`."""

    def __init__(
        self, *, bytes_per_s: float | None = None, stop: threading.Event | None = None
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._stop = stop or threading.Event()
        self._mutex = threading.Lock()
        self._free_s = 0.0  # the time at which the next byte may be copied

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may be copied. Raise `AbortedError` if the copy was stopped."""
        if self._bytes_per_s is not None:
            with self._mutex:
                now_s = time.monotonic()
                begin_s = max(self._free_s, now_s)
                self._free_s = begin_s + size_bytes / self._bytes_per_s
            self._stop.wait(begin_s - now_s)
        if self._stop.is_set():
            raise AbortedError("the copy was stopped", remedy=_RESUMES)


class Copier:
    """Copies checkpoints of one run, one at a time, with all items or only `items`."""

    def __init__(
        self,
        source: Store,
        target: Store,
        items: Sequence[str] | None = None,
        *,
        threads: int = 4,
        pacing: Pacing | None = None,
    ) -> None:
        self.source, self.target = source, target
        self.threads, self.pacing = threads, pacing or Pacing()
        self.shared = TargetFiles(target)
        self._items = items
        self._records = Records(source, target)

    def copy(self, folder: str, progress: Progress | None = None) -> int | None:
        """Copy one checkpoint. Return the bytes of data files that were copied, besides those that
        were linked or there; None if the target already has the checkpoint.

        Raise `NotFoundError` if the checkpoint was deleted meanwhile and `CorruptError` if it is
        damaged; nothing of it is left at the target then. After any other error, and after a stop
        (`AbortedError`), the copied files are kept for the next try. Raise `AlreadyExistsError` if
        a different checkpoint has its name or another process is copying it, and `UsageError` if
        the target is a different run.
        """
        if self.is_there(folder):
            return None
        try:
            copied_bytes = self.bring(folder, progress=progress)
            self.commit(folder)
        except (CorruptError, NotFoundError) as error:
            self.abort(folder, error.what)
            raise (attempts.deleted(self.source, folder) or error) from error
        return copied_bytes

    def abort(self, folder: str, reason: str) -> bool:
        """Abort a copy and delete its files; return True, and keep it, if it is committed now."""
        return self._attempt(folder).abort(reason)

    def is_there(self, folder: str) -> bool:
        """Return True if the target has it; raise `AlreadyExistsError` for another of that name."""
        decision = attempts.read_decision(self.target, folder)
        if not isinstance(decision, manifest.Commit):
            return False
        commit = None if self._items is None else self._commit(folder)
        if commit is not None and not self._is_whole(commit):
            same = is_partial(decision, commit, omitted_items_of(commit, self._items or ()))
        else:  # bytes, not values: NaN is not equal to itself
            original = attempts.read_manifest(self.source, folder)
            same = original == attempts.read_manifest(self.target, folder)
        if not same:
            raise AlreadyExistsError(
                "a different checkpoint has this name",
                where=f"{self.target.url}/{folder}",
                expected=f"a copy of {self.source.url}/{folder} with the same items",
                remedy="copy to another place",
            )
        return True

    def bring(
        self, folder: str, ranks: Sequence[int] | None = None, progress: Progress | None = None
    ) -> int:
        """Copy the files of all ranks, or of `ranks`, without committing. Processes may copy the
        files of different ranks at the same time; one of them commits when all are done."""
        commit = self._commit(folder)
        # Rank 0 commits, so it also copies the coordinator's files, which belong to no rank.
        wanted = list(range(commit.index_count) if ranks is None else ranks)
        if ranks is not None and 0 in ranks:
            wanted += range(commit.ranks, commit.index_count)
        originals = {rank: self._original(folder, commit, rank) for rank in wanted}
        indexes = [original.part for original in originals.values()]
        self._records.bring(commit.term)
        with closing(self._begin(folder, None if ranks is None else min(ranks))):
            if isinstance(attempts.read_decision(self.target, folder), manifest.Commit):
                return 0  # another process was faster
            names = [file.name for index in indexes for file in index.files]
            names += [index_format.index_name(rank, commit.ranks) for rank in wanted]
            self._attempt(folder).make_folders(names)
            present = self._sizes(folder, names)
            for original in originals.values():  # remains of an interrupted copy of other items
                for name in original.dropped & present.keys():
                    self.target.delete(f"{folder}/{name}")
            copied_bytes = _FileCopies(self, folder, present, progress).bring(indexes)
            for rank, original in originals.items():
                name, data = index_format.index_name(rank, commit.ranks), original.data
                path = f"{folder}/{name}"
                is_same_size = present.get(name) == len(data)
                if is_same_size and self.target.read(path, limit_bytes=len(data)) == data:
                    continue  # another process may be reading it
                if name in present:
                    self.target.delete(path)
                self.target.create(path, data)
            return copied_bytes

    def is_under_way(self, folder: str) -> bool:
        return bool(self._locked(folder))

    def commit(self, folder: str) -> None:
        """Make a checkpoint visible at the target; raise `StorageError` if a file is missing."""
        commit, data = self._commit(folder), attempts.read_manifest(self.source, folder)
        names = [index_format.index_name(rank, commit.ranks) for rank in range(commit.index_count)]
        self._check_whole(folder, dict.fromkeys(names))  # asked again and again: reads no index
        written, sizes = manifest.WrittenIndexes(), dict[str, int]()
        originals = [self._original(folder, commit, rank) for rank in range(commit.index_count)]
        for name, (index, encoded, _) in zip(names, originals, strict=True):
            written = written.plus(index_format.written_of(index, encoded))
            sizes[name] = len(encoded)
            sizes |= {file.name: file.size_bytes for file in index.files}
        self._check_whole(folder, sizes)
        if not self._is_whole(commit):
            data = manifest.encode(partial_of(commit, self._items or (), written))
        attempt = self._attempt(folder)
        attempt.sync(sizes)
        attempt.publish(data)
        for original in originals:
            self.shared.add(folder, original.part.files)
        if attempts.PIN_NAME in self.source.file_names(folder):
            with contextlib.suppress(AlreadyExistsError):
                self.target.create(f"{folder}/{attempts.PIN_NAME}", b"")
        for name in filter(attempts.COPYING_NAME.fullmatch, self.target.file_names(folder)):
            self.target.delete(f"{folder}/{name}")
        _log.info("copied %s from %s to %s", folder, self.source.url, self.target.url)

    # The checkpoint as the target will have it

    def _commit(self, folder: str) -> manifest.Commit:
        commit = attempts.read_decision(self.source, folder)
        if not isinstance(commit, manifest.Commit):
            raise NotFoundError("there is no such checkpoint", where=f"{self.source.url}/{folder}")
        return commit

    def _is_whole(self, commit: manifest.Commit) -> bool:
        """Return True if the copy has all items of its original."""
        return self._items is None or omitted_items_of(commit, self._items) == commit.omitted_items

    def _original(self, folder: str, commit: manifest.Commit, rank: int) -> _CopiedIndex:
        data, where = attempts.read_index_bytes(self.source, folder, commit, rank)
        index = index_format.decode(data, where=where)
        if self._is_whole(commit):
            return _CopiedIndex(index, data)
        part = only_items(index, self._items or ())
        dropped = {file.name for file in index.files} - {file.name for file in part.files}
        return _CopiedIndex(part, index_format.encode(part), frozenset(dropped))

    # The target

    def _attempt(self, folder: str) -> attempts.Attempt:
        """Return the attempt, which can be committed only while the target is the same run."""
        name = attempts.parse_folder(folder)
        if name is None:
            raise NotFoundError("there is no such checkpoint", where=f"{self.source.url}/{folder}")
        return attempts.Attempt(self.target, name, self._records.check)

    def _begin(self, folder: str, first_rank: int | None) -> Lock:
        """Create the folder, or resume that of an interrupted copy, and lock it. Processes may copy
        different ranks at the same time, but a copy of all ranks excludes every other one."""
        if isinstance(attempts.read_decision(self.target, folder), manifest.Abort):
            self.target.delete_folder(folder)
        with contextlib.suppress(AlreadyExistsError):
            self.target.make_folder(folder)
        own, whole = attempts.copying_name(first_rank), attempts.copying_name(None)
        try:
            lock = self.target.lock(f"{folder}/{own}")
        except AlreadyExistsError:
            raise self._busy(folder, own) from None
        for name in self._locked(folder):
            if name != own and whole in (name, own):
                lock.close()
                raise self._busy(folder, name)
        return lock

    def _locked(self, folder: str) -> list[str]:
        """Return the locks that are held by processes copying this checkpoint now."""
        names = filter(attempts.COPYING_NAME.fullmatch, self.target.file_names(folder))
        return [name for name in names if self.target.is_locked(f"{folder}/{name}")]

    def _busy(self, folder: str, name: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            "another process is copying this checkpoint",
            where=f"{self.target.url}/{folder}",
            found=f"{name} is locked",
            remedy="wait for that copy to end",
        )

    def _check_whole(self, folder: str, wanted: Mapping[str, int | None]) -> None:
        """Raise `StorageError` if a file is missing at the target or has another size."""
        present = self._sizes(folder, wanted)
        for name, size in wanted.items():
            if name not in present or size not in (None, present[name]):
                raise StorageError(
                    "cannot commit a copy that is not whole",
                    where=f"{self.target.url}/{folder}/{name}",
                    expected=None if size is None else f"{size} bytes",
                    found=str(present.get(name, "no file")),
                    remedy=_RESUMES,
                )

    def _sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes of the files in a folder at the target and in subfolders of `names`."""
        listed = {"": self.target.list(folder)}
        for inner in attempts.inner_folders(names):
            listed[f"{inner}/"] = self.target.list(f"{folder}/{inner}")
        return {
            place + entry.name: entry.size_bytes
            for place, entries in listed.items()
            for entry in entries
            if not entry.is_folder
        }


class _CopiedIndex(NamedTuple):
    """A rank's index as the target will have it, its bytes, and the files that are left out."""

    part: index_format.Index
    data: bytes
    dropped: frozenset[str] = frozenset()


class TargetFiles:
    """The files of checkpoints at the target, which a copy may link."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[FileId, str] = {}
        self._read: set[str] = set()
        self._is_listed = False
        self._has_links = True

    def link(self, file: index_format.StoredFile, folder: str) -> bool:
        """Link a file of the target into this folder. Return False if that is impossible."""
        if not self._is_listed:  # checkpoints that share files
            self._is_listed = True
            for name in Scanner(self._store).names():
                self._add_stored(name.folder, only_sharing=True)
        if file.origin and file.origin not in self._read:
            # The checkpoint for which it was written: its manifest need not record any sharing.
            self._add_stored(file.origin, only_sharing=False)
        place = self._places.get(file_id(file, folder))
        if place is None or not self._has_links:
            return False
        try:
            self._has_links = self._store.link(place, f"{folder}/{file.name}")
        except NotFoundError:  # deleted meanwhile
            return False
        return self._has_links

    def add(self, folder: str, files: Iterable[index_format.StoredFile]) -> None:
        self._read.add(folder)
        for file in files:
            self._places.setdefault(file_id(file, folder), f"{folder}/{file.name}")

    def _add_stored(self, folder: str, *, only_sharing: bool) -> None:
        with contextlib.suppress(LaststepError):  # unreadable checkpoints share nothing
            decided = attempts.read_decision(self._store, folder)
            if isinstance(decided, manifest.Commit) and (
                decided.written.shared_bytes or not only_sharing
            ):
                for index in attempts.read_indexes(self._store, folder, decided):
                    self.add(folder, index.files)


@dataclass(eq=False, slots=True)
class _FileCopies:
    copier: Copier
    folder: str
    present: Mapping[str, int]
    """The sizes of the files that are already in its folder at the target."""
    progress: Progress | None
    _total_bytes: int = field(default=0, init=False)
    _done_bytes: int = field(default=0, init=False)
    _mutex: threading.Lock = field(default_factory=threading.Lock, init=False)

    def bring(self, indexes: Sequence[index_format.Index]) -> int:
        copied_bytes = 0
        self._total_bytes = sum(index.size_bytes for index in indexes)
        for index in indexes:
            with closing(BlockReader(self.copier.source, self.folder, index)) as opened:
                missing = []
                for file in file_ranges(opened.sound()):
                    size, is_there = file.file.size_bytes, file.file.name in self.present
                    if is_there and self._is_right(file):
                        continue
                    if not is_there and self.copier.shared.link(file.file, self.folder):
                        self._tell(size)
                    else:
                        copied_bytes += size
                        name = f"{self.folder}/{file.file.name}"
                        create = partial(self.copier.target.open_writer, name, expected_bytes=size)
                        missing.append(_FileCopy(file, file.reader, create))
                self._run(missing)
        return copied_bytes

    def _is_right(self, file: FileRanges) -> bool:
        """Verify a file that is already at the target. Delete it and return False if it is wrong or
        if some of its bytes have no digest: those may be holes at the target, and other checkpoints
        may link the file."""
        name, target = f"{self.folder}/{file.file.name}", self.copier.target
        if self.present[file.file.name] == file.file.size_bytes and file.is_covered():
            done_bytes = self._done_bytes
            with closing(target.open_reader(name)) as reader:
                try:
                    self._run([_FileCopy(file, reader, None)])
                    return True
                except CorruptError:
                    self._done_bytes = done_bytes
        target.delete(name)
        return False

    def _run(self, copies: Sequence[_FileCopy]) -> None:
        """Process all chunks of these files; no thread works on them afterwards."""

        def take(copy: _FileCopy, chunk: _FileChunk) -> None:
            self.copier.pacing.take(chunk.stop - chunk.start)
            copy.take(chunk)
            self._tell(chunk.stop - chunk.start)

        threads = self.copier.threads
        try:
            with WorkerPool("copy", threads, limit=threads) as workers:
                for copy in copies:
                    for chunk in copy.chunks:
                        workers.put(take, copy, chunk)
        finally:
            for copy in copies:
                copy.close()

    def _tell(self, size: int) -> None:
        with self._mutex:
            self._done_bytes += size
            if self.progress is not None:
                self.progress(self._done_bytes, self._total_bytes)


class _FileChunk(NamedTuple):
    """Bytes [start, stop) of a file, and the block ranges that overlap them."""

    start: int
    stop: int
    ranges: list[StoredRange]


def _chunks_of(file: FileRanges) -> list[_FileChunk]:
    """Return the chunks of a file; the header is a chunk of its own."""
    size, data_at = file.file.size_bytes, file.header_bytes
    starts = [*range(0, data_at, max(data_at, 1)), *range(data_at, size, CHUNK_BYTES)]
    chunks = [_FileChunk(*place, []) for place in zip(starts, [*starts[1:], size], strict=True)]
    first = 0
    for part in sorted(file.ranges.values(), key=lambda part: part.start):
        while chunks[first].stop <= part.start:
            first += 1
        for chunk in chunks[first:]:
            if chunk.start >= part.stop:
                break
            chunk.ranges.append(part)
    return chunks


class _FileCopy:
    """Reads and verifies one file, chunk by chunk, and writes it if it has a writer."""

    def __init__(
        self, file: FileRanges, reader: FileReading, open_writer: Callable[[], FileWriting] | None
    ) -> None:
        self.file = file
        self.chunks = _chunks_of(file)
        self._reader = reader
        self._open_writer = open_writer
        self._writer: FileWriting | None = None
        self._left = len(self.chunks)
        self._mutex = threading.Lock()

    def take(self, chunk: _FileChunk) -> None:
        """Copy one chunk; with the last one, finish the file. A range that crosses the end of a
        chunk is read and verified with both chunks, so only verified bytes are written."""
        start = min([chunk.start, *(part.start for part in chunk.ranges)])
        start -= start % ALIGN_BYTES  # direct I/O requires alignment
        stop = max([chunk.stop, *(part.stop for part in chunk.ranges)])
        view = _buffer(stop - start)
        self._read(start, stop, view)
        for part in chunk.ranges:
            stored = view[part.start - start : part.stop - start]
            refuse(part.content.verify_stored(stored, self._reader))
        with self._mutex:
            if self._writer is None and self._open_writer is not None:
                self._writer = self._open_writer()
            writer = self._writer
        if writer is not None:
            padded = align_up(chunk.stop - chunk.start, writer.alignment_bytes)
            at = chunk.start - start
            writer.write_at(chunk.start, view[at : at + padded])
        with self._mutex:
            self._left -= 1
            is_last = self._left == 0
        if is_last and writer is not None:
            writer.finish(self.file.file.size_bytes)

    def close(self) -> None:
        """Close the writer. An incomplete file is left as it is."""
        if self._writer is not None:
            self._writer.close()

    def _read(self, start: int, stop: int, view: memoryview) -> None:
        try:  # whole pages, so that a direct read needs no extra copy
            got = self._reader.read_into(start, view[: align_up(stop - start, ALIGN_BYTES)])
        except StorageError as error:
            if not error.device_failed:
                raise
            # Treat a failed device as damage to this file; others may be readable.
            raise CorruptError(
                "a data file cannot be read", where=self.file.where, found=error.found
            ) from error
        if start + got < stop:
            raise CorruptError(
                "a data file is too short",
                where=self.file.where,
                expected=f"at least {stop} bytes",
                found=f"{start + got} bytes",
            )


def _buffer(size: int) -> memoryview:
    """Return a page-aligned buffer, with a spare page, that this thread reuses for each chunk."""
    kept: memoryview | None = getattr(_of_thread, "buffer", None)
    if kept is None or len(kept) < size + ALIGN_BYTES:
        size = max(size, CHUNK_BYTES) + ALIGN_BYTES
        kept = memoryview(mmap.mmap(-1, align_up(size, ALIGN_BYTES)))
        _of_thread.buffer = kept
    return kept


class Records:
    """The records that make two places the same run: its id, and the records of its terms.

    A checkpoint is copied under its own name, so that name must mean the same in both places. The
    target may lack records, but it MUST NOT have any that the source lacks or has with different
    bytes: a job would then have continued there, and the order of commits would no longer determine
    the newest checkpoint. Records are copied in the order of their numbers, before the first commit
    that needs them, so the target is a valid run at any time.
    """

    def __init__(self, source: Store, target: Store, *, may_be_ahead: bool = False) -> None:
        """With `may_be_ahead`, the target may have terms that the source lacks."""
        self._source = source
        self._target = target
        self._may_be_ahead = may_be_ahead
        self._same: set[str] = set()
        """Names of records that are equal in both places. Cached, because records never change."""

    def bring(self, term: int | None) -> None:
        """Copy the record of the run, and those of all terms (up to `term` if given) with the
        endings of their job instances. Raise `UsageError` if the target is a different run."""
        self.check()
        self.bring_run()
        known = terms.Terms(self._source)
        if numbers := [n for n in known.numbers() if term is None or n <= term]:
            terms.make_folder(self._target)
        present = set(self._target.file_names(terms.TERMS_FOLDER)) if numbers else set[str]()
        for number in numbers:
            record = known.read(number)
            wanted = [terms.term_record_name(number)]
            if record is not None and record.start:
                wanted.append(ending_name(record.start))
            for name in (name for name in wanted if name.rpartition("/")[2] not in present):
                with contextlib.suppress(NotFoundError):  # the job instance did not end well
                    self._create(name)

    def check(self) -> None:
        """Raise `UsageError` if the run ids differ, or if the target has a term that the source
        lacks or has with another record.

        Of the terms that both have, only the newest is compared: every term belongs to one job
        instance, so if the places had diverged earlier, this record would differ too.
        """
        if attempts.RUN_NAME not in self._same:
            expected, found = (run.run_id(store) for store in (self._source, self._target))
            if expected and found and expected != found:
                raise self._other(f"run {found} instead of {expected}")
        source, target = (
            frozenset(terms.Terms(store).numbers()) for store in (self._source, self._target)
        )
        wrong = [] if self._may_be_ahead else sorted(target - source)
        for number in sorted(source & target)[-1:]:
            if not self._is_same(terms.term_record_name(number)):
                wrong.append(number)
        if wrong:
            who = terms.Terms(self._target).described(wrong[0])
            raise self._other(f"another job saved there separately: {who}")

    def bring_run(self) -> None:
        if attempts.RUN_NAME in self._same:
            return
        expected, found = (run.run_id(store) for store in (self._source, self._target))
        if expected != found and (found or Scanner(self._target).names()):
            raise self._other(
                f"run {found}" if found else "folders of checkpoints without a record"
            )
        if attempts.RUN_NAME not in self._target.file_names(""):
            try:
                self._create(attempts.RUN_NAME)
            except NotFoundError:
                return  # folders without run.json are also a run
        self._same.add(attempts.RUN_NAME)

    def _create(self, name: str) -> None:
        try:
            self._target.create(name, self._source.read(name, limit_bytes=terms.RECORD_LIMIT_BYTES))
        except AlreadyExistsError:  # another process was faster
            if not self._is_same(name):
                raise self._other(f"{name} differs") from None

    def _is_same(self, name: str) -> bool:
        if name not in self._same:
            places = (self._source, self._target)
            original, copied = (
                store.read(name, limit_bytes=terms.RECORD_LIMIT_BYTES) for store in places
            )
            if original == copied:
                self._same.add(name)
        return name in self._same

    def _other(self, found: str) -> UsageError:
        return UsageError(
            "cannot copy into a different run",
            where=self._target.url,
            expected=f"an empty place, or a copy of {self._source.url}",
            found=found,
            remedy="copy to another place; two copies that were both saved to cannot be merged",
        )
