"""Say in the log for whom a rank waits, where not all make a call that all have to make.

Every rank leaves a note in the job's store when it makes the call. After a few seconds the first
rank looks whose notes are missing, and the others whether the first's is: if all looked for all, a
large job would ask its store millions of questions. Over a connection of its own: the first is busy
waiting.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from laststep.errors import StorageError
from laststep.process import threads
from laststep.terms import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.ranks.rank import Rank

log = logging.getLogger(__name__)

PATIENCE_S = 5.0


def tell(what: str, late: Iterable[int], limit_s: float) -> None:
    """Who has not made that call."""
    log.warning(
        "%s waits for %s, for %g s at most: every rank has to call it",
        what,
        listed((f"rank {number}" for number in late), 8) or "other ranks",
        limit_s,
    )


@contextlib.contextmanager
def awaited(rank: Rank, what: str, name: str, limit_s: float) -> Iterator[None]:
    """While this block runs, all ranks are expected to make the call `what`; whoever has not made
    it after a few seconds is named in the log. `name` tells this call from earlier ones."""
    store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (no other way)
    store.set(f"{name}/{rank.number}", b"1")
    come = threading.Event()

    def watch() -> None:
        if come.wait(PATIENCE_S):
            return
        with contextlib.suppress(RuntimeError):  # a store that is gone is told by whoever waits
            own = store.clone()
            asked = range(rank.ranks if rank.is_first else 1)
            late = [number for number in asked if not own.check([f"{name}/{number}"])]
            if not come.is_set() and (late or rank.is_first):
                tell(what, late, limit_s)

    thread = threading.Thread(target=watch, name="laststep-arriving", daemon=True)
    with contextlib.suppress(StorageError):  # then nobody tells who is late
        threads.start(thread)
    try:
        yield
    finally:
        come.set()
        if thread.is_alive():
            thread.join()
