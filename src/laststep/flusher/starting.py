"""Start a flusher and see how it fares: a process of its own, or a thread of the trainer.

Knows nothing of what it does there.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from laststep.catalog.epochs import Writer, this_writer
from laststep.engine.memory import Mapping
from laststep.engine.wire import Connection, KeepRules
from laststep.flusher.serving import Flusher

_NOT_FOR_THE_HELPER = (signal.SIGINT, signal.SIGTERM)
"""A person's Ctrl-C is for the trainer; the helper ends with it, after its work is done."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the helper process is told on its command line."""

    run: str
    pool_fd: int
    pool_bytes: int
    socket_fd: int
    trainer: Writer
    trainer_pidfd: int
    writers: int
    keep: KeepRules | None


class Helper:
    """The running flusher, as its trainer sees it."""

    def __init__(
        self, process: subprocess.Popen[bytes] | None, thread: threading.Thread | None
    ) -> None:
        self._process = process
        self._thread = thread

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False when it has not ended by then."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        assert self._thread is not None  # noqa: S101 (one of the two is always there)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def how_it_ended(self) -> str:
        """For the message of an error."""
        if self._process is None:
            return "its thread ended"
        code = self._process.poll()
        if code is None:
            return "it closed the connection"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"


def start_process(
    end: socket.socket,
    *,
    run: str,
    pool_fd: int,
    pool_bytes: int,
    writers: int,
    keep: KeepRules | None,
) -> Helper:
    """Start the helper process; it inherits the pool and its end of the connection only."""
    # Opened here, where the number surely is the trainer's: it may be gone, and its number
    # another's, before the helper runs. What was handed over until then is finished all the same.
    pidfd = os.pidfd_open(os.getpid())
    setup = Setup(
        run=run, pool_fd=pool_fd, pool_bytes=pool_bytes, socket_fd=end.fileno(),
        trainer=this_writer(), trainer_pidfd=pidfd, writers=writers, keep=keep,
    )  # fmt: skip
    # The helper must find this very package, however the trainer found it.
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    # Blocked signals are inherited: the helper is deaf to them from its first instruction on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_HELPER)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "laststep.flusher", msgspec.json.encode(setup).decode()],
            pass_fds=(pool_fd, end.fileno(), pidfd),
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(pidfd)
    end.close()
    return Helper(process, None)


def start_thread(
    end: socket.socket, pool: memoryview, *, run: str, writers: int, keep: KeepRules | None
) -> Helper:
    """The same flusher on a thread of this process, where a helper cannot be had."""
    flusher = Flusher(
        Connection(end), pool, run_path=run, trainer=this_writer(), writers=writers, keep=keep
    )
    thread = threading.Thread(target=flusher.serve, name="laststep-flusher", daemon=True)
    thread.start()
    return Helper(None, thread)


def _trainer_lives(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def main(arguments: list[str]) -> None:
    """The helper process: one argument, a `Setup` as JSON."""
    setup = msgspec.json.decode(arguments[0], type=Setup)
    for number in _NOT_FOR_THE_HELPER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_THE_HELPER)
    end = socket.socket(fileno=setup.socket_fd)
    connection = Connection(end, peer_lives=lambda: _trainer_lives(setup.trainer_pidfd))
    mapping = Mapping(setup.pool_fd, setup.pool_bytes)
    Flusher(
        connection, mapping.view, run_path=setup.run, trainer=setup.trainer,
        writers=setup.writers, keep=setup.keep,
    ).serve()  # fmt: skip
