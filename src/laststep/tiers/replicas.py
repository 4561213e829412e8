"""Compute how far each tier is behind the newest checkpoint of a run (`replica_status`)."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.attempt import AttemptName, by_point, parse_folder
from laststep.catalog.run import Run
from laststep.constants import MEMORY
from laststep.errors import LaststepError, NotFoundError
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.tiers.recovery import SnapshotState, recover
from laststep.tiers.replicating import noted_replicas
from laststep.tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class Newest(NamedTuple):
    """The newest checkpoint of a tier, and its creation time."""

    name: AttemptName
    created_s: float


_BY_POINT = operator.attrgetter("name.point")


def replica_status(run: Run, urls: Sequence[str] = ()) -> list[ReplicaStatus]:
    """Return the status of each tier of a run, nearest first: the recorded tiers and those at
    `urls`, where `shm:///…` names the location of shared memory."""
    bases = {url: base for url in urls if (base := Tier(url).memory_base) is not None}
    memory = bases or {MEMORY: BASE}
    found = [one for url, base in memory.items() if (one := _in_memory(run, url, base)) is not None]
    found.append(_in_store(run.store.url, run))
    behind = [*noted_replicas(run.store), *(url for url in urls if url not in bases)]
    for url in dict.fromkeys(behind):
        try:
            found.append(_in_store(url, Run.open(open_store(url))))
        except NotFoundError:
            found.append(ReplicaStatus(tier=url))  # nothing was replicated yet
        except LaststepError as error:
            found.append(ReplicaStatus(tier=url, error=str(error)))
    first = max((one.newest for one in found if one.newest), key=_BY_POINT, default=None)
    for place, one in enumerate(found):
        if first is not None and one.newest is not None:
            # Tiers have different times for the same checkpoint: of the snapshot or of the commit.
            is_same = one.newest.name.folder == first.name.folder
            found[place] = replace(
                one,
                behind_steps=first.name.step - one.newest.name.step,
                behind_s=0.0 if is_same else max(first.created_s - one.newest.created_s, 0.0),
            )
    return found


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
    holders: dict[str, set[int]] = {}
    created_s: dict[str, float] = {}
    for one in segments:
        for save in (save for save in one.saves if save.fate in counted):
            holders.setdefault(save.folder, set()).add(one.rank)
            created_s[save.folder] = save.created_s
    ranks = {one.rank for one in segments}
    names = ((parse_folder(folder), folder) for folder in holders if holders[folder] == ranks)
    return _status(tier, [Newest(name, created_s[folder]) for name, folder in names if name])


def _in_store(tier: str, run: Run) -> ReplicaStatus:
    whole = sorted((item for item in run.lineage() if item.is_whole), key=by_point)
    status = _status(tier, [Newest(item, item.created_s) for item in whole])
    if not whole or (commit := whole[-1].commit) is None:
        return status
    items = tuple(record.name for record in commit.items)
    return replace(status, items=items, omitted_items=commit.omitted_items)


def _status(tier: str, known: Sequence[Newest]) -> ReplicaStatus:
    folders = {one.name.folder for one in known}
    newest = max(known, key=_BY_POINT, default=None)
    return ReplicaStatus(tier=tier, newest=newest, checkpoints=len(folders))
