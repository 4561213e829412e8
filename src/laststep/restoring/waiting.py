"""Wait, before a restore, for saves that other processes have under way: something newer may come.
Whoever goes on saving then is told of.

Nothing tells when another process is done, so the run is looked at now and then, up to a limit.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from typing import TYPE_CHECKING

from laststep.catalog.run import Run
from laststep.catalog.starts import coming, still_coming
from laststep.errors import LaststepError
from laststep.process import interrupts
from laststep.settings import WAIT_FOR_OTHERS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.run import LiveWriter
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

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
                "saves of one of them fail", _named(writer),
            )  # fmt: skip
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
                "checkpoint that is committed", who, saves, WAIT_FOR_OTHERS_S,
            )  # fmt: skip
            return
        interrupts.let_in()
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
