"""A run as a restore sees it, including snapshots in shared memory and checkpoints of replicas.

A store that forwards every call to the run's own store, except for the folders of in-memory
snapshots. Those are read from memory whether or not they were ever stored, and so are the records
of the run and of its terms if the store has lost them. Only for reading: writes are forwarded to
the run's own store.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.errors import NotFoundError, StorageError
from laststep.format.manifest import Commit
from laststep.memory import segments
from laststep.storage.store import Store, StoreEntry
from laststep.tiers import recovery, snapshots
from laststep.tiers.snapshots import MemorySnapshot

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from laststep.memory.segments import Segment
    from laststep.storage.store import FileReading, FileWriting, Lock
    from laststep.tiers.snapshots import NodePart, Readers

log = logging.getLogger(__name__)


class NearestStore(Store):
    """The store of a run, with in-memory snapshots and replicas. Close it when done."""

    def __init__(self, store: Store, base: str | None, own: Segment | None = None) -> None:
        self.primary = store
        """The run's own store."""
        self.in_memory = base is not None
        """True if shared memory is searched."""
        self._elsewhere: dict[str, Store] = {}
        """The replica to read from, by folder, for checkpoints that the primary lacks or has
        damaged."""
        self.has_marks, self.same_everywhere = store.has_marks, store.same_everywhere
        self._base = base
        self._own = own
        self._snapshots: dict[str, MemorySnapshot] | None = None
        self._readers: dict[str, Readers] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.primary.url

    def close(self) -> None:
        for snapshot in (self._snapshots or {}).values():
            snapshot.close()
        self._snapshots = None

    def look(self) -> dict[str, MemorySnapshot]:
        """Return the snapshots in memory by folder. They are searched for once, on the first
        call."""
        with self._lock:
            if self._snapshots is None:
                found = (
                    recovery.snapshots_of(self.primary, self._base, self._own) if self._base else []
                )
                self._snapshots = {snapshot.folder: snapshot for snapshot in found}
                if found and recovery.is_lost(self.primary):
                    log.warning(
                        "%s no longer has a run: step %d is restored from shared memory and "
                        "stored there again; remove %s to start over",
                        self.url,
                        found[-1].record.at.step,
                        " and ".join(found[-1].segments),
                    )
            return self._snapshots

    def open(self, named: Mapping[str, Sequence[str]]) -> None:
        """Use exactly these snapshots, given as folder and segments, as found by another rank. Skip
        those that cannot be opened on this node."""
        with self._lock:
            self._snapshots = {}
            for folder, places in named.items():
                with contextlib.suppress(StorageError, NotFoundError):  # it is on another node
                    for parts in snapshots.complete(map(segments.opened, places)):
                        if parts[0][1].at.folder == folder:
                            self._snapshots[folder] = MemorySnapshot(parts)

    @property
    def node(self) -> str:
        """A name for the shared memory in use that is unique across nodes."""
        return snapshots.node_of(self._base or "")

    def left_here(self) -> tuple[NodePart, ...]:
        """Return the parts of snapshots that dead processes have left on this node."""
        there = recovery.segments_of(self.primary, self._base) if self._base else []
        recovery.wait_for_flushers(there)
        return snapshots.parts_of_dead(there)

    def open_parts(self, nodes: Sequence[str], parts: Mapping[str, Sequence[NodePart]]) -> None:
        """Use exactly the snapshots that are complete over all nodes together."""
        with self._lock:
            self._snapshots = {}
            for found, readers in snapshots.complete_over_nodes(nodes, parts, self.node):
                for snapshot in snapshots.opened(found):
                    self._snapshots[snapshot.folder] = snapshot
                    self._readers[snapshot.folder] = readers

    def committed(self) -> list[str]:
        """Return the folders of snapshots that are also committed in the run."""
        run = recovery.run_id(self.primary)
        return [
            folder
            for folder, snapshot in self.look().items()
            if snapshot.record.run == run
            and not recovery.is_of_another(self.primary, snapshot.record)
            and isinstance(decision.read(self.primary, folder), Commit)
        ]

    def readers(self, folder: str) -> Readers | None:
        """Return the ranks that can read each part of a snapshot, or None unless it is spread over
        nodes."""
        return self._readers.get(folder) if folder in self.look() else None

    def keep(self, folders: Container[str]) -> None:
        """Drop all snapshots except these."""
        for folder in [name for name in self.look() if name not in folders]:
            self.look().pop(folder).close()

    def spoil(self, folder: str, why: str) -> bool:
        """Drop a damaged snapshot, so that the checkpoint is read from the run. Return False if it
        was not in memory."""
        spoilt = self.look().pop(folder, None)
        if spoilt is not None:
            log.warning("reading %s from %s instead of shared memory: %s", folder, self.url, why)
            spoilt.close()
        return spoilt is not None

    def stand_in(self, folder: str, tier: Store) -> None:
        """Read this checkpoint, which the primary lacks or has damaged, from a replica from now
        on."""
        self._elsewhere[folder] = tier

    def without_tiers(self) -> NearestStore:
        """Return a store with the same snapshots that reads nothing from replicas."""
        nearer = NearestStore(self.primary, self._base, self._own)
        nearer._snapshots = self.look()
        return nearer

    def is_in_primary(self, folder: str) -> bool:
        """Return True if a checkpoint is read from the run's own store."""
        return folder not in self._elsewhere and folder not in self.look()

    def tier_of(self, folder: str) -> str | None:
        """Return the URL of the replica that a checkpoint is read from, or None."""
        is_there = folder in self._elsewhere and folder not in self.look()
        return self._elsewhere[folder].url if is_there else None

    def place_of(self, folder: str) -> Store:
        """Return the store to read a checkpoint from; damage is reported with its URL."""
        return self if self.tier_of(folder) is None else self._elsewhere[folder]

    def _place(self, name: str) -> Store:
        return self._elsewhere.get(name.partition("/")[0], self.primary)

    def list(self, folder: str) -> list[StoreEntry]:
        found = self.look()
        if folder in found:
            created_s = found[folder].record.created_s
            return [
                StoreEntry(name=name, is_folder=False, size_bytes=size, modified_s=created_s)
                for name, size in sorted(found[folder].sizes().items())
            ]
        entries = {entry.name: entry for entry in self._place(folder).list(folder)}
        if folder == "":
            nearer = {name: snapshot.record.created_s for name, snapshot in found.items()}
            for name, created_s in {**dict.fromkeys(self._elsewhere, 0.0), **nearer}.items():
                made = StoreEntry(name=name, is_folder=True, size_bytes=0, modified_s=created_s)
                entries.setdefault(name, made)
        for record, data in self._records().items():
            inner, _, name = record.rpartition("/")
            if inner == folder:
                entry = StoreEntry(name=name, is_folder=False, size_bytes=len(data), modified_s=0)
                entries.setdefault(name, entry)
        return sorted(entries.values(), key=lambda entry: entry.name)

    def _records(self) -> dict[str, bytes]:
        """Return the records of runs and terms in memory."""
        snapshots = self.look().values()
        return {name: data for snapshot in snapshots for name, data in snapshot.record.records}

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        snapshot = self.look().get(name.partition("/")[0])
        if snapshot is not None and (data := snapshot.read(name)) is not None:
            return data
        try:
            return self._place(name).read(name, limit_bytes=limit_bytes)
        except NotFoundError:
            if (record := self._records().get(name)) is None:
                raise
            return record

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        snapshot = self.look().get(name.partition("/")[0])
        place = self._place(name) if snapshot is None else snapshot
        return place.open_reader(name, cached=cached)

    # Everything else is forwarded to the run's own store.

    def create(self, name: str, data: bytes) -> None:
        self.primary.create(name, data)

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        self.primary.make_folder(name, parents=parents)

    def sync_folder(self, name: str) -> None:
        self.primary.sync_folder(name)

    def delete(self, name: str) -> None:
        self.primary.delete(name)

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        self.primary.delete_folder(name, first=first)

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        return self.primary.open_writer(name, expected_bytes=expected_bytes)

    def lock(self, name: str) -> Lock:
        return self.primary.lock(name)

    def is_locked(self, name: str) -> bool:
        return self.primary.is_locked(name)

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        return self.primary.marked(name)

    def free_bytes(self) -> int | None:
        return self.primary.free_bytes()
