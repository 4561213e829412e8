"""Find the checkpoint to restore and restore it: the newest that verifies, or the one named.

Only `Corrupt`, which readers raise after a second look, makes an older checkpoint count; storage
that cannot be reached and state that does not fit raise. Everything passed over is reported.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep import interrupts
from laststep.catalog.content import Content
from laststep.catalog.listing import nearest_steps
from laststep.catalog.names import parse_folder
from laststep.catalog.run import Run, newest_epoch
from laststep.catalog.starts import coming, still_coming
from laststep.checkpointer.loading import Fit, Transfer, fit, judge_twins, state_of_rank
from laststep.checkpointer.parts import naming
from laststep.dist.group import together
from laststep.errors import Corrupt, LaststepError, NotFound, Problems
from laststep.events import Bus, PassedOver
from laststep.events import Restored as RestoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.catalog.listing import Listed
    from laststep.catalog.run import LiveWriter
    from laststep.dist.group import Ranks
    from laststep.dist.ranks import Rank
    from laststep.engine.pool import Pool
    from laststep.format.manifest import Commit
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""So long a restore waits for a save that another process has not finished."""
_LOOK_S = 0.05
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

    listed: Listed
    commit: Commit
    skipped: tuple[Skipped, ...]
    problems: Problems
    mixed: bool
    lineage_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
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
    wanted: Wanted,
    *,
    touched: Callable[[str], None],
    saw: Callable[[int], None],
    ranks: Ranks,
) -> Outcome | None:
    """Restore; None where there is nothing yet and no step was asked for. `touched` is called with
    the folder's name before the first live byte changes, `saw`, on the first rank, with the newest
    epoch before each look at what there is. Saves of this process are over."""
    look = functools.partial(_look, store, ranks, saw)
    look(wait=True)
    try:
        run = together(ranks, lambda: Run.open(store))
    except NotFound:
        if wanted.step is not None:
            raise
        return None
    lineage, left = together(ranks, lambda: _candidates(run, wanted))
    skipped: list[Skipped] = []
    last: Corrupt | None = None
    changed = False
    passed: set[str] = set()
    while left := _of_first(ranks, left):
        interrupts.let_in()
        folder = left.pop()
        passed.add(folder)
        began = time.perf_counter()
        try:
            listed, content = together(ranks, functools.partial(_open, run, folder, ranks))
        except NotFound as gone:
            if wanted.step is not None:
                raise
            # Retention takes a checkpoint only after a commit, so there may be a newer one now.
            log.info("looking again: %s", gone)
            look()
            lineage = together(ranks, run.lineage)
            left = [one.folder for one in lineage if one.folder not in passed]
            continue
        except Corrupt as error:
            last = _pass_over(folder, error, wanted, bus, skipped)
            continue
        try:
            with content:
                found = fit(
                    content, providers, wanted.only, strict=wanted.strict,
                    where=f"{store.url}/{listed.folder}", remedy=_REMEDY, ranks=ranks,
                )  # fmt: skip
                transfer = Transfer(content, found.matches, ranks)
                touched(listed.folder)
                changed_before, changed = changed, True
                size = transfer.run(pool, wanted.threads)
                judge_twins(found, ranks)
                give = functools.partial(
                    hand_over, content, found, providers, pool, ranks.rank,
                    allow_pickle=wanted.allow_pickle,
                )  # fmt: skip
                together(ranks, give)
        except Corrupt as error:
            last = _pass_over(folder, error, wanted, bus, skipped)
            continue
        seconds = time.perf_counter() - began
        bus.emit(
            RestoredEvent(step=listed.step, folder=listed.folder, size_bytes=size, seconds=seconds)
        )
        position = lineage.index(listed) if listed in lineage else -1
        return Outcome(
            listed=listed, commit=content.commit, skipped=tuple(skipped), problems=found.problems,
            # What a damaged checkpoint had put in place may lie beyond what this one covers.
            mixed=changed_before and (bool(found.problems) or wanted.only is not None),
            lineage_steps=tuple(one.step for one in lineage[: position + 1]) or (listed.step,),
        )  # fmt: skip
    if last is not None:
        raise _none_left(store, skipped) from last
    return None


def _look(store: Store, ranks: Ranks, saw: Callable[[int], None], *, wait: bool = False) -> None:
    """On the first rank, which decides: see which epoch is the newest, before what it has saved."""
    if ranks.rank.is_first:
        if wait:
            wait_for_writers(store)
        saw(newest_epoch(store))


def _candidates(run: Run, wanted: Wanted) -> tuple[tuple[Listed, ...], list[str]]:
    """The lineage, and the folders to try, the last one first."""
    lineage = run.lineage()
    if wanted.step is not None:
        return lineage, [_named(run, wanted.step).folder]
    return lineage, [one.folder for one in lineage]


def _of_first(ranks: Ranks, folders: list[str]) -> list[str]:
    """What the first rank has found: all try the same, in the same order."""
    return msgspec.msgpack.decode(ranks.tell(0, msgspec.msgpack.encode(folders)), type=list[str])


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
    folder: str, error: Corrupt, wanted: Wanted, bus: Bus, skipped: list[Skipped]
) -> Corrupt:
    """Go on to an older one and say so; a step that was asked for has none to stand in for it."""
    if wanted.step is not None:
        raise error
    reason = error.without_remedy()  # which is to take the newest good one: so it is done
    name = parse_folder(folder)
    step = -1 if name is None else name.step
    skipped.append(Skipped(step=step, folder=folder, reason=reason))
    bus.emit(PassedOver(step=step, folder=folder, reason=reason))
    return error


def _open(run: Run, folder: str, ranks: Ranks) -> tuple[Listed, Content]:
    listed = run.find(folder)
    if listed is None:
        raise NotFound("the checkpoint was deleted meanwhile", where=f"{run.store.url}/{folder}")
    if listed.commit is None:
        raise listed.error or Corrupt("the manifest cannot be read", where=listed.folder)
    number, several = ranks.rank.number, ranks.size > 1
    return listed, Content(run.store, folder, listed.commit, rank=number, by_rank=several)


def _none_left(store: Store, skipped: list[Skipped]) -> Corrupt:
    return Corrupt(
        f"none of the {len(skipped)} checkpoints of this run can be restored",
        where=store.url,
        found="; ".join(f"step {s.step}: {s.reason}" for s in skipped[:3]),
        remedy=f"`laststep verify {store.url}` lists all damage; a copy of the run may still be "
        "good, and a new run elsewhere begins from the start",
    )


def _named(run: Run, step: int) -> Listed:
    """The checkpoint of that step: on the lineage, or else the last one committed beside it."""
    found = [one for one in run.checkpoints() if one.step == step]
    on_lineage = [one for one in found if one.on_lineage]
    if on_lineage:
        return on_lineage[-1]
    if found:
        log.warning("step %d is not on the lineage of this run: %s", step, found[-1].folder)
        return found[-1]
    raise NotFound(
        f"there is no checkpoint of step {step}", where=run.store.url,
        found=nearest_steps((one.step for one in run.checkpoints()), step),
        remedy="restore() without a step takes the newest",
    )  # fmt: skip


def newest_of(store: Store) -> Listed | None:
    """The newest checkpoint that a run has, if there is one to be seen."""
    try:
        return Run.open(store).newest()
    except LaststepError:
        return None  # there is no run yet, or restoring will say what is wrong with it


def wait_for_writers(store: Store) -> None:
    """Let others finish what they have under way, up to a limit in all."""
    deadline = time.monotonic() + PATIENCE_S
    wait_for_announced(store, deadline)
    try:
        run = Run.open(store)
    except LaststepError:
        return  # whoever opens it says what is wrong
    wait_for_flushers(run, deadline)


def wait_for_announced(store: Store, deadline: float) -> None:
    """Wait for the saves that somebody has announced and nobody has ended, whether there is
    anything of them in the run yet or not."""
    for announced in coming(store):
        who, count = f"process {announced.pid}", len(announced.places)
        log.info("waiting for the flusher of %s, which has %d saves to finish", who, count)
        while still_coming(store, announced):
            if time.monotonic() >= deadline:
                log.warning(
                    "the flusher of %s has not finished %d saves after %.0f s: restoring the "
                    "newest checkpoint that is committed", who, count, PATIENCE_S,
                )  # fmt: skip
                break
            interrupts.let_in()
            time.sleep(_LOOK_S)  # another process works: there is nothing to be woken by


def wait_for_flushers(run: Run, deadline: float) -> None:
    """A trainer that died may have left a flusher that is finishing its last save: let it. Whether
    its trainer is dead cannot be known, so a live one is waited for likewise. What a failed disk
    kept our own from deciding is not."""
    for writer in _other_writers(run):
        whose = f"process {writer.pid} on {writer.host}" if writer.pid else "another process"
        who = f"the flusher of {whose}"
        saves = ", ".join(writer.attempts)
        log.info("waiting for %s, which is finishing %s", who, saves)
        while any(
            attempt.alive and attempt.folder in writer.attempts for attempt in run.attempts()
        ):
            if time.monotonic() >= deadline:
                log.warning(
                    "%s is alive and has not committed %s after %.0f s: restoring the newest "
                    "checkpoint that is committed", who, saves, PATIENCE_S,
                )  # fmt: skip
                break
            interrupts.let_in()
            time.sleep(_LOOK_S)  # another process works: there is nothing to be woken by


def _other_writers(run: Run) -> list[LiveWriter]:
    """Writers that are alive, have undecided saves and do not work for this process."""
    found: list[LiveWriter] = []
    try:
        writer = run.live_writer()
        while writer is not None:
            own = writer.shares_pids and writer.pid == os.getpid()
            if writer.attempts and not own:
                found.append(writer)
            writer = run.live_writer(below=writer.epoch)
    except LaststepError as error:
        log.warning("cannot tell whether another process is saving to this run: %s", error)
    return found
