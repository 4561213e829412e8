"""Wait, before a restore, for saves that other processes are still writing: they may be newer.

Warn about writers that keep saving afterwards. Another process does not signal when it is done, so
the run is polled, up to a time limit.

Other Checkpointers of this process on the same run are waited for too.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laststep.catalog.instances import coming, still_coming
from laststep.catalog.run import Run
from laststep.errors import LaststepError
from laststep.process import signals
from laststep.settings import WAIT_FOR_OTHERS_S

if TYPE_CHECKING:
    from laststep.catalog.run import LiveWriter
    from laststep.flush.saves import SaveHandle
    from laststep.storage.store import Store


log = logging.getLogger(__name__)


_Ask = Callable[[Any], "tuple[SaveHandle, ...]"]
_entered: weakref.WeakKeyDictionary[object, tuple[Path, _Ask]] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_entered.clear)


def enter(who: object, run: str, under_way: _Ask) -> None:
    """Register `who` as a writer to that run; `under_way(who)` returns its unfinished saves."""
    _entered[who] = Path(run).resolve(), under_way


def wait_for_others(who: object, run: str) -> None:
    """Wait until the unfinished saves of this process's other Checkpointers of the run have ended.
    Their failures are reported by their own Checkpointers."""
    for other, (place, ask) in list(_entered.items()):
        if place != Path(run).resolve():
            continue
        handles = () if other is who else ask(other)
        if not handles:
            continue
        steps = ", ".join(str(handle.step) for handle in handles)
        log.info("waiting for another Checkpointer of %s, which is saving step %s", run, steps)
        for handle in handles:
            handle.committed.over_within(None)


_LOOK_S = 0.05


def wait_for_writers(store: Store) -> None:
    """Wait until other processes have finished their saves, with one time limit for all; warn if
    one keeps saving to the run."""
    deadline = time.monotonic() + WAIT_FOR_OTHERS_S
    _wait_for_announced(store, deadline)
    try:
        run = Run.open(store)
    except LaststepError:
        return  # the caller opens the run next and raises
    _wait_for_flushers(run, deadline)
    for writer in _other_writers(run):
        if not writer.trainer_is_gone:
            log.warning(
                (
                    "%s is saving to this run. Only one job may save at a time: if this one saves "
                    "too, saves of one of them fail"
                ),
                _named(writer),
            )
            return


def _wait_for_announced(store: Store, deadline: float) -> None:
    """Wait for saves that have a pending marker, even if nothing of them is in the run yet."""
    for announced in coming(store):
        who = f"the flusher of process {announced.pid}"
        saves = f"{len(announced.places)} saves"
        _let_finish(who, saves, functools.partial(still_coming, store, announced), deadline)


def _wait_for_flushers(run: Run, deadline: float) -> None:
    """Wait for flushers that still write to the run. A trainer that died may have left a flusher
    that is finishing its last save. It is not known whether a trainer is dead, so flushers of live
    trainers are waited for too. Attempts of this process that a disk failure left undecided are
    not."""
    for writer in _other_writers(run):
        if writer.attempts:
            works = functools.partial(_undecided, run, frozenset(writer.attempts))
            who = f"the flusher of {_named(writer)}"
            _let_finish(who, ", ".join(writer.attempts), works, deadline)


def _named(writer: LiveWriter) -> str:
    return f"process {writer.pid} on {writer.host}" if writer.pid else "another process"


def _undecided(run: Run, folders: frozenset[str]) -> bool:
    return any(attempt.alive and attempt.folder in folders for attempt in run.attempts())


def _let_finish(who: str, saves: str, works: Callable[[], bool], deadline: float) -> None:
    log.info("waiting for %s, which is finishing %s", who, saves)
    while works():
        if time.monotonic() >= deadline:
            log.warning(
                "%s is alive and has not finished %s after %.0f s: restoring the newest "
                "checkpoint that is committed",
                who,
                saves,
                WAIT_FOR_OTHERS_S,
            )
            return
        signals.check_signals()
        time.sleep(_LOOK_S)  # poll: another process sends no event


def _other_writers(run: Run) -> list[LiveWriter]:
    """Return the live writers that do not belong to this process."""
    others: list[LiveWriter] = []
    try:
        writer = run.live_writer()
        while writer is not None:
            own = writer.shares_pids and writer.pid == os.getpid()
            if not own:
                others.append(writer)
            writer = run.live_writer(below=writer.term)
    except LaststepError as error:
        log.warning("cannot determine whether another process is saving to this run: %s", error)
    return others
