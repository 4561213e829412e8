"""What only further tiers have of a run: its disk may be a new one, or have lost some of it.

The first rank of a job asks them before a restore looks at the run. Their checkpoints are read
where they lie, beside those at home; nothing is copied. Where both have gone on, each by itself,
home counts. A home without any checkpoint is no new run while a tier cannot be asked.

Also says how far each tier is behind.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.epochs import Epochs
from laststep.catalog.lineage import AttemptName, parse_folder
from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFoundError, StorageError, UsageError
from laststep.process import signals
from laststep.process.threads import Workers
from laststep.storage.registry import open_store
from laststep.storage.shared_memory import BASE
from laststep.terms import MEMORY
from laststep.tiers.draining import noted_tiers
from laststep.tiers.leftovers import SaveFate, rescue
from laststep.tiers.records import Records
from laststep.tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store


log = logging.getLogger(__name__)

BRIEF_S = 30.0
"""How long a tier is waited for where home has a checkpoint to go on from."""
_TOLD_S = 5.0


class TierHas(NamedTuple):
    """What a further tier has."""

    url: str
    """Of the tier, as the user has named it."""
    tier: Store
    listed: tuple[Listed, ...]
    """The checkpoints that have all items, in the order of commits; something may be missing."""
    excerpts: tuple[Listed, ...]
    """Those that have some, and of which all files are there."""


def look_further(nearest: Store, tiers: Sequence[Tier]) -> list[TierHas]:
    """What the further tiers have, nearest first. One that cannot be asked is told of in the log
    where there is something nearer than any of them, else it is an error."""
    has_some, found = bool(_listed(nearest)), []
    for url in (tier.url for tier in tiers):
        try:
            found.append(ask(url, BRIEF_S if has_some else None))
        except (LaststepError, OSError) as error:
            if not has_some:
                raise _unknown(nearest, url, error) from error
            log.warning("cannot look whether %s has a newer checkpoint: %s", url, error)
    return found


def only_there(
    nearest: Store, found: list[TierHas], step: int | None, takes: Callable[[str], bool]
) -> dict[str, str]:
    """The checkpoints that nothing nearer lists, and at which tier each is to be read; of excerpts
    the one that is to be restored, if any is, by what is taken of it. Home gets the records of
    epochs that it lacks: it becomes the run that it was. A tier that is another run, or has gone on
    by itself, is `found` no more."""
    here = {one.folder: one for one in _listed(nearest)}
    has_some, places = bool(here), dict[str, str]()
    for has in tuple(found):
        more = {one.folder: one for one in has.listed if one.folder not in here}
        try:
            if has.listed or has.excerpts:
                _make_same_run(nearest, tuple(here.values()), has)
        except UsageError as error:
            if not has_some:
                raise
            log.warning("nothing is read at %s: %s", has.url, error)
            found.remove(has)
            continue
        here |= more
        places |= dict.fromkeys(more, has.url)
    return places | _excerpt_beyond(tuple(here.values()), found, step, takes)


def ask(url: str, within_s: float | None) -> TierHas:
    """What a tier has; `StorageError` where it does not answer in time. A server that is away, or
    a mount that hangs, is left to its thread."""
    answered = threading.Event()
    future = Workers(1, "laststep-ask").submit(_held, url)
    future.add_done_callback(lambda _: answered.set())
    told_s = _TOLD_S if within_s is None else min(_TOLD_S, within_s)
    if not signals.wait(answered, told_s):
        log.warning("waiting for %s, to learn which checkpoints it has", url)
        if not signals.wait(answered, None if within_s is None else within_s - told_s):
            raise StorageError(
                "a further tier does not answer",
                where=url,
                found=f"nothing within {within_s:g} s",
                remedy="look at the server and at the network",
            )
    return future.result()


def _held(url: str) -> TierHas:
    tier = open_store(url)
    listed = _listed(tier)
    excerpts = tuple(one for one in listed if _lacking(one) and one.is_whole)
    return TierHas(url, tier, tuple(one for one in listed if not _lacking(one)), excerpts)


def _excerpt_beyond(
    here: Sequence[Listed], found: Sequence[TierHas], step: int | None, takes: Callable[[str], bool]
) -> dict[str, str]:
    """The excerpt of what is to be restored, with all that is taken of it, where nothing that is
    here counts for that; and its tier. One that lacks some counts where there is nothing at all, so
    that who restores is told."""
    has_some = any(step in (None, one.step) for one in here)
    for has in found:
        for one in _beyond(here, has.excerpts, step):
            if has_some and any(map(takes, _lacking(one))):
                log.warning(
                    "%s is whole nowhere: %s has it without %s",
                    one.folder,
                    has.url,
                    ", ".join(_lacking(one)),
                )
            else:
                return {one.folder: has.url}
    return {}


def _beyond(here: Sequence[Listed], there: Sequence[Listed], step: int | None) -> Sequence[Listed]:
    """The newest there that is newer than all here, or that step if it is not here; if any."""
    if step is None:
        newest = max((listed.point for listed in here), default=(0, 0))
        wanted = [listed for listed in there if listed.on_lineage and listed.point > newest]
    else:
        has_it = any(listed.step == step for listed in here)
        wanted = [] if has_it else [listed for listed in there if listed.step == step]
    return wanted[-1:]


def _make_same_run(nearest: Store, here: Sequence[Listed], has: TierHas) -> None:
    """Bring home what records of the run it lacks: of all epochs, also of those that have committed
    nothing, so that the next one is none of them. `UsageError` where home is another run, or both
    have gone on: a start at the tier may have left behind what home has committed, if it knew
    that."""
    there = {one.folder: one for one in (*has.listed, *has.excerpts)}
    records = Records(has.tier, nearest, may_be_ahead=True)
    records.check()
    ours, theirs = (frozenset(Epochs(store).numbers()) for store in (nearest, has.tier))
    if theirs <= ours:
        records.bring_run()
        return
    if ours - theirs and min(ours - theirs) > max(theirs):  # older records were lost here
        records.bring(None)
        return
    names = {**there, **{one.folder: one for one in here}}.values()
    known = {name.folder for name in Run.open(has.tier).would_descend(names)} | there.keys()
    newest = max(here, key=lambda one: one.point).folder if here else None
    if ours - theirs or not (newest is None or newest in known):
        raise UsageError(
            "this run and a further tier have gone on, each by itself",
            where=nearest.url,
            found=f"epochs {sorted(theirs - ours)} at {has.url} alone",
            remedy="home counts; what was saved there by itself can be restored there, and another "
            "place is wanted for the checkpoints of this run",
        )
    records.bring(None)


def _unknown(nearest: Store, url: str, error: Exception) -> StorageError:
    told, remedy = str(error), "start again when it can be reached"
    if isinstance(error, LaststepError):
        told, remedy = error.without_remedy(), error.remedy or remedy
    return StorageError(
        f"there is no checkpoint here, and {url} may have some",
        where=nearest.url,
        found=told,
        remedy=f"{remedy}; to begin anew without it, leave that tier out",
    )


def _lacking(listed: Listed) -> tuple[str, ...]:
    """The items that an excerpt lacks."""
    return () if listed.commit is None else listed.commit.left_out


def _listed(store: Store) -> tuple[Listed, ...]:
    """All checkpoints, also those of which something is missing."""
    try:
        return Run.open(store).checkpoints()
    except NotFoundError:
        return ()


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
    except NotFoundError:
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
        one,
        behind_steps=first.name.step - one.newest.name.step,
        behind_s=0.0 if is_same else max(first.created_s - one.newest.created_s, 0.0),
    )
