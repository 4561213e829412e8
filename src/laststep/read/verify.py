"""Check every byte of a stored checkpoint against its digests, and list all that is damaged.

Reads past the page cache where the store can, so what is checked is what is stored. Knows nothing
of torch, of lineage or of what a person is shown. Damage is a value, never an error: one bad block
hides no other. What raises is a place that cannot be asked: no such checkpoint, one that is
deleted meanwhile, a store that may answer later. The files of one rank are open at a time, and
their data read ahead by `threads` workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import LIMIT_BYTES, name_of, read_bytes
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.read.blocks import Damage, Extent, Readable, damage_of, read_ahead
from laststep.read.files import OpenIndex, stored_in
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES, MANIFEST_NAME

if TYPE_CHECKING:
    from laststep.format.index import Index
    from laststep.format.layout import TensorEntry
    from laststep.read.files import DataFile
    from laststep.storage.store import Store

_MAX_TOUCHED = 100

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

    `NotFoundError` where there is no committed checkpoint, or none any more.
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
        """Check the manifest, then index by index, with the data files of each."""
        commit = self._manifest()
        sizes = self._sizes()
        self._total_bytes = sum(sizes.values())
        names = [name for name in sizes if name.rpartition("/")[2].startswith("index-r")]
        if commit is not None:
            names = [name_of(commit, number) for number in range(commit.index_count)]
            if commit.ranks > 1:
                self._per_rank = frozenset(item.name for item in commit.items if item.per_rank)
        self._tell()
        known: set[str] = set()
        for number, name in enumerate(names):
            index = self._index(commit, number, name, sizes.get(name, 0))
            if index is not None:
                known.update(file.name for file in index.files)
                with closing(OpenIndex(self._store, self._folder, index)) as opened:
                    self._check(opened)
        if any(damage.what in ("index", "manifest") for damage in self.damage):
            lost = (name for name in sizes if name.endswith((".safetensors", ".pack")))
            self.unchecked_bytes += sum(sizes[name] for name in lost if name not in known)

    def _sizes(self) -> dict[str, int]:
        """The files in the folder of the checkpoint, and in the folders within it."""
        here = self._store.list(self._folder)
        places = [("", here)]
        places += [
            (f"{entry.name}/", self._store.list(f"{self._folder}/{entry.name}"))
            for entry in here
            if entry.is_folder
        ]
        return {
            place + entry.name: entry.size_bytes
            for place, entries in places
            for entry in entries
            if not entry.is_folder
        }

    def _index(
        self, commit: manifest.Commit | None, number: int, name: str, there_bytes: int
    ) -> Index | None:
        """An index; None, and damage, where it is not sound. Where the manifest is lost, nothing
        vouches for it, but it still vouches for the data."""
        where = f"{self._store.url}/{self._folder}/{name}"
        try:
            if commit is not None:
                data, _ = read_bytes(self._store, self._folder, commit, number)
            else:
                path = f"{self._folder}/{name}"
                data = self._store.read(path, limit_bytes=LIMIT_BYTES)
            index = index_format.decode(data, where=where)
        except NotFoundError:
            raise
        except LaststepError as error:
            self.damage.append(damage_of(error, file=name, what="index", stop=there_bytes))
            return None
        self.files += 1
        self.bytes += len(data)
        return index

    def _manifest(self) -> manifest.Commit | None:
        name = f"{self._folder}/{MANIFEST_NAME}"
        try:
            reader = self._store.open_reader(name)
        except NotFoundError:
            raise NotFoundError(
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
            except (CorruptError, StorageError) as error:
                damage = damage_of(error, file=MANIFEST_NAME, what="manifest", stop=len(data))
                self.damage.append(damage)
                return None
        if isinstance(decided, manifest.Abort):
            raise NotFoundError(
                "there is no checkpoint: the attempt was aborted",
                where=f"{self._store.url}/{self._folder}",
                found=decided.reason,
            )
        return decided

    def _check(self, opened: OpenIndex) -> None:
        """Check the data files of a rank."""
        ends = {file.name: file.reader.size_bytes for file in opened.files}
        missing = {damage.file for damage in opened.damage if damage.what == "missing file"}
        self.files += len(opened.files) - len(missing)
        for damage in opened.damage:
            lost = self._lost(opened, damage) if damage.what == "size" else ()
            self.damage.append(replace(damage, touches=lost))
        parts = [(layout, extent) for layout in opened.layouts for extent in _extents(layout, ends)]
        with closing(read_ahead((part for _, part in parts), threads=self._threads)) as reads:
            for (layout, part), (_, wrong) in zip(parts, reads, strict=True):
                self._note(layout, part, wrong, ends)

    def _lost(self, opened: OpenIndex, damage: Damage) -> tuple[str, ...]:
        """What lay behind the end of a plain data file that is too short."""
        for layout in opened.layouts:
            if layout.layout.name == damage.file:
                at = layout.layout.header_bytes
                return self._touched(layout, damage.start - at, layout.layout.tensor_bytes)
        return ()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.bytes, max(self._total_bytes, self.bytes))

    def _note(
        self, layout: DataFile, part: Readable, damage: list[Damage], ends: dict[str, int]
    ) -> None:
        # What is missing behind the end of a short file is one damage already: its size.
        self.damage += [
            replace(wrong, touches=self._touched_by(layout, wrong))
            for wrong in damage
            if wrong.start < ends[wrong.file] or not part.size_bytes
        ]
        self.bytes += part.stored_bytes
        if part.what is None:
            is_there = part.stored_bytes if isinstance(part, Extent) else part.size_bytes
            self.blocks += -(-is_there // BLOCK_BYTES)
        self._tell()

    def _touched_by(self, layout: DataFile, wrong: Damage) -> tuple[str, ...]:
        return () if wrong.what == "header" else self._touched(layout, *wrong.data)

    def _touched(self, layout: DataFile, start: int, stop: int) -> tuple[str, ...]:
        """The tensors that lie in bytes [start, stop) of a layout, at most so many."""

        def lies_there(entry: TensorEntry) -> bool:
            return entry.start < stop and start < entry.stop

        tensors = itertools.islice(filter(lies_there, layout.layout.tensors), _MAX_TOUCHED)
        boxes = [stored_in(layout.layout, entry) for entry in tensors]
        return tuple(box.text + self._whose(layout, box.item) for box in boxes)

    def _whose(self, layout: DataFile, item: str) -> str:
        """The rank that has it for itself, as the end of a text."""
        return f" of rank {layout.rank}" if item in self._per_rank else ""


def _extents(layout: DataFile, ends: dict[str, int]) -> Iterator[Readable]:
    """All that is there of a layout: headers, and blocks in chunks."""
    size = layout.layout.tensor_bytes
    parts: Iterator[Readable] = itertools.chain(
        layout.headers(),
        (
            layout.blocks(start, min(start + CHUNK_BYTES, size))
            for start in range(0, size, CHUNK_BYTES)
        ),
    )
    for part in parts:
        if not isinstance(part, Extent) or part.start < ends[part.file] or not part.size_bytes:
            yield part
