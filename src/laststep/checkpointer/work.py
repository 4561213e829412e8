"""What runs for a Checkpointer: memory, capture thread, flusher, and the saves under way."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from laststep import flusher
from laststep.config import FlushIn
from laststep.errors import LaststepError

if TYPE_CHECKING:
    import socket

    from laststep.catalog.epochs import Writer
    from laststep.checkpointer.keep import Keep
    from laststep.checkpointer.team import Team
    from laststep.config import Settings
    from laststep.engine.client import Client, Launch
    from laststep.engine.copy.capture import Capturer
    from laststep.engine.handle import SaveHandle
    from laststep.engine.pool import Pool


def launcher(
    run: str, pool: Pool, settings: Settings, keep: Keep | None, trainer: Writer
) -> Launch:
    """How to start a flusher for that run."""
    rules = None if keep is None else keep.rules()

    def launch(end: socket.socket) -> flusher.Helper:
        writers = settings.writers
        if settings.flush is FlushIn.THREAD:
            return flusher.start_thread(
                end, pool.memory(), run=run, trainer=trainer, writers=writers, keep=rules
            )
        return flusher.start_process(
            end, run=run, trainer=trainer, pool_fd=pool.fd, pool_bytes=pool.cap_bytes,
            writers=writers, keep=rules,
        )  # fmt: skip

    return launch


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

    def start_early(self) -> bool:
        """Somebody trains, and so will save: start the flusher, which takes a while, beside the
        first step. Should it fail, the first save tries again, and reports it."""
        if os.getpid() == self._pid:
            threading.Thread(target=self._start, name="laststep-start", daemon=True).start()
        return True

    def _start(self) -> None:
        with contextlib.suppress(LaststepError):
            self._client.start()

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
