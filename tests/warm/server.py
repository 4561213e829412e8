"""Imports torch once and forks a process for everyone who asks, through client.py.

Imports nothing before it is first asked, and has no threads. Ends, with what it has forked, when
the process that started it does: that one holds the other end of its standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

MODULES = (
    "numpy",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.nn.parallel",
    "laststep.cli",
)
REQUEST_BYTES = 1 << 20


def warm_up() -> None:
    """Import what takes long."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")  # as in tests/conftest.py
    for name in MODULES:
        importlib.import_module(name)
    import torch

    import laststep
    from laststep.memory.segments import Mapping

    for name in laststep.__all__:
        getattr(laststep, name)
    Mapping.allocate = Mapping.populate = lambda *_: None  # as in tests/conftest.py
    torch.set_num_threads(1)
    # The first step of an optimizer imports half of torch.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads, which would not survive a fork")
    gc.collect()
    gc.freeze()  # nothing of this is looked at, and so copied, in every process


def run(arguments: list[str]) -> None:
    """As `python` runs its arguments."""
    if arguments[0] == "-u":  # torchrun asks for it
        sys.stdout.reconfigure(write_through=True)
        del arguments[0]
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 (that is what an interpreter is for)


def put(files: list[int], numbers: list[int]) -> None:
    """Give the files that came the numbers that they had."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that was asked for."""
    put(files, request["files"])
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),  # noqa: SIM115
        open(1, "w", closefd=False),  # noqa: SIM115
        open(2, "w", buffering=1, errors="backslashreplace", closefd=False),  # noqa: SIM115
    )
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    import numpy as np
    import torch

    torch.set_num_threads(
        1
    )  # renews the thread pool before threads start, as in torture/processes.py
    np.random.seed()  # noqa: NPY002 (as that of a new interpreter: not the same in all)
    run(request["arguments"])


class Server:
    """The processes that it has forked, and who waits for them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._is_warm = False
        self._waiting: dict[int, tuple[socket.socket, int]] = {}
        """By the pidfd of the process: who waits for it, and its id."""

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Until nobody needs it any more; in a forked process, what that one has to become."""
        while True:
            poll = select.poll()
            clients = {client.fileno(): end for end, (client, _) in self._waiting.items()}
            for file in (0, self._listener.fileno(), *clients, *self._waiting):
                poll.register(file, select.POLLIN)
            ready = {file for file, _ in poll.poll()}
            if 0 in ready:
                for pid in [pid for _, pid in self._waiting.values()]:
                    os.kill(pid, signal.SIGKILL)
                return None
            for end in ready & set(self._waiting):
                self._tell(end)
            for file in ready & set(clients):
                if clients[file] in self._waiting:
                    self._pass_on(clients[file])
            if self._listener.fileno() in ready and (task := self._fork()) is not None:
                return task

    def _tell(self, end: int) -> None:
        """That process has ended."""
        client, pid = self._waiting.pop(end)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            client.send(str(status).encode())
        client.close()
        os.close(end)

    def _pass_on(self, end: int) -> None:
        """Its client sends it a signal, or is dead."""
        client, pid = self._waiting[end]
        number = b""
        with contextlib.suppress(OSError):
            number = client.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            os.waitpid(pid, 0)
            del self._waiting[end]
            client.close()
            os.close(end)

    def _fork(self) -> tuple[dict[str, Any], list[int]] | None:
        if not self._is_warm:
            warm_up()
            self._is_warm = True
        client, _ = self._listener.accept()
        data, files, _, _ = socket.recv_fds(client, REQUEST_BYTES, 100)
        if not data:
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._listener.close()
            client.close()
            for end, (other, _) in self._waiting.items():
                other.close()
                os.close(end)
            return json.loads(data), files
        for file in files:
            os.close(file)
        self._waiting[os.pidfd_open(pid)] = client, pid
        return None


def leave(status: int) -> None:
    """End as an interpreter does, but leave its memory as it is, which is shared: to destroy every
    object takes 0.2 s. With threads about, an end has risks of its own and is not cut short."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if (main := sys.modules["__main__"].__dict__) is not globals():
        main.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    if len(list(Path("/proc/self/task").iterdir())) == 1:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    sys.path.pop(0)
    task = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if task is not None:
        try:
            become(*task)
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            leave(end.code or 0)
        leave(0)
