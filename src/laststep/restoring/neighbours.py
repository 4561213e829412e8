"""The Checkpointers of this process, by run: a restore waits for what the others have under way.

Two on one run are common in a notebook, where a cell that is run again makes a second one while the
first still flushes. Nothing is kept alive by being listed here, and a forked child starts with
nothing: what the parent has under way is not its own.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laststep.flush.handle import SaveHandle

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
