"""Processes as /proc shows them, and work done in a forked child that reports through a pipe.

Knows nothing of checkpoints. Whoever forks here must have no threads of its own; one that will have
some makes a `Nursery` before, which forks for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import select
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Say = Callable[..., None]


def children_of(parent: int) -> list[int]:
    """The processes whose parent is `parent`, zombies too."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            stat = (folder / "stat").read_text()
            # The second field is the command in parentheses, which may contain anything.
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                children.append(int(folder.name))
    return children


def descendants(pid: int) -> list[int]:
    """Its children, their children and so on, zombies included."""
    found = children_of(pid)
    for child in found:  # grows while we go
        found += children_of(child)
    return found


def lives(pid: int) -> bool:
    """Whether it is there and not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def command_of(pid: int) -> str:
    """Return the start of its command line; empty once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()[:400].decode(errors="replace")
    return ""


def wait_until_dead(pids: Iterable[int], seconds: float) -> bool:
    """Whether all of them have ended by then."""
    deadline = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Child:
    """A forked process that runs `body(say)`. `heard` is what it said so far, a list for each.

    `say` writes through a pipe, with `os.write` alone: it works without free descriptors, memory
    for files or a disk, and what was said before a kill is heard. The last thing that it says is
    "end", or "foreign" and the traceback of what came out; after neither it was killed, or crashed.
    """

    def __init__(self, pid: int, pipe: int, dump: IO[bytes]) -> None:
        self.pid = pid
        self.heard: list[list[object]] = []
        self._pidfd = os.pidfd_open(pid)
        self._pipe = pipe
        self._rest = b""
        self._dump = dump

    @classmethod
    def fork(cls, body: Callable[[Say], None]) -> Child:
        """One of ours."""
        reader, writer = os.pipe()
        dump = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _in_child(body, writer, dump.fileno())
        os.close(writer)
        return cls(pid, reader, dump)

    def listen(self, seconds: float) -> bool:
        """Wait for more; False when nothing came, or it has closed its end."""
        if not select.select([self._pipe], [], [], max(0.0, seconds))[0]:
            return False
        data = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.heard += [json.loads(line) for line in lines]
        return bool(data)

    def said(self, word: str) -> list[list[object]]:
        """What followed that word, each time."""
        return [rest for first, *rest in self.heard if first == word]

    def wait(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Until it has ended or `until` holds; False when neither came in time."""
        deadline = time.monotonic() + seconds
        while not until():
            ready, _, _ = select.select([self._pidfd], [], [], 0)
            if ready:
                while self.listen(0):
                    pass  # what it said before its end
                return True
            if time.monotonic() > deadline:
                return False
            self.listen(0.01)
        return True

    @property
    def has_ended(self) -> bool:
        return self.wait(0) and bool(select.select([self._pidfd], [], [], 0)[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def stacks(self) -> list[str]:
        """Where its threads are now, or were when it crashed."""
        self.kill(signal.SIGUSR2)
        self.wait(1.0)
        self._dump.seek(0)
        return self._dump.read().decode(errors="replace").splitlines()[-60:]

    def close(self) -> None:
        """End it and what is here of it."""
        self.kill()
        self.wait(20.0)
        with contextlib.suppress(ChildProcessError):  # another one may have forked it for us
            os.waitpid(self.pid, 0)
        os.close(self._pipe)
        os.close(self._pidfd)
        self._dump.close()


class Nursery:
    """A process without threads that forks children for one that has them."""

    def __init__(self, body: Callable[[Say, dict[str, object]], None]) -> None:
        self._end, other = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._end.close()
            _fork_for(other, body)
        other.close()

    def child(self, arguments: dict[str, object]) -> Child:
        """A new one, which runs `body(say, arguments)`."""
        reader, writer = os.pipe()
        dump = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        socket.send_fds(self._end, [json.dumps(arguments).encode()], [writer, dump.fileno()])
        os.close(writer)
        return Child(int(self._end.recv(64)), reader, dump)

    def close(self) -> None:
        """No more."""
        self._end.close()
        os.waitpid(self.pid, 0)


def _fork_for(end: socket.socket, body: Callable[[Say, dict[str, object]], None]) -> None:
    """Fork a child for each request until nobody asks any more; never returns."""
    while True:
        request, fds, _, _ = socket.recv_fds(end, 1 << 16, 2)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            end.close()
            _in_child(functools.partial(_with_arguments, body, request), *fds)
        for fd in fds:
            os.close(fd)
        end.send(str(pid).encode())


def _with_arguments(
    body: Callable[[Say, dict[str, object]], None], request: bytes, say: Say
) -> None:
    body(say, json.loads(request))


def _in_child(body: Callable[[Say], None], pipe: int, dump: int) -> None:
    """Run it and say how it went; never returns."""

    def say(*words: object) -> None:
        os.write(pipe, json.dumps(words).encode() + b"\n")

    try:
        os.dup2(dump, 2)
        faulthandler.enable(file=dump)
        faulthandler.register(signal.SIGUSR2, file=dump, all_threads=True, chain=False)
        # torch renews its thread pool at the first use after a fork, without a lock: two threads
        # that come first together get "Invalid thread pool!" (seen once in 40 runs of the suite).
        torch.set_num_threads(1)
        body(say)
        say("end")
    except BaseException:  # noqa: BLE001 (whatever it is, the parent has to hear of it)
        say("foreign", traceback.format_exc())
    finally:
        os._exit(0)
