"""Check every byte of a stored checkpoint against its digests, and list all that is damaged.

Reads past the page cache where the store can, so what is checked is what is stored. Knows nothing
of torch, of lineage or of what a person is shown. Damage is a value, never an error: one bad block
hides no other. What raises is a place that cannot be asked: no such checkpoint, one that is
deleted meanwhile, a store that may answer later. Files are opened some at a time, and their data
read ahead by `threads` workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog import decision, groups
from laststep.errors import Corrupt, NotFound, StorageFailed
from laststep.format import manifest
from laststep.format.group import GROUPS_FOLDER
from laststep.format.manifest import FileRecord
from laststep.read.ahead import read_ahead
from laststep.read.blocks import OBJECT, Damage, Extent, Readable, damage_of
from laststep.read.entries import item_of_object, object_text, stored_in
from laststep.read.files import open_file
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES, MANIFEST_NAME

if TYPE_CHECKING:
    from laststep.format.header import ObjectEntry
    from laststep.format.safetensors import TensorEntry
    from laststep.read.files import DataFile
    from laststep.storage.store import Store

_MAX_TOUCHED = 100
_OPEN_FILES = 64
"""So many are open at a time: a job of many ranks wrote more than a process may have."""

Progress = Callable[[int, int], None]
"""Told the bytes checked so far and the bytes that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was read, and all damage; `unchecked_bytes` are there, but their digests are lost."""

    files: int
    blocks: int
    bytes: int
    damage: tuple[Damage, ...]
    unchecked_bytes: int = 0


def verify_checkpoint(
    store: Store, folder: str, *, threads: int = 4, progress: Progress | None = None
) -> VerifyReport:
    """Read all of the checkpoint in `folder` and compare it with its digests.

    `NotFound` where there is no committed checkpoint, or none any more.
    """
    check = _Check(store, folder, threads, progress)
    check.all()
    if check.damage:
        gone = decision.deleted(store, folder)
        if gone is not None:
            raise gone
    return VerifyReport(
        files=check.files,
        blocks=check.blocks,
        bytes=check.bytes,
        damage=tuple(sorted(check.damage, key=lambda d: (d.file, d.start, d.what))),
        unchecked_bytes=check.unchecked_bytes,
    )


class _Check:
    """One verification, and what it has found so far."""

    def __init__(self, store: Store, folder: str, threads: int, progress: Progress | None) -> None:
        self._store = store
        self._folder = folder
        self._threads = threads
        self._progress = progress
        self._total_bytes = 0
        self._per_rank: frozenset[str] = frozenset()
        self.damage: list[Damage] = []
        self.files = self.blocks = self.bytes = self.unchecked_bytes = 0

    def all(self) -> None:
        """Check manifests, headers and data, some files at a time."""
        records = self._records()
        among = {record.name: record for record in records}
        self._total_bytes += self.bytes
        self._tell()
        own = [record for record in records if not record.lent]
        for at in range(0, len(own), _OPEN_FILES):
            with ExitStack() as stack:
                files = [self._open(record, among, stack) for record in own[at : at + _OPEN_FILES]]
                self._read_all([file for file in files if file is not None])

    def _records(self) -> list[FileRecord]:
        """The data files, and what the manifests say of them."""
        commit = self._manifest()
        if commit is None:
            # Nothing vouches for the headers, but they still vouch for the data.
            records = self._files_there()
        else:
            records = list(commit.files)
            there = self._store.list(f"{self._folder}/{GROUPS_FOLDER}") if commit.groups else []
            sizes = {f"{GROUPS_FOLDER}/{entry.name}": entry.size_bytes for entry in there}
            for group in commit.groups:
                records += self._group(commit, group, sizes.get(group.name, 0))
            if commit.ranks > 1:
                self._per_rank = frozenset(item.name for item in commit.items if item.per_rank)
        self._total_bytes = sum(record.size_bytes for record in records)
        return records

    def _files_there(self) -> list[FileRecord]:
        """The data files by their names, of which only those of lent ones have a `~`."""
        here = self._store.list(self._folder)
        folders = [entry.name for entry in here if entry.is_folder]
        places = [("", here)]
        places += [(f"{name}/", self._store.list(f"{self._folder}/{name}")) for name in folders]
        return [
            FileRecord(
                name=place + entry.name, size_bytes=entry.size_bytes, header_bytes=0,
                header_digest="", lent="~" in entry.name,
            )
            for place, entries in places
            for entry in entries
            if entry.name.endswith(".safetensors") and not entry.is_folder
        ]  # fmt: skip

    def _group(
        self, commit: manifest.Commit, record: manifest.GroupRecord, there_bytes: int
    ) -> tuple[FileRecord, ...]:
        """The files of a group of ranks; none, and damage, where its manifest is not sound."""
        try:
            files = groups.read(self._store, self._folder, commit, record).files
        except (Corrupt, StorageFailed) as error:
            damage = damage_of(error, file=record.name, what="group manifest", stop=there_bytes)
            self.damage.append(damage)
            self.unchecked_bytes += record.size_bytes
            return ()
        self.files += 1
        self.bytes += there_bytes
        return files

    def _manifest(self) -> manifest.Commit | None:
        name = f"{self._folder}/{MANIFEST_NAME}"
        try:
            reader = self._store.open_reader(name)
        except NotFound:
            raise NotFound(
                "there is no committed checkpoint",
                where=f"{self._store.url}/{self._folder}",
                expected=f"a {MANIFEST_NAME}",
                remedy="`laststep ls` lists the checkpoints of a run",
            ) from None
        with closing(reader):
            data = bytearray(reader.size_bytes)
            self.files += 1
            self.bytes += len(data)
            try:
                reader.read_into(0, memoryview(data))
                decided = manifest.decode(bytes(data), where=f"{self._store.url}/{name}")
            except (Corrupt, StorageFailed) as error:
                damage = damage_of(error, file=MANIFEST_NAME, what="manifest", stop=len(data))
                self.damage.append(damage)
                return None
        if isinstance(decided, manifest.Abort):
            raise NotFound(
                "there is no checkpoint: the attempt was aborted",
                where=f"{self._store.url}/{self._folder}",
                found=decided.reason,
            )
        return decided

    def _open(
        self, record: FileRecord, among: Mapping[str, FileRecord], stack: ExitStack
    ) -> DataFile | None:
        """Check a file's size and header, and those of the files that it borrows of; the file, if
        headers vouch for its data."""
        opened = open_file(self._store, self._folder, record, among)
        stack.callback(opened.close)
        file, there_bytes = opened.file, opened.there_bytes
        lost: tuple[str, ...] = ()
        if file is not None and opened.damage and not file.header.is_packed:  # its size only
            data_at = record.header_bytes
            lost = self._touched(
                file, file.reader.size_bytes - data_at, record.size_bytes - data_at
            )
        self.damage += [replace(damage, touches=lost) for damage in opened.damage]
        if there_bytes is not None:
            header_bytes = min(opened.record.header_bytes, there_bytes)
            self.files += 1 if file is None else len(file.files)
            self.bytes += header_bytes
            self.bytes += 0 if file is None else sum(o.record.header_bytes for o in file.files[1:])
            if file is None:
                self.unchecked_bytes += there_bytes - header_bytes
        return file

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.bytes, max(self._total_bytes, self.bytes))

    def _read_all(self, files: list[DataFile]) -> None:
        """Read all data and compare."""
        parts = [(file, extent) for file in files for extent in _extents(file)]
        with closing(read_ahead((part for _, part in parts), threads=self._threads)) as reads:
            for (file, part), (_, damage) in zip(parts, reads, strict=True):
                self._note(file, part, damage)

    def _note(self, file: DataFile, part: Readable, damage: list[Damage]) -> None:
        files = (file, *file.masters)
        ends = {h.record.name: h.reader.size_bytes for whole in files for h in whole.files}
        # What is missing behind the end of a short file is one damage already: its size.
        self.damage += [
            replace(wrong, touches=self._touched_by(file, wrong))
            for wrong in damage
            if wrong.start < ends[wrong.file] or not part.size_bytes or file.header.is_packed
        ]
        self.bytes += part.stored_bytes
        if part.what is None:
            is_there = part.stored_bytes if isinstance(part, Extent) else part.size_bytes
            self.blocks += -(-is_there // BLOCK_BYTES)
        self._tell()

    def _touched_by(self, file: DataFile, wrong: Damage) -> tuple[str, ...]:
        name = wrong.what.removeprefix(OBJECT)
        if name != wrong.what:
            return (object_text(name) + self._whose(file, item_of_object(name)),)
        return self._touched(file, *wrong.data)

    def _touched(self, file: DataFile, start: int, stop: int) -> tuple[str, ...]:
        """What lies in bytes [start, stop) of a file's data, at most so much."""

        def lies_there(entry: TensorEntry | ObjectEntry) -> bool:
            return entry.start < stop and start < entry.stop

        tensors = itertools.islice(filter(lies_there, file.header.tensors), _MAX_TOUCHED)
        boxes = [stored_in(file.header, entry) for entry in tensors]
        texts = [box.text + self._whose(file, box.item) for box in boxes]
        if not file.header.is_packed:
            names = [entry.name for entry in filter(lies_there, file.header.objects)]
            texts += [object_text(name) + self._whose(file, item_of_object(name)) for name in names]
        return tuple(texts[:_MAX_TOUCHED])

    def _whose(self, file: DataFile, item: str | None) -> str:
        """The rank that has it for itself, as the end of a text."""
        return f" of rank {file.record.rank}" if item in self._per_rank else ""


def _extents(file: DataFile) -> Iterator[Readable]:
    """All data of a file that are there, in chunks of whole blocks and single objects."""
    header = file.header
    ends = {held.record.name: held.reader.size_bytes for held in file.files}
    parts: Iterator[Readable] = itertools.chain(
        (
            file.blocks(start, min(start + CHUNK_BYTES, header.tensor_bytes))
            for start in range(0, header.tensor_bytes, CHUNK_BYTES)
        ),
        map(file.object, header.objects),
    )
    for part in parts:
        if not isinstance(part, Extent) or part.start < ends[part.file] or not part.size_bytes:
            yield part
