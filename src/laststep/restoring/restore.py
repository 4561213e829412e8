"""Restore a checkpoint into the live state, or peek at the one that a restore would take."""

from __future__ import annotations

import functools
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.catalog.run import Run
from laststep.errors import NotFoundError, Problems
from laststep.events import Bus
from laststep.events import Restored as RestoredEvent
from laststep.ranks.group import collective
from laststep.restoring import plan as planning
from laststep.restoring.choose import choosing_of
from laststep.restoring.exchange import Transfer, state_of_rank
from laststep.saving.describe import naming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.catalog.listing import Listed
    from laststep.catalog.terms import Seen
    from laststep.ranks.group import Rank, Ranks
    from laststep.read.content import Content
    from laststep.read.reader import Room
    from laststep.restoring.choose import Chosen, Skipped
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store
    from laststep.tiers.tier import Tier

_REMEDY = "pass strict=False to restore what fits, or only=[…] to restore a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of `restore()`."""

    step: int | None
    """The step that was restored; None in a new run."""
    next_step: int
    """The step to continue with; 0 in a new run."""
    skipped: tuple[Skipped, ...] = ()
    """Newer checkpoints that could not be restored, and why."""
    problems: Problems = field(default_factory=Problems)
    """With strict=False: the state that did not fit and was left alone."""
    folder: str | None = None
    metrics: dict[str, float | int | str | bool] = field(default_factory=dict)
    metadata: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeked:
    """The checkpoint that `peek()` found; every later `restore()` reads this one."""

    step: int
    next_step: int
    """The step to continue with, if steps are counted from 0 when they start."""
    folder: str
    skipped: tuple[Skipped, ...]
    """Newer checkpoints that could not be restored, and why."""
    metrics: dict[str, float | int | str | bool]
    metadata: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A successful restore, with the result for the user."""

    restored: Restored
    chosen: Chosen
    mixed: bool
    """True if the live state may be a mixture with a checkpoint that was tried before."""
    was_in_primary: bool
    """True if all that was requested fitted, and came from the primary."""
    items: frozenset[str]
    """The names of all items of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    step: int | None
    """Restore exactly this step; None: the newest that verifies."""
    only: Sequence[str] | None
    strict: bool
    exact: bool
    """Refuse tensors that were rounded when they were saved."""
    allow_pickle: bool
    threads: int
    tiers: Sequence[Tier] = ()
    """Replicas, read for checkpoints that are missing or damaged in the primary."""
    peeked: str | None = None
    """Folder of the checkpoint that `peek()` returned; no other is restored."""
    damaged: frozenset[str] = frozenset()
    """Folders of checkpoints to skip, because they were peeked at and then found damaged."""


def restore_into(
    store: Store,
    providers: Mapping[str, StateProvider],
    room: Room,
    bus: Bus,
    wanted: RestoreRequest,
    *,
    touched: Callable[[], None],
    saw: Callable[[Seen], None],
    ranks: Ranks,
) -> Outcome | None:
    """Restore a checkpoint; return None if there is none yet and no step was requested.

    `touched` is called before the first live byte changes, `saw` on rank 0 with the newest term
    before each listing of the run. All ranks call this together, after their saves have ended.
    """
    choosing = choosing_of(store, bus, wanted, saw, ranks, "restore()")
    if choosing is None:
        return None
    near = choosing.near
    changed: set[str] = set()  # checkpoints that may have changed live state

    def restore(chosen: Chosen) -> Outcome:
        began = time.perf_counter()
        with closing(choosing.open(chosen)) as content:
            planning.refuse_partial(content, wanted.only)
            plan = planning.plan_restore(
                content, providers, wanted.only, strict=wanted.strict, remedy=_REMEDY, ranks=ranks
            )
            if wanted.exact:
                collective(ranks, lambda: planning.refuse_rounded(content, plan.matches))
            readers = None if near is None else near.readers(chosen.folder)
            transfer = Transfer(content, plan.matches, ranks, readers)
            touched()
            changed.add(chosen.folder)
            size_bytes = transfer.run(room, wanted.threads)
            if plan.have_aliases:
                planning.compare_aliases(plan, ranks, content.where)
            give = functools.partial(hand_over, content, plan, providers, room, ranks.rank)
            collective(ranks, functools.partial(give, allow_pickle=wanted.allow_pickle))
        bus.emit(
            RestoredEvent(
                step=chosen.step,
                folder=chosen.folder,
                size_bytes=size_bytes,
                seconds=time.perf_counter() - began,
            )
        )
        restored = Restored(
            step=chosen.step,
            next_step=chosen.step + 1,
            problems=plan.problems,
            skipped=choosing.skipped(chosen),
            folder=chosen.folder,
            metrics=content.commit.metrics,
            metadata=content.commit.metadata,
        )
        is_in_primary = near is None or near.is_in_primary(chosen.folder)
        return Outcome(
            restored=restored,
            chosen=chosen,
            was_in_primary=is_in_primary and not plan.problems,
            items=frozenset(content.items),
            # A damaged checkpoint may have changed state that this one does not cover, unless it
            # is the same checkpoint read from another tier.
            mixed=len(changed) > 1 and (bool(plan.problems) or wanted.only is not None),
        )

    return choosing.until_one_succeeds(restore)


def peek_into(
    store: Store, bus: Bus, wanted: RestoreRequest, *, saw: Callable[[Seen], None], ranks: Ranks
) -> Peeked | None:
    """Return the checkpoint that a restore would take; None if there is none yet. All ranks open
    it, which verifies everything except tensors."""
    choosing = choosing_of(store, bus, wanted, saw, ranks, "peek()")
    if choosing is None:
        return None

    def look(chosen: Chosen) -> Peeked:
        with closing(choosing.open(chosen)) as content:
            planning.refuse_partial(content, None)
            return Peeked(
                step=chosen.step,
                next_step=chosen.step + 1,
                folder=chosen.folder,
                skipped=choosing.skipped(chosen),
                metrics=content.commit.metrics,
                metadata=content.commit.metadata,
            )

    return choosing.until_one_succeeds(look)


def hand_over(
    content: Content,
    plan: planning.RestorePlan,
    providers: Mapping[str, StateProvider],
    room: Room,
    rank: Rank,
    *,
    allow_pickle: bool,
) -> None:
    """Pass every provider its state, on the training thread."""
    for match in plan.matches:
        name = match.item.name
        tree = match.tree(allow_pickle=allow_pickle)
        with naming(name, "restored"):
            if name in plan.derived:
                providers[name].derive(tree, rank.number)
            else:
                providers[name].restore(tree)
    if not plan.merged:
        return
    states: dict[str, list[object]] = {name: [] for name in plan.merged}
    for number in range(content.commit.ranks):
        with closing(content.of_rank(number)) as theirs:
            for name, of_ranks in states.items():
                of_ranks.append(state_of_rank(theirs, name, room, allow_pickle=allow_pickle))
    for name, of_ranks in states.items():
        merge = providers[name].when_ranks_change
        assert callable(merge)  # noqa: S101 (only callables are merged)
        with naming(name, "restored"):
            providers[name].restore(merge(of_ranks, rank.number, rank.ranks))


def newest_of(store: Store) -> Listed | None:
    """Return the newest checkpoint of a run; None if there is none yet."""
    try:
        return Run.open(store).newest()
    except NotFoundError:
        return None
