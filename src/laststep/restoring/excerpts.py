"""A checkpoint that has only some items is never taken for all of it, and may be read at a further
tier that alone has it.

An excerpt is not brought home: there its name is that of the whole, which another place may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.run import newest_point
from laststep.errors import Mismatch, Problems
from laststep.ranks.group import together
from laststep.restoring.fit import selection
from laststep.storage.registry import open_store
from laststep.tiers.further import excerpt_beyond, look_further, only_there
from laststep.tiers.nearest import NearestStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.catalog.lineage import Seen
    from laststep.format.manifest import Commit
    from laststep.ranks.group import Ranks
    from laststep.restoring.restore import RestoreRequest
    from laststep.storage.store import Store
    from laststep.tiers.further import TierHas


def found_further(
    nearest: Store, wanted: RestoreRequest, ranks: Ranks, saw: Callable[[Seen], None]
) -> tuple[Store, Callable[[Seen], None], list[TierHas]]:
    """Where all ranks read what is wanted: the nearest, with what only further tiers have, or a
    tier with an excerpt. Who is told what was newest: nearer than any tier, wherever it is read.
    And what the tiers have, which the first rank knows."""
    found: list[TierHas] = []
    if not wanted.tiers:
        return nearest, saw, found

    def look() -> tuple[dict[str, str], str]:
        if not ranks.rank.is_first:
            return {}, ""
        found[:] = look_further(nearest, wanted.tiers)
        places = only_there(nearest, found)
        stand_in(places)
        return places, excerpt_beyond(nearest, found, wanted.step, takes) or ""

    def takes(item: str) -> bool:
        return selection(wanted.only, item)[0]

    def stand_in(places: Mapping[str, str]) -> None:
        assert isinstance(nearest, NearestStore)  # noqa: S101 (there are further tiers)
        stores = {url: open_store(url) for url in {*places.values()}}
        for folder, url in places.items():
            nearest.stand_in(folder, stores[url])

    told = ranks.tell(0, msgspec.msgpack.encode(together(ranks, look)))
    places, excerpt = msgspec.msgpack.decode(told, type=tuple[dict[str, str], str])
    together(ranks, lambda: None if ranks.rank.is_first else stand_in(places))
    if not excerpt and not places:
        return nearest, saw, found

    def saw_nearer(_: Seen) -> None:
        assert isinstance(nearest, NearestStore)  # noqa: S101 (as above)
        saw(newest_point(nearest.without_tiers()))

    return open_store(excerpt) if excerpt else nearest, saw_nearer, found


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
