"""A run as those see it who restore: what is whole in shared memory comes out of that.

A store that passes everything on to the run's own, but for the folders of saves that were sealed in
segments which nobody writes to any more. Of these it has the manifest and the data files, whether
or not they were ever stored. One that the run has decided against, or that another start has left
behind, does not count. Only for reading: what is written goes to the run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.epochs import Epochs
from laststep.catalog.run import Run
from laststep.errors import NotFound
from laststep.format import manifest
from laststep.format.manifest import Commit
from laststep.memory import segments
from laststep.storage.store import Store, StoreEntry
from laststep.terms import MANIFEST_NAME
from laststep.tiers.sealed import SealedCheckpoint, saves_in

if TYPE_CHECKING:
    from laststep.memory.segments import Segment
    from laststep.storage.store import FileReading, FileWriting, Lock

log = logging.getLogger(__name__)


def sealed_of(store: Store, base: str, own: Segment | None = None) -> list[SealedCheckpoint]:
    """What is whole in shared memory of the run in that store, oldest first: of segments whose
    processes are gone, and of one's own. Close them when done."""
    found: list[SealedCheckpoint] = []
    run = _run_id(store)
    for segment in segments.found(base, store.url):
        mine = own is not None and segment.folder == own.folder
        if segment.owner.ranks > 1 or (segment.is_alive() and not mine):
            continue
        for save in saves_in(segment):
            with contextlib.suppress(NotFound):
                if save.run == run and _counts(store, save.at.folder, save.at.epoch):
                    found.append(SealedCheckpoint(segment, save))
    return sorted(found, key=lambda checkpoint: checkpoint.save.at.point)


def _run_id(store: Store) -> str | None:
    with contextlib.suppress(NotFound):
        return Run.open(store).id
    return None


def _counts(store: Store, folder: str, epoch: int) -> bool:
    """Whether a sealed save is part of the run: it was committed, or nobody has taken the run over
    since it was sealed. That its own writer could not store it does not matter."""
    if isinstance(decision.read(store, folder), Commit):
        return True
    return max(Epochs(store).numbers(), default=0) <= epoch


def nearest_of(store: Store, base: str | None, own: Segment | None) -> Store:
    """The run as it is restored: what is in shared memory, if it has any, comes out of that."""
    return store if base is None else NearestStore(store, base, own)


class NearestStore(Store):
    """The store of a run, with what is nearer than it. Close it when done."""

    def __init__(self, store: Store, base: str, own: Segment | None = None) -> None:
        self._store = store
        self.has_marks, self.same_everywhere = store.has_marks, store.same_everywhere
        self._base = base
        self._own = own
        self._sealed: dict[str, SealedCheckpoint] | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    def close(self) -> None:
        for checkpoint in (self._sealed or {}).values():
            checkpoint.close()
        self._sealed = None

    def look(self) -> dict[str, SealedCheckpoint]:
        """What is whole in shared memory, by folder; looked for once, when the first one asks."""
        with self._lock:
            if self._sealed is None:
                found = sealed_of(self._store, self._base, self._own)
                self._sealed = {checkpoint.folder: checkpoint for checkpoint in found}
            return self._sealed

    def spoil(self, folder: str) -> bool:
        """What is in memory of a checkpoint is not as it was sealed: from now on it is the run's
        own. Whether it was in memory."""
        spoilt = self.look().pop(folder, None)
        if spoilt is not None:
            log.warning("%s in shared memory is damaged, and is looked for in %s", folder, self.url)
            spoilt.close()
        return spoilt is not None

    def list(self, folder: str) -> list[StoreEntry]:
        sealed = self.look()
        if folder in sealed:
            sizes = {**sealed[folder].sizes(), MANIFEST_NAME: len(self._manifest(folder))}
            created = sealed[folder].save.created_s
            return [
                StoreEntry(name=name, is_folder=False, size_bytes=size, modified_s=created)
                for name, size in sorted(sizes.items())
            ]
        entries = self._store.list(folder)
        if folder == "":
            there = {entry.name for entry in entries}
            entries += [
                StoreEntry(
                    name=name, is_folder=True, size_bytes=0, modified_s=one.save.created_s
                )
                for name, one in sealed.items()
                if name not in there
            ]  # fmt: skip
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        folder, _, file = name.partition("/")
        if folder in self.look() and file == MANIFEST_NAME:
            return self._manifest(folder)
        return self._store.read(name, limit_bytes=limit_bytes)

    def _manifest(self, folder: str) -> bytes:
        return manifest.encode(self.look()[folder].commit)

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        folder, _, file = name.partition("/")
        sealed = self.look().get(folder)
        if sealed is not None and file != MANIFEST_NAME:
            return sealed.reader(file)
        return self._store.open_reader(name, cached=cached)

    # The rest is the run's own.

    def create(self, name: str, data: bytes) -> None:
        self._store.create(name, data)

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        self._store.make_folder(name, parents=parents)

    def sync_folder(self, name: str) -> None:
        self._store.sync_folder(name)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        self._store.delete_folder(name, first=first)

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        return self._store.open_writer(name, expected_bytes=expected_bytes)

    def lock(self, name: str) -> Lock:
        return self._store.lock(name)

    def is_locked(self, name: str) -> bool:
        return self._store.is_locked(name)

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        return self._store.marked(name)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()
