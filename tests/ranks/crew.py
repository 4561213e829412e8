"""A crew of real processes that tests give tasks to, each time as a job of so many ranks.

The processes stay for the whole session and form a new process group, over loopback, for every
task. After a task that failed they are replaced, so that no test
sees what another has left behind. A process ends when the pipe to it closes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

HERE = Path(__file__).parent
MEMBER = HERE / "member.py"
SOURCE = HERE.parent.parent / "src"
SIZE = 4
_LAST_WORDS_S = 15.0
"""After a rank has failed the others get so long to tell their side."""


class Failed(AssertionError):
    """A task failed; the message has what each rank says."""


class _Member:
    """One process."""

    def __init__(self, path: tuple[Path, ...]) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.pipe = ours
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.process = subprocess.Popen(
            [os.environ["WARM_PYTHON"], str(MEMBER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=self.errors,
            stderr=self.errors,
            env=environment,
        )
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def last_words(self) -> str:
        with contextlib.suppress(ValueError):
            size = self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(0, size - 4000))
            return self.errors.read().decode(errors="replace")
        return ""


class Crew:
    """The processes; made when they are first needed, at least `size` of them. They can also import
    what is in the folders of `also`."""

    def __init__(self, *, size: int = SIZE, also: tuple[Path, ...] = ()) -> None:
        self._size = size
        self._path = (SOURCE, *also, HERE, HERE.parent)
        self._members: list[_Member] = []

    def __call__(self, task: str, ranks: int, timeout_s: float = 180.0, **arguments: Any) -> list:
        """Run `module:function` on so many ranks; the results, by rank."""
        fresh = [_Member(self._path) for _ in range(max(ranks, self._size) - len(self._members))]
        for member in fresh:
            member.pipe.recv()  # it runs: how long that takes does not count
        self._members += fresh
        # Hosted here, under a port that nobody else can take before a rank has it.
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        members = self._members[:ranks]
        for rank, member in enumerate(members):
            member.pipe.send((task, rank, ranks, store.port, arguments))
        found = self._answers(members, timeout_s)
        if all(answer is not None and answer[0] for answer in found):
            return [answer[1] for answer in found]
        said = [
            f"--- rank {rank} of {ranks}\n"
            + ("no answer\n" if answer is None else f"{answer[1]}\n")
            + ("" if answer is not None and answer[0] else member.last_words())
            for rank, (answer, member) in enumerate(zip(found, members, strict=True))
        ]
        self.close()
        raise Failed(f"{task} {arguments}\n" + "\n".join(said))

    def _answers(self, members: list[_Member], timeout_s: float) -> list[tuple[bool, Any] | None]:
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(members):
            waiting = {m.pipe: n for n, m in enumerate(members) if n not in found}
            ready = multiprocessing.connection.wait(
                list(waiting), timeout=max(deadline - time.monotonic(), 0)
            )
            if not ready:
                break
            for pipe in ready:
                try:
                    answer = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answer = (False, "its process ended")
                found[waiting[pipe]] = answer  # type: ignore[index]
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        return [found.get(rank) for rank in range(len(members))]

    def close(self) -> None:
        """End all processes."""
        for member in self._members:
            member.end()
        self._members = []
