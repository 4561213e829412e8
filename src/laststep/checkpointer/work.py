"""What runs for a Checkpointer: memory, capture thread, flusher, and the saves under way.

Does not know the Checkpointer, and nothing that runs does, so that one that is dropped without
`close()` is noticed: what was handed over is then finished by a thread of its own (`lifetimes`).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from laststep import flusher
from laststep.checkpointer.neighbours import UnderWay
from laststep.config import FlushIn

if TYPE_CHECKING:
    import socket
    import threading
    from collections.abc import Callable

    from laststep.checkpointer.keep import Keep
    from laststep.config import Settings
    from laststep.engine.client import Client, Launch
    from laststep.engine.copy.capture import Capturer
    from laststep.engine.handle import SaveHandle
    from laststep.engine.pool import Pool

log = logging.getLogger(__name__)

_hooks_left: list[Callable[[], None]] = []
"""What takes the hooks of dropped Checkpointers off the optimizers. Another thread must not, as an
optimizer may be going through its hooks: the next Checkpointer does, when it is made."""


def remove_hooks_left() -> None:
    """Called by the thread that trains, and not in an optimizer's step."""
    while _hooks_left:
        _hooks_left.pop()()


def launcher(run: str, pool: Pool, settings: Settings, keep: Keep | None) -> Launch:
    """How to start a flusher for that run."""
    rules = None if keep is None else keep.rules()

    def launch(end: socket.socket) -> flusher.Helper:
        writers = settings.writers
        if settings.flush is FlushIn.THREAD:
            return flusher.start_thread(end, pool.memory(), run=run, writers=writers, keep=rules)
        return flusher.start_process(
            end, run=run, pool_fd=pool.fd, pool_bytes=pool.cap_bytes, writers=writers, keep=rules
        )

    return launch


class Work:
    """The parts that run, until they are closed by the Checkpointer or after it."""

    def __init__(self, run: str, pool: Pool, capturer: Capturer, client: Client) -> None:
        self._run = run
        self._pool = pool
        self._capturer = capturer
        self._client = client
        self._over = False
        self.handles: list[SaveHandle] = []
        """Saves that are not known to be over, or whose end nobody was told of yet."""
        self.preflight: threading.Thread | None = None

    def under_way(self) -> UnderWay:
        handles = tuple(handle for handle in self.handles if not handle.committed.over())
        pid = None if self._over else self._client.helper_pid
        return UnderWay(handles=handles, flusher_pid=pid or os.getpid())

    def close(self) -> None:
        """Wait for all saves and end everything, on the thread that trains."""
        self._end()
        self._capturer.unhook()

    def finish(self) -> None:
        """The Checkpointer is gone: finish what it had under way, and say so."""
        steps = [handle.step for handle in self.under_way().handles]
        if steps:
            log.warning(
                "the Checkpointer of %s is gone without close(); finishing the saves of steps %s",
                self._run, steps,
            )  # fmt: skip
        self._end()
        _hooks_left.append(self._capturer.unhook)
        for handle in self.handles:
            if handle.error is not None and not handle.seen:
                log.error("a save failed and nobody was there to see it: %s", handle.error)

    def abandon(self) -> None:
        """In a forked child: all of it belongs to the parent."""
        self._client.abandon()

    def _end(self) -> None:
        self._capturer.stop()
        self._client.close()
        if self.preflight is not None:
            self.preflight.join()
        self._pool.close()
        self._over = True
