"""Check every byte of a stored checkpoint against its digests, and list all damage.

Bypasses the page cache if the store can, so that the stored bytes themselves are checked. Errors
are raised only if the checkpoint cannot be examined: it does not exist, was deleted meanwhile, or
the store may answer later. The files of one rank are open at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog.attempt import deleted, read_index_bytes, read_manifest
from laststep.constants import CHUNK_BYTES, MANIFEST_NAME
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.read.blocks import BlockReader, Damage, damage_of, headers
from laststep.read.content import stored_in
from laststep.read.reader import read_ahead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.format.index import Index
    from laststep.read.blocks import LayoutBlocks
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
    """Verify the checkpoint in `folder`. Raise `NotFoundError` if it is uncommitted or deleted."""
    check = _Check(store, folder, threads, progress)
    check.all()
    if check.damage:
        gone = deleted(store, folder)
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
        here = self._store.list(self._folder)
        sizes = {entry.name: entry.size_bytes for entry in here if not entry.is_folder}
        for folder in (entry.name for entry in here if entry.is_folder):
            files = self._store.list(f"{self._folder}/{folder}")
            sizes |= {f"{folder}/{e.name}": e.size_bytes for e in files if not e.is_folder}
        self._total_bytes = sum(sizes.values())
        commit = self._manifest(sizes.get(MANIFEST_NAME, 0))
        self._tell()
        known: set[str] = set()
        if commit is not None:
            of_ranks = [item.name for item in commit.items if item.per_rank and commit.ranks > 1]
            self._per_rank = frozenset(of_ranks)
            for number in range(commit.index_count):
                index = self._index(commit, number, sizes)
                if index is not None:
                    known.update(file.name for file in index.files)
                    with closing(BlockReader(self._store, self._folder, index)) as reader:
                        self._check(reader)
        if any(damage.what in ("index", "manifest") for damage in self.damage):
            lost = (name for name in sizes if name.endswith((".safetensors", ".pack")))
            self.unchecked_bytes += sum(sizes[name] for name in lost if name not in known)

    def _index(
        self, commit: manifest.Commit, number: int, sizes: Mapping[str, int]
    ) -> Index | None:
        """Return an index, or None and add damage."""
        name = index_format.index_name(number, commit.ranks)
        try:
            data, where = read_index_bytes(self._store, self._folder, commit, number)
            index = index_format.decode(data, where=where)
        except NotFoundError:
            raise
        except LaststepError as error:
            self.damage.append(damage_of(error, file=name, what="index", stop=sizes.get(name, 0)))
            return None
        self.files += 1
        self.bytes += len(data)
        return index

    def _manifest(self, size_bytes: int) -> manifest.Commit | None:
        """Return the manifest, or None and add damage."""
        where = f"{self._store.url}/{self._folder}"
        try:
            data = read_manifest(self._store, self._folder)
            decided = manifest.decode(data, where=f"{where}/{MANIFEST_NAME}")
        except (CorruptError, StorageError) as error:
            lost = damage_of(error, file=MANIFEST_NAME, what="manifest", stop=size_bytes)
            self.damage.append(lost)
            decided = None
        except NotFoundError:
            decided = manifest.Abort(reason="no manifest", by="")
        if isinstance(decided, manifest.Abort):
            raise NotFoundError(
                "there is no committed checkpoint",
                where=where,
                found=decided.reason,
                remedy="`laststep ls` lists the checkpoints of a run",
            )
        self.files += 1
        self.bytes += size_bytes
        return decided

    def _check(self, reader: BlockReader) -> None:
        """Check the data files of a rank."""
        files = reader.files()
        self.files += len([file for file in files if not file.is_missing])
        for damage in (damage for file in files for damage in file.damage):
            lost: tuple[str, ...] = ()
            for layout in reader.layouts if damage.what == "size" else ():
                if layout.layout.name == damage.file:  # the tensors in its missing end
                    at = damage.start - layout.layout.header_bytes
                    lost = self._touched(layout, at, layout.layout.tensor_bytes)
            self.damage.append(replace(damage, touches=lost))
        for _, header in headers(reader):
            if not header.file.is_missing:
                self.damage += header.read()
                self.bytes += min(len(header.content), header.file.reader.size_bytes)
                self._tell()
        ends = {file.file.name: file.reader.size_bytes for file in files}
        parts = [
            (layout, layout.blocks(start, min(start + CHUNK_BYTES, layout.layout.tensor_bytes)))
            for layout in reader.layouts
            for start in range(0, layout.layout.tensor_bytes, CHUNK_BYTES)
        ]
        with closing(read_ahead((part for _, part in parts), threads=self._threads)) as reads:
            for (layout, part), (_, damages) in zip(parts, reads, strict=True):
                # The missing end of a short file is reported once already, as its size.
                self.damage += [
                    replace(wrong, touches=self._touched(layout, *wrong.data))
                    for wrong in damages
                    if wrong.start < ends[wrong.file]
                ]
                stored_bytes, blocks = part.stored()
                self.bytes += stored_bytes
                self.blocks += blocks
                self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.bytes, max(self._total_bytes, self.bytes))

    def _touched(self, layout: LayoutBlocks, start: int, stop: int) -> tuple[str, ...]:
        """Return the first tensors in bytes [start, stop) of a layout."""
        touched = (e for e in layout.layout.tensors if e.start < stop and start < e.stop)
        boxes = [stored_in(layout.layout, e) for e in itertools.islice(touched, _MAX_TOUCHED)]
        of_rank = f" of rank {layout.reader.index.rank}"
        return tuple(b.text + (of_rank if b.item in self._per_rank else "") for b in boxes)
