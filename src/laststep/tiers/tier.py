"""The tiers of a run, nearest first, as configured by the user.

The first durable tier is the *primary*: terms are claimed and saves are committed there first.
Shared memory may come before it; the tiers behind it are replicas.
"""

from __future__ import annotations

import os
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from laststep.catalog.attempt import parse_folder
from laststep.catalog.retention import Keep  # noqa: TC001 (fields are checked by their types)
from laststep.catalog.terms import TERMS_FOLDER
from laststep.checks import Checked, shown
from laststep.constants import MEMORY, bytes_per_s
from laststep.errors import UsageError
from laststep.storage.files import refuse_secrets
from laststep.storage.registry import real_place
from laststep.storage.shared_memory import BASE

if TYPE_CHECKING:
    from collections.abc import Sequence

_RATE = r"^[0-9]+(\.[0-9]+)? ?([kMG]|[KMG]i)B/s$"


class Tier(Checked, frozen=True, kw_only=False):
    """A place where checkpoints are kept: a folder, a URL, or shared memory (`shm://`)."""

    url: str
    every: Annotated[int, Meta(ge=1)] = 1
    """Copy every N-th checkpoint to this tier."""
    keep: Keep | None = None
    """The retention rules of this tier; None keeps all checkpoints."""
    limit: Annotated[str, Meta(pattern=_RATE, description="a rate such as '200 MB/s'")] | None = (
        None
    )
    """The highest rate of copying to this tier, such as '200 MB/s'."""
    items: (
        Annotated[
            tuple[str, ...], Meta(min_length=1, description="names of items, as in ('model',)")
        ]
        | None
    ) = None
    """The items to copy to this tier; None: all."""

    @property
    def limit_bytes_per_s(self) -> float | None:
        return None if self.limit is None else bytes_per_s(self.limit)

    @property
    def memory_base(self) -> str | None:
        """The folder of shared memory, or None if the tier is a store."""
        base = self.url.removeprefix(MEMORY) if self.url.startswith(MEMORY) else None
        return base or BASE if base is not None and base[:1] in ("", "/") else None


class Arranged(NamedTuple):
    memory: str | None
    """The folder of shared memory, or None if saves are not kept in memory."""
    primary: str | os.PathLike[str]
    keep: Keep | None
    replicas: tuple[Tier, ...] = ()


def arranged(
    run: str | os.PathLike[str] | None, tiers: Sequence[object], keep: Keep | None
) -> Arranged:
    """Return the tiers that a user configured, by a path or as a list; check them."""
    for tier in tiers if isinstance(tiers, list | tuple) else ():
        refuse_secrets(tier.url if isinstance(tier, Tier) else str(tier))
    if run is not None and not tiers:
        return Arranged(None, run, keep)
    if run is not None or not tiers or not isinstance(tiers, list | tuple):
        raise UsageError(
            "pass either a path or tiers",
            found="neither" if run is None and not tiers else f"{shown(run)}, tiers={shown(tiers)}",
            expected="the path or URL of a run, or tiers=[…]",
            remedy="pass Checkpointer('runs/gpt', …) or Checkpointer(tiers=['shm://', 'runs/gpt'])",
        )
    named = []
    for tier in tiers:
        url = os.fspath(tier) if isinstance(tier, os.PathLike) else tier
        if not isinstance(url, str | Tier):
            raise UsageError("invalid tier", found=shown(tier))
        named.append(url if isinstance(url, Tier) else Tier(url))
    memory = named[0].memory_base
    stores = named if memory is None else named[1:]
    if not stores or any(tier.memory_base is not None for tier in stores):
        raise UsageError(
            "tiers must start with shared memory, if any, and include at least one store",
            expected="tiers=['shm://', 'runs/gpt', …]",
            found=f"tiers={shown(tiers)}",
            remedy="name a folder or a URL behind shm://; a run in memory alone is "
            "Checkpointer('shm://name')",
        )
    primary, *replicas = stores
    whole = [primary] if memory is None else [named[0], primary]
    if any((tier.every, tier.limit, tier.items) != (1, None, None) for tier in whole):
        raise UsageError(
            "shared memory and the primary take every save in full",
            found=f"tiers={shown(tiers)}",
            remedy="pass every=, limit= and items= for the tiers behind the first store",
        )
    if keep is not None and primary.keep is not None:
        raise UsageError(
            "the primary has two retention rules",
            found=f"keep={keep} and {primary}",
            remedy="leave one of them out",
        )
    _refuse_same([tier.url for tier in stores])
    return Arranged(memory, primary.url, primary.keep or keep, tuple(replicas))


def _refuse_same(urls: Sequence[str]) -> None:
    """Raise `UsageError` if tiers overlap: retention at one would delete data of the other."""
    parts = [(url, [part for part in real_place(url).split("/") if part]) for url in urls]
    for (outer, place), (nested, second) in permutations(parts, 2):
        is_below, inner = second[: len(place)] == place, second[len(place) :]
        if is_below and (not inner or inner[0] == TERMS_FOLDER or parse_folder(inner[0])):
            raise UsageError(
                "two tiers name the same place, or one lies inside the other's run",
                where=outer,
                found=nested,
                expected="another place for each",
            )
