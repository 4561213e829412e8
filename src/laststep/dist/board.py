"""A board on which the ranks of a job leave notes for each other: their store, asked with care.

A client of our own of the store that torch.distributed was started with (a TCPStore), so that
nothing here waits behind a collective. Every wait is a look now and then under a deadline of our
own: the store's own `wait` can outlast its time-out, and a store that is gone must be an error, not
a silence. Used from background threads, and from training's own only where a description is new.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from laststep import interrupts
from laststep.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05
_CALL_S = 30.0
"""A single question is answered within that, or the store is gone."""


class Board:
    """Notes under one prefix, for one thread at a time."""

    def __init__(self, prefix: str) -> None:
        store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (there is no other way)
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._store: Any = distributed_c10d.PrefixStore(prefix, store.clone())
        self._store.set_timeout(timedelta(seconds=_CALL_S))

    def put(self, name: str, note: bytes) -> None:
        """Leave a note, and see that it is there: to a store that is gone it would seem to be."""
        try:
            self._store.set(name, note)
            arrived = self._store.check([name])
        except RuntimeError as error:
            raise _gone(error) from error
        if not arrived:
            raise _gone("a note that was left is not there")

    def look(self, name: str) -> bytes | None:
        """A note, if it is there."""
        try:
            if not self._store.check([name]):
                return None
            return bytes(self._store.get(name))
        except RuntimeError as error:
            raise _gone(error) from error

    def remove(self, names: Iterable[str]) -> None:
        """Take notes away that nobody needs any more."""
        try:
            for name in names:
                self._store.delete_key(name)
        except RuntimeError as error:
            raise _gone(error) from error

    def wait(self, name: str, timeout_s: float) -> bytes | None:
        """A note, as soon as it is there; None when the time is up."""
        return self.wait_all([name], timeout_s).get(name)

    def wait_all(self, names: Iterable[str], timeout_s: float) -> dict[str, bytes]:
        """All notes, or those that are there when the time is up."""
        deadline = time.monotonic() + timeout_s
        missing, found = list(names), {}
        pause = _FIRST_LOOK_S
        while True:
            for name in list(missing):
                note = self.look(name)
                if note is None:
                    break  # they mostly come together: ask for the rest when this one is there
                found[name] = note
                missing.remove(name)
            left = deadline - time.monotonic()
            if not missing:
                return found
            if left <= 0:
                found.update({n: note for n in missing if (note := self.look(n)) is not None})
                return found
            interrupts.let_in()
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_LOOK_S)


def _gone(found: object) -> StorageFailed:
    return StorageFailed(
        "the store that the ranks of this job meet in does not answer",
        found=str(found).partition("\n")[0],
        remedy="the process that hosts it (rank 0's launcher, mostly) has probably ended",
    )
