"""Bring back to the home of a run what only a further tier has: its disk may be a new one.

The first rank of a job does so before a restore looks at the run. What comes is a copy like any
other, verified and committed; where home has gone on by itself, nothing comes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFound, Usage
from laststep.storage.registry import open_store
from laststep.tiers.bringing import CopyRoute
from laststep.tiers.copying import Copier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)


def fetch_back(home: Store, tiers: Sequence[Tier], step: int | None, *, threads: int) -> None:
    """See to it that home has what is to be restored, if any tier has it, nearest first: the newest
    there is, or that step. A tier that cannot be reached is told of in the log."""
    for url in (tier.url for tier in tiers):
        try:
            _fetch(home, open_store(url), step, threads)
        except Usage as error:
            log.warning("nothing is fetched from %s: %s", url, error)
        except (LaststepError, OSError) as error:
            log.warning("cannot look whether %s has a newer checkpoint: %s", url, error)


def _fetch(home: Store, tier: Store, step: int | None, threads: int) -> None:
    there = [listed for listed in _listed(tier) if listed.is_whole]
    here = {listed.folder: listed for listed in _listed(home) if listed.is_whole}
    if step is None:
        newest = max((listed.point for listed in here.values()), default=(0, 0))
        wanted = [listed for listed in there if listed.on_lineage and listed.point > newest][-1:]
    else:
        has_it = any(listed.step == step for listed in here.values())
        wanted = [] if has_it else [listed for listed in there if listed.step == step][-1:]
    for listed in wanted:
        log.warning("%s is fetched from %s, which alone has it", listed.folder, tier.url)
        Copier(CopyRoute(source=tier, target=home, threads=threads)).copy(listed.folder)


def _listed(store: Store) -> tuple[Listed, ...]:
    try:
        return Run.open(store).checkpoints()
    except NotFound:
        return ()
