"""A run as those see it who restore: what is whole in shared memory comes out of that.

A store that passes everything on to the run's own, but for the folders of saves that were sealed in
segments which nobody writes to any more. Of these it has the manifest and the data files, whether
or not they were ever stored, and the records of run and epoch, where the store has lost them. A
job's counts if all of its ranks have sealed it, here. One that another start has left behind does
not. Only for reading: what is written goes to the run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.catalog.epochs import Epochs
from laststep.catalog.run import Run
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError
from laststep.format import manifest
from laststep.format.manifest import Commit
from laststep.memory import segments
from laststep.process import signals
from laststep.settings import WAIT_FOR_OTHERS_S
from laststep.storage.registry import open_store, real_place
from laststep.storage.store import Store, StoreEntry
from laststep.terms import MANIFEST_NAME
from laststep.tiers.nodes import left_here, node_of, put_together
from laststep.tiers.rescue import is_left_behind, is_of_another
from laststep.tiers.sealed import SealedCheckpoint, saves_in

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from laststep.catalog.lineage import AttemptName
    from laststep.memory.segments import Segment
    from laststep.storage.store import FileReading, FileWriting, Lock
    from laststep.tiers.nodes import NodePart, Readers
    from laststep.tiers.sealed import SealedByRanks, SealedSave

log = logging.getLogger(__name__)

_LOOK_S = 0.02


def sealed_of(
    store: Store, base: str, own: Segment | None = None, flusher_of: Segment | None = None
) -> list[SealedCheckpoint]:
    """What is whole in shared memory of the run in that store, oldest first: of segments whose
    processes are gone, and of this start's, whose `own` is one. Where the store has lost the run,
    that is the one that saved last. Close them when done. A flusher, whose trainer may have died
    meanwhile, says which segment is its: it would wait for itself."""
    there = segments_of(store, base)
    served = None if flusher_of is None else flusher_of.folder
    _let_end([segment for segment in there if segment.folder != served])
    gone = {segment.folder for segment in there if not segment.is_alive()}
    mine = set() if own is None else {own.folder}
    whole = [
        parts
        for parts in _whole(there)
        if (folders := {segment.folder for segment, _ in parts if segment is not None}) <= gone
        or folders & mine
    ]
    run, found = _run_id(store), []
    if whole and is_lost(store):
        run = max((parts[0][1] for parts in whole), key=lambda save: save.created_s).run
    for parts in whole:
        if parts[0][1].run == run and _counts(store, parts[0][1]):
            found += _opened(parts)
    return sorted(found, key=lambda checkpoint: checkpoint.save.at.point)


def segments_of(store: Store, base: str) -> list[Segment]:
    """The segments of the run in that store: by its place, or by its id where it was moved."""
    place, run = real_place(store.url), _run_id(store)
    return [
        segment
        for segment in segments.found(base)
        if segment.owner.run == place or _has_moved(segment, run, place)
    ]


def _has_moved(segment: Segment, run: str | None, place: str) -> bool:
    """Whether it has saves of that run, which is at that place now. As long as the run is also
    where they went to, one of the two is a copy, and that has no part in them."""
    if not run or all(save.run != run for save in saves_in(segment)):
        return False
    before = segment.owner.run
    try:
        return real_place(before) == place or _run_id(open_store(before)) != run
    except LaststepError:
        return False  # nobody knows


def is_lost(store: Store) -> bool:
    """Whether there is nothing of a run: it is a new one, or its disk is."""
    return _run_id(store) is None and not Epochs(store).numbers()


def _let_end(there: Sequence[Segment]) -> None:
    """Give flushers time whose trainers have died: soon they leave what is whole as it is."""
    deadline = time.monotonic() + WAIT_FOR_OTHERS_S
    for segment in there:
        while segment.is_ending():
            if time.monotonic() >= deadline:
                log.warning(
                    "the flusher of process %d does not end, and %s is left to it",
                    segment.owner.pid,
                    segment.folder,
                )
                return
            signals.let_in()
            time.sleep(_LOOK_S)  # another process works: there is nothing to be woken by


def _whole(there: Iterable[Segment]) -> list[SealedByRanks]:
    """The saves in these segments that all ranks of their job have sealed. An attempt is of one
    start, so its parts are."""
    by_attempt: dict[tuple[str, int, AttemptName], dict[int, tuple[Segment, SealedSave]]] = {}
    for segment in there:
        for save in saves_in(segment):
            parts = by_attempt.setdefault((save.run, segment.owner.ranks, save.at), {})
            parts[segment.owner.rank] = segment, save
    return [
        [parts[rank] for rank in range(ranks)]
        for (_, ranks, _), parts in by_attempt.items()
        if parts.keys() == set(range(ranks))
    ]


def _opened(parts: SealedByRanks) -> list[SealedCheckpoint]:
    """The checkpoint that these parts are; none where they are gone, or fit not together."""
    checkpoint = None
    try:
        checkpoint = SealedCheckpoint(parts)
        checkpoint.agreed  # noqa: B018 (or why there is none)
    except (LaststepError, msgspec.MsgspecError) as error:
        log.warning("%s in shared memory does not count: %s", parts[0][1].at.folder, error)
        if checkpoint is not None:
            checkpoint.close()
        return []
    return [checkpoint]


def _run_id(store: Store) -> str | None:
    with contextlib.suppress(NotFoundError):
        return Run.open(store).id
    return None


def _counts(store: Store, save: SealedSave) -> bool:
    """Whether a sealed save is part of the run: it was committed, or nobody has gone on without it
    since. That its own writers could not store it does not matter."""
    if is_of_another(store, save):
        return False
    with contextlib.suppress(CorruptError):  # whatever it said: this is sound
        if isinstance(decision.read(store, save.at.folder), Commit):
            return True
    return not is_left_behind(store, save)


@contextlib.contextmanager
def nearest(
    store: Store, base: str | None, own: Segment | None, *, has_further: bool
) -> Iterator[Store]:
    """The run as it is restored: with a base of shared memory, what is there comes out of that;
    with further tiers, what is damaged here may come out of those."""
    if base is None and not has_further:
        yield store
        return
    with contextlib.closing(NearestStore(store, base, own)) as near:
        yield near


def beneath(store: Store) -> Store:
    """The store of a run itself, whatever is nearer than it."""
    return store.home if isinstance(store, NearestStore) else store


class NearestStore(Store):
    """The store of a run, with what is nearer than it. Close it when done."""

    def __init__(self, store: Store, base: str | None, own: Segment | None = None) -> None:
        self.home = store
        """The run's own."""
        self.in_memory = base is not None
        """Whether it looks into shared memory."""
        self._elsewhere: dict[str, Store] = {}
        """Where checkpoints are read that are not here, or damaged."""
        self.has_marks, self.same_everywhere = store.has_marks, store.same_everywhere
        self._base = base
        self._own = own
        self._sealed: dict[str, SealedCheckpoint] | None = None
        self._readers: dict[str, Readers] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.home.url

    def close(self) -> None:
        for checkpoint in (self._sealed or {}).values():
            checkpoint.close()
        self._sealed = None

    def look(self) -> dict[str, SealedCheckpoint]:
        """What is whole in shared memory, by folder; looked for once, when the first one asks."""
        with self._lock:
            if self._sealed is None:
                found = sealed_of(self.home, self._base, self._own) if self._base else []
                self._sealed = {checkpoint.folder: checkpoint for checkpoint in found}
                if found and is_lost(self.home):
                    log.warning(
                        "there is no run in %s any more: step %d comes back out of shared memory, "
                        "and is stored there again; remove %s before a start that is to begin anew",
                        self.url,
                        found[-1].save.at.step,
                        " and ".join(found[-1].segments),
                    )
            return self._sealed

    def open(self, named: Mapping[str, Sequence[str]]) -> None:
        """Look no further than at these folders, which lie in these segments, as far as they can
        be opened here: another rank has found them."""
        with self._lock:
            self._sealed = {}
            for folder, places in named.items():
                with contextlib.suppress(StorageError, NotFoundError):  # it is on another node
                    for parts in _whole(map(segments.opened, places)):
                        if parts[0][1].at.folder == folder:
                            self._sealed[folder] = SealedCheckpoint(parts)

    @property
    def node(self) -> str:
        """A name of the shared memory that is looked at, on whatever node."""
        return node_of(self._base or "")

    def left_here(self) -> tuple[NodePart, ...]:
        """What the dead have left on this node."""
        there = segments_of(self.home, self._base) if self._base else []
        _let_end(there)
        return left_here(there)

    def open_parts(self, nodes: Sequence[str], parts: Mapping[str, Sequence[NodePart]]) -> None:
        """Look no further than at what all nodes have together; see `put_together`."""
        with self._lock:
            self._sealed = {}
            for save, readers in put_together(nodes, parts, self.node):
                for checkpoint in _opened(save):
                    self._sealed[checkpoint.folder] = checkpoint
                    self._readers[checkpoint.folder] = readers

    def committed(self) -> list[str]:
        """Of what is in memory, what the run has too."""
        run, sealed = _run_id(self.home), self.look()
        return [
            folder
            for folder, one in sealed.items()
            if one.save.run == run
            and not is_of_another(self.home, one.save)
            and isinstance(decision.read(self.home, folder), Commit)
        ]

    def readers(self, folder: str) -> Readers | None:
        """Which ranks can read what of a checkpoint, where that lies on several nodes."""
        return self._readers.get(folder) if folder in self.look() else None

    def keep(self, folders: Container[str]) -> None:
        """Pass over all others that are in memory."""
        for folder in [name for name in self.look() if name not in folders]:
            self.look().pop(folder).close()

    def spoil(self, folder: str, why: str) -> bool:
        """What is in memory of a checkpoint does not serve: from now on it is the run's own.
        Whether it was in memory."""
        spoilt = self.look().pop(folder, None)
        if spoilt is not None:
            log.warning("%s is looked for in %s, not in shared memory: %s", folder, self.url, why)
            spoilt.close()
        return spoilt is not None

    def stand_in(self, folder: str, tier: Store) -> None:
        """A checkpoint that is not here, or is damaged, is read at a further tier from now on."""
        self._elsewhere[folder] = tier

    def without_tiers(self) -> NearestStore:
        """The same, but for what is read at further tiers."""
        nearer = NearestStore(self.home, self._base, self._own)
        nearer._sealed = self.look()
        return nearer

    def is_at_home(self, folder: str) -> bool:
        """Whether it is read in the run's own store."""
        return folder not in self._elsewhere and folder not in self.look()

    def tier_of(self, folder: str) -> str | None:
        """The further tier at which it is read, if it is."""
        is_there = folder in self._elsewhere and folder not in self.look()
        return self._elsewhere[folder].url if is_there else None

    def place_of(self, folder: str) -> Store:
        """Return the store to read a checkpoint from, whose URL is where damage is reported."""
        return self if self.tier_of(folder) is None else self._elsewhere[folder]

    def _place(self, name: str) -> Store:
        return self._elsewhere.get(name.partition("/")[0], self.home)

    def list(self, folder: str) -> list[StoreEntry]:
        sealed = self.look()
        if folder in sealed:
            sizes = {**sealed[folder].sizes(), MANIFEST_NAME: len(self._manifest(folder))}
            created = sealed[folder].save.created_s
            return [
                StoreEntry(name=name, is_folder=False, size_bytes=size, modified_s=created)
                for name, size in sorted(sizes.items())
            ]
        entries = {entry.name: entry for entry in self._place(folder).list(folder)}
        if folder == "":
            nearer = {name: one.save.created_s for name, one in sealed.items()}
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
        """The records of runs and epochs that lie in memory."""
        return {name: data for one in self.look().values() for name, data in one.save.records}

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        folder, _, file = name.partition("/")
        if folder in self.look() and file == MANIFEST_NAME:
            return self._manifest(folder)
        try:
            return self._place(name).read(name, limit_bytes=limit_bytes)
        except NotFoundError:
            if (record := self._records().get(name)) is None:
                raise
            return record

    def _manifest(self, folder: str) -> bytes:
        return manifest.encode(self.look()[folder].commit)

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        folder, _, file = name.partition("/")
        sealed = self.look().get(folder)
        if sealed is not None and file != MANIFEST_NAME:
            return sealed.reader(file)
        return self._place(name).open_reader(name, cached=cached)

    # The rest is the run's own.

    def create(self, name: str, data: bytes) -> None:
        self.home.create(name, data)

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        self.home.make_folder(name, parents=parents)

    def sync_folder(self, name: str) -> None:
        self.home.sync_folder(name)

    def delete(self, name: str) -> None:
        self.home.delete(name)

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        self.home.delete_folder(name, first=first)

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        return self.home.open_writer(name, expected_bytes=expected_bytes)

    def lock(self, name: str) -> Lock:
        return self.home.lock(name)

    def is_locked(self, name: str) -> bool:
        return self.home.is_locked(name)

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        return self.home.marked(name)

    def free_bytes(self) -> int | None:
        return self.home.free_bytes()
