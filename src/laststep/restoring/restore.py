"""Find the checkpoint to restore and restore it: the newest that verifies, or the one named.

Only `CorruptError`, which readers raise after a second look, makes an older checkpoint count;
storage that cannot be reached and state that does not fit raise. Everything passed over is
reported."""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from laststep.catalog.run import Run
from laststep.errors import NotFoundError, Problems
from laststep.events import Bus
from laststep.events import Restored as RestoredEvent
from laststep.ranks.group import together
from laststep.restoring.choose import (
    Asked,
    Attempts,
    Choosing,
    Skipped,
    Which,
    check_asked,
    look_at_tiers,
    look_into_memory,
    open_run,
    seen_in,
)
from laststep.restoring.fit import (
    Fit,
    fit,
    judge_twins,
    refuse_excerpt,
    refuse_rounded,
    warn_of_left_out,
)
from laststep.restoring.transfer import Transfer, state_of_rank
from laststep.restoring.waiting import wait_for_writers
from laststep.saving.describe import naming
from laststep.tiers.nearest import NearestStore, beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.catalog.lineage import Seen
    from laststep.catalog.listing import Listed
    from laststep.format.manifest import Commit
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.read.content import Content
    from laststep.restoring.choose import Chosen
    from laststep.restoring.exchange import TensorRoom
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

_REMEDY = "pass strict=False to restore what fits, or only=[…] to restore a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore()` did."""

    step: int | None
    """The step that was restored; None in a new run."""
    next_step: int
    """The step to go on with: 0 in a new run."""
    skipped: tuple[Skipped, ...] = ()
    """Newer checkpoints that were passed over, and why."""
    problems: Problems = field(default_factory=Problems)
    """With strict=False: what did not fit and was left alone."""
    folder: str | None = None
    metrics: dict[str, float | int | str | bool] = field(default_factory=dict)
    metadata: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeked:
    """The checkpoint that `peek()` has found, and that each `restore()` after it reads."""

    step: int
    next_step: int
    """The step to go on with, where steps are counted from 0 as they begin."""
    folder: str
    skipped: tuple[Skipped, ...]
    """Newer checkpoints that were passed over, and why."""
    metrics: dict[str, float | int | str | bool]
    metadata: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was restored."""

    chosen: Chosen
    commit: Commit
    skipped: tuple[Skipped, ...]
    problems: Problems
    mixed: bool
    was_at_home: bool
    """Whether what was read was read in the run itself, not in memory or at a further tier, and all
    that was wanted of it fitted."""
    was_read: bool
    """Whether that is all of it."""

    def told(self, skipped: tuple[Skipped, ...] = ()) -> Restored:
        """The same as a user is told it, with what was passed over before."""
        commit = self.commit
        return Restored(
            step=commit.step,
            next_step=commit.step + 1,
            skipped=(*skipped, *self.skipped),
            problems=self.problems,
            folder=self.chosen.folder,
            metrics=commit.metrics,
            metadata=commit.metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, and how."""

    step: int | None
    """Exactly this step; None: the newest that verifies."""
    only: Sequence[str] | None
    strict: bool
    exact: bool
    """Whether what was rounded is refused."""
    allow_pickle: bool
    threads: int
    tiers: Sequence[Tier] = ()
    """What only these have is read there."""
    peeked: str | None = None
    """The folder of the one that was peeked at, which is restored, or none."""
    damaged: frozenset[str] = frozenset()
    """Those that peeking leaves out."""


def restore_into(
    store: Store,
    providers: Mapping[str, StateProvider],
    room: TensorRoom,
    bus: Bus,
    wanted: RestoreRequest,
    *,
    touched: Callable[[str], None],
    saw: Callable[[Seen], None],
    ranks: Ranks,
) -> Outcome | None:
    """Restore; None where there is nothing yet and no step was asked for. `touched` is called with
    the folder's name before the first live byte changes, `saw`, on the first rank, with the newest
    epoch before each look at what there is. All ranks are here, and their saves are over."""
    choosing = _choosing(store, wanted, saw, ranks, "restore()")
    if choosing is None:
        return None
    restoring = _Restoring(choosing, providers, room, bus, wanted, ranks, touched)
    named = wanted.step is not None or wanted.peeked is not None
    found = Attempts(choosing, bus, named=named).until_one_succeeds(restoring.restore)
    return None if found is None else replace(found[0], skipped=found[1])


def peek_into(
    store: Store, bus: Bus, wanted: RestoreRequest, *, saw: Callable[[Seen], None], ranks: Ranks
) -> Peeked | None:
    """The checkpoint that a restore would take, opened on all ranks: its manifest, the headers of
    its files and all that is no tensor are verified. None where there is nothing yet."""
    choosing = _choosing(store, wanted, saw, ranks, "peek()")
    if choosing is None:
        return None

    def look(chosen: Chosen) -> tuple[str, Commit]:
        with choosing.open(chosen) as content:
            refuse_excerpt(content.commit, None, choosing.where(chosen))
            return chosen.folder, content.commit

    found = Attempts(choosing, bus, named=False).until_one_succeeds(look)
    if found is None:
        return None
    (folder, commit), skipped = found
    return Peeked(
        step=commit.step,
        next_step=commit.step + 1,
        folder=folder,
        skipped=skipped,
        metrics=commit.metrics,
        metadata=commit.metadata,
    )


def _choosing(
    store: Store, wanted: RestoreRequest, saw: Callable[[Seen], None], ranks: Ranks, call: str
) -> Choosing | None:
    """The checkpoints to try, as all ranks see them; None where there is no run."""
    only = None if wanted.only is None else tuple(wanted.only)
    near = isinstance(store, NearestStore) and store.in_memory
    check_asked(
        ranks,
        Asked(
            step=wanted.step,
            only=only,
            strict=wanted.strict,
            exact=wanted.exact,
            in_memory=near,
            tiers=len(wanted.tiers),
            peeked=wanted.peeked,
            call=call,
        ),
    )
    together(ranks, lambda: wait_for_writers(beneath(store)) if ranks.rank.is_first else None)
    further = look_at_tiers(store, wanted, ranks)
    look_into_memory(store, ranks)
    # What was committed last, before any look at what there is.
    together(ranks, lambda: saw(seen_in(store)) if ranks.rank.is_first else None)
    try:
        run = open_run(store, ranks)
    except NotFoundError:
        if wanted.step is not None or wanted.peeked is not None:
            raise
        return None
    which = Which(wanted.step, wanted.peeked, wanted.damaged)
    return Choosing(run, which, ranks, saw, further)


class _Restoring:
    """Restores one checkpoint, on all ranks."""

    def __init__(
        self,
        choosing: Choosing,
        providers: Mapping[str, StateProvider],
        room: TensorRoom,
        bus: Bus,
        wanted: RestoreRequest,
        ranks: Ranks,
        touched: Callable[[str], None],
    ) -> None:
        self._choosing = choosing
        self._providers = providers
        self._room = room
        self._bus = bus
        self._wanted = wanted
        self._ranks = ranks
        self._touched = touched
        self._changed: set[str] = set()
        """Those that may have put something in place."""

    def restore(self, chosen: Chosen) -> Outcome:
        """Restore that one; what fails on one rank fails on all."""
        began = time.perf_counter()
        wanted, ranks, room = self._wanted, self._ranks, self._room
        with self._choosing.open(chosen) as content:
            where = self._choosing.where(chosen)
            refuse_excerpt(content.commit, wanted.only, where)
            fitted = fit(
                content,
                self._providers,
                wanted.only,
                strict=wanted.strict,
                where=where,
                remedy=pass_objects(content, self._providers) + _REMEDY,
                ranks=ranks,
            )
            if wanted.exact:
                refuse = functools.partial(refuse_rounded, content, fitted.matches, where)
                together(ranks, refuse)
            transfer = Transfer(content, fitted.matches, ranks, self._choosing.readers(chosen))
            self._touched(chosen.folder)
            self._changed.add(chosen.folder)
            size_bytes = transfer.run(room, wanted.threads)
            judge_twins(fitted, ranks)
            give = functools.partial(
                hand_over,
                content,
                fitted,
                self._providers,
                room,
                ranks.rank,
                allow_pickle=wanted.allow_pickle,
            )
            together(ranks, give)
        at_home = self._choosing.is_at_home(chosen) and not fitted.problems
        outcome = Outcome(
            chosen=chosen,
            commit=content.commit,
            skipped=(),
            problems=fitted.problems,
            was_at_home=at_home,
            was_read=at_home and wanted.only is None,
            # What a damaged one had put in place may lie beyond what this one covers, unless it is
            # the same, read elsewhere.
            mixed=len(self._changed) > 1 and (bool(fitted.problems) or wanted.only is not None),
        )
        self._bus.emit(
            RestoredEvent(
                step=chosen.step,
                folder=chosen.folder,
                size_bytes=size_bytes,
                seconds=time.perf_counter() - began,
            )
        )
        return outcome


def pass_objects(content: Content, providers: Mapping[str, StateProvider]) -> str:
    """What to do first where something does not fit: plain values stand where a module or an
    optimizer was saved, whose parameters have names that only the object knows."""
    told = [
        f"pass the {item.kind} itself as {name}, not its state_dict(); "
        for name, item in content.items.items()
        if item.kind in ("module", "optimizer")
        and name in providers
        and providers[name].kind == "value"
    ]
    return "".join(told)


def hand_over(
    content: Content,
    fitted: Fit,
    providers: Mapping[str, StateProvider],
    room: TensorRoom,
    rank: Rank,
    *,
    allow_pickle: bool,
) -> None:
    """Give every provider its state, on the training thread."""
    for match in fitted.matches:
        name = match.item.name
        tree = match.tree(allow_pickle=allow_pickle)
        with naming(name, "restored"):
            if name in fitted.derived:
                providers[name].derive(tree, rank.number)
            else:
                providers[name].restore(tree)
    if not fitted.merged:
        return
    states: dict[str, list[object]] = {name: [] for name in fitted.merged}
    for number in range(content.commit.ranks):
        with content.of_rank(number) as theirs:
            for name, of_ranks in states.items():
                of_ranks.append(state_of_rank(theirs, name, room, allow_pickle=allow_pickle))
    for name, of_ranks in states.items():
        merge = providers[name].when_ranks_change
        assert callable(merge)  # noqa: S101 (that is why it is here)
        with naming(name, "restored"):
            made = merge(of_ranks, rank.number, rank.ranks)
            warn_of_left_out(name, providers[name], made)
            providers[name].restore(made)


def newest_of(store: Store) -> Listed | None:
    """Return the newest checkpoint of a run; None if there is none yet."""
    try:
        return Run.open(store).newest()
    except NotFoundError:
        return None
