"""The key-value store of torch.distributed, with deadlines of our own.

A separate client of the store that torch.distributed was started with (a TCPStore), so that nothing
here waits behind a collective. A launcher that restarts ranks may keep the store, with the keys of
the dead ranks in it (torchrun does): `under` adds a prefix that is unique to this job instance.
Waiting is polling with a deadline (`until`), because the store's own `wait` can outlast its
timeout. A single request can also block forever if the host of the store stops or the network is
cut, so a thread sends it, and the caller raises when its time is up. Used from background threads;
from the training thread only when the description of the state is new.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import distributed_c10d

from laststep.constants import listed
from laststep.errors import StorageError
from laststep.process import signals
from laststep.process.threads import Worker, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from laststep.ranks.group import Rank

log = logging.getLogger(__name__)

_Seen = TypeVar("_Seen")

_LOOK_S, _LOOK_EACH_S = 0.02, 0.0002
"""Polling interval: at least the first, and the second times the number of ranks, since all of them
poll one store."""
_FIRST_LOOKS = 16
"""Poll this many times as often at first: most keys appear soon."""
_TOGETHER = 256
"""Keys per request."""
_CALL_S = 30.0
"""A store that does not answer a request within this time is gone."""
_HUSH_S = 1.0
PATIENCE_S = 5.0
"""After this time the log says which ranks a call waits for."""


class KeyValueStore:
    """Keys under one prefix, used by one thread at a time."""

    def __init__(self, prefix: str, *, ranks: int = 1, patience_s: float = _CALL_S) -> None:
        """Raise if no answer comes in `patience_s` or 30 s. `ranks` clients poll the store."""
        self.prefix = prefix
        """The prefix of all keys, equal on all ranks."""
        self._look_s = max(_LOOK_S, ranks * _LOOK_EACH_S)
        self._patience_s = min(patience_s, _CALL_S)
        self._default: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (no other way)
        self._pool = WorkerPool("kv", 1)

    def under(self, name: str) -> None:
        """Extend the prefix. MUST be called before the first request."""
        self.prefix += f"/{name}"

    def now_s(self) -> float:
        """Return the clock of all deadlines here (monotonic)."""
        return time.monotonic()

    def put(self, name: str, note: bytes) -> None:
        """Set a key and check it: writing to a store that is gone seems to succeed."""

        def leave(store: Any) -> bool:
            store.set(name, note)
            return bool(store.check([name]))

        if not self._ask(leave):
            raise _gone("a note that was left is not there")

    def look(self, name: str) -> bytes | None:
        return self.look_all([name]).get(name)

    def look_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist."""

        def read(store: Any) -> dict[str, bytes]:
            seen: dict[str, bytes] = {}
            for together in _cut(names):
                if store.check(together):
                    seen.update(zip(together, _values(store, together), strict=True))
                elif len(together) > 1:
                    present = [name for name in together if store.check([name])]
                    seen.update({name: bytes(store.get(name)) for name in present})
            return seen

        return self._ask(read)

    def remove(self, names: Iterable[str]) -> None:

        def delete(store: Any) -> None:
            for name in names:
                store.delete_key(name)

        self._ask(delete)

    def until(
        self,
        look: Callable[[], _Seen],
        until_s: float = math.inf,
        *,
        rest: Callable[[float], object] | None = None,
    ) -> _Seen:
        """Poll until `look` returns something true, or until `until_s` (monotonic); return what the
        last look returned. `rest` sleeps between two looks and may return early."""
        pause = self._look_s / _FIRST_LOOKS
        while True:
            late = self.now_s() >= until_s
            if (seen := look()) or late:
                return seen
            (rest or _sleep)(max(min(pause, until_s - self.now_s()), 0))
            pause = min(2 * pause, self._look_s)

    def wait_all(
        self, names: Iterable[str], until_s: float, *, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, bytes]:
        """Wait for all keys, calling `meanwhile` in between; return what exists at `until_s`."""
        missing, seen = _cut(names), dict[str, bytes]()

        def read(store: Any) -> list[bytes] | None:
            return _values(store, missing[0]) if store.check(missing[0]) else None

        def look() -> bool:
            # They mostly come together: the rest is asked for when the first are there.
            while missing:
                if (notes := self._ask(read)) is None:
                    if meanwhile is not None:
                        meanwhile()
                    return False
                seen.update(zip(missing.pop(0), notes, strict=True))
            return True

        if not self.until(look, until_s):
            seen.update(self.look_all(itertools.chain.from_iterable(missing)))
        return seen

    def close(self) -> None:
        """Accept no more requests; do not wait: one without an answer ends with the process."""
        self._pool.put(self._disconnect)
        self._pool.queued.put(None)

    def close_at_exit(self) -> None:
        """Close at exit: wait briefly for a request in flight, which would crash Python."""
        last = self._pool.submit(self._disconnect)
        self.close()
        with contextlib.suppress(TimeoutError):
            last.result(_HUSH_S)

    def _ask(self, ask: Callable[[Any], _Seen]) -> _Seen:
        answered = threading.Event()
        answer = self._pool.submit(lambda: ask(self._store))
        answer.add_done_callback(lambda _: answered.set())
        if not signals.wait(answered, self._patience_s):
            answer.cancel()  # unless it was sent
            raise _gone(f"no answer within {self._patience_s:g} s")
        if (error := answer.exception()) is not None:
            raise _gone(error) from error
        return answer.result()

    def _disconnect(self) -> None:
        vars(self).pop("_store", None)
        self._default = None

    @functools.cached_property
    def _store(self) -> Any:
        """The client, connected by the first request, since that can stand still as well."""
        store = distributed_c10d.PrefixStore(self.prefix, self._default.clone())
        store.set_timeout(timedelta(seconds=_CALL_S))
        return store


def _sleep(seconds: float) -> None:
    """Sleep, running signal handlers meanwhile."""
    until_s = time.monotonic() + seconds
    while (left := until_s - time.monotonic()) > 0:
        signals.check_signals()
        time.sleep(signals.look_within(left) or left)


def _values(store: Any, names: list[str]) -> list[bytes]:
    if len(names) > 1 and store.has_extended_api():
        return [bytes(note) for note in store.multi_get(names)]
    return [bytes(store.get(name)) for name in names]


def _cut(names: Iterable[str]) -> list[list[str]]:
    every = list(names)
    return [every[at : at + _TOGETHER] for at in range(0, len(every), _TOGETHER)]


def _gone(found: object) -> StorageError:
    return StorageError(
        "the key-value store of this job does not answer",
        found=str(found).partition("\n")[0],
        remedy="the process that hosts it (rank 0's launcher, mostly) has probably ended",
    )


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
    """Log the ranks that do not make the call `what` within seconds; `name` tells it from earlier
    ones. Rank 0 checks the keys of all and the other ranks check rank 0's: if every rank checked
    every key, a large job would send its store millions of requests. Uses a connection of its own,
    because rank 0's is busy waiting."""
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
