"""Start a flusher and see how it fares: a process of its own, or a thread of the trainer.

Knows nothing of what it does there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import xxhash

from laststep.errors import StorageError
from laststep.flush.__main__ import NOT_FOR_THE_HELPER, Setup
from laststep.flush.protocol import Connection
from laststep.flush.server import Flusher
from laststep.process import system, threads
from laststep.storage.registry import import_path

if TYPE_CHECKING:
    from laststep.catalog.epochs import Trainer
    from laststep.flush.protocol import Orders

_BARE = ("-S", "-P", "-c")
"""Nothing of `site`: what packages put into its folder to be run takes longer than all the rest."""
_CODE = (
    "import sys; sys.path[:0], sys.path[len(sys.path):] = sys.argv[2:3], sys.argv[3:]; "
    "sys.modules['typing_extensions'] = None; "
    "from laststep.flush.__main__ import main; "
    "del sys.modules['typing_extensions']; main(sys.argv[1])"
)
"""msgspec takes `typing_extensions` where it finds it, else `typing`, which is the same here; but
the former brings `inspect` with it, and the two are a tenth of a start. A store may need it."""


class Helper(Protocol):
    """The running flusher."""

    @property
    def pid(self) -> int | None: ...

    @property
    def pidfd(self) -> int | None: ...

    def join(self, timeout_s: float) -> bool: ...

    def end(self, timeout_s: float) -> bool: ...

    def how_it_ended(self) -> str: ...


Launch = Callable[[socket.socket], Helper]


class HelperProcess:
    """A flusher in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        # It cannot be another's: nobody else takes note of the end of our children.
        self.pidfd = os.pidfd_open(process.pid)
        self._close_pidfd = weakref.finalize(self, os.close, self.pidfd)
        # Not at the end of the program: saves that are finished then are still waited for by it.
        self._close_pidfd.atexit = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False when it has not ended by then."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close_pidfd()  # it is reaped, and whoever waited for it knows
        return True

    def end(self, timeout_s: float) -> bool:
        """Kill it, and wait until it is dead and reaped: after this it touches no slot and decides
        nothing. False where a disk that hangs keeps it alive for longer."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return self.join(timeout_s)

    def how_it_ended(self) -> str:
        """For the message of an error."""
        code = self._process.poll()
        if code is None:
            return "it does not end"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"


class HelperThread:
    """The same flusher on a thread of the trainer."""

    pid = None
    pidfd = None

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher
        self._thread = threading.Thread(target=flusher.serve, name="laststep-flusher", daemon=True)
        flusher.start()
        threads.start(self._thread)

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False when it has not ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> bool:
        """Have it give up all that it has, once its connection is closed, and wait for its end."""
        self._flusher.give_up()
        return self.join(timeout_s)

    def how_it_ended(self) -> str:
        """For the message of an error."""
        return "its thread does not end" if self._thread.is_alive() else "its thread ended"


def start_process(
    end: socket.socket, *, run: str, trainer: Trainer, pool_fd: int, pool_bytes: int, orders: Orders
) -> Helper:
    """Start the helper process; it inherits the pool and its end of the connection only."""
    # Opened here, where the number surely is the trainer's: it may be gone, and its number
    # another's, before the helper runs. What was handed over until then is finished all the same.
    pidfd = os.pidfd_open(os.getpid())
    opener = import_path(run)
    foreign = any(tier.opener is not None for tier in orders.further)
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
        rank=system.speaks_as(),
    )
    # Blocked signals are inherited: the helper is deaf to them from its first instruction on.
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
            remedy="free memory, processes or open files (`ulimit -n`), or pass flush='thread'",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(pidfd)
    end.close()
    return HelperProcess(process)


def start_thread(
    end: socket.socket, pool: memoryview, *, run: str, trainer: Trainer, orders: Orders
) -> Helper:
    """The same flusher on a thread of this process, where a helper cannot be had."""
    return HelperThread(Flusher(Connection(end), pool, run=run, trainer=trainer, orders=orders))


def _places(*, foreign: bool) -> list[str]:
    """Where the helper finds this very package, and the others that it needs, however the trainer
    found them; with a store or a codec of somebody else's, whatever the trainer finds."""
    files = [module.__file__ or "" for module in (msgspec, xxhash)]
    numpy = importlib.util.find_spec("numpy")  # not imported: only some saves need it
    files += [] if numpy is None or numpy.origin is None else [numpy.origin]
    needed = [str(Path(file).resolve().parents[1]) for file in files]
    needed += [str(Path(place).resolve()) for place in sys.path] if foreign else []
    return [str(Path(__file__).resolve().parents[2]), *dict.fromkeys(needed)]
