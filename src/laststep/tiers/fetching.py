"""Bring back to the home of a run what only a further tier has: its disk may be a new one.

The first rank of a job does so before a restore looks at the run. What comes is a copy like any
other, verified and committed; where home has gone on by itself, nothing comes. Excerpts do not
come, since at home their names are those of the whole: they are read where they lie.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFound, Usage
from laststep.storage.registry import open_store
from laststep.tiers.bringing import CopyRoute
from laststep.tiers.copying import Copier
from laststep.tiers.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)


class Excerpts(NamedTuple):
    """The excerpts that a further tier has."""

    url: str
    """Of the tier, as the user has named it."""
    tier: Store
    listed: tuple[Listed, ...]


def fetch_back(
    home: Store, tiers: Sequence[Tier], step: int | None, *, threads: int
) -> list[Excerpts]:
    """See to it that home has what is to be restored, if any tier has it, nearest first: the newest
    there is, or that step. Returns what tiers have of it in excerpts. A tier that cannot be reached
    is told of in the log."""
    excerpts = []
    for url in (tier.url for tier in tiers):
        try:
            store = open_store(url)
            there = _listed(store)
            excerpts.append(Excerpts(url, store, tuple(filter(_lacking, there))))
            for one in _beyond(_whole(home), [one for one in there if not _lacking(one)], step):
                log.warning("%s is fetched from %s, which alone has it", one.folder, url)
                Copier(CopyRoute(source=store, target=home, threads=threads)).copy(one.folder)
        except Usage as error:
            log.warning("nothing is fetched from %s: %s", url, error)
        except (LaststepError, OSError) as error:
            log.warning("cannot look whether %s has a newer checkpoint: %s", url, error)
    return [found for found in excerpts if found.listed]


def excerpt_beyond(
    home: Store,
    nearest: Store,
    found: Sequence[Excerpts],
    step: int | None,
    takes: Callable[[str], bool],
) -> str | None:
    """The tier that has an excerpt of what is to be restored, with all that is taken of it, where
    the run itself has none of that: then the run at home is the same. One that lacks some counts
    where the run has nothing at all, so that who restores is told."""
    here = _whole(nearest) if found else []
    has_some = any(step in (None, one.step) for one in here)
    for url, tier, listed in found:
        for one in _beyond(here, listed, step):
            if not any(map(takes, _lacking(one))):
                try:
                    _make_same_run(home, tier, one.epoch)
                except (LaststepError, OSError) as error:
                    log.warning("nothing is read at %s: %s", url, error)
                    continue
            elif has_some:
                log.warning(
                    "%s is whole nowhere: %s has it without %s", one.folder, url,
                    ", ".join(_lacking(one)),
                )  # fmt: skip
                continue
            log.warning("%s is read at %s, which alone has it", one.folder, url)
            return url
    return None


def _make_same_run(home: Store, tier: Store, epoch: int) -> None:
    """`Usage` where home is another run; where it is none, it becomes the one at the tier."""
    try:
        run = Run.open(home).id
    except NotFound:
        Records(tier, home).bring(epoch)
        return
    if run != Run.open(tier).id:
        raise Usage("a tier is another run", where=tier.url, expected=run, found=Run.open(tier).id)
    Records(home, tier).check()


def _beyond(here: Sequence[Listed], there: Sequence[Listed], step: int | None) -> Sequence[Listed]:
    """The newest there that is newer than all here, or that step if it is not here; if any."""
    if step is None:
        newest = max((listed.point for listed in here), default=(0, 0))
        wanted = [listed for listed in there if listed.on_lineage and listed.point > newest]
    else:
        has_it = any(listed.step == step for listed in here)
        wanted = [] if has_it else [listed for listed in there if listed.step == step]
    return wanted[-1:]


def _lacking(listed: Listed) -> tuple[str, ...]:
    """The items that an excerpt lacks."""
    return () if listed.commit is None else listed.commit.left_out


def _whole(store: Store) -> list[Listed]:
    return [listed for listed in _listed(store) if not _lacking(listed)]


def _listed(store: Store) -> tuple[Listed, ...]:
    """The checkpoints of which all files are there."""
    try:
        return tuple(listed for listed in Run.open(store).checkpoints() if listed.is_whole)
    except NotFound:
        return ()
