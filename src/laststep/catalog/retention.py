"""Deletion: which checkpoints the retention rules keep, and what crashes have left behind.

`decide` is pure: it maps the listed checkpoints and a `Keep` to one verdict each. Regardless of the
rules, these are kept: the newest good checkpoint of the lineage, the one that the run was resumed
from, pinned ones, links, and the replacement of a kept checkpoint, without which the replaced one
would count again. Everything is kept in a run in which a later version of laststep has written,
because its manifests may refer to other checkpoints in an unknown way.

Rules count only good checkpoints on the lineage: those with a readable manifest and all files
present at full length. Other checkpoints are evidence and are kept unless `abandoned=False`; only a
checkpoint whose step was committed again is deleted without that.

Of the debris of crashes (`orphans`) only files are removed that no live writer can still need:
attempts that were aborted or whose writer is dead; copies in which no process is active and which
are either older than a later checkpoint or unchanged for a week; half-deleted folders; temporary
names and unlocked liveness locks older than an hour. A free lock proves that a writer is dead only
under the same kernel, or if the store guarantees it; otherwise an attempt must also have been
unchanged for an hour. Committed checkpoints and everything behind a link are never touched.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import operator
import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeGuard

import msgspec

from laststep.catalog.attempt import PIN_NAME, Attempt, parse_folder, read_indexes
from laststep.catalog.listing import Listed, nearest_steps
from laststep.catalog.terms import TERMS_FOLDER, is_here, parse_liveness_lock
from laststep.checks import Checked
from laststep.constants import MANIFEST_NAME
from laststep.errors import CorruptError, NotFoundError, UsageError
from laststep.format.manifest import Abort
from laststep.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from laststep.catalog.listing import ScannedAttempt
    from laststep.catalog.run import Run
    from laststep.catalog.terms import Terms
    from laststep.format.index import StoredFile
    from laststep.storage.store import StoreEntry

_log = logging.getLogger(__name__)

QUIET_S = 3600.0
"""A writer counts as dead after this time without any change, unless there is better evidence."""

COPY_QUIET_S = 7 * 86400.0
"""An interrupted copy may be removed after this time; until then the next copy resumes it. Once
there is a later checkpoint, `QUIET_S` applies."""

_TEMPORARY = re.compile(r"(.+)\.tmp-[0-9a-f]{12}")
"""Temporary names that a store gives to files it creates and folders it deletes."""

_Count = Annotated[int, msgspec.Meta(ge=1)]


class Keep(Checked, frozen=True, kw_only=True):
    """Retention rules: a checkpoint is kept if any rule matches it, or if there is none. Pinned
    ones, the newest good one and the one that the run was resumed from are always kept."""

    last: _Count | None = None
    """Keep the last N checkpoints."""
    every: _Count | None = None
    """Keep checkpoints whose step is a multiple of N."""
    best: _Count | None = None
    """Keep the best N checkpoints by `metric`; of equal ones the later. All are kept as long as
    none has the metric as a number."""
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    """Smaller (`min`) or larger (`max`) values of the metric are better."""
    abandoned: bool = True
    """Keep abandoned branches, unreadable manifests and incomplete checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.best is None) != (self.metric is None):
            raise UsageError(
                "Keep needs both best and metric",
                found=repr(self),
                remedy=f"pass Keep(best={self.best or 1}, metric={self.metric or 'loss'!r})",
            )

    def bound(self) -> int | None:
        """Return the most checkpoints that these rules keep; None if that grows with the run."""
        if self.every is not None or (self.last is None and self.best is None):
            return None
        return (self.last or 0) + (self.best or 0) + 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    step: int
    keep: bool
    reasons: tuple[str, ...]


def decide(
    listed: Sequence[Listed],
    keep: Keep,
    *,
    resumed_from: str | None = None,
    pinned: frozenset[str] = frozenset(),
) -> tuple[Verdict, ...]:
    """Return one verdict per checkpoint. `listed` MUST be in the order of commits."""
    reasons: dict[str, list[str]] = {item.folder: [] for item in listed}

    def stays(items: Iterable[Listed], reason: str) -> None:
        for item in items:
            reasons[item.folder].append(reason)

    good = [item for item in listed if item.on_lineage and item.is_whole]
    stays(good[-1:], "the newest")
    stays([item for item in listed if item.folder == resumed_from], "resumed from")
    stays([item for item in listed if item.pinned or item.folder in pinned], "pinned")
    links = [item for item in listed if item.is_link]
    stays(links, "a symbolic link, which is never deleted")
    for later in [item for item in listed if isinstance(item.error, UsageError)][-1:]:
        stays(listed, f"{later.folder} is of a later format and may need it")
    for items, reason in _by_rule(good, keep):
        stays(items, reason)
    for item in listed if keep.abandoned else ():
        flaw = _flaw(item)
        if flaw and (item.error is not None or item.superseded_by is None):
            stays((item,), f"{flaw}: kept as evidence")
    for item in listed:  # a replacement comes after what it replaces
        if reasons[item.folder] and item.is_whole and item.superseded_by in reasons:
            reasons[item.superseded_by].append(f"replaces {item.folder}, which stays")
    return tuple(
        Verdict(
            folder=item.folder,
            step=item.step,
            keep=bool(reasons[item.folder]),
            reasons=tuple(reasons[item.folder]) or (_why_not(item),),
        )
        for item in listed
    )


def _by_rule(good: Sequence[Listed], keep: Keep) -> Iterator[tuple[Sequence[Listed], str]]:
    if keep.last is None and keep.every is None and keep.best is None:
        yield good, "no retention rule"
    if keep.last is not None:
        yield good[-keep.last :], f"one of the last {keep.last}"
    if keep.every is not None:
        chosen = [item for item in good if item.step % keep.every == 0]
        yield chosen, f"every {keep.every} steps"
    if keep.best is not None and keep.metric is not None:
        best = _best(good, keep.metric, keep)[: keep.best]
        text = f"one of the best {keep.best} by {keep.metric}"
        yield best or good, text if best else f"until one has {keep.metric!r} as a number"


def missing_metric(listed: Sequence[Listed], keep: Keep) -> str | None:
    """Return a warning if no good checkpoint has the metric of a best-k rule as a number."""
    metric = keep.metric
    good = [item for item in listed if item.on_lineage and item.is_whole]
    if metric is None or not good or _best(good, metric, keep):
        return None
    metrics = {name for item in good if item.commit is not None for name in item.commit.metrics}
    names = ", ".join(sorted(metrics)) or "none"
    return f"no checkpoint has the metric {metric!r} as a number; there are: {names}"


def _best(good: Sequence[Listed], metric: str, keep: Keep) -> list[Listed]:
    """Return the checkpoints that have the metric as a number (NaN is not one), best first."""
    sign = 1 if keep.mode == "min" else -1
    ranked = []
    for place, item in enumerate(good):
        value = None if item.commit is None else item.commit.metrics.get(metric)
        if _is_number(value):
            ranked.append((sign * value, -place, item))
    ranked.sort(key=lambda entry: entry[:2])
    return [item for _, _, item in ranked]


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a metric can be compared. Integers may be larger than any float."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _why_not(item: Listed) -> str:
    if item.superseded_by is not None:
        return f"its step was saved again in {item.superseded_by}"
    return _flaw(item) or "no rule keeps it"


def _flaw(item: Listed) -> str:
    """Return the reason why no rule counts this checkpoint; "" for a good one on the lineage."""
    if item.error is not None:
        return "its manifest cannot be read"
    if item.incomplete is not None:
        return f"incomplete ({item.incomplete})"
    return "" if item.on_lineage else "on an abandoned branch"


class PrunePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints to keep and to delete, in the order of commits."""

    store: Store
    listed: tuple[Listed, ...]
    verdicts: tuple[Verdict, ...]
    deletions: tuple[str, ...]
    """The folders to delete, in the order of deletion."""

    lacking: str | None
    """A warning that no checkpoint has a best-k rule's metric, so that all are kept; else None."""

    def sharing(self) -> Sharing:
        return sharing_of(self.store, self.listed)

    def execute(
        self, *, before: Callable[[], None] | None = None, each: Callable[[str], None] | None = None
    ) -> tuple[str, ...]:
        """Delete the planned folders, except those pinned since, and return them. `before` each
        deletion raises if the plan is no longer valid; `each` is called after it."""
        deleted: list[str] = []
        replacements = {item.folder: item.superseded_by for item in self.listed}
        kept: set[str | None] = set()
        gone = set(self.deletions)
        whole = [item.folder for item in self.listed if item.is_whole and item.folder not in gone]
        for folder in whole[-1:] if gone else ():
            # Its writer may have died before its name was durable, and the deletions may remove
            # every other checkpoint.
            with contextlib.suppress(NotFoundError):  # deleted meanwhile
                self.store.sync_folder(folder)
        for folder in self.deletions:
            if before is not None:
                before()
            if folder in kept or PIN_NAME in self.store.file_names(folder):
                _log.info("kept %s: it was pinned since, or replaces one that was", folder)
                kept.add(replacements[folder])
                continue
            self.store.delete_folder(folder, first=MANIFEST_NAME)
            deleted.append(folder)
            _log.info("pruned %s", folder)
            if each is not None:
                each(folder)
        return tuple(deleted)


def plan_prune(
    run: Run, keep: Keep, *, resumed_from: str | None = None, in_use: frozenset[str] = frozenset()
) -> PrunePlan:
    """Plan the deletions that the rules call for; a save in progress refers to those `in_use`."""
    listed, _ = run.look()
    verdicts = decide(listed, keep, resumed_from=resumed_from, pinned=in_use)
    doomed = [item for item, verdict in zip(listed, verdicts, strict=True) if not verdict.keep]
    return PrunePlan(
        store=run.store,
        listed=listed,
        verdicts=verdicts,
        deletions=_in_order(doomed),
        lacking=missing_metric(listed, keep),
    )


def plan_removal(run: Run, step: int) -> PrunePlan:
    """Plan the deletion of every checkpoint of one step: if only the newest of them went, the one
    that it had replaced would count again. Raise `UsageError` if a job may still need one."""
    listed, _ = run.look()
    chosen = [item for item in listed if item.step == step]
    if not chosen:
        raise no_step(run, listed, step)
    return _chosen_plan(run, listed, chosen)


def plan_rollback(run: Run, step: int) -> PrunePlan:
    """Plan the deletion of everything that was committed after a step of the lineage, which is then
    the newest checkpoint."""
    listed, _ = run.look()
    target = [item for item in listed if item.step == step and item.on_lineage and item.is_whole]
    if not target:
        error = no_step(run, [item for item in listed if item.on_lineage], step)
        if any(item.step == step for item in listed):
            error.what = f"step {step} is no whole checkpoint of the lineage"
        raise error
    later = [item for item in listed if item.point > target[-1].point]
    return _chosen_plan(run, listed, later)


def _chosen_plan(run: Run, listed: Sequence[Listed], chosen: Sequence[Listed]) -> PrunePlan:
    """Plan to delete these, the last commit first. Raise `UsageError` if one must stay."""
    if chosen:
        refuse_writer(run)
    for item in listed:
        if isinstance(item.error, UsageError):  # of a later format, which may need any other
            raise item.error
    for item in chosen:
        if item.pinned or item.is_link:
            raise UsageError(
                f"refused to delete step {item.step}",
                where=f"{run.store.url}/{item.folder}",
                found="a pinned checkpoint" if item.pinned else "a symbolic link",
                remedy="`laststep unpin` it first" if item.pinned else "remove the link yourself",
            )
    return PrunePlan(
        store=run.store,
        listed=tuple(listed),
        verdicts=(),
        deletions=_in_order(chosen),
        lacking=None,
    )


def _in_order(doomed: Iterable[Listed]) -> tuple[str, ...]:
    """Return the folders in the order of their deletion: replaced ones first, which would count
    again without their replacements, then the last commit first."""
    ordered = sorted(doomed, key=lambda item: (bool(item.superseded_by), item.point), reverse=True)
    return tuple(item.folder for item in ordered)


def refuse_writer(run: Run) -> None:
    """Raise `UsageError` if a job saves to the run."""
    writer = run.live_writer()
    if writer is not None:
        raise UsageError(
            "refused to delete checkpoints of a run that is in use",
            where=run.store.url,
            found=f"a live writer: {writer.who}",
            remedy="wait until it has ended; `laststep prune` can run beside it",
        )


def no_step(run: Run, listed: Sequence[Listed], step: int) -> NotFoundError:
    return NotFoundError(
        f"there is no checkpoint of step {step}",
        where=run.store.url,
        found=nearest_steps((item.step for item in listed), step) if listed else None,
        remedy="`laststep ls` lists what there is",
    )


# What crashes have left behind


class RemovalReason(enum.Enum):
    ABORTED = "given up"
    DEAD_WRITER = "no manifest, and its writer is dead"
    STALE_COPY = "an abandoned copy"
    DEBRIS = "a leftover temporary name"
    DEAD_WITNESS = "of a start that is over"


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that is no longer needed. `name` is relative to the run."""

    name: str
    why: RemovalReason
    is_folder: bool
    size_bytes: int


def orphans(
    store: Store, terms: Terms, scanned: tuple[ScannedAttempt, ...], *, now_s: float
) -> tuple[Orphan, ...]:
    """Return all that may be removed now. The scan MUST include the subfolders of attempts."""
    result = attempts_of_the_dead(terms, scanned, now_s=now_s, locks_tell=store.locks_tell)
    for item in scanned:
        if item.is_committed and not item.folder.is_link:
            result += _debris(item.entries, item.folder.name, now_s)
    result += _debris(store.list(""), "", now_s)
    entries = store.list(TERMS_FOLDER)
    result += _debris(entries, TERMS_FOLDER, now_s)
    for entry in entries:
        # An unlocked liveness lock may belong to a live job instance on another machine, but is of
        # no use to it.
        name, why = f"{TERMS_FOLDER}/{entry.name}", RemovalReason.DEAD_WITNESS
        is_old = now_s - entry.modified_s > QUIET_S
        if is_old and parse_liveness_lock(entry.name) and not store.is_locked(name):
            size_bytes = entry.size_bytes
            result.append(Orphan(name=name, why=why, is_folder=False, size_bytes=size_bytes))
    return tuple(result)


def attempts_of_the_dead(
    terms: Terms,
    scanned: tuple[ScannedAttempt, ...],
    *,
    now_s: float,
    locks_tell: Callable[[], bool] = lambda: False,
) -> list[Orphan]:
    """Return aborted or undecided attempts whose writer is dead or long silent. Copies older than a
    later checkpoint are found only if checkpoints were scanned too."""
    committed = filter(operator.attrgetter("is_committed"), scanned)
    newest = max(map(operator.attrgetter("name.point"), committed), default=(0, 0))
    result = []
    for item in scanned:
        if item.folder.is_link or item.is_committed:
            continue
        quiet_s = now_s - item.changed_s
        if item.is_copy:  # its term belongs to the writer of the original, so proves nothing
            why = RemovalReason.STALE_COPY
            is_overtaken = item.name.point < newest
            is_dead = not item.is_copied_now and (
                (is_overtaken and locks_tell())
                or quiet_s > (QUIET_S if is_overtaken else COPY_QUIET_S)
            )
        else:
            why = RemovalReason.DEAD_WRITER
            is_dead = _is_dead(terms, item.name.term, quiet_s)
        if is_dead:
            why = RemovalReason.ABORTED if isinstance(item.decided, Abort) else why
            name, size_bytes = item.folder.name, item.size_bytes
            result.append(Orphan(name=name, why=why, is_folder=True, size_bytes=size_bytes))
    return result


def remove(store: Store, orphan: Orphan) -> bool:
    """Remove one orphan. Return False if it turned out to be committed. An undecided attempt is
    aborted first, so a writer that was wrongly considered dead cannot commit it."""
    attempt = parse_folder(orphan.name)
    undecided = orphan.why in (RemovalReason.DEAD_WRITER, RemovalReason.STALE_COPY)
    if undecided and attempt is not None:
        if Attempt(store, attempt).abort(f"{orphan.why.value}; cleaned up"):
            return False
    elif orphan.is_folder:
        store.delete_folder(orphan.name)
    else:
        store.delete(orphan.name)
    level = logging.WARNING if undecided else logging.INFO
    _log.log(level, "removed %s (%s, %d bytes)", orphan.name, orphan.why.value, orphan.size_bytes)
    return True


def _is_dead(terms: Terms, term: int, quiet_s: float) -> bool:
    if terms.is_alive(term):
        return False
    try:
        record = terms.read(term)
    except CorruptError:
        record = None
    # A free lock proves that a writer of this machine is dead.
    return (record is not None and is_here(record)) or quiet_s > QUIET_S


def _debris(entries: Iterable[StoreEntry], folder: str, now_s: float) -> list[Orphan]:
    """Return the old temporary names in a folder. In the root also those of attempts, however
    recent: their deletion has begun, and two processes may do it at the same time."""
    found = []
    for entry in entries:
        match = _TEMPORARY.fullmatch(entry.name)
        is_folder = entry.is_folder and not entry.is_link
        is_half_deleted = not folder and is_folder and match and parse_folder(match[1])
        if match and (is_half_deleted or now_s - entry.modified_s > QUIET_S):
            name = f"{folder}/{entry.name}" if folder else entry.name
            why, size_bytes = RemovalReason.DEBRIS, entry.size_bytes
            found.append(Orphan(name=name, why=why, is_folder=is_folder, size_bytes=size_bytes))
    return found


# Files that checkpoints share


class FileId(NamedTuple):
    written_for: str
    name: str
    size_bytes: int


class Sharing:
    """The files of all checkpoints of a run."""

    def __init__(self) -> None:
        self._stored_bytes: dict[str, int] = {}
        self._files: dict[str, list[FileId]] = {}
        self._folders: dict[FileId, list[str]] = {}

    def add(self, folder: str, stored_bytes: int, files: Iterable[StoredFile]) -> None:
        """Add a checkpoint with its data files; `stored_bytes` counts all files in its folder."""
        self._stored_bytes[folder] = stored_bytes
        self._files[folder] = [file_id(file, folder) for file in files]
        for file in self._files[folder]:
            self._folders.setdefault(file, []).append(folder)

    def freed_bytes(self, folders: Iterable[str]) -> int:
        """Return the bytes that deleting all of these folders frees; a shared file only with the
        last one. Less than is freed if a copy turned hard links into files."""
        chosen = set(folders)
        names = Counter(file for folder in chosen for file in self._files[folder])
        kept = sum(
            file.size_bytes * (count - (count == len(self._folders[file])))
            for file, count in names.items()
        )
        # Missing files are not in stored_bytes, so the difference may be negative.
        return max(sum(self._stored_bytes[folder] for folder in chosen) - kept, 0)

    def stored_bytes(self) -> int:
        return self.freed_bytes(self._stored_bytes)

    def shared_bytes(self, folder: str) -> int:
        """Return the bytes of the files in this folder that are also in another folder."""
        files = self._files[folder]
        return sum(file.size_bytes for file in files if len(self._folders[file]) > 1)

    def sharers(self, folder: str) -> tuple[str, ...]:
        """Return the other folders that share a file with this one, in the order of checkpoints."""
        folders = {other for file in self._files[folder] for other in self._folders[file]}
        return tuple(other for other in self._files if other in folders - {folder})


def file_id(file: StoredFile, folder: str) -> FileId:
    return FileId(file.origin or folder, file.own_name, file.size_bytes)


def sharing_of(store: Store, listed: Sequence[Listed]) -> Sharing:
    """Return which files each of these checkpoints contains. Indexes are read only if any
    checkpoint shares files; a checkpoint whose indexes cannot be read counts as sharing none."""
    any_shares = any(
        item.commit is not None and item.commit.written.shared_bytes for item in listed
    )
    sharing = Sharing()
    for item in listed:
        files: list[StoredFile] = []
        if any_shares and item.commit is not None:
            with contextlib.suppress(CorruptError, NotFoundError):
                for index in read_indexes(store, item.folder, item.commit):
                    files += index.files
        sharing.add(item.folder, item.stored_bytes, files)
    return sharing
