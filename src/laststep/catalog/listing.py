"""What there is in a run: committed checkpoints, attempts, and what was given up.

Reads names, sizes and manifests, never data files. A manifest never changes while it exists, so one
that was read is remembered; whether it still exists is looked up each time. What somebody deletes
while it is looked at is left out. Any thread may call.

In a job of many ranks the files lie in folders within that of the checkpoint. Every rank looks at
the run when it restores, so the folders of very many files, and of attempts, are passed over unless
a `ScanDepth` says otherwise. Of a checkpoint of very many files a scan then counts names, since the
manifest knows their bytes; it asks for all sizes only where names are missing. A linked folder is
not looked into: what is in there is not in the run.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision, lineage
from laststep.catalog.decision import list_checked
from laststep.catalog.indexes import read_index
from laststep.catalog.lineage import (
    FATE_NAME,
    PIN_NAME,
    RUN_NAME,
    AttemptName,
    is_copying_name,
    parse_folder,
)
from laststep.errors import LaststepError, StorageError
from laststep.format.manifest import Abort, Commit
from laststep.plan.files import folder_of, index_name
from laststep.storage.store import StoreEntry
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from laststep.catalog.epochs import Epochs
    from laststep.storage.store import Store

_NEAREST = 6
_VERY_MANY = 4096
"""A scan passes over the folders of ranks of a checkpoint that has more files."""
_DATA_FILES = (".safetensors", ".pack")
_LOOKED_INTO = 100
"""So many folders are looked into for a run that was meant."""
SCAN_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.4)
"""Before each scan of a run, until one has missed nothing. After the last one its result counts:
some filesystems list files that cannot be read yet."""
_LOOKS_AT_ONCE = 16
"""In an object store, where each of them is two requests or three."""


class ScanDepth(enum.Enum):
    """What a scan looks through completely, even folders of very many files."""

    NOTHING = enum.auto()
    ATTEMPTS = enum.auto()
    """All that is not committed; for callers that remove it, and have to know what is in it."""
    ALL = enum.auto()


class Listed(AttemptName, frozen=True, kw_only=True, gc=True):
    """A committed checkpoint; where its manifest cannot be read, `commit` is None, `error` tells.

    `on_lineage` is False for an abandoned branch and for one whose step was committed again, which
    `superseded_by` names. `incomplete` says which file is missing or has another size than the
    manifest says; bytes that have changed are for `verify` to find.
    """

    commit: Commit | None
    error: LaststepError | None
    on_lineage: bool
    superseded_by: str | None
    pinned: bool
    size_bytes: int
    """The bytes of its data files by its manifest; of all its files where that cannot be read."""

    stored_bytes: int
    """The bytes of all files in its folder, also of those that it shares with others (`sharing`).
    For very many files that are all there, or were not looked through, as the manifest counts
    them."""

    created_s: float
    incomplete: str | None = None
    is_link: bool = False
    """Whether its folder lies elsewhere."""

    @property
    def is_whole(self) -> bool:
        """Whether there is all that a restore needs, as far as names and sizes tell."""
        return self.commit is not None and self.incomplete is None


class OpenAttempt(AttemptName, frozen=True, kw_only=True):
    """An undecided attempt, and whether its writer is alive. Its bytes are those that the scan saw:
    in a job of many ranks most lie in folders, which only a deep scan looks through."""

    alive: bool
    size_bytes: int
    is_copy: bool = False
    """Whether it comes from another place: then `alive` tells of who copies it."""


class ScannedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's folder as it was found; `decided` is None where there is no manifest."""

    name: AttemptName
    touched_s: float
    """When a name in the folder was made or removed last."""

    entries: tuple[StoreEntry, ...]
    """What is in the folder, and in the folders within it that were looked through; the names of
    the latter have a `/`."""

    decided: Commit | Abort | LaststepError | None
    passed_over: tuple[str, ...] = ()
    """The folders within it that were not looked through."""

    is_link: bool = False
    """Whether the folder lies elsewhere."""

    incomplete: str | None = None
    """Which file is not there as the manifest lists it, in words; None where all are."""

    is_copied_now: bool = False
    """Whether it is undecided, and somebody is copying it."""

    @property
    def is_copy(self) -> bool:
        """Whether it was brought here from another place, and not committed yet."""
        return self.decided is None and any(is_copying_name(entry.name) for entry in self.entries)

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files: as they are, and as the manifest says of those that were
        passed over."""
        here = [entry for entry in self.entries if not entry.is_folder]
        if isinstance(self.decided, Commit) and self.passed_over:
            # A data file may lie beside the folders: it is among those that the manifest counts.
            here = [entry for entry in here if not entry.name.endswith(_DATA_FILES)]
            return sum(entry.size_bytes for entry in here) + self.decided.size_bytes
        return sum(entry.size_bytes for entry in here)

    @property
    def changed_s(self) -> float:
        """When anything in it changed last."""
        return max((self.touched_s, *(entry.modified_s for entry in self.entries)))

    @property
    def is_committed(self) -> bool:
        """Whether it counts as a checkpoint: an unreadable manifest does, it is evidence."""
        return self.decided is not None and not isinstance(self.decided, Abort)


def _is_deep(commit: Commit) -> bool:
    """Whether it has very many data files, in folders."""
    return commit.file_count > _VERY_MANY and bool(folder_of(0, commit.ranks))


def _missing_index(commit: Commit, names: AbstractSet[str]) -> str | None:
    """Which indexes are not among these names, in words; None where all are."""
    indexes = (index_name(number, commit.ranks) for number in range(commit.index_count))
    missing = [name for name in indexes if name not in names]
    if not missing:
        return None
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{missing[0]} is missing{more}"


class Scanner:
    """Looks through the attempts of one run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[AttemptName, tuple[int, float, Commit | Abort]] = {}

    def names(self) -> tuple[AttemptName, ...]:
        """All attempts that have a folder, decided or not."""
        if self._store.same_everywhere:
            return tuple(name for name, _ in self.folders())
        parsed = map(parse_folder, self._store.folder_names(""))
        return tuple(name for name in parsed if name is not None)

    def scan(self, through: ScanDepth = ScanDepth.NOTHING) -> tuple[ScannedAttempt, ...]:
        """Every attempt and what was decided about it."""
        for pause_s in SCAN_PAUSES_S:
            time.sleep(pause_s)
            folders = self.folders()
            scanned = self._look_at(folders, through)
            if not self.missed_commit(scanned, {name for name, _ in folders}):
                break
        scanned = self._still_there(scanned)
        present = {item.name for item in scanned}
        for name in tuple(self._read):
            if name not in present:
                self._read.pop(name, None)
        return scanned

    def missed_commit(
        self, scanned: Collection[ScannedAttempt], listed: AbstractSet[AttemptName]
    ) -> bool:
        """Return whether the last checkpoint may be one that was committed during the scan.

        Retention may then have deleted the one before it, so that the scan has seen neither.
        `listed` are the folders that there were when the scan began.
        """
        last = max((item.name.point for item in scanned if item.is_committed), default=(0, 0))
        newer = {item.name for item in scanned if item.decided is None and item.name.point > last}
        if not newer:
            return False
        there = {name for name in self.names() if name.point > last}
        return not newer <= there <= listed or any(
            MANIFEST_NAME in self._store.file_names(name.folder) for name in newer
        )

    def _look_at(
        self, folders: Sequence[tuple[AttemptName, StoreEntry]], through: ScanDepth
    ) -> tuple[ScannedAttempt, ...]:
        """Look at all of these; at several at once where each look waits for a server."""
        if not self._store.same_everywhere or len(folders) < 2:
            return tuple(self.look(name, entry, through) for name, entry in folders)
        from laststep.process.threads import Workers  # every start waits for what is imported

        with Workers(min(len(folders), _LOOKS_AT_ONCE), "laststep-look") as workers:
            looks = [workers.submit(self.look, name, entry, through) for name, entry in folders]
        return tuple(look.result() for look in looks)

    def scan_undecided(self, through: ScanDepth = ScanDepth.NOTHING) -> tuple[ScannedAttempt, ...]:
        """The attempts that nothing was decided about. Of the others only names are read, which a
        run of thousands of checkpoints has time for."""
        scanned = (
            self.look(name, entry, through)
            for name, entry in self.folders()
            if MANIFEST_NAME not in self._store.file_names(entry.name)
        )
        return self._still_there(tuple(item for item in scanned if item.decided is None))

    def _still_there(self, scanned: tuple[ScannedAttempt, ...]) -> tuple[ScannedAttempt, ...]:
        """The scanned attempts without those that somebody deletes: they have no manifest, and by
        now no name."""
        if all(item.decided is not None for item in scanned):
            return scanned
        there = set(self.names())
        return tuple(item for item in scanned if item.decided is not None or item.name in there)

    def folders(self) -> list[tuple[AttemptName, StoreEntry]]:
        """The folders of all attempts, to be looked at one by one."""
        # Object stores list names in order, and `run.json` sorts after the markers of folders: its
        # presence also shows that no later page of the listing is missing.
        listed = list_checked(self._store, "", RUN_NAME)
        entries = [entry for entry in listed if entry.is_folder]
        parsed = [(parse_folder(entry.name), entry) for entry in entries]
        return [(name, entry) for name, entry in parsed if name is not None]

    def look(
        self, name: AttemptName, folder: StoreEntry, through: ScanDepth = ScanDepth.NOTHING
    ) -> ScannedAttempt:
        """One attempt and what was decided about it."""
        scanned = self._look_once(name, folder, fully=False)
        wanted = through is ScanDepth.ALL or (
            through is ScanDepth.ATTEMPTS and not scanned.is_committed
        )
        if wanted and scanned.passed_over and not self._has_all_names(scanned):
            scanned = self._look_once(name, folder, fully=True)
        if scanned.incomplete is not None:
            # Files that are being deleted look the same; then the manifest is gone by now.
            scanned = self._look_once(name, folder, fully=not scanned.passed_over)
        return scanned

    def _look_once(self, name: AttemptName, folder: StoreEntry, *, fully: bool) -> ScannedAttempt:
        entries = list_checked(self._store, folder.name, MANIFEST_NAME)
        manifest = next((entry for entry in entries if entry.name == MANIFEST_NAME), None)
        decided = None if manifest is None else self._decided(name, manifest)
        if isinstance(decided, Commit) and any(entry.name == FATE_NAME for entry in entries):
            decided = decision.as_fated(self._store, folder.name, decided)
        fully = fully or (isinstance(decided, Commit) and not _is_deep(decided))
        passed_over = []
        for inner in [entry.name for entry in entries if entry.is_folder and not entry.is_link]:
            if fully:
                entries += [
                    msgspec.structs.replace(entry, name=f"{inner}/{entry.name}")
                    for entry in self._store.list(f"{folder.name}/{inner}")
                ]
            else:
                passed_over.append(inner)
        return ScannedAttempt(
            name=name,
            touched_s=folder.modified_s,
            entries=tuple(entries),
            decided=decided,
            passed_over=tuple(passed_over),
            is_link=folder.is_link,
            is_copied_now=decided is None and self._is_copied_now(folder.name, entries),
            incomplete=None if passed_over else self._incomplete(folder.name, decided, entries),
        )

    def _incomplete(
        self,
        folder: str,
        decided: Commit | Abort | LaststepError | None,
        entries: Iterable[StoreEntry],
    ) -> str | None:
        """Which file is not there as a commit says, in words; None where all are."""
        if not isinstance(decided, Commit):
            return None
        sizes = {entry.name: entry.size_bytes for entry in entries if not entry.is_folder}
        missing = _missing_index(decided, sizes.keys())
        if missing is not None:
            return missing
        there = [size for name, size in sizes.items() if name.endswith(_DATA_FILES)]
        if len(there) == decided.file_count and sum(there) == decided.size_bytes:
            return None
        return self._wrong_file(folder, decided, sizes)

    def _wrong_file(self, folder: str, commit: Commit, sizes: Mapping[str, int]) -> str | None:
        """Which data file is not there as its index says, in words. Indexes are read only where the
        sums in the manifest do not fit: a file is wrong, or somebody has put one there."""
        wrong = []
        for rank in range(commit.index_count):
            try:
                index = read_index(self._store, folder, commit, rank)
            except StorageError:
                raise
            except LaststepError as error:
                return error.without_remedy()
            wrong += [file for file in index.files if sizes.get(file.name) != file.size_bytes]
        if not wrong:
            return None
        file, more = wrong[0], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        if file.name not in sizes:
            return f"{file.name} is missing{more}"
        return f"{file.name} has {sizes[file.name]} bytes instead of {file.size_bytes}{more}"

    def _is_copied_now(self, folder: str, entries: Iterable[StoreEntry]) -> bool:
        locks = (f"{folder}/{entry.name}" for entry in entries if is_copying_name(entry.name))
        return any(map(self._store.is_locked, locks))

    def _has_all_names(self, scanned: ScannedAttempt) -> bool:
        """Whether there are all indexes, and as many data files as the manifest counts."""
        commit = scanned.decided
        if not isinstance(commit, Commit):
            return False
        names = [entry.name for entry in scanned.entries if not entry.is_folder]
        for inner in scanned.passed_over:
            within = self._store.file_names(f"{scanned.name.folder}/{inner}")
            names += [f"{inner}/{name}" for name in within]
        return (
            sum(name.endswith(_DATA_FILES) for name in names) >= commit.file_count
            and _missing_index(commit, frozenset(names)) is None
        )

    def _decided(
        self, name: AttemptName, entry: StoreEntry
    ) -> Commit | Abort | LaststepError | None:
        known = self._read.get(name)
        if known is not None and known[:2] == (entry.size_bytes, entry.modified_s):
            return known[2]
        folder = name.folder
        try:
            decided = decision.read_manifest(self._store, folder)
        except StorageError:
            raise  # The store cannot be reached: that says nothing about the checkpoint.
        except LaststepError as error:
            return error  # Not remembered: a second read may be better.
        if decided is not None:
            self._read[name] = (entry.size_bytes, entry.modified_s, decided)
        return decided


def checkpoints(scanned: tuple[ScannedAttempt, ...], chain: lineage.Chain) -> tuple[Listed, ...]:
    """The committed ones in the order of commits. Pure."""
    committed = {item.name: item for item in scanned if item.is_committed}
    on_lineage = lineage.order(committed, chain)
    sound = frozenset(
        name
        for name, item in committed.items()
        if isinstance(item.decided, Commit) and item.incomplete is None
    )
    replaced = lineage.superseded(on_lineage, sound)
    by_point = sorted(committed, key=lambda name: name.point)
    ordered = by_point if chain.links else on_lineage
    among = frozenset(on_lineage)
    return tuple(_listed(committed[name], among, replaced) for name in ordered)


def attempts(scanned: tuple[ScannedAttempt, ...], epochs: Epochs) -> tuple[OpenAttempt, ...]:
    """The undecided ones in the order of attempts. A link is none: no writer has made it, and
    what is behind it is not the run's to decide about."""
    undecided = sorted(
        (item for item in scanned if item.decided is None and not item.is_link),
        key=lambda item: item.name.point,
    )
    alive = {epoch: epochs.is_alive(epoch) for epoch in {item.name.epoch for item in undecided}}
    return tuple(
        OpenAttempt(
            step=item.name.step,
            epoch=item.name.epoch,
            attempt=item.name.attempt,
            alive=item.is_copied_now if item.is_copy else alive[item.name.epoch],
            size_bytes=item.size_bytes,
            is_copy=item.is_copy,
        )
        for item in undecided
    )


def _listed(
    item: ScannedAttempt,
    on_lineage: frozenset[AttemptName],
    replaced: Mapping[AttemptName, AttemptName],
) -> Listed:
    name = item.name
    commit = item.decided if isinstance(item.decided, Commit) else None
    by = replaced.get(name)
    written = (entry.modified_s for entry in item.entries if entry.name == MANIFEST_NAME)
    return Listed(
        step=name.step,
        epoch=name.epoch,
        attempt=name.attempt,
        commit=commit,
        error=item.decided if isinstance(item.decided, LaststepError) else None,
        on_lineage=name in on_lineage and by is None,
        superseded_by=None if by is None else by.folder,
        pinned=any(entry.name == PIN_NAME for entry in item.entries),
        size_bytes=item.size_bytes if commit is None else commit.size_bytes,
        stored_bytes=item.size_bytes,
        created_s=next(written, 0.0) if commit is None else commit.created_s,
        incomplete=item.incomplete,
        is_link=item.is_link,
    )


def nearest_steps(steps: Iterable[int], wanted: int) -> str:
    """What there is instead of a step that is not there, for the message of an error."""
    there = sorted(set(steps))
    near = sorted(sorted(there, key=lambda step: abs(step - wanted))[:_NEAREST])
    if not near:
        return "no checkpoint"
    text = f"step{'s' if len(near) > 1 else ''} {', '.join(map(str, near))}"
    left = len(there) - len(near)
    return f"{text}, and {left} more" if left else text


def remedy_for_no_run(store: Store) -> str | None:
    """What a person probably meant who named the folder above a run; None where there is none."""
    folders = store.folder_names("")[:_LOOKED_INTO]
    runs = sorted(name for name in folders if RUN_NAME in store.file_names(name))
    if not runs:
        return None
    more = f" (and {len(runs) - 1} more are)" if len(runs) > 1 else ""
    return f"{store.url}/{runs[0]} is a run{more}: was that meant?"
