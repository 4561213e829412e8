"""Find checkpoints on replicas, in case the primary is a new disk or has lost a part of the run.

Rank 0 queries the replicas before a restore lists the run. Their checkpoints are read in place, in
addition to those of the primary; nothing is copied. If both have diverged, the primary is
authoritative. A primary without any checkpoint is not treated as a new run while a replica cannot
be reached.

This module also computes how far each tier is behind (`replica_status`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.lineage import AttemptName, parse_folder
from laststep.catalog.run import Run
from laststep.catalog.terms import Terms
from laststep.constants import MEMORY
from laststep.errors import LaststepError, NotFoundError, StorageError, UsageError
from laststep.process import signals
from laststep.process.threads import WorkerPool
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.tiers.copying import Records
from laststep.tiers.orphans import SnapshotState, recover
from laststep.tiers.replicating import noted_replicas
from laststep.tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store


log = logging.getLogger(__name__)

BRIEF_S = 30.0
"""The longest wait for a replica if the primary has a checkpoint to continue from."""
_WARN_S = 5.0


class ReplicaHas(NamedTuple):
    """The checkpoints of a replica."""

    url: str
    """The URL as the user passed it."""
    store: Store
    listed: tuple[Listed, ...]
    """The checkpoints with all items, in the order of commits; files may be missing."""
    partial: tuple[Listed, ...]
    """The partial checkpoints of which no file is missing."""


def look_at_replicas(nearest: Store, tiers: Sequence[Tier]) -> list[ReplicaHas]:
    """List the checkpoints of the replicas, nearest first. If one cannot be reached, log a warning
    if there is a checkpoint nearer than the replicas, else raise `StorageError`."""
    has_some, found = bool(_listed(nearest)), []
    for url in (tier.url for tier in tiers):
        try:
            found.append(ask(url, BRIEF_S if has_some else None))
        except (LaststepError, OSError) as error:
            if not has_some:
                raise _unknown(nearest, url, error) from error
            log.warning("cannot check whether %s has a newer checkpoint: %s", url, error)
    return found


def only_there(
    nearest: Store, found: list[ReplicaHas], step: int | None, takes: Callable[[str], bool]
) -> dict[str, str]:
    """Map the folders of checkpoints that exist only on replicas to the replica to read them from.
    At most one partial checkpoint is included: the one to restore, as judged by the items that
    `takes` accepts.

    The primary gets the term records that it lacks, so that it is the same run again. A replica
    that is a different run, or has diverged, is removed from `found`.
    """
    here = {one.folder: one for one in _listed(nearest)}
    has_some, places = bool(here), dict[str, str]()
    for has in tuple(found):
        more = {one.folder: one for one in has.listed if one.folder not in here}
        try:
            if has.listed or has.partial:
                _make_same_run(nearest, tuple(here.values()), has)
        except UsageError as error:
            if not has_some:
                raise
            log.warning("nothing is read at %s: %s", has.url, error)
            found.remove(has)
            continue
        here |= more
        places |= dict.fromkeys(more, has.url)
    return places | _partial_beyond(tuple(here.values()), found, step, takes)


def ask(url: str, within_s: float | None) -> ReplicaHas:
    """List the checkpoints of a replica. Raise `StorageError` if it does not answer in time; its
    thread is then abandoned, because a call to an unreachable server or a hanging mount cannot be
    cancelled."""
    answered = threading.Event()
    future = WorkerPool("ask", 1).submit(_held, url)
    future.add_done_callback(lambda _: answered.set())
    told_s = _WARN_S if within_s is None else min(_WARN_S, within_s)
    if not signals.wait(answered, told_s):
        log.warning("waiting for %s, to learn which checkpoints it has", url)
        if not signals.wait(answered, None if within_s is None else within_s - told_s):
            raise StorageError(
                "a replica does not answer",
                where=url,
                found=f"nothing within {within_s:g} s",
                remedy="check the server and the network",
            )
    return future.result()


def _held(url: str) -> ReplicaHas:
    tier = open_store(url)
    listed = _listed(tier)
    partial = tuple(one for one in listed if _lacking(one) and one.is_whole)
    return ReplicaHas(url, tier, tuple(one for one in listed if not _lacking(one)), partial)


def _partial_beyond(
    here: Sequence[Listed],
    found: Sequence[ReplicaHas],
    step: int | None,
    takes: Callable[[str], bool],
) -> dict[str, str]:
    """Return the partial checkpoint to restore and its replica, if no complete one here qualifies.

    It must have every item that `takes` accepts. If there is nothing else at all, one that lacks
    some is returned too, so that the restore reports the missing items.
    """
    has_some = any(step in (None, one.step) for one in here)
    for has in found:
        for one in _beyond(here, has.partial, step):
            if has_some and any(map(takes, _lacking(one))):
                log.warning(
                    "%s is complete nowhere: %s has it without %s",
                    one.folder,
                    has.url,
                    ", ".join(_lacking(one)),
                )
            else:
                return {one.folder: has.url}
    return {}


def _beyond(here: Sequence[Listed], there: Sequence[Listed], step: int | None) -> Sequence[Listed]:
    """Return the newest checkpoint there that is newer than all here, or the one of `step` if there
    is none here; at most one."""
    if step is None:
        newest = max((listed.point for listed in here), default=(0, 0))
        wanted = [listed for listed in there if listed.on_lineage and listed.point > newest]
    else:
        has_it = any(listed.step == step for listed in here)
        wanted = [] if has_it else [listed for listed in there if listed.step == step]
    return wanted[-1:]


def _make_same_run(nearest: Store, here: Sequence[Listed], has: ReplicaHas) -> None:
    """Copy the run's records that the primary lacks: of all terms, including those without a
    commit, so that the next term gets an unused number.

    Raise `UsageError` if the primary is a different run or both have diverged. The replica has not
    diverged if a job there knew the primary's commits and abandoned them.
    """
    there = {one.folder: one for one in (*has.listed, *has.partial)}
    records = Records(has.store, nearest, may_be_ahead=True)
    records.check()
    ours, theirs = (frozenset(Terms(store).numbers()) for store in (nearest, has.store))
    if theirs <= ours:
        records.bring_run()
        return
    if ours - theirs and min(ours - theirs) > max(theirs):  # older records were lost here
        records.bring(None)
        return
    names = {**there, **{one.folder: one for one in here}}.values()
    known = {name.folder for name in Run.open(has.store).would_descend(names)} | there.keys()
    newest = max(here, key=lambda one: one.point).folder if here else None
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


def _unknown(nearest: Store, url: str, error: Exception) -> StorageError:
    told, remedy = str(error), "start again when it can be reached"
    if isinstance(error, LaststepError):
        told, remedy = error.without_remedy(), error.remedy or remedy
    return StorageError(
        f"there is no checkpoint here, but {url} may have some",
        where=nearest.url,
        found=told,
        remedy=f"{remedy}; leave that tier out to start a new run without it",
    )


def _lacking(listed: Listed) -> tuple[str, ...]:
    """Return the items that a partial checkpoint lacks."""
    return () if listed.commit is None else listed.commit.omitted_items


def _listed(store: Store) -> tuple[Listed, ...]:
    """Return all checkpoints, including incomplete ones."""
    try:
        return Run.open(store).checkpoints()
    except NotFoundError:
        return ()


class Newest(NamedTuple):
    """The newest checkpoint of a tier, and its creation time."""

    name: AttemptName
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """The newest checkpoint of a tier, and how far it is behind the newest of all tiers."""

    tier: str
    newest: Newest | None = None
    checkpoints: int = 0
    behind_s: float | None = None
    """The age difference to the newest checkpoint of all tiers: the work that is lost if all nearer
    tiers are lost. None if unknown or if the tier has no checkpoint."""
    behind_steps: int | None = None
    items: tuple[str, ...] = ()
    """The items of its newest checkpoint; empty for shared memory, which has all items."""
    omitted_items: tuple[str, ...] = ()
    """The items that its newest, partial checkpoint lacks; they are lost if all nearer tiers are
    lost."""
    error: str | None = None
    """The reason why the state of the tier is unknown."""


def replica_status(run: Run, urls: Sequence[str] = ()) -> list[ReplicaStatus]:
    """Return the status of each tier of a run, nearest first: the recorded tiers and those at
    `urls`, where `shm:///…` names the location of shared memory."""
    bases = {url: base for url in urls if (base := Tier(url).memory_base) is not None}
    memory = bases or {MEMORY: BASE}
    found = [one for url, base in memory.items() if (one := _in_memory(run, url, base)) is not None]
    found.append(_of_run(run.store.url, run))
    behind = [*noted_replicas(run.store), *(url for url in urls if url not in bases)]
    found += [_of_store(url) for url in dict.fromkeys(behind)]
    return _compared(found)


def _in_memory(run: Run, tier: str, base: str) -> ReplicaStatus | None:
    """Return the status of shared memory, counting the snapshots that all ranks with segments on
    this machine hold. None if there are no segments."""
    try:
        segments = recover(run.store.url, base=base, dry_run=True).segments
    except LaststepError as error:
        return ReplicaStatus(tier=tier, error=str(error))
    if not segments:
        return None
    counted = (SnapshotState.STORED, SnapshotState.ALONE)
    held = {
        (one.rank, save.folder): save
        for one in segments
        for save in one.saves
        if save.fate in counted
    }
    ranks = len({one.rank for one in segments})
    holders = Counter(folder for _, folder in held)
    saves = [save for (_, folder), save in held.items() if holders[folder] == ranks]
    return _status(tier, ((parse_folder(save.folder), save.created_s) for save in saves))


def _of_run(tier: str, run: Run) -> ReplicaStatus:
    whole = [item for item in run.lineage() if item.is_whole]
    status = _status(tier, ((item, item.created_s) for item in whole))
    commit = max(whole, key=lambda item: item.point).commit if whole else None
    if commit is None:
        return status
    items = tuple(record.name for record in commit.items)
    return replace(status, items=items, omitted_items=commit.omitted_items)


def _of_store(url: str) -> ReplicaStatus:
    try:
        return _of_run(url, Run.open(open_store(url)))
    except NotFoundError:
        return ReplicaStatus(tier=url)  # nothing was replicated yet
    except LaststepError as error:
        return ReplicaStatus(tier=url, error=str(error))


def _status(tier: str, saves: Iterable[tuple[AttemptName | None, float]]) -> ReplicaStatus:
    known = [Newest(name, created_s) for name, created_s in saves if name is not None]
    newest = max(known, key=_order, default=None)
    return ReplicaStatus(
        tier=tier, newest=newest, checkpoints=len({one.name.folder for one in known})
    )


def _order(one: Newest) -> tuple[int, int]:
    return one.name.point


def _compared(found: list[ReplicaStatus]) -> list[ReplicaStatus]:
    """Return the statuses with each tier's distance to the newest checkpoint of all."""
    first = max((one.newest for one in found if one.newest is not None), key=_order, default=None)
    return [one if first is None else _behind(one, first) for one in found]


def _behind(one: ReplicaStatus, first: Newest) -> ReplicaStatus:
    if one.newest is None:
        return one
    # Tiers have different times for the same checkpoint: that of the snapshot or of the commit.
    is_same = one.newest.name.folder == first.name.folder
    return replace(
        one,
        behind_steps=first.name.step - one.newest.name.step,
        behind_s=0.0 if is_same else max(first.created_s - one.newest.created_s, 0.0),
    )
