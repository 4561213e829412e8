"""A checkpoint that has only some items is never taken for all of it, and may be read at a further
tier that alone has it.

An excerpt is not brought home: there its name is that of the whole, which another place may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.catalog.run import newest_point
from laststep.errors import Mismatch, Problems
from laststep.ranks.group import together
from laststep.restoring.fit import selection
from laststep.storage.registry import open_store
from laststep.tiers.fetching import excerpt_beyond, fetch_back
from laststep.tiers.nearest import beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.lineage import Seen
    from laststep.format.manifest import Commit
    from laststep.ranks.group import Ranks
    from laststep.restoring.restore import RestoreRequest
    from laststep.storage.store import Store
    from laststep.tiers.fetching import TierHas


def fetched(
    nearest: Store, wanted: RestoreRequest, ranks: Ranks, saw: Callable[[Seen], None]
) -> tuple[Store, Callable[[Seen], None], list[TierHas]]:
    """Where all ranks read what is wanted, once the first one has brought home what only a further
    tier has: the nearest, or a tier with an excerpt. Who is told what was newest: at home, wherever
    it is read. And what further tiers have, which the first rank knows."""
    home = beneath(nearest)
    found: list[TierHas] = []

    def look() -> str:
        if not ranks.rank.is_first:
            return ""
        found[:] = fetch_back(home, nearest, wanted.tiers, wanted.step, threads=wanted.threads)
        return excerpt_beyond(home, nearest, found, wanted.step, takes) or ""

    def takes(item: str) -> bool:
        return selection(wanted.only, item)[0]

    url = ranks.tell(0, together(ranks, look).encode()).decode() if wanted.tiers else ""
    if not url:
        return nearest, saw, found
    return open_store(url), lambda _: saw(newest_point(home)), []


def refuse_excerpt(commit: Commit, only: Sequence[str] | None, where: str) -> None:
    """`Mismatch` where something is wanted that an excerpt lacks."""
    lacking = [item for item in commit.left_out if selection(only, item)[0]]
    if lacking:
        here = [record.name for record in commit.items]
        error = Mismatch(
            "the checkpoint is an excerpt, without " + ", ".join(lacking), where=where,
            expected="all items" if only is None else f"what only={list(only)} names",
            found=f"{', '.join(here)} of a checkpoint of the run {commit.run}",
            remedy=f"restore(only={here}) takes what is here; the whole is, or was, in the "
            "run that this was copied from",
        )  # fmt: skip
        error.problems = Problems(missing=tuple(lacking))
        raise error
