"""Find the checkpoint to restore and restore it: the newest that verifies, or the one named.

Only `Corrupt`, which readers raise after a second look, makes an older checkpoint count; storage
that cannot be reached and state that does not fit raise. Everything passed over is reported.
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from laststep.catalog.run import Run
from laststep.errors import Corrupt, LaststepError, NotFound, Problems
from laststep.events import Bus, PassedOver
from laststep.events import Restored as RestoredEvent
from laststep.process import interrupts
from laststep.ranks.group import together
from laststep.restoring.choose import (
    Asked,
    Choosing,
    StandsOrGone,
    check_asked,
    open_run,
)
from laststep.restoring.exactness import refuse_rounded
from laststep.restoring.excerpts import refuse_excerpt
from laststep.restoring.fit import Fit, fit, judge_twins, warn_of_left_out
from laststep.restoring.places import look_at_tiers, look_into_memory, seen_in
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
    from laststep.restoring.placer import TensorRoom
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

_REMEDY = "pass strict=False to restore what fits, or only=[…] to restore a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was passed over."""

    step: int
    folder: str
    reason: str


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
class Outcome:
    """What was restored."""

    chosen: Chosen
    commit: Commit
    skipped: tuple[Skipped, ...]
    problems: Problems
    mixed: bool
    was_read: bool
    """Whether all of it was read in the run itself, not in memory or at a further tier."""

    def told(self) -> Restored:
        """The same as a user is told it."""
        commit = self.commit
        return Restored(
            step=commit.step, next_step=commit.step + 1, skipped=self.skipped,
            problems=self.problems, folder=self.chosen.folder, metrics=commit.metrics,
            metadata=commit.metadata,
        )  # fmt: skip


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
    only = None if wanted.only is None else tuple(wanted.only)
    near = isinstance(store, NearestStore) and store.in_memory
    check_asked(
        ranks,
        Asked(
            step=wanted.step, only=only, strict=wanted.strict, exact=wanted.exact, in_memory=near,
            tiers=len(wanted.tiers),
        ),
    )  # fmt: skip
    together(ranks, lambda: wait_for_writers(beneath(store)) if ranks.rank.is_first else None)
    further = look_at_tiers(store, wanted, ranks)
    look_into_memory(store, ranks)
    # What was committed last, before any look at what there is.
    together(ranks, lambda: saw(seen_in(store)) if ranks.rank.is_first else None)
    try:
        run = open_run(store, ranks)
    except NotFound:
        if wanted.step is not None:
            raise
        return None
    choosing = Choosing(run, wanted.step, ranks, saw, further)
    return _Attempts(choosing, providers, room, bus, wanted, ranks, touched).until_one_succeeds()


class _Attempts:
    """Tries to restore checkpoints, one after the other, on all ranks."""

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
        self._changed = False
        """Whether an earlier one may have put something in place."""
        self._skipped: list[Skipped] = []
        self._deleted: list[Skipped] = []
        """Those that were gone when they were to be opened."""

    def until_one_succeeds(self) -> Outcome | None:
        """The first that can be restored; None where there is none to try."""
        last: LaststepError | None = None
        while (chosen := self._choosing.next()) is not None:
            interrupts.let_in()
            began = time.perf_counter()
            try:
                outcome, size_bytes = self._restore(chosen)
            except (Corrupt, NotFound) as error:
                self._go_on_after(chosen, error)
                last = error
                continue
            seconds = time.perf_counter() - began
            self._bus.emit(
                RestoredEvent(
                    step=chosen.step, folder=chosen.folder, size_bytes=size_bytes, seconds=seconds
                )
            )
            newer = [skipped for skipped in self._deleted if skipped.step > chosen.step]
            return replace(outcome, skipped=(*newer, *self._skipped))
        if last is not None:
            raise self._none_left() from last
        return None

    def _restore(self, chosen: Chosen) -> tuple[Outcome, int]:
        """Restore that one, on all ranks, and count the bytes; what fails on one fails on all."""
        wanted, ranks, room = self._wanted, self._ranks, self._room
        with self._choosing.open(chosen) as content:
            where = self._choosing.where(chosen)
            refuse_excerpt(content.commit, wanted.only, where)
            fitted = fit(
                content, self._providers, wanted.only, strict=wanted.strict, where=where,
                remedy=pass_objects(content, self._providers) + _REMEDY, ranks=ranks,
            )  # fmt: skip
            if wanted.exact:
                refuse = functools.partial(refuse_rounded, content, fitted.matches, where)
                together(ranks, refuse)
            transfer = Transfer(content, fitted.matches, ranks, self._choosing.readers(chosen))
            self._touched(chosen.folder)
            changed_before, self._changed = self._changed, True
            size_bytes = transfer.run(room, wanted.threads)
            judge_twins(fitted, ranks)
            give = functools.partial(
                hand_over, content, fitted, self._providers, room, ranks.rank,
                allow_pickle=wanted.allow_pickle,
            )  # fmt: skip
            together(ranks, give)
        outcome = Outcome(
            chosen=chosen, commit=content.commit, skipped=(), problems=fitted.problems,
            was_read=self._choosing.is_at_home(chosen) and wanted.only is None
            and not fitted.problems,
            # What a damaged checkpoint had put in place may lie beyond what this one covers.
            mixed=changed_before and (bool(fitted.problems) or wanted.only is not None),
        )  # fmt: skip
        return outcome, size_bytes

    def _go_on_after(self, chosen: Chosen, error: Corrupt | NotFound) -> None:
        """Choose what to try next: the same again, one of a new list, or an older one. A step that
        was asked for has none to stand in for it: its error is raised."""
        named = self._wanted.step is not None
        if self._choosing.spoil(chosen, error):
            return
        verdict = self._choosing.judge(chosen, error)
        if verdict is StandsOrGone.UNSEEN:
            self._choosing.wait_to_see(chosen, error)
        elif verdict is StandsOrGone.DELETED and not named:
            log.warning("%s is gone, and the run is listed again: %s", chosen.folder, error)
            self._deleted.append(_skip(chosen, "it was deleted meanwhile"))
            self._choosing.list_again()
        elif self._choosing.stand_in(chosen, error):
            return
        elif named or isinstance(error, NotFound):
            raise error
        else:
            # Without the remedy, which is to take the newest good one: so it is done.
            skipped = _skip(chosen, error.without_remedy())
            self._skipped.append(skipped)
            self._bus.emit(
                PassedOver(step=skipped.step, folder=skipped.folder, reason=skipped.reason)
            )
            self._choosing.go_on()

    def _none_left(self) -> LaststepError:
        url, skipped = self._choosing.url, self._skipped
        if not skipped:
            return NotFound(
                "the checkpoints of this run were deleted while they were looked at", where=url,
                found="; ".join(f"{gone.folder} is gone" for gone in self._deleted[:3]),
                remedy="`laststep ls` lists what is there; restore() again to begin anew if it is "
                "none",
            )  # fmt: skip
        return Corrupt(
            f"none of the {len(skipped)} checkpoints of this run can be restored", where=url,
            found="; ".join(f"step {s.step}: {s.reason}" for s in skipped[:3]),
            remedy=f"`laststep verify {url}` lists all damage; a copy of the run may still be "
            "good, and a new run elsewhere begins from the start",
        )  # fmt: skip


def _skip(chosen: Chosen, reason: str) -> Skipped:
    return Skipped(step=chosen.step, folder=chosen.folder, reason=reason)


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
    """The newest checkpoint that a run has, if there is one to be seen."""
    try:
        return Run.open(store).newest()
    except LaststepError:
        return None  # there is no run yet, or restoring will say what is wrong with it
