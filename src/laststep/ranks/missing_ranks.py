"""Log which ranks a collective call is waiting for.

Every rank sets a key when it makes the call. After a few seconds rank 0 checks all keys and the
other ranks check rank 0's: if every rank checked every key, a large job would send its store
millions of requests. Uses a connection of its own, because rank 0's is busy waiting.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from laststep.constants import listed
from laststep.errors import StorageError
from laststep.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.ranks.rank import Rank

log = logging.getLogger(__name__)

PATIENCE_S = 5.0


def tell(what: str, late: Iterable[int], limit_s: float) -> None:
    """Log the ranks that have not made the call."""
    log.warning(
        "%s waits for %s, for at most %g s: every rank has to call it",
        what,
        listed((f"rank {number}" for number in late), 8) or "other ranks",
        limit_s,
    )


@contextlib.contextmanager
def awaited(rank: Rank, what: str, name: str, limit_s: float) -> Iterator[None]:
    """Inside this block all ranks are expected to make the call `what`; log those that have not
    after a few seconds. `name` distinguishes this call from earlier ones."""
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

    worker = Worker("arriving", watch)
    with contextlib.suppress(StorageError):  # then nobody tells who is late
        worker.start()
    try:
        yield
    finally:
        come.set()
        worker.join()
