"""A run as a restore sees it, including snapshots in shared memory and checkpoints of replicas.

`NearestStore` forwards every call to the run's own store, except for the folders of in-memory
snapshots and of checkpoints that are read from a replica. A primary that has lost the run gets its
records again from a replica, so that it is the same run. If primary and replica have diverged, the
primary is authoritative. A primary without any checkpoint is not treated as a new run while a
replica cannot be reached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.run import Run, run_id
from laststep.catalog.terms import Terms
from laststep.errors import LaststepError, NotFoundError, StorageError, UsageError
from laststep.memory import segments
from laststep.process import signals
from laststep.process.system import boot
from laststep.process.threads import WorkerPool
from laststep.storage.registry import open_store, real_place
from laststep.storage.store import Store, StoreEntry
from laststep.tiers import recovery, snapshots

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from laststep.catalog.listing import Listed
    from laststep.memory.segments import Segment
    from laststep.storage.store import FileReading, FileWriting, Lock
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

_WARN_S = 5.0
BRIEF_S = 30.0
"""The longest wait for a replica if the primary has a checkpoint to continue from."""


class NearestStore(Store):
    """The store of a run, with in-memory snapshots and replicas. Close it when done."""

    def __init__(self, store: Store, base: str | None, own: Segment | None) -> None:
        self.primary = store
        self.in_memory = base is not None
        """True if shared memory is searched."""
        self._elsewhere: dict[str, Store] = {}
        """The replica of each checkpoint that the primary lacks or has damaged, by folder."""
        self.has_marks, self.same_everywhere = store.has_marks, store.same_everywhere
        self._base = base
        self._own = own
        self._snapshots: dict[str, snapshots.MemorySnapshot] | None = None
        self._readers: dict[str, snapshots.Readers] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.primary.url

    def close(self) -> None:
        for snapshot in (self._snapshots or {}).values():
            snapshot.close()
        self._snapshots = None

    def look(self) -> dict[str, snapshots.MemorySnapshot]:
        """Return the snapshots in memory by folder, which are searched for on the first call."""
        with self._lock:
            if self._snapshots is None:
                found = list[snapshots.MemorySnapshot]()
                if self._base:
                    found = recovery.snapshots_of(self.primary, self._base, self._own)
                    recovery.warn_of_incomplete(self.primary, self._base, found)
                for snapshot in found:
                    recovery.check_records(self.primary, snapshot)
                self._snapshots = {snapshot.folder: snapshot for snapshot in found}
            return self._snapshots

    def open(self, named: Mapping[str, Sequence[str]]) -> None:
        """Use exactly these snapshots (folder: segments), which another rank has found."""
        with self._lock:
            self._snapshots = {}
            for folder, places in named.items():
                with contextlib.suppress(StorageError, NotFoundError):  # it is on another node
                    for parts in snapshots.complete(map(segments.opened, places)):
                        if parts[0][1].at.folder == folder:
                            self._snapshots[folder] = snapshots.MemorySnapshot(parts)

    @property
    def node(self) -> str:
        """A name for the shared memory in use that is unique across nodes."""
        try:
            place = os.stat(self._base or "")  # noqa: PTH116 (the flusher has no pathlib)
        except OSError:
            return f"{boot()}/none"
        return f"{boot()}/{place.st_dev}/{place.st_ino}"

    def left_here(self) -> tuple[snapshots.NodePart, ...]:
        """Return the parts of snapshots that dead processes have left on this node."""
        found = segments.found(self._base, real_place(self.url)) if self._base else []
        recovery.wait_for_flushers(found)
        return tuple(
            snapshots.NodePart(segment.folder, segment.owner.rank, segment.owner.ranks, record)
            for segment in found
            if not segment.is_alive()
            for record in snapshots.records_in(segment)
        )

    def open_parts(
        self, nodes: Sequence[str], parts: Mapping[str, Sequence[snapshots.NodePart]]
    ) -> None:
        """Use exactly the snapshots that are complete over all nodes together."""
        with self._lock:
            self._snapshots = {}
            for found, readers in snapshots.complete_over_nodes(nodes, parts, self.node):
                for snapshot in snapshots.opened(found):
                    self._snapshots[snapshot.folder] = snapshot
                    self._readers[snapshot.folder] = readers

    def committed(self) -> list[str]:
        """Return the folders of snapshots that are also committed in the run."""
        run = run_id(self.primary)
        return [
            folder
            for folder, snapshot in self.look().items()
            if snapshot.record.run == run
            and recovery.standing_of(self.primary, snapshot.record) is recovery.SnapshotState.STORED
        ]

    def readers(self, folder: str) -> snapshots.Readers | None:
        """Return the ranks that can read each part of a snapshot that is spread over nodes."""
        return self._readers.get(folder) if folder in self.look() else None

    def keep(self, folders: Container[str]) -> None:
        for folder in [name for name in self.look() if name not in folders]:
            self.look().pop(folder).close()

    def spoil(self, folder: str, why: str) -> bool:
        """Drop a damaged snapshot, to read the run instead; return False if there was none."""
        spoilt = self.look().pop(folder, None)
        if spoilt is not None:
            log.warning("reading %s from %s instead of shared memory: %s", folder, self.url, why)
            spoilt.close()
        return spoilt is not None

    def stand_in(self, folder: str, tier: Store) -> None:
        """Read this checkpoint, which the primary lacks or has damaged, from a replica."""
        self._elsewhere[folder] = tier

    def without_tiers(self) -> NearestStore:
        """Return a store with the same snapshots that reads nothing from replicas."""
        nearer = NearestStore(self.primary, self._base, self._own)
        nearer._snapshots = self.look()
        return nearer

    def is_in_primary(self, folder: str) -> bool:
        return folder not in self._elsewhere and folder not in self.look()

    def place_of(self, folder: str) -> Store:
        """Return the store to read a checkpoint from, with the URL to report damage under."""
        return self if folder in self.look() else self._elsewhere.get(folder, self)

    def _place(self, name: str) -> Store | snapshots.MemorySnapshot:
        folder = name.partition("/")[0]
        return self.look().get(folder) or self._elsewhere.get(folder, self.primary)

    def list(self, folder: str) -> list[StoreEntry]:
        entries = {entry.name: entry for entry in self._place(folder).list(folder)}
        found = self.look()
        for name in (*found, *self._elsewhere) if folder == "" else ():
            created_s = found[name].record.created_s if name in found else 0.0
            made = StoreEntry(name=name, is_folder=True, size_bytes=0, modified_s=created_s)
            entries.setdefault(name, made)
        return sorted(entries.values(), key=lambda entry: entry.name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        return self._place(name).read(name, limit_bytes=limit_bytes)

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        return self._place(name).open_reader(name, cached=cached)

    # Everything else is forwarded to the run's own store

    def create(self, name: str, data: bytes) -> None:
        self.primary.create(name, data)

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        self.primary.make_folder(name, parents=parents)

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


# --- replicas -----------------------------------------------------------------------------------


class ReplicaHas(NamedTuple):
    url: str
    """The URL as the user passed it."""
    store: Store
    listed: tuple[Listed, ...]
    """The checkpoints with all items, in the order of commits; files may be missing."""
    has_partial: bool


def look_at_replicas(nearest: Store, tiers: Sequence[Tier]) -> list[ReplicaHas]:
    """List the checkpoints of the replicas, nearest first. If one cannot be reached, log a warning
    if there is a checkpoint nearer than the replicas, else raise `StorageError`."""
    has_some, found = bool(_listed(nearest)), list[ReplicaHas]()
    for url in (tier.url for tier in tiers):
        try:
            found.append(ask(url, BRIEF_S if has_some else None))
        except (LaststepError, OSError) as error:
            if not has_some:
                raise StorageError(
                    f"there is no checkpoint here, but {url} may have some",
                    where=nearest.url,
                    found=str(error),
                    remedy="start again when it can be reached; leave that tier out to start a new "
                    "run without it",
                ) from error
            log.warning("cannot check whether %s has a newer checkpoint: %s", url, error)
    if not has_some and not any(has.listed for has in found):
        for has in (has for has in found if has.has_partial):
            raise UsageError(
                "there is no whole checkpoint",
                where=nearest.url,
                found=f"some items of this run at {has.url}",
                remedy="restore these with restore(only=[…]) and a Checkpointer on that tier "
                "alone, or leave that tier out to start a new run",
            )
    return found


def only_there(nearest: Store, found: list[ReplicaHas]) -> dict[str, str]:
    """Map the folders of checkpoints that exist only on replicas to the replica to read them from.
    The primary gets the records that it lacks. A replica that is a different run, or has diverged,
    is removed from `found`."""
    here = {item.folder: item for item in _listed(nearest)}
    has_some, places = bool(here), dict[str, str]()
    for has in [has for has in found if has.listed]:
        try:
            _make_same_run(nearest, tuple(here.values()), has)
        except UsageError as error:
            if not has_some:
                raise
            log.warning("nothing is read at %s: %s", has.url, error)
            found.remove(has)
            continue
        more = {item.folder: item for item in has.listed if item.folder not in here}
        here |= more
        places |= dict.fromkeys(more, has.url)
    return places


def ask(url: str, within_s: float | None) -> ReplicaHas:
    """List the checkpoints of a replica. Raise `StorageError` if it does not answer in time; its
    thread is then abandoned, because a call to an unreachable server or a hanging mount cannot be
    cancelled."""

    def listing() -> ReplicaHas:
        tier = open_store(url)
        listed = _listed(tier)
        whole = tuple(item for item in listed if not (item.commit and item.commit.omitted_items))
        return ReplicaHas(url, tier, whole, len(whole) < len(listed))

    answered = threading.Event()
    future = WorkerPool("ask", 1).submit(listing)
    future.add_done_callback(lambda _: answered.set())
    if not signals.wait(answered, min(_WARN_S, within_s or _WARN_S)):
        log.warning("waiting for %s, to learn which checkpoints it has", url)
    if not signals.wait(answered, within_s):
        raise StorageError(
            "a replica does not answer",
            where=url,
            found=f"nothing within {within_s:g} s",
            remedy="check the server and the network",
        )
    return future.result()


def _make_same_run(nearest: Store, here: Sequence[Listed], has: ReplicaHas) -> None:
    """Copy the run's records that the primary lacks: of all terms, including those without a
    commit, so that the next term gets an unused number. Raise `UsageError` if the primary is a
    different run or both have diverged, unless a job at the replica knew the primary's commits
    and abandoned them."""
    from laststep.tiers.copying import Records  # imported late: few restores need it

    records = Records(has.store, nearest, may_be_ahead=True)
    records.check()
    ours, theirs = (frozenset(Terms(store).numbers()) for store in (nearest, has.store))
    if theirs <= ours:
        records.bring_run()
        return
    if ours - theirs and min(ours - theirs) > max(theirs):  # older records were lost here
        records.bring(None)
        return
    names = {item.folder: item for item in (*has.listed, *here)}.values()
    known = {name.folder for name in (*Run.open(has.store).would_descend(names), *has.listed)}
    newest = max(here, key=lambda item: item.point).folder if here else None
    if ours - theirs or not (newest is None or newest in known):
        raise UsageError(
            "this run and a replica have diverged",
            where=nearest.url,
            found=f"terms {sorted(theirs - ours)} at {has.url} alone",
            remedy=(
                "the primary is authoritative: use another place for this run's replica; "
                "checkpoints saved there separately can be restored there"
            ),
        )
    records.bring(None)


def _listed(store: Store) -> tuple[Listed, ...]:
    try:
        return Run.open(store).checkpoints()
    except NotFoundError:
        return ()
