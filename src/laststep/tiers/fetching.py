"""Bring back to the home of a run what only a further tier has: its disk may be a new one.

The first rank of a job does so before a restore looks at the run. What comes is a copy like any
other, verified and committed. Where both have gone on, each by itself, nothing comes: home counts.
A home without any checkpoint does not look like a new run while a tier cannot be asked, or has
nothing but damage. Excerpts do not come, since at home their names are those of the whole: they are
read where they lie.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.epochs import Epochs
from laststep.catalog.run import Run
from laststep.errors import Corrupt, LaststepError, NotFound, StorageFailed, Usage
from laststep.process import interrupts
from laststep.process.workers import Workers
from laststep.storage.registry import open_store
from laststep.tiers.bringing import CopyRoute
from laststep.tiers.copying import Copier
from laststep.tiers.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

BRIEF_S = 30.0
"""How long a tier is waited for where home has a checkpoint to go on from."""
_TOLD_S = 5.0


class TierHas(NamedTuple):
    """What a further tier has."""

    url: str
    """Of the tier, as the user has named it."""
    tier: Store
    whole: tuple[Listed, ...]
    """The checkpoints of which all files are there, in the order of commits; excerpts are not."""
    excerpts: tuple[Listed, ...]


def fetch_back(
    home: Store, nearest: Store, tiers: Sequence[Tier], step: int | None, *, threads: int
) -> list[TierHas]:
    """See to it that home has what is to be restored, if any tier has it and nothing nearer does:
    the newest there is, or that step. Returns what tiers have. One that cannot be asked is told of
    in the log where there is something nearer, else it is an error."""
    has_some, found = bool(_listed(nearest)), []
    for url in (tier.url for tier in tiers):
        try:
            held = ask(url, BRIEF_S if has_some else None)
        except (LaststepError, OSError) as error:
            if not has_some:
                raise _unknown(home, url, error) from error
            log.warning("cannot look whether %s has a newer checkpoint: %s", url, error)
            continue
        found.append(held)
        try:
            _fetch(home, nearest, held, step, threads)
        except Usage as error:
            if not has_some:
                raise
            log.warning("nothing is fetched from %s: %s", url, error)
    return found


def ask(url: str, within_s: float | None) -> TierHas:
    """What a tier has; `StorageFailed` where it does not answer in time. A server that is away, or
    a mount that hangs, is left to its thread."""
    answered = threading.Event()
    future = Workers(1, "laststep-ask").submit(_held, url)
    future.add_done_callback(lambda _: answered.set())
    told_s = _TOLD_S if within_s is None else min(_TOLD_S, within_s)
    if not interrupts.wait(answered, told_s):
        log.warning("waiting for %s, to learn which checkpoints it has", url)
        if not interrupts.wait(answered, None if within_s is None else within_s - told_s):
            raise StorageFailed(
                "a further tier does not answer", where=url, found=f"nothing within {within_s:g} s"
            )
    return future.result()


def _held(url: str) -> TierHas:
    tier = open_store(url)
    there = [one for one in _listed(tier) if one.is_whole]
    whole, excerpts = ([o for o in there if bool(_lacking(o)) is some] for some in (False, True))
    return TierHas(url, tier, tuple(whole), tuple(excerpts))


def _fetch(home: Store, nearest: Store, held: TierHas, step: int | None, threads: int) -> None:
    here = _listed(nearest)
    damaged: LaststepError | None = None
    for one in _beyond(home, here, held, held.whole, step):
        log.warning("%s is fetched from %s, which alone has it", one.folder, held.url)
        records = Records(held.tier, home, may_be_ahead=True)
        # All epochs, also those of which nothing was committed there: the next one is none of them.
        records.bring(None)
        route = CopyRoute(source=held.tier, target=home, threads=threads)
        try:
            Copier(route, records=records).copy(one.folder)
        except Corrupt as error:
            log.warning("%s at %s is damaged: %s", one.folder, held.url, error.without_remedy())
            damaged = error
        else:
            return
    if damaged is not None and not here:
        raise Corrupt(
            "there is no checkpoint here, and none at the tier that is whole", where=home.url,
            expected=f"one of those at {held.url}", found=damaged.without_remedy(),
            remedy=f"`laststep verify {held.url}` lists all damage; leave that tier out to begin "
            "anew",
        ) from damaged  # fmt: skip


def excerpt_beyond(
    home: Store,
    nearest: Store,
    found: Sequence[TierHas],
    step: int | None,
    takes: Callable[[str], bool],
) -> str | None:
    """The tier that has an excerpt of what is to be restored, with all that is taken of it, where
    the run itself has none of that: then the run at home is the same. One that lacks some counts
    where the run has nothing at all, so that who restores is told."""
    here = _listed(nearest)
    has_some = any(step in (None, one.step) for one in here)
    for held in found:
        try:
            for one in [*_beyond(home, here, held, held.excerpts, step)][:1]:
                if any(map(takes, _lacking(one))):
                    if has_some:
                        log.warning(
                            "%s is whole nowhere: %s has it without %s", one.folder, held.url,
                            ", ".join(_lacking(one)),
                        )  # fmt: skip
                        continue
                else:
                    Records(held.tier, home, may_be_ahead=True).bring(None)
                log.warning("%s is read at %s, which alone has it", one.folder, held.url)
                return held.url
        except (LaststepError, OSError) as error:
            log.warning("nothing is read at %s: %s", held.url, error)
    return None


def _beyond(
    home: Store, here: Sequence[Listed], held: TierHas, there: Sequence[Listed], step: int | None
) -> Iterator[Listed]:
    """Of what a tier has, what is newer than all here, newest first; or that of a step that is not
    here. Of the lineage, if any is."""
    if step is None:
        newest = max((one.point for one in here), default=(0, 0))
        there = [one for one in there if one.point > newest]
    else:
        there = [one for one in there if one.step == step]
    if not there:
        return
    lineage = _lineage(home, here, held)
    current = [one for one in there if one.folder in lineage]
    if step is None:
        yield from reversed(current)
    elif not any(one.step == step and (one.folder in lineage or not current) for one in here):
        yield (current or there)[-1]


def _lineage(home: Store, here: Sequence[Listed], held: TierHas) -> frozenset[str]:
    """The folders, of both, that the newest state of the run descends from, which is told by the
    place that has gone on; `Usage` where that is each of them, or they are two runs."""
    tier, there = held.tier, {one.folder: one for one in (*held.whole, *held.excerpts)}
    Records(tier, home, may_be_ahead=True).check()
    ours, theirs = (frozenset(Epochs(store).numbers()) for store in (home, tier))
    run = Run.open(tier if theirs - ours or not here else home)
    names = run.would_descend({**there, **{one.folder: one for one in here}}.values())
    lineage = frozenset(name.folder for name in names)
    # A start at the tier that has left behind what home committed did so knowingly if it was there.
    newest = max(here, key=lambda one: one.point).folder if here else ""
    is_known = not here or newest in lineage or newest in there
    if theirs - ours and (ours - theirs or not is_known):
        raise Usage(
            "this run and a further tier have gone on, each by itself", where=home.url,
            found=f"epochs {sorted(theirs - ours)} at {tier.url} alone",
            remedy="home counts; what was saved there by itself can be restored there, and another "
            "place is wanted for the checkpoints of this run",
        )  # fmt: skip
    return lineage


def _unknown(home: Store, url: str, error: Exception) -> StorageFailed:
    return StorageFailed(
        "there is no checkpoint here, and a further tier may have some", where=home.url,
        expected=f"an answer of {url}",
        found=error.without_remedy() if isinstance(error, LaststepError) else str(error),
        remedy="start again when it can be reached; or leave that tier out to begin anew",
    )  # fmt: skip


def _lacking(listed: Listed) -> tuple[str, ...]:
    """The items that an excerpt lacks."""
    return () if listed.commit is None else listed.commit.left_out


def _listed(store: Store) -> tuple[Listed, ...]:
    """All checkpoints, also those of which something is missing."""
    try:
        return Run.open(store).checkpoints()
    except NotFound:
        return ()
