"""Start a flusher, as a helper process or on a thread of the trainer, and observe its exit.

Does not know the flusher's work.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from laststep.errors import StorageError
from laststep.flush.__main__ import NOT_FOR_THE_HELPER, Setup
from laststep.flush.protocol import Connection
from laststep.flush.server import Flusher
from laststep.process import system
from laststep.process.threads import Worker
from laststep.storage.registry import import_path

if TYPE_CHECKING:
    from laststep.catalog.terms import Trainer
    from laststep.flush.protocol import Orders

_BARE = ("-S", "-P", "-c")
"""Skip `site`: the startup code that packages install in site-packages takes longer than all the
rest."""
_CODE = (
    "import sys; sys.path[:0], sys.path[len(sys.path):] = sys.argv[2:3], sys.argv[3:]; "
    "sys.modules['typing_extensions'] = None; "
    "from laststep.flush.__main__ import main; "
    "del sys.modules['typing_extensions']; main(sys.argv[1])"
)
"""msgspec imports `typing_extensions` if it is installed, else `typing`, which is equivalent here.
The former also imports `inspect`, and the two take a tenth of the start-up time. The entry is
removed again because a store may need `typing_extensions`."""


class HelperProcess:
    """A flusher in a helper process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        # The pid cannot have been reused: nobody else reaps our children.
        self.pidfd = os.pidfd_open(process.pid)
        self._close_pidfd = weakref.finalize(self, os.close, self.pidfd)
        # Not at exit: the pidfd is still needed to wait for saves that finish then.
        self._close_pidfd.atexit = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, timeout_s: float) -> bool:
        """Wait for its exit; return False on timeout."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close_pidfd()  # the process is reaped; no thread polls the pidfd any more
        return True

    def end(self, timeout_s: float) -> bool:
        """Kill it and wait until it is dead and reaped: from then on it touches no slot and decides
        nothing. Return False if it is still alive at the timeout, for example because of a hanging
        disk."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return self.join(timeout_s)

    def how_it_ended(self) -> str:
        """Describe its exit for an error message."""
        code = self._process.poll()
        if code is None:
            return "it does not exit"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"


class HelperThread:
    """A flusher on a thread of the trainer."""

    pid = None
    pidfd = None

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher
        self._thread = Worker("flusher", flusher.serve)
        flusher.start()
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; return False on timeout."""
        return self._thread.join(timeout_s)

    def end(self, timeout_s: float) -> bool:
        """Make it give up all saves, once its connection is closed, and wait for its end."""
        self._flusher.give_up()
        return self.join(timeout_s)

    def how_it_ended(self) -> str:
        """Describe its end for an error message."""
        return "its thread does not exit" if self._thread.is_alive() else "its thread ended"


Helper = HelperProcess | HelperThread
"""The running flusher."""
Launch = Callable[[socket.socket], Helper]


def start_process(
    end: socket.socket, *, run: str, trainer: Trainer, pool_fd: int, pool_bytes: int, orders: Orders
) -> Helper:
    """Start the helper process; it inherits only the pool, its end of the connection and a pidfd of
    the trainer. Raise `StorageError` if it cannot be started."""
    # Opened here, where the pid certainly is the trainer's: the trainer may die, and its pid be
    # reused, before the helper runs. The helper still finishes the saves handed over by then.
    pidfd = os.pidfd_open(os.getpid())
    opener = import_path(run)
    foreign = any(tier.opener is not None for tier in orders.replicas)
    places = _places(foreign=opener is not None or orders.encodes or foreign)
    setup = Setup(
        run=run,
        opener=opener,
        pool_fd=pool_fd,
        pool_bytes=pool_bytes,
        socket_fd=end.fileno(),
        trainer=trainer,
        trainer_pidfd=pidfd,
        orders=orders,
        rank=system.logging_rank(),
    )
    # Blocked signals are inherited: the helper ignores them from its first instruction on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_HELPER)
    try:
        process = subprocess.Popen(
            [sys.executable, *_BARE, _CODE, msgspec.json.encode(setup).decode(), *places],
            pass_fds=(pool_fd, end.fileno(), pidfd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise StorageError(
            "cannot start the flusher",
            found=str(error),
            remedy="free memory, processes or open files (`ulimit -n`), or pass "
            "options=laststep.Options(flush='thread')",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(pidfd)
    end.close()
    return HelperProcess(process)


def start_thread(
    end: socket.socket, pool: memoryview, *, run: str, trainer: Trainer, orders: Orders
) -> Helper:
    """Start the flusher on a thread of this process, for systems where a helper process is
    impossible."""
    return HelperThread(Flusher(Connection(end), pool, run=run, trainer=trainer, orders=orders))


def _places(*, foreign: bool) -> list[str]:
    """Return the import paths for the helper: this package and its dependencies, from the locations
    that the trainer uses; with a third-party store or codec, also the trainer's whole
    `sys.path`."""
    files = [module.__file__ or "" for module in (msgspec, xxhash)]
    numpy = importlib.util.find_spec("numpy")  # not imported: only some saves need it
    files += [] if numpy is None or numpy.origin is None else [numpy.origin]
    needed = [str(Path(file).resolve().parents[1]) for file in files]
    needed += [str(Path(place).resolve()) for place in sys.path] if foreign else []
    return [str(Path(__file__).resolve().parents[2]), *dict.fromkeys(needed)]
