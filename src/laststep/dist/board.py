"""A board on which the ranks of a job leave notes for each other: their store, asked with care.

A client of our own of the store that torch.distributed was started with (a TCPStore), so that
nothing here waits behind a collective; and under the same prefix, so that notes of an earlier start
of the job are not seen. Every wait is a look now and then under a deadline of our own: the store's
own `wait` can outlast its time-out. A single question can outlast it too, for ever if the host of
the store stands still or the network is cut. So a thread asks it, and whoever waits for the answer
goes when the time is up: a store that is gone must be an error, not a silence. Used from background
threads, and from training's own only where a description is new.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from laststep import interrupts
from laststep.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05
_CALL_S = 30.0
"""A single question is answered within that, or the store is gone."""


class _Question:
    """Something to ask the store; answered by the board's thread."""

    def __init__(self, ask: Callable[[Any], object]) -> None:
        self.ask = ask
        self.answered = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None
        self.dropped = False
        """Nobody waits any more: one that was not asked yet need not be."""


class Board:
    """Notes under one prefix, for one thread at a time."""

    def __init__(self, prefix: str, *, patience_s: float = _CALL_S) -> None:
        """A question that is not answered within `patience_s`, or 30 s, is an error."""
        self._prefix = prefix
        self._patience_s = min(patience_s, _CALL_S)
        self._default: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (no other way)
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="laststep-board", daemon=True)
        self._thread.start()

    def put(self, name: str, note: bytes) -> None:
        """Leave a note, and see that it is there: to a store that is gone it would seem to be."""

        def leave(store: Any) -> bool:
            store.set(name, note)
            return bool(store.check([name]))

        if not self._ask(leave):
            raise _gone("a note that was left is not there")

    def look(self, name: str) -> bytes | None:
        """A note, if it is there."""

        def read(store: Any) -> bytes | None:
            return bytes(store.get(name)) if store.check([name]) else None

        note: bytes | None = self._ask(read)
        return note

    def remove(self, names: Iterable[str]) -> None:
        """Take notes away that nobody needs any more."""

        def delete(store: Any) -> None:
            for name in names:
                store.delete_key(name)

        self._ask(delete)

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

    def close(self) -> None:
        """No more questions. Does not wait: one that is never answered ends with the program."""
        self._questions.put(None)

    def _ask(self, ask: Callable[[Any], object]) -> Any:
        one = _Question(ask)
        self._questions.put(one)
        if not interrupts.wait(one.answered, self._patience_s):
            one.dropped = True
            raise _gone(f"no answer within {self._patience_s:g} s")
        if one.error is not None:
            raise _gone(one.error) from one.error
        return one.answer

    def _work(self) -> None:
        store: Any = None
        while (one := self._questions.get()) is not None:
            if one.dropped:
                continue
            try:
                if store is None:  # here, since connecting can stand still as well
                    store = distributed_c10d.PrefixStore(self._prefix, self._default.clone())
                    store.set_timeout(timedelta(seconds=_CALL_S))
                one.answer = one.ask(store)
            except Exception as error:  # noqa: BLE001 (raised by whoever asked)
                one.error = error
            one.answered.set()
        self._default = None


def _gone(found: object) -> StorageFailed:
    return StorageFailed(
        "the store that the ranks of this job meet in does not answer",
        found=str(found).partition("\n")[0],
        remedy="the process that hosts it (rank 0's launcher, mostly) has probably ended",
    )
