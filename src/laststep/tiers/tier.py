"""The places that a run is kept in, nearest first, as a user names them.

One of them is the run's *home*: there epochs are claimed and saves are committed first. Before it
there may be shared memory; what comes after it is drained to. Knows nothing of how.
"""

from __future__ import annotations

import os
import re
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from laststep.catalog.lineage import EPOCHS_FOLDER, parse_folder
from laststep.catalog.retention import Keep  # noqa: TC001 (fields are checked by their types)
from laststep.checks import Checked, shown
from laststep.errors import UsageError
from laststep.storage.files import refuse_secrets
from laststep.storage.registry import real_place
from laststep.storage.shared_memory import BASE
from laststep.terms import MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_RATE = rf"[0-9]+(\.[0-9]+)? ?({'|'.join(_UNITS)})/s"


class Tier(Checked, frozen=True, kw_only=False):
    """A place that checkpoints are kept in: a folder, a URL, or shared memory (`shm://`)."""

    url: str
    every: Annotated[int, Meta(ge=1)] = 1
    """Of so many checkpoints one goes there."""
    keep: Keep | None = None
    """Which ones stay there; None: all."""
    limit: Annotated[str, Meta(pattern=f"^{_RATE}$", description="a rate such as '200 MB/s'")] | (
        None
    ) = None
    """How fast it is drained to at most."""
    items: (
        Annotated[
            tuple[str, ...], Meta(min_length=1, description="names of items, as in ('model',)")
        ]
        | None
    ) = None
    """Which items go there; None: all."""

    @property
    def limit_bytes_per_s(self) -> float | None:
        """The same as a number."""
        if self.limit is None:
            return None
        number, unit = re.split(r" ?(?=[A-Za-z])", self.limit.removesuffix("/s"), maxsplit=1)
        return float(number) * _UNITS[unit]

    @property
    def memory_base(self) -> str | None:
        """Where shared memory is to lie; None for a tier that is a store."""
        base = self.url.removeprefix(MEMORY) if self.url.startswith(MEMORY) else None
        return base or BASE if base is not None and base[:1] in ("", "/") else None


class Arranged(NamedTuple):
    """The places of a run."""

    memory: str | None
    """Where its shared memory lies; None: no save is kept there."""
    home: str | os.PathLike[str]
    keep: Keep | None
    further: tuple[Tier, ...] = ()


def arranged(
    run: str | os.PathLike[str] | None, tiers: Sequence[object], keep: Keep | None
) -> Arranged:
    """What a user has named, as the place of a run or as several tiers."""
    for tier in tiers if isinstance(tiers, list | tuple) else ():
        refuse_secrets(tier.url if isinstance(tier, Tier) else str(tier))
    if run is not None and not tiers:
        return Arranged(None, run, keep)
    if run is not None or not tiers or not isinstance(tiers, list | tuple):
        raise UsageError(
            "a run has one place, or several tiers",
            found="neither" if run is None and not tiers else f"{shown(run)}, tiers={shown(tiers)}",
            expected="the path or URL of a run, or tiers=[…]",
            remedy="pass Checkpointer('runs/gpt', …) or Checkpointer(tiers=['shm://', 'runs/gpt'])",
        )
    named = [tier if isinstance(tier, Tier) else Tier(_text(tier)) for tier in tiers]
    memory, *_ = [*(tier.memory_base for tier in named[:1]), None]
    stores = named if memory is None else named[1:]
    if not stores or any(tier.memory_base is not None for tier in stores):
        raise UsageError(
            "one tier at least is a store, and shared memory comes before all others",
            expected="tiers=['shm://', 'runs/gpt', …]",
            found=f"tiers={shown(tiers)}",
            remedy="name a folder or a URL behind shm://; a run in memory alone is "
            "Checkpointer('shm://name')",
        )
    home, *further = stores
    if memory is not None and named[0].items is not None:
        raise UsageError(
            "shared memory takes all items: what lies there is the snapshot itself",
            found=str(named[0]),
            remedy="pass items= for the tiers behind the first store",
        )
    if home.every != 1 or home.limit is not None or home.items is not None:
        raise UsageError(
            "every save goes to the first store among the tiers, whole",
            found=str(home),
            remedy="pass every=, limit= and items= for the tiers behind it",
        )
    if keep is not None and home.keep is not None:
        raise UsageError(
            "the first store among the tiers has two rules of retention",
            found=f"keep={keep} and {home}",
            remedy="leave one of them out",
        )
    _refuse_same([tier.url for tier in stores])
    return Arranged(memory, home.url, home.keep or keep, tuple(further))


def _refuse_same(urls: Sequence[str]) -> None:
    """`UsageError` where retention at one place would delete what lies at another."""
    for (one, place), (other, second) in permutations([(url, _parts(url)) for url in urls], 2):
        if place == second:
            raise UsageError(
                "two tiers are the same place",
                where=one,
                found=f"{other}, which leads there too",
                expected="another place for each",
                remedy="name each place once",
            )
        inner = second[len(place) :] if second[: len(place)] == place else ()
        if inner and (inner[0] == EPOCHS_FOLDER or parse_folder(inner[0]) is not None):
            raise UsageError(
                "a tier lies in what another keeps of its run",
                where=other,
                expected=f"a place beside {one}",
                found="one in it",
                remedy="name another folder",
            )


def _parts(url: str) -> tuple[str, ...]:
    """A place by the names that lead to it."""
    return tuple(part for part in real_place(url).split("/") if part)


def _text(tier: object) -> str:
    if isinstance(tier, os.PathLike):
        tier = os.fspath(tier)
    if not isinstance(tier, str):
        raise UsageError("a tier is a path, a URL or a laststep.Tier", found=shown(tier))
    return tier
