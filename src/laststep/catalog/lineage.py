"""Which commits the present state of a run descends from, and in what order.

Pure: from the points (epoch, attempt) from which epochs continue, and the names of the committed
checkpoints. The order of commits is the order of points. A run without any record has only the
order of its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from laststep.catalog.names import AttemptName

Point = tuple[int, int]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What there was when it was decided to continue from somewhere; 0 for what there is not."""

    epoch: int = 0
    """The newest epoch, by its record or by what it saved."""
    commit: Point = (0, 0)
    """The last commit of all: the newest epoch need not have one."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch and the point from which it continues (None: it starts fresh)."""

    epoch: int
    continues: Point | None


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The epochs of the lineage, newest first.

    `unrecorded_below` says that there is no record of any epoch below the last link: what was
    committed there (folders copied by hand) counts up to the point from which that link continues.
    """

    links: tuple[Link, ...]
    unrecorded_below: bool = False


def order(names: Iterable[AttemptName], chain: Chain) -> tuple[AttemptName, ...]:
    """The commits on the lineage, oldest first."""
    listed = list(names)
    if not chain.links:
        return tuple(sorted(listed, key=lambda name: (name.step, name.epoch, name.attempt)))
    limits = _limits(chain)
    chosen = [
        name
        for name in listed
        if name.epoch in limits and _within(name.attempt, limits[name.epoch])
    ]
    if chain.unrecorded_below:
        chosen += _unrecorded(listed, chain.links[-1].continues)
    return tuple(sorted(chosen, key=lambda name: name.point))


def superseded(
    on_lineage: Sequence[AttemptName], sound: frozenset[AttemptName]
) -> Mapping[AttemptName, AttemptName]:
    """Which commit replaced which: a later one of the same step, if that one is whole."""
    latest: dict[int, AttemptName] = {}
    replaced: dict[AttemptName, AttemptName] = {}
    for name in reversed(on_lineage):
        if name.step in latest:
            replaced[name] = latest[name.step]
        elif name in sound:
            latest[name.step] = name
    return replaced


def _limits(chain: Chain) -> dict[int, int | None]:
    """The last attempt that counts of each epoch of the lineage; None where all of them count."""
    limits: dict[int, int | None] = {chain.links[0].epoch: None}
    for link in chain.links:
        if link.continues is not None:
            epoch, attempt = link.continues
            limits[epoch] = attempt
    return limits


def _within(attempt: int, limit: int | None) -> bool:
    return limit is None or attempt <= limit


def _unrecorded(names: Sequence[AttemptName], continues: Point | None) -> list[AttemptName]:
    if continues is None:
        return []
    # Nothing but the step tells what such folders were to each other: what is beyond the step that
    # was taken up again was left behind.
    steps = [name.step for name in names if name.point == continues]
    last = steps[0] if steps else None
    return [
        name for name in names if name.epoch < continues[0] and (last is None or name.step <= last)
    ]
