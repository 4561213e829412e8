"""What runs for a Checkpointer: memory, capture thread, flusher, and the saves under way."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from laststep import interrupts
from laststep.catalog.starts import Start
from laststep.config import FlushIn
from laststep.engine.client import Client
from laststep.engine.wire import Continue
from laststep.errors import LaststepError
from laststep.flusher import starting

if TYPE_CHECKING:
    import socket

    from laststep.catalog.epochs import Writer
    from laststep.catalog.listing import Listed
    from laststep.checkpointer.keep import Keep
    from laststep.checkpointer.team import Team
    from laststep.config import Settings
    from laststep.engine.client import Launch
    from laststep.engine.copy.capture import Capturer
    from laststep.engine.handle import SaveHandle
    from laststep.engine.pool import Pool
    from laststep.events import Bus
    from laststep.storage.store import Store


_START_S = 10.0
"""So long a restore waits for the flusher to run, on a machine that has better things to do."""


def launcher(
    run: str, pool: Pool, settings: Settings, keep: Keep | None, trainer: Writer
) -> Launch:
    """How to start a flusher for that run."""
    rules = None if keep is None else keep.rules()

    def launch(end: socket.socket) -> starting.Helper:
        writers = settings.writers
        if settings.flush is FlushIn.THREAD:
            return starting.start_thread(
                end, pool.memory(), run=run, trainer=trainer, writers=writers, keep=rules
            )
        return starting.start_process(
            end, run=run, trainer=trainer, pool_fd=pool.fd, pool_bytes=pool.cap_bytes,
            writers=writers, keep=rules,
        )  # fmt: skip

    return launch


def client_of(store: Store, pool: Pool, settings: Settings, keep: Keep | None, bus: Bus) -> Client:
    """The way to the flusher of a new start of a job."""
    start = Start(store)
    launch = launcher(store.url, pool, settings, keep, start.writer)
    return Client(launch, pool, bus, start)


def continuing(found: Listed | None, seen: int, *, resumed: bool = True) -> Continue:
    """What saves continue from: what was found when that epoch was the newest, or nothing."""
    if found is None:
        return Continue(seen=seen)
    return Continue(
        epoch=found.epoch, attempt=found.attempt, folder=found.folder, seen=seen,
        resumed_from=found.folder if resumed else None,
    )  # fmt: skip


class Work:
    """The parts that run, until they are closed."""

    def __init__(
        self, pool: Pool, capturer: Capturer, client: Client, team: Team | None = None
    ) -> None:
        self._pid = os.getpid()
        self._team = team
        self._pool = pool
        self._capturer = capturer
        self._client = client
        self.handles: list[SaveHandle] = []
        """Saves that are not known to be over, or whose end nobody was told of yet."""
        self.preflight: threading.Thread | None = None
        self._starter: threading.Thread | None = None

    def start_early(self) -> bool:
        """Somebody trains, or restores to train, and so will save: start the flusher, which takes a
        while, beside that. Should it fail, the first save tries again, and reports it."""
        if os.getpid() == self._pid:
            self._starter = threading.Thread(target=self._start, name="laststep-start", daemon=True)
            self._starter.start()
        return True

    def await_start(self) -> None:
        """Wait until the flusher that was started early runs, or never will; not for ever."""
        if self._starter is not None:
            self._starter.join(_START_S)
            interrupts.wait(self._client.up, _START_S)

    def _start(self) -> None:
        try:
            self._client.start()
        except LaststepError:
            self._client.up.set()  # there is nothing to wait for

    def under_way(self) -> tuple[SaveHandle, ...]:
        return tuple(handle for handle in self.handles if not handle.committed.over())

    def close(self) -> None:
        """Wait for all saves and end everything, on the thread that trains."""
        self._capturer.close()
        if self._team is not None:
            self._team.close()
        self._client.close()
        if self.preflight is not None:
            self.preflight.join()
        self._pool.close()

    def abandon(self) -> None:
        """In a forked child: all of it belongs to the parent."""
        self._client.abandon()
