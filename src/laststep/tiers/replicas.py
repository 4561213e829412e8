"""Compute how far each tier is behind the newest checkpoint of a run (`replica_status`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.lineage import AttemptName, parse_folder
from laststep.catalog.run import Run
from laststep.constants import MEMORY
from laststep.errors import LaststepError, NotFoundError
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.tiers.recovery import SnapshotState, recover
from laststep.tiers.replicating import noted_replicas
from laststep.tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
