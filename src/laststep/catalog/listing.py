"""List a run: committed checkpoints, undecided attempts and aborted ones.

Only names, sizes and manifests are read, never data files. A manifest never changes while it
exists, so its content is cached; its existence is checked every time. Checkpoints that are deleted
during a scan are left out. Thread-safe.

In a job of many ranks, files are stored in subfolders of the checkpoint's folder. Those of attempts
and of checkpoints with very many files are skipped unless a scan is `deep`, because every restore
scans the run. For a checkpoint with very many files even a deep scan only counts names, since the
manifest has the sizes; sizes are listed only if names are missing. A linked subfolder is not
scanned, because its content is not part of the run.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import attempt as attempts
from laststep.catalog import terms
from laststep.catalog.attempt import AttemptName
from laststep.constants import MANIFEST_NAME
from laststep.errors import LaststepError, StorageError
from laststep.format.index import folder_of, index_name
from laststep.format.manifest import Abort, Commit
from laststep.storage.store import Store, StoreEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Set as AbstractSet


_NEAREST = 6
_VERY_MANY = 4096
"""A scan skips the rank subfolders of a checkpoint with more files than this."""
_DATA_FILES = (".safetensors", ".pack")
_LOOKED_INTO = 100
_DCP_METADATA = ".metadata"
"""The most folders that are searched for a run when the given path is not one."""
_LOOKS_AT_ONCE = 16
"""Folders of an object store that are scanned at once; each takes two or three requests."""


class Listed(AttemptName, frozen=True, kw_only=True, gc=True):
    """A committed checkpoint. If its manifest cannot be read, `commit` is None and `error` has the
    reason.

    `on_lineage` is False for a checkpoint on an abandoned branch and for one whose step was
    committed again; `superseded_by` names the later one. `incomplete` describes a file that is
    missing or whose size differs from the manifest. Changed bytes are detected only by `verify`.
    """

    commit: Commit | None
    error: LaststepError | None
    on_lineage: bool
    superseded_by: str | None
    pinned: bool
    size_bytes: int
    """The size of its data files by the manifest, or of all its files without a manifest."""
    stored_bytes: int
    """The size of all files in its folder, including files shared with other checkpoints (see
    `Sharing`); by the manifest if there are very many."""
    created_s: float
    incomplete: str | None = None
    is_link: bool = False
    """True if its folder is a symbolic link."""

    @property
    def is_whole(self) -> bool:
        """Return True if, judging by names and sizes, a restore would find everything it needs."""
        return self.commit is not None and self.incomplete is None


class OpenAttempt(AttemptName, frozen=True, kw_only=True):
    """An undecided attempt. `size_bytes` covers only the files that the scan saw; `alive` is True
    if its writer is alive."""

    alive: bool
    size_bytes: int
    is_copy: bool = False
    """True for a copy from another place; `alive` then refers to the process that copies it."""


class ScannedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of one attempt as a scan found it; `decided` is None if there is no manifest."""

    name: AttemptName
    folder: StoreEntry
    entries: tuple[StoreEntry, ...]
    """The content of the folder and of scanned subfolders, whose names contain a `/`."""
    decided: Commit | Abort | LaststepError | None
    passed_over: tuple[str, ...] = ()
    """The subfolders that were skipped."""
    incomplete: str | None = None
    """A description of the first file that is missing or whose size differs from the manifest."""
    is_copied_now: bool = False
    """True if it is undecided and a process is copying it."""

    @property
    def is_copy(self) -> bool:
        """Return True if it is an uncommitted copy of a checkpoint from another place."""
        names = map(operator.attrgetter("name"), self.entries)
        return self.decided is None and any(map(attempts.COPYING_NAME.fullmatch, names))

    @property
    def size_bytes(self) -> int:
        """The size of all its files: as listed, or by the manifest for skipped subfolders."""
        size_bytes = 0
        counted: tuple[str, ...] = ()
        if isinstance(self.decided, Commit) and self.passed_over:
            # The manifest's total includes data files beside the subfolders: count them once.
            size_bytes, counted = self.decided.written.size_bytes, _DATA_FILES
        for entry in self.entries:
            if not entry.is_folder and not entry.name.endswith(counted):
                size_bytes += entry.size_bytes
        return size_bytes

    @property
    def changed_s(self) -> float:
        return max((self.folder.modified_s, *(entry.modified_s for entry in self.entries)))

    @property
    def is_committed(self) -> bool:
        """Return True if it counts as a checkpoint. An unreadable manifest counts as committed, so
        that it is kept as evidence."""
        return self.decided is not None and not isinstance(self.decided, Abort)


def _missing_indexes(commit: Commit, names: Iterable[str]) -> list[str]:
    """Return the indexes of a checkpoint that are not among `names`, in order."""
    indexes = map(index_name, range(commit.index_count), itertools.repeat(commit.ranks))
    return sorted(set(indexes).difference(names))


class Scanner(msgspec.Struct, eq=False):
    """Scans the attempts of one run and caches their manifests."""

    _store: Store
    _read: dict[AttemptName, tuple[int, float, Commit | Abort]] = {}

    def names(self) -> list[AttemptName]:
        """Return all attempts that have a folder, decided or not."""
        if self._store.same_everywhere:
            return list(self.folders())
        return list(filter(None, map(attempts.parse_folder, self._store.folder_names(""))))

    def folders(self) -> dict[AttemptName, StoreEntry]:
        # Object stores list names in order, and `run.json` sorts after the markers of folders: its
        # presence also shows that no later page of the listing is missing.
        found = {}
        for entry in attempts.list_checked(self._store, "", attempts.RUN_NAME):
            name = attempts.parse_folder(entry.name) if entry.is_folder else None
            if name is not None:
                found[name] = entry
        return found

    def scan(self, *, deep: bool = False) -> tuple[ScannedAttempt, ...]:
        """Return every attempt with its decision; only a `deep` scan lists ranks' subfolders."""
        look = functools.partial(self.look, deep=deep)
        scanned: tuple[ScannedAttempt, ...] = ()
        for _ in attempts.looks():  # the last scan counts in any case
            folders = self.folders()
            if self._store.same_everywhere and len(folders) > 1:  # each waits for a server's answer
                from laststep.process.threads import WorkerPool  # late: every start waits

                with WorkerPool("look", min(len(folders), _LOOKS_AT_ONCE)) as workers:
                    answers = [workers.submit(look, *item) for item in folders.items()]
                scanned = tuple([answer.result() for answer in answers])
            else:
                scanned = tuple(map(look, folders.keys(), folders.values()))
            for name in self._read.keys() - folders.keys():
                self._read.pop(name, None)
            if not self.missed_commit(scanned, folders.keys()):
                break
        return self._still_there(scanned)

    def missed_commit(
        self, scanned: Collection[ScannedAttempt], listed: AbstractSet[AttemptName]
    ) -> bool:
        """Return True if a checkpoint may have been committed during the scan and missed: retention
        may then have deleted the one before it. `listed` existed when the scan began."""
        if all(map(operator.attrgetter("decided"), scanned)):
            return False  # no attempt is undecided
        last = max((item.name.point for item in scanned if item.is_committed), default=(0, 0))
        newer = {item.name for item in scanned if item.decided is None and item.name.point > last}
        if not newer:
            return False
        present = {name for name in self.names() if name.point > last}
        return not newer <= present <= listed or any(
            MANIFEST_NAME in self._store.file_names(name.folder) for name in newer
        )

    def scan_undecided(self, *, deep: bool = False) -> tuple[ScannedAttempt, ...]:
        """Return the undecided attempts; of others only names are read, so this is always fast."""
        scanned = []
        for name, entry in self.folders().items():
            if MANIFEST_NAME not in self._store.file_names(entry.name):
                item = self.look(name, entry, deep=deep)
                if item.decided is None:
                    scanned.append(item)
        return self._still_there(tuple(scanned)) if scanned else ()

    def _still_there(self, scanned: tuple[ScannedAttempt, ...]) -> tuple[ScannedAttempt, ...]:
        """Leave out attempts that are being deleted: they have no manifest, and by now no name."""
        if all(item.decided is not None for item in scanned):
            return scanned
        present = set(self.names())
        return tuple(item for item in scanned if item.decided is not None or item.name in present)

    def look(self, name: AttemptName, folder: StoreEntry, *, deep: bool = False) -> ScannedAttempt:
        """Return one attempt with its decision; `deep` as for `scan`."""
        scanned = self._look_once(name, folder, fully=False)
        if deep and scanned.passed_over and not self._has_all_names(scanned):
            scanned = self._look_once(name, folder, fully=True)
        if scanned.incomplete is not None:
            # A checkpoint that is being deleted looks the same, but then has no manifest by now.
            scanned = self._look_once(name, folder, fully=not scanned.passed_over)
        return scanned

    def _look_once(self, name: AttemptName, folder: StoreEntry, *, fully: bool) -> ScannedAttempt:
        entries = attempts.list_checked(self._store, folder.name, MANIFEST_NAME)
        decided = None
        inner, locks = [], []
        for entry in entries:
            if entry.name == MANIFEST_NAME:
                decided = self._decided(name, entry)
            elif entry.is_folder and not entry.is_link:
                inner.append(entry.name)
            elif attempts.COPYING_NAME.fullmatch(entry.name):
                locks.append(f"{folder.name}/{entry.name}")
        if isinstance(decided, Commit):
            fully = fully or not (
                decided.written.files > _VERY_MANY and folder_of(0, decided.ranks)
            )
        if fully:
            for above in inner:
                for entry in self._store.list(f"{folder.name}/{above}"):
                    entries.append(msgspec.structs.replace(entry, name=f"{above}/{entry.name}"))
        passed_over = () if fully else tuple(inner)
        return ScannedAttempt(
            name=name,
            folder=folder,
            entries=tuple(entries),
            decided=decided,
            passed_over=passed_over,
            is_copied_now=decided is None and any(map(self._store.is_locked, locks)),
            incomplete=None if passed_over else self._incomplete(folder.name, decided, entries),
        )

    def _incomplete(
        self,
        folder: str,
        decided: Commit | Abort | LaststepError | None,
        entries: Iterable[StoreEntry],
    ) -> str | None:
        """Describe the first file that differs from the commit; None if there is none."""
        if not isinstance(decided, Commit):
            return None
        sizes = {entry.name: entry.size_bytes for entry in entries if not entry.is_folder}
        for name in _missing_indexes(decided, sizes)[:1]:
            return f"{name} is missing"
        data_sizes = [size for name, size in sizes.items() if name.endswith(_DATA_FILES)]
        if (len(data_sizes), sum(data_sizes)) == (
            decided.written.files,
            decided.written.size_bytes,
        ):
            return None
        # A file is wrong or was added: the indexes tell which.
        for rank in range(decided.index_count):
            try:
                index = attempts.read_index(self._store, folder, decided, rank)
            except StorageError:
                raise
            except LaststepError as error:
                return error.without_remedy()
            for file in index.files:
                size = sizes.get(file.name, "no")
                if size != file.size_bytes:
                    return f"{file.name} has {size} bytes instead of {file.size_bytes}"
        return None

    def _has_all_names(self, scanned: ScannedAttempt) -> bool:
        """Return True if all indexes are there, and as many data files as the manifest counts."""
        commit = scanned.decided
        if not isinstance(commit, Commit):
            return False
        names = [entry.name for entry in scanned.entries if not entry.is_folder]
        for inner in scanned.passed_over:
            within = self._store.file_names(f"{scanned.name.folder}/{inner}")
            names += [f"{inner}/{name}" for name in within]
        data_files = [name for name in names if name.endswith(_DATA_FILES)]
        return len(data_files) >= commit.written.files and not _missing_indexes(commit, names)

    def _decided(
        self, name: AttemptName, entry: StoreEntry
    ) -> Commit | Abort | LaststepError | None:
        known = self._read.get(name)
        if known is not None and known[:2] == (entry.size_bytes, entry.modified_s):
            return known[2]
        try:
            decided = attempts.read_decision(self._store, name.folder)
        except StorageError:
            raise  # The store is unreachable, which is no evidence about the checkpoint.
        except LaststepError as error:
            return error  # Not cached: a second read may succeed.
        if decided is not None:
            self._read[name] = (entry.size_bytes, entry.modified_s, decided)
        return decided


def checkpoints(scanned: tuple[ScannedAttempt, ...], chain: terms.Chain) -> tuple[Listed, ...]:
    """Return the committed attempts in the order of commits. Pure."""
    committed: dict[AttemptName, ScannedAttempt] = {}
    sound: set[AttemptName] = set()
    for item in scanned:
        if item.is_committed:
            committed[item.name] = item
            if isinstance(item.decided, Commit) and item.incomplete is None:
                sound.add(item.name)
    on_lineage = terms.order(committed, chain)
    replaced = terms.superseded(on_lineage, sound)
    counted = frozenset(on_lineage) - replaced.keys()
    listed = []
    for name in sorted(committed, key=attempts.by_point) if chain.limits else on_lineage:
        item, by = committed[name], replaced.get(name)
        commit = item.decided if isinstance(item.decided, Commit) else None
        files = dict(zip(map(operator.attrgetter("name"), item.entries), item.entries, strict=True))
        size_bytes = item.size_bytes
        listed.append(
            Listed(
                step=name.step,
                term=name.term,
                attempt=name.attempt,
                commit=commit,
                error=item.decided if isinstance(item.decided, LaststepError) else None,
                on_lineage=name in counted,
                superseded_by=None if by is None else by.folder,
                pinned=attempts.PIN_NAME in files,
                size_bytes=size_bytes if commit is None else commit.written.size_bytes,
                stored_bytes=size_bytes,
                created_s=files[MANIFEST_NAME].modified_s if commit is None else commit.created_s,
                incomplete=item.incomplete,
                is_link=item.folder.is_link,
            )
        )
    return tuple(listed)


def open_attempts(
    scanned: tuple[ScannedAttempt, ...], known: terms.Terms
) -> tuple[OpenAttempt, ...]:
    """Return the undecided attempts in order, without links: the run does not own their targets."""
    is_alive = functools.cache(known.is_alive)
    found = [
        OpenAttempt(
            step=item.name.step,
            term=item.name.term,
            attempt=item.name.attempt,
            alive=item.is_copied_now if item.is_copy else is_alive(item.name.term),
            size_bytes=item.size_bytes,
            is_copy=item.is_copy,
        )
        for item in scanned
        if item.decided is None and not item.folder.is_link
    ]
    return tuple(sorted(found, key=attempts.by_point))


def nearest_steps(steps: Iterable[int], wanted: int) -> str:
    """Return, for an error message, the existing steps nearest to a missing one."""
    known = sorted(set(steps), key=lambda step: abs(step - wanted))
    near = ", ".join(map(str, sorted(known[:_NEAREST])))
    if len(known) > _NEAREST:
        return f"{len(known)} steps, the nearest: {near}"
    return f"steps {near}" if near else "no checkpoint"


def remedy_for_no_run(store: Store) -> str | None:
    """Return a remedy for a user who passed a DCP checkpoint or the parent folder of a run; None if
    it is neither."""
    if _DCP_METADATA in store.file_names(""):
        return (
            f"this is a checkpoint of PyTorch's DCP: `laststep import {store.url} RUN` converts it"
        )
    folders = store.folder_names("")[:_LOOKED_INTO]
    runs = sorted(name for name in folders if attempts.RUN_NAME in store.file_names(name))
    if not runs:
        return None
    more = f" (and {len(runs) - 1} more are)" if len(runs) > 1 else ""
    return f"{store.url}/{runs[0]} is a run{more}: was that meant?"
