"""Find the checkpoint to restore and restore it: the newest that verifies, or the one named.

Only `Corrupt`, which readers raise after a second look, makes an older checkpoint count; storage
that cannot be reached and state that does not fit raise. Everything passed over is reported.
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.run import Run, newest_point
from laststep.errors import Corrupt, LaststepError, NotFound, Problems
from laststep.events import Bus, PassedOver
from laststep.events import Restored as RestoredEvent
from laststep.process import interrupts
from laststep.ranks.group import together
from laststep.restoring.choose import Asked, Choosing, StandsOrGone, check_asked, open_run
from laststep.restoring.fit import Fit, fit, judge_twins
from laststep.restoring.transfer import Transfer, state_of_rank
from laststep.restoring.waiting import wait_for_writers
from laststep.saving.describe import naming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.catalog.listing import Listed
    from laststep.format.manifest import Commit
    from laststep.memory.pool import Pool
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.read.content import Content
    from laststep.restoring.choose import Chosen
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, and how."""

    step: int | None
    """Exactly this step; None: the newest that verifies."""
    only: Sequence[str] | None
    strict: bool
    allow_pickle: bool
    threads: int


def restore_into(
    store: Store,
    providers: Mapping[str, StateProvider],
    pool: Pool,
    bus: Bus,
    wanted: RestoreRequest,
    *,
    touched: Callable[[str], None],
    saw: Callable[[tuple[int, int]], None],
    ranks: Ranks,
) -> Outcome | None:
    """Restore; None where there is nothing yet and no step was asked for. `touched` is called with
    the folder's name before the first live byte changes, `saw`, on the first rank, with the newest
    epoch before each look at what there is. All ranks are here, and their saves are over."""
    asked = None if wanted.only is None else tuple(wanted.only)
    check_asked(ranks, Asked(step=wanted.step, only=asked, strict=wanted.strict))
    together(ranks, lambda: _look_at_writers(store, saw) if ranks.rank.is_first else None)
    try:
        run = open_run(store, ranks)
    except NotFound:
        if wanted.step is not None:
            raise
        return None
    choosing = Choosing(run, wanted.step, ranks, saw)
    attempt = _Attempts(choosing, providers, pool, wanted, ranks, touched)
    skipped: list[Skipped] = []
    deleted: list[Chosen] = []
    last: LaststepError | None = None
    while (chosen := choosing.next()) is not None:
        interrupts.let_in()
        began = time.perf_counter()
        try:
            done = attempt.restore(chosen)
        except (Corrupt, NotFound) as error:
            verdict = choosing.judge(chosen, error)
            if verdict is StandsOrGone.UNSEEN:
                choosing.wait_to_see(chosen, error)
            elif verdict is StandsOrGone.DELETED and wanted.step is None:
                log.warning("%s is gone, and the run is listed again: %s", chosen.folder, error)
                deleted.append(chosen)
                choosing.list_again()
            elif isinstance(error, NotFound):
                raise
            else:
                _pass_over(chosen, error, wanted, bus, skipped)
                choosing.go_on()
            last = error
            continue
        seconds = time.perf_counter() - began
        bus.emit(
            RestoredEvent(
                step=chosen.step, folder=chosen.folder, size_bytes=done.size_bytes, seconds=seconds
            )
        )
        gone = [_skip(one, "it was deleted meanwhile") for one in deleted if one.step > chosen.step]
        return replace(done.outcome, skipped=(*gone, *skipped))
    if last is not None:
        raise _none_left(store, skipped, deleted) from last
    return None


def _look_at_writers(store: Store, saw: Callable[[tuple[int, int]], None]) -> None:
    """See to it that nothing is coming, and what was committed last, before any look at what there
    is."""
    wait_for_writers(store)
    saw(newest_point(store))


class _Done(NamedTuple):
    outcome: Outcome
    size_bytes: int


class _Attempts:
    """Tries to restore checkpoints, one after the other."""

    def __init__(
        self,
        choosing: Choosing,
        providers: Mapping[str, StateProvider],
        pool: Pool,
        wanted: RestoreRequest,
        ranks: Ranks,
        touched: Callable[[str], None],
    ) -> None:
        self._choosing = choosing
        self._providers = providers
        self._pool = pool
        self._wanted = wanted
        self._ranks = ranks
        self._touched = touched
        self._changed = False
        """Whether an earlier one may have put something in place."""

    def restore(self, chosen: Chosen) -> _Done:
        """That one, on all ranks; what fails on one fails on all."""
        wanted, ranks, pool = self._wanted, self._ranks, self._pool
        with self._choosing.open(chosen) as content:
            found = fit(
                content, self._providers, wanted.only, strict=wanted.strict,
                where=f"{self._choosing.url}/{chosen.folder}", remedy=_REMEDY, ranks=ranks,
            )  # fmt: skip
            transfer = Transfer(content, found.matches, ranks)
            self._touched(chosen.folder)
            changed_before, self._changed = self._changed, True
            size = transfer.run(pool, wanted.threads)
            judge_twins(found, ranks)
            give = functools.partial(
                hand_over, content, found, self._providers, pool, ranks.rank,
                allow_pickle=wanted.allow_pickle,
            )  # fmt: skip
            together(ranks, give)
        outcome = Outcome(
            chosen=chosen, commit=content.commit, skipped=(), problems=found.problems,
            # What a damaged checkpoint had put in place may lie beyond what this one covers.
            mixed=changed_before and (bool(found.problems) or wanted.only is not None),
        )  # fmt: skip
        return _Done(outcome, size)


def hand_over(
    content: Content,
    found: Fit,
    providers: Mapping[str, StateProvider],
    pool: Pool,
    rank: Rank,
    *,
    allow_pickle: bool,
) -> None:
    """Give every provider its state, on the training thread."""
    for match in found.matches:
        name = match.item.name
        tree = match.tree(allow_pickle=allow_pickle)
        with naming(name, "restored"):
            if name in found.derived:
                providers[name].derive(tree, rank.number)
            else:
                providers[name].restore(tree)
    if not found.merged:
        return
    states: dict[str, list[object]] = {name: [] for name in found.merged}
    for number in range(content.commit.ranks):
        with content.of_rank(number) as theirs:
            for name, some in states.items():
                some.append(state_of_rank(theirs, name, pool, allow_pickle=allow_pickle))
    for name, some in states.items():
        merge = providers[name].when_ranks_change
        assert callable(merge)  # noqa: S101 (that is why it is here)
        with naming(name, "restored"):
            providers[name].restore(merge(some, rank.number, rank.ranks))


def _pass_over(
    chosen: Chosen, error: Corrupt, wanted: RestoreRequest, bus: Bus, skipped: list[Skipped]
) -> None:
    """Go on to an older one and say so; a step that was asked for has none to stand in for it."""
    if wanted.step is not None:
        raise error
    # Without the remedy, which is to take the newest good one: so it is done.
    skipped.append(_skip(chosen, error.without_remedy()))
    bus.emit(PassedOver(step=chosen.step, folder=chosen.folder, reason=skipped[-1].reason))


def _skip(chosen: Chosen, reason: str) -> Skipped:
    return Skipped(step=chosen.step, folder=chosen.folder, reason=reason)


def _none_left(store: Store, skipped: list[Skipped], deleted: list[Chosen]) -> LaststepError:
    if not skipped:
        return NotFound(
            "the checkpoints of this run were deleted while they were looked at", where=store.url,
            found="; ".join(f"{one.folder} is gone" for one in deleted[:3]),
            remedy="`laststep ls` lists what is there; restore() again to begin anew if it is none",
        )  # fmt: skip
    return Corrupt(
        f"none of the {len(skipped)} checkpoints of this run can be restored",
        where=store.url,
        found="; ".join(f"step {s.step}: {s.reason}" for s in skipped[:3]),
        remedy=f"`laststep verify {store.url}` lists all damage; a copy of the run may still be "
        "good, and a new run elsewhere begins from the start",
    )


def newest_of(store: Store) -> Listed | None:
    """The newest checkpoint that a run has, if there is one to be seen."""
    try:
        return Run.open(store).newest()
    except LaststepError:
        return None  # there is no run yet, or restoring will say what is wrong with it
