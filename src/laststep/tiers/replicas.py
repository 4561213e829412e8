"""Compute how far each tier is behind the newest checkpoint of a run (`replica_status`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laststep.catalog.attempt import by_point
from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFoundError
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.listing import Listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """The newest checkpoint of a tier, and how far it is behind the newest of all tiers."""

    tier: str
    newest: Listed | None = None
    checkpoints: int = 0
    behind_s: float | None = None
    """The age difference to the newest checkpoint of all tiers: the work that is lost if all nearer
    tiers are lost. None if unknown or if the tier has no checkpoint."""
    behind_steps: int | None = None
    error: str | None = None
    """The reason why the state of the tier is unknown."""


def replica_status(run: Run, urls: Sequence[str] = ()) -> list[ReplicaStatus]:
    """Return the status of a run and of its replicas at `urls`, nearest first."""
    found = [_in_store(run.store.url, run)]
    for url in dict.fromkeys(urls):
        try:
            found.append(_in_store(url, Run.open(open_store(url))))
        except NotFoundError:
            found.append(ReplicaStatus(tier=url))  # nothing was replicated yet
        except LaststepError as error:
            found.append(ReplicaStatus(tier=url, error=str(error)))
    first = max((status.newest for status in found if status.newest), key=by_point, default=None)
    for place, status in enumerate(found):
        if first is not None and status.newest is not None:
            found[place] = replace(
                status,
                behind_steps=first.step - status.newest.step,
                behind_s=max(first.created_s - status.newest.created_s, 0.0),
            )
    return found


def _in_store(tier: str, run: Run) -> ReplicaStatus:
    whole = sorted((item for item in run.lineage() if item.is_whole), key=by_point)
    return ReplicaStatus(tier=tier, newest=whole[-1] if whole else None, checkpoints=len(whole))
