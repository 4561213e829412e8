"""A board on which the ranks of a job leave notes for each other: their store, asked with care.

A client of our own of the store that torch.distributed was started with (a TCPStore), so that
nothing here waits behind a collective; and under the same prefix. That alone does not keep the
notes of an earlier start away where a launcher starts ranks again and keeps the store, as torchrun
does: `under` does, once the ranks know a name of their start by other means. Every wait is a look
now and then under a deadline of our own (`until`): the store's own `wait` can outlast its time-out.
A single question can outlast it too, for ever if the host of the store stands still or the network
is cut. So a thread asks it, and whoever waits for the answer goes when the time is up: a store that
is gone must be an error, not a silence. Used from background threads, and from training's own only
where a description is new.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import distributed_c10d

from laststep.errors import StorageError
from laststep.process import signals, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Seen = TypeVar("_Seen")

_LOOK_S, _LOOK_EACH_S = 0.02, 0.0002
"""How often to look, at most. All ranks ask one store: the more there are, the less often each
does."""
_FIRST_LOOKS = 16
"""What others do mostly comes soon: so many times more often at first."""
_TOGETHER = 256
"""So many notes are asked for in one question."""
_CALL_S = 30.0
"""A single question is answered within that, or the store is gone."""
_HUSH_S = 1.0


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

    def __init__(self, prefix: str, *, ranks: int = 1, patience_s: float = _CALL_S) -> None:
        """A question that is not answered within `patience_s`, or 30 s, is an error. So many
        `ranks` ask the same store."""
        self.prefix = prefix
        """What all names begin with, on all ranks."""
        self._look_s = max(_LOOK_S, ranks * _LOOK_EACH_S)
        self._patience_s = min(patience_s, _CALL_S)
        self._default: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (no other way)
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="laststep-board", daemon=True)
        threads.start(self._thread)

    def under(self, name: str) -> None:
        """Put all notes under this name as well. MUST be called before anything is asked."""
        self.prefix += f"/{name}"

    def now_s(self) -> float:
        """The time by which everybody waits who looks at this board (monotonic)."""
        return time.monotonic()

    def put(self, name: str, note: bytes) -> None:
        """Leave a note, and see that it is there: to a store that is gone it would seem to be."""

        def leave(store: Any) -> bool:
            store.set(name, note)
            return bool(store.check([name]))

        if not self._ask(leave):
            raise _gone("a note that was left is not there")

    def look(self, name: str) -> bytes | None:
        """A note, if it is there."""
        notes = self._look_at([name])
        return None if notes is None else notes[0]

    def look_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of the notes that are there."""
        seen: dict[str, bytes] = {}
        for together in _cut(names):
            if (notes := self._look_at(together)) is not None:
                seen.update(zip(together, notes, strict=True))
            elif len(together) > 1:
                looks = {name: self.look(name) for name in together}
                seen.update({name: note for name, note in looks.items() if note is not None})
        return seen

    def remove(self, names: Iterable[str]) -> None:
        """Take notes away that nobody needs any more."""

        def delete(store: Any) -> None:
            for name in names:
                store.delete_key(name)

        self._ask(delete)

    def until(
        self,
        look: Callable[[], _Seen | None],
        until_s: float = math.inf,
        *,
        rest: Callable[[float], object] | None = None,
    ) -> _Seen | None:
        """Look now and then, until there is something to see; None at that time (monotonic), after
        a last look. `rest` passes the time between two looks, and may end early."""
        pause = self._look_s / _FIRST_LOOKS
        while True:
            late = self.now_s() >= until_s
            if (seen := look()) is not None or late:
                return seen
            (rest or _sleep)(max(min(pause, until_s - self.now_s()), 0))
            pause = min(2 * pause, self._look_s)

    def wait_all(
        self, names: Iterable[str], until_s: float, *, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, bytes]:
        """All notes, or those that are there at that time (monotonic). `meanwhile` is called at
        every look that does not see them all."""
        missing, seen = _cut(names), dict[str, bytes]()

        def look() -> dict[str, bytes] | None:
            # They mostly come together: the rest is asked for when the first are there.
            while missing:
                if (notes := self._look_at(missing[0])) is None:
                    if meanwhile is not None:
                        meanwhile()
                    return None
                seen.update(zip(missing.pop(0), notes, strict=True))
            return seen

        if self.until(look, until_s) is None:
            seen.update(self.look_all(itertools.chain.from_iterable(missing)))
        return seen

    def close(self) -> None:
        """No more questions. Does not wait: one that is never answered ends with the program."""
        self._questions.put(None)

    def hush(self) -> None:
        """The same where the program ends now, which a question in its midst would turn into a
        crash: waits for that a little. Who asks from now on hears nothing."""
        self.close()
        self._thread.join(_HUSH_S)

    def _look_at(self, names: list[str]) -> list[bytes] | None:
        """Some notes, if all of them are there."""

        def read(store: Any) -> list[bytes] | None:
            if not store.check(names):
                return None
            if len(names) > 1 and store.has_extended_api():
                return [bytes(note) for note in store.multi_get(names)]
            return [bytes(store.get(name)) for name in names]

        notes: list[bytes] | None = self._ask(read)
        return notes

    def _ask(self, ask: Callable[[Any], object]) -> Any:
        question = _Question(ask)
        self._questions.put(question)
        if not signals.wait(question.answered, self._patience_s):
            question.dropped = True
            raise _gone(f"no answer within {self._patience_s:g} s")
        if question.error is not None:
            raise _gone(question.error) from question.error
        return question.answer

    def _work(self) -> None:
        store: Any = None
        while (question := self._questions.get()) is not None:
            if question.dropped:
                continue
            try:
                if store is None:  # here, since connecting can stand still as well
                    store = distributed_c10d.PrefixStore(self.prefix, self._default.clone())
                    store.set_timeout(timedelta(seconds=_CALL_S))
                question.answer = question.ask(store)
            except Exception as error:  # noqa: BLE001 (raised by whoever asked)
                question.error = error
            question.answered.set()
        self._default = None


def _sleep(seconds: float) -> None:
    """Wait, letting handlers of signals in."""
    until_s = time.monotonic() + seconds
    while (left := until_s - time.monotonic()) > 0:
        signals.let_in()
        time.sleep(signals.look_within(left) or left)


def _cut(names: Iterable[str]) -> list[list[str]]:
    """So many at a time."""
    every = list(names)
    return [every[at : at + _TOGETHER] for at in range(0, len(every), _TOGETHER)]


def _gone(found: object) -> StorageError:
    return StorageError(
        "the store that the ranks of this job meet in does not answer",
        found=str(found).partition("\n")[0],
        remedy="the process that hosts it (rank 0's launcher, mostly) has probably ended",
    )
