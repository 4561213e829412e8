"""Find the checkpoint to restore and restore it: the newest that verifies, or the one named.

Only `Corrupt`, which readers raise after a second look, makes an older checkpoint count; storage
that cannot be reached and state that does not fit raise. Everything passed over is reported.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep import interrupts
from laststep.catalog.content import Content
from laststep.catalog.listing import nearest_steps
from laststep.catalog.run import Run
from laststep.checkpointer.loading import fit, transfer
from laststep.checkpointer.parts import naming
from laststep.errors import Corrupt, LaststepError, NotFound, Problems
from laststep.events import Bus, PassedOver
from laststep.events import Restored as RestoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.catalog.listing import Listed
    from laststep.catalog.run import LiveWriter
    from laststep.engine.pool import Pool
    from laststep.format.manifest import Commit
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_PATIENCE_S = 120.0
_LOOK_S = 0.05
_REMEDY = "pass strict=False to restore what fits, or only=[…] to restore a part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was passed over."""

    step: int
    folder: str
    reason: str


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
    own_pids: frozenset[int],
) -> Outcome | None:
    """Restore; None where there is nothing yet and no step was asked for. `touched` is called with
    the folder's name before the first live byte changes. Saves by `own_pids`, which flush for this
    process, are over."""
    try:
        run = Run.open(store)
    except NotFound:
        if wanted.step is not None:
            raise
        return None
    wait_for_flushers(run, own_pids=own_pids)
    lineage = run.lineage()
    left = list(lineage) if wanted.step is None else [_named(run, wanted.step)]
    skipped: list[Skipped] = []
    last: Corrupt | None = None
    changed = False
    passed: set[str] = set()
    while left:
        interrupts.let_in()
        listed = left.pop()
        passed.add(listed.folder)
        began = time.perf_counter()
        try:
            content = _open(store, listed)
        except NotFound as gone:
            if wanted.step is not None:
                raise
            # Retention takes a checkpoint only after a commit, so there may be a newer one now.
            log.info("looking again: %s", gone)
            lineage = run.lineage()
            left = [one for one in lineage if one.folder not in passed]
            continue
        except Corrupt as error:
            last = _pass_over(listed, error, wanted, bus, skipped)
            continue
        try:
            with content:
                matches, problems = fit(
                    content, providers, wanted.only, strict=wanted.strict,
                    where=f"{store.url}/{listed.folder}", remedy=_REMEDY,
                )  # fmt: skip
                touched(listed.folder)
                changed_before, changed = changed, True
                size = transfer(content, matches, pool, threads=wanted.threads)
            for match in matches:
                tree = match.tree(allow_pickle=wanted.allow_pickle)
                with naming(match.item.name, "restored"):
                    providers[match.item.name].restore(tree)
        except Corrupt as error:
            last = _pass_over(listed, error, wanted, bus, skipped)
            continue
        seconds = time.perf_counter() - began
        bus.emit(
            RestoredEvent(step=listed.step, folder=listed.folder, size_bytes=size, seconds=seconds)
        )
        position = lineage.index(listed) if listed in lineage else -1
        return Outcome(
            listed=listed, commit=content.commit, skipped=tuple(skipped), problems=problems,
            # What a damaged checkpoint had put in place may lie beyond what this one covers.
            mixed=changed_before and (bool(problems) or wanted.only is not None),
            lineage_steps=tuple(one.step for one in lineage[: position + 1]) or (listed.step,),
        )  # fmt: skip
    if last is not None:
        raise _none_left(store, skipped) from last
    return None


def _pass_over(
    listed: Listed, error: Corrupt, wanted: Wanted, bus: Bus, skipped: list[Skipped]
) -> Corrupt:
    """Go on to an older one and say so; a step that was asked for has none to stand in for it."""
    if wanted.step is not None:
        raise error
    reason = error.without_remedy()  # which is to take the newest good one: so it is done
    skipped.append(Skipped(step=listed.step, folder=listed.folder, reason=reason))
    bus.emit(PassedOver(step=listed.step, folder=listed.folder, reason=reason))
    return error


def _open(store: Store, listed: Listed) -> Content:
    if listed.commit is None:
        raise listed.error or Corrupt("the manifest cannot be read", where=listed.folder)
    return Content(store, listed.folder, listed.commit)


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


def wait_for_flushers(run: Run, *, own_pids: frozenset[int]) -> None:
    """A trainer that died may have left a flusher that is finishing its last save: let it. Whether
    its trainer is dead cannot be known, so a live one is waited for likewise. What a failed disk
    kept our own from deciding is not."""
    deadline = time.monotonic() + _PATIENCE_S
    for writer in _other_writers(run, own_pids):
        who = f"process {writer.pid} on {writer.host}" if writer.pid else "another process"
        saves = ", ".join(writer.attempts)
        log.info("waiting for %s, which is finishing %s", who, saves)
        while any(
            attempt.alive and attempt.folder in writer.attempts for attempt in run.attempts()
        ):
            if time.monotonic() >= deadline:
                log.warning(
                    "%s is alive and has not committed %s after %.0f s: restoring the newest "
                    "checkpoint that is committed", who, saves, _PATIENCE_S,
                )  # fmt: skip
                break
            interrupts.let_in()
            time.sleep(_LOOK_S)  # another process works: there is nothing to be woken by


def _other_writers(run: Run, own_pids: frozenset[int]) -> list[LiveWriter]:
    """Writers that are alive, have undecided saves and do not work for this process."""
    found: list[LiveWriter] = []
    try:
        writer = run.live_writer()
        while writer is not None:
            if writer.attempts and writer.pid not in own_pids:
                found.append(writer)
            writer = run.live_writer(below=writer.epoch)
    except LaststepError as error:
        log.warning("cannot tell whether another process is saving to this run: %s", error)
    return found
