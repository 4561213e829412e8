"""How far each tier of a run has come: its newest checkpoint, and so what is lost with all tiers
that are nearer.

The nearest is the shared memory of this machine, if something of the run lies there; then comes the
run itself, then the tiers that it is drained to, as its `tiers.json` lists them, and whatever else
a user names. Only looks.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.names import AttemptName, parse_folder
from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFound
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.terms import MEMORY
from laststep.tiers.leftovers import SaveFate, rescue
from laststep.tiers.noted import noted_tiers
from laststep.tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


log = logging.getLogger(__name__)


class Newest(NamedTuple):
    """The newest checkpoint of a tier, and when it came there."""

    name: AttemptName
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far one tier has come."""

    tier: str
    newest: Newest | None = None
    checkpoints: int = 0
    behind_s: float | None = None
    """How much older its newest is than that of all tiers: the work that is lost with everything
    nearer. None: all of it, as far as anybody knows."""
    behind_steps: int | None = None
    items: tuple[str, ...] = ()
    """Those of its newest; where that is in shared memory, all are."""
    left_out: tuple[str, ...] = ()
    """The items that its newest lacks, being an excerpt: with everything nearer they are lost."""
    error: str | None = None
    """Why nobody knows."""


def standings(run: Run, further: Sequence[str] = ()) -> list[Standing]:
    """How far each tier of that run has come, nearest first. Of `further` ones, `shm:///…` is where
    shared memory lies."""
    bases = {url: base for url in further if (base := Tier(url).memory_base) is not None}
    memory = bases or {MEMORY: BASE}
    found = [one for url, base in memory.items() if (one := _in_memory(run, url, base)) is not None]
    found.append(_of_run(run.store.url, run))
    behind = [*noted_tiers(run.store), *(url for url in further if url not in bases)]
    found += [_of_store(url) for url in dict.fromkeys(behind)]
    return _compared(found)


def _in_memory(run: Run, tier: str, base: str) -> Standing | None:
    """Of shared memory: what all ranks hold that have some of this run on this machine."""
    try:
        segments = rescue(run.store.url, base=base, dry_run=True).segments
    except LaststepError as error:
        return Standing(tier=tier, error=str(error))
    if not segments:
        return None
    counted = (SaveFate.STORED, SaveFate.ALONE)
    held = {
        (one.rank, save.folder): save
        for one in segments
        for save in one.saves
        if save.fate in counted
    }
    ranks = len({one.rank for one in segments})
    holders = Counter(folder for _, folder in held)
    saves = [save for (_, folder), save in held.items() if holders[folder] == ranks]
    return _standing(tier, ((parse_folder(save.folder), save.created_s) for save in saves))


def _of_run(tier: str, run: Run) -> Standing:
    whole = [item for item in run.lineage() if item.is_whole]
    standing = _standing(tier, ((item, item.created_s) for item in whole))
    commit = max(whole, key=lambda item: item.point).commit if whole else None
    if commit is None:
        return standing
    items = tuple(record.name for record in commit.items)
    return replace(standing, items=items, left_out=commit.left_out)


def _of_store(url: str) -> Standing:
    try:
        return _of_run(url, Run.open(open_store(url)))
    except NotFound:
        return Standing(tier=url)  # nothing was drained yet
    except LaststepError as error:
        return Standing(tier=url, error=str(error))


def _standing(tier: str, saves: Iterable[tuple[AttemptName | None, float]]) -> Standing:
    known = [Newest(name, created_s) for name, created_s in saves if name is not None]
    newest = max(known, key=_order, default=None)
    return Standing(tier=tier, newest=newest, checkpoints=len({one.name.folder for one in known}))


def _order(one: Newest) -> tuple[int, int]:
    return one.name.point


def _compared(found: list[Standing]) -> list[Standing]:
    """The same, with how far each is behind the newest of all."""
    first = max((one.newest for one in found if one.newest is not None), key=_order, default=None)
    return [one if first is None else _behind(one, first) for one in found]


def _behind(one: Standing, first: Newest) -> Standing:
    if one.newest is None:
        return one
    # Of one checkpoint tiers tell different times: when it was sealed there, or committed.
    is_same = one.newest.name.folder == first.name.folder
    return replace(
        one, behind_steps=first.name.step - one.newest.name.step,
        behind_s=0.0 if is_same else max(first.created_s - one.newest.created_s, 0.0),
    )  # fmt: skip
