"""Wait, before a restore, for saves that other processes have under way: something newer may come.
Whoever goes on saving then is told of.

Nothing tells when another process is done, so the run is looked at now and then, up to a limit.

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

from laststep.catalog.run import Run
from laststep.catalog.starts import coming, still_coming
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
    """`who` saves to that run; `under_way(who)` says what it has not finished."""
    _entered[who] = Path(run).resolve(), under_way


def wait_for_others(who: object, run: str) -> None:
    """Wait until the saves that others had under way are over; how they ended is theirs to tell."""
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
    """Let others finish what they have under way, up to a limit in all."""
    deadline = time.monotonic() + WAIT_FOR_OTHERS_S
    _wait_for_announced(store, deadline)
    try:
        run = Run.open(store)
    except LaststepError:
        return  # whoever opens it says what is wrong
    _wait_for_flushers(run, deadline)
    for writer in _other_writers(run):
        if not writer.trainer_is_gone:
            log.warning(
                "%s saves to this run: only one job at a time may. If this one saves too, the "
                "saves of one of them fail",
                _named(writer),
            )
            return


def _wait_for_announced(store: Store, deadline: float) -> None:
    """Wait for the saves that somebody has announced and nobody has ended, whether there is
    anything of them in the run yet or not."""
    for announced in coming(store):
        who = f"the flusher of process {announced.pid}"
        saves = f"{len(announced.places)} saves"
        _let_finish(who, saves, functools.partial(still_coming, store, announced), deadline)


def _wait_for_flushers(run: Run, deadline: float) -> None:
    """A trainer that died may have left a flusher that is finishing its last save: let it. Whether
    its trainer is dead cannot be known, so a live one is waited for likewise. What a failed disk
    kept our own from deciding is not."""
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
        signals.let_in()
        time.sleep(_LOOK_S)  # another process works: there is nothing to be woken by


def _other_writers(run: Run) -> list[LiveWriter]:
    """Writers that are alive and do not work for this process."""
    others: list[LiveWriter] = []
    try:
        writer = run.live_writer()
        while writer is not None:
            own = writer.shares_pids and writer.pid == os.getpid()
            if not own:
                others.append(writer)
            writer = run.live_writer(below=writer.epoch)
    except LaststepError as error:
        log.warning("cannot tell whether another process is saving to this run: %s", error)
    return others
