"""Check every byte of a stored checkpoint against its digests, and list all damage.

Bypasses the page cache if the store can, so that the stored bytes themselves are checked. Knows
nothing about torch, lineage or the presentation to a user. Damage is a value, never an error: one
bad block does not hide another. Errors are raised only if the checkpoint cannot be examined: it
does not exist, was deleted meanwhile, or the store may answer later. The files of one rank are open
at a time; `threads` workers read ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import LIMIT_BYTES, name_of, read_bytes
from laststep.constants import CHUNK_BYTES, MANIFEST_NAME
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.read.blocks import BlockReader, Damage, damage_of, headers
from laststep.read.content import stored_in
from laststep.read.reader import read_ahead

if TYPE_CHECKING:
    from laststep.format.index import Index
    from laststep.format.layout import TensorEntry
    from laststep.read.blocks import Extent, LayoutBlocks
    from laststep.storage.store import Store

_MAX_TOUCHED = 100

Progress = Callable[[int, int], None]
"""Callback with the bytes checked so far and the total bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of a verification. `unchecked_bytes` exist, but their digests are lost."""

    files: int
    blocks: int
    bytes: int
    damage: tuple[Damage, ...]
    unchecked_bytes: int = 0


def verify_checkpoint(
    store: Store, folder: str, *, threads: int = 4, progress: Progress | None = None
) -> VerifyReport:
    """Read all of the checkpoint in `folder` and compare it with its digests.

    Raise `NotFoundError` if there is no committed checkpoint, or it was deleted meanwhile.
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
    """One verification, and its results so far."""

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
        """Check the manifest, then each index with its data files."""
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
                with closing(BlockReader(self._store, self._folder, index)) as reader:
                    self._check(reader)
        if any(damage.what in ("index", "manifest") for damage in self.damage):
            lost = (name for name in sizes if name.endswith((".safetensors", ".pack")))
            self.unchecked_bytes += sum(sizes[name] for name in lost if name not in known)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the files in the checkpoint's folder and in its subfolders, by
        name."""
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
        """Return an index, or None and add damage if it is invalid. If the manifest is lost, the
        index can only be checked against its own digest, but the data can still be checked against
        it."""
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

    def _check(self, reader: BlockReader) -> None:
        """Check the data files of a rank."""
        files = reader.files()
        self.files += len([file for file in files if not file.is_missing])
        for damage in (damage for file in files for damage in file.damage):
            lost = self._lost(reader, damage) if damage.what == "size" else ()
            self.damage.append(replace(damage, touches=lost))
        for _, header in headers(reader):
            if not header.file.is_missing:
                self.damage += header.read()
                self.bytes += min(len(header.content), header.file.reader.size_bytes)
                self._tell()
        ends = {file.name: file.reader.size_bytes for file in files}
        parts = [
            (layout, layout.blocks(start, min(start + CHUNK_BYTES, layout.layout.tensor_bytes)))
            for layout in reader.layouts
            for start in range(0, layout.layout.tensor_bytes, CHUNK_BYTES)
        ]
        with closing(read_ahead((part for _, part in parts), threads=self._threads)) as reads:
            for (layout, part), (_, wrong) in zip(parts, reads, strict=True):
                self._note(layout, part, wrong, ends)

    def _lost(self, reader: BlockReader, damage: Damage) -> tuple[str, ...]:
        """Return the tensors in the missing end of a plain data file that is too short."""
        for layout in reader.layouts:
            if layout.layout.name == damage.file:
                at = layout.layout.header_bytes
                return self._touched(layout, damage.start - at, layout.layout.tensor_bytes)
        return ()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.bytes, max(self._total_bytes, self.bytes))

    def _note(
        self, layout: LayoutBlocks, part: Extent, damage: list[Damage], ends: dict[str, int]
    ) -> None:
        # The missing end of a short file is reported once already, as its size.
        self.damage += [
            replace(wrong, touches=self._touched(layout, *wrong.data))
            for wrong in damage
            if wrong.start < ends[wrong.file]
        ]
        stored_bytes, blocks = part.stored()
        self.bytes += stored_bytes
        self.blocks += blocks
        self._tell()

    def _touched(self, layout: LayoutBlocks, start: int, stop: int) -> tuple[str, ...]:
        """Return the tensors in bytes [start, stop) of a layout, at most `_MAX_TOUCHED`."""

        def lies_there(entry: TensorEntry) -> bool:
            return entry.start < stop and start < entry.stop

        tensors = itertools.islice(filter(lies_there, layout.layout.tensors), _MAX_TOUCHED)
        boxes = [stored_in(layout.layout, entry) for entry in tensors]
        return tuple(box.text + self._whose(layout, box.item) for box in boxes)

    def _whose(self, layout: LayoutBlocks, item: str) -> str:
        """Return the rank as a suffix for the name of a per-rank item's tensor, else ""."""
        return f" of rank {layout.rank}" if item in self._per_rank else ""
