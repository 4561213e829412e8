"""Jobs of several ranks, each a process of its own, which tests stop and kill.

The store that ranks meet in is hosted by a process of its own, so that it outlives any rank, unless
a test wants otherwise. All processes are forked from one that has imported torch, and are ended, by
their ids, when their job is over, with their flushers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import laststep
from stored import folders
from waiting import PATIENCE_S, is_flusher, wait_until

WORKER = Path(__file__).with_name("rank_worker.py")
SOURCE = WORKER.parent.parent.parent / "src"
DEADLINE_S = 30.0
"""Everybody hears sooner, unless a test has it pass (`Process.late`)."""


class Zygote:
    """Forks what it is asked for."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [os.environ["WARM_PYTHON"], str(WORKER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        socket.send_fds(self._requests, [json.dumps(request).encode()], streams)
        return int(json.loads(self._requests.recv(100)))

    def poll(self, pid: int) -> int | None:
        self._requests.send(json.dumps({"what": "poll", "pid": pid}).encode())
        code = json.loads(self._requests.recv(100))
        return None if code is None else int(code)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(PATIENCE_S)


class Process:
    """One of a job's processes, to talk to."""

    def __init__(self, zygote: Zygote, request: dict[str, Any], log: Path) -> None:
        inner_in, self._to = os.pipe()
        self._from, inner_out = os.pipe()
        self._zygote = zygote
        self._heard = b""
        self._patience_s = float(request.get("patience_s", PATIENCE_S))
        self.code: int | None = None
        self.log = log
        with log.open("ab") as errors:
            self.pid = zygote.fork(request, [inner_in, inner_out, errors.fileno()])
        os.close(inner_in)
        os.close(inner_out)
        self.flushers: list[int] = []

    def next_words(self) -> list[str]:
        """The next line that it prints."""
        while b"\n" not in self._heard:
            if not select.select([self._from], [], [], self._patience_s)[0]:
                raise TimeoutError(f"nothing was heard; its log: {self.log.read_text()[-4000:]}")
            data = os.read(self._from, 4096)
            if not data:
                break
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().split(" ")

    def hear(self, *expected: str) -> str:
        """The next line, which must begin so; returns the rest."""
        words = self.next_words()
        if words[: len(expected)] != list(expected):
            raise AssertionError(f"{words}; its log: {self.log.read_text()[-4000:]}")
        return " ".join(words[len(expected) :])

    def tell(self, command: str) -> None:
        os.write(self._to, f"{command}\n".encode())

    def do(self, command: str) -> None:
        self.tell(command)
        self.hear("done", command.split(maxsplit=1)[0])

    def failed(self) -> str:
        """The error that it must report next."""
        return self.hear("failed")

    def late(self) -> list[str]:
        """What it says next, when the time is up for which it waits for others, or will wait: no
        machine is so slow that it has not begun to by the last time that is tried."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            self.tell(f"pass {4 * DEADLINE_S:g}")
            words = self.next_words()
            if words != ["done", "pass"]:
                self.hear("done", "pass")
                return words
            if b"\n" in self._heard or select.select([self._from], [], [], 0.1)[0]:
                return self.next_words()
        raise TimeoutError(f"its time does not pass; its log: {self.log.read_text()[-4000:]}")

    def gives_up(self) -> str:
        """The error that it reports when its time is up."""
        words = self.late()
        assert words[0] == "failed", words
        return " ".join(words[1:])

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def flusher(self) -> int:
        """The id of its flusher."""
        self.tell("helper")
        self.flushers.append(int(self.hear("helper")))
        return self.flushers[-1]

    def kill_flusher(self) -> None:
        """The one that it had when it was last asked for, or opened."""
        os.kill(self.flushers[-1], signal.SIGKILL)

    def is_idle(self) -> bool:
        """Whether it answers, and has nothing else to say."""
        self.tell("helper")
        try:
            words = self.next_words()
        except TimeoutError:
            return False
        return words[0] == "helper" and not self._heard

    def hang_up(self) -> None:
        """Nothing more to tell: it ends without close()."""
        if self._to >= 0:
            os.close(self._to)
            self._to = -1

    def end(self) -> int:
        """Its exit status, once it has ended."""
        deadline = time.monotonic() + self._patience_s
        while self.code is None:
            self.code = self._zygote.poll(self.pid)
            if self.code is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it does not end; its log: {self.log.read_text()[-4000:]}")
                time.sleep(0.01)
        return self.code

    def kill(self) -> None:
        if self.code is None:
            self.send(signal.SIGKILL)
            self.end()

    def clean_up(self) -> None:
        self.kill()
        for pid in self.flushers:
            if is_flusher(pid):
                os.kill(pid, signal.SIGKILL)
                wait_for_end(pid)  # until then it writes to the run, which goes next
        self.hang_up()
        os.close(self._from)


class Job:
    """So many ranks, started, in groups of so many, their files in folders for two ranks each;
    `ranks[n]` to talk to. Starts with the same `notes` see those of each other."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        ranks: int,
        *,
        first_hosts: bool = False,
        store: Process | None = None,
        start: str = "start1",
        notes: str | None = None,
        group: int | None = None,
        folders: bool = False,
        networks: tuple[str | None, ...] = (),
        address: str = "127.0.0.1",
        interfaces: tuple[str, ...] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.store = store
        self.port = 0
        self.ranks: list[Process] = []
        self.committed: list[int] = []
        self._zygote, self._folder = zygote, folder
        # A flusher of its own would know nothing of these folders.
        self._settings = {"flush": "thread"} if folders else {}
        self._owned = None
        networks = networks or (None,) * ranks
        if store is not None:
            self.port = store.port  # type: ignore[attr-defined]
        elif not first_hosts:
            host = {"what": "host", "address": address, "network": networks[0]}
            self.store = self._owned = Process(zygote, host, folder / "store.log")
            self.port = self.store.port = int(self.store.hear("port"))  # type: ignore[attr-defined]
        for number in range(ranks):
            interface = interfaces[number] if interfaces else "lo"
            request = {
                "what": "rank",
                "rank": number,
                "ranks": ranks,
                "address": address,
                "port": self.port,
                "start": start,
                "hosts": first_hosts and number == 0,
                "network": networks[number],
                "group": group,
                "folders": folders,
                "notes": notes,
                "patience_s": patience_s,
                "environment": {"GLOO_SOCKET_IFNAME": interface},
            }
            self.ranks.append(Process(zygote, request, folder / f"{start}.rank{number}.log"))
            if request["hosts"]:
                self.port = int(self.ranks[0].hear("port"))
        for process in self.ranks:
            process.hear("ready")

    def open(
        self,
        run: Path,
        *,
        deadline_s: float = DEADLINE_S,
        only: dict[int, dict[str, Any]] | None = None,
        answer_s: float | None = None,
        **settings: Any,
    ) -> None:
        """A Checkpointer on every rank; `only` has settings of single ranks. The store that they
        meet in has to answer within `answer_s`."""
        if answer_s is not None:
            for process in self.ranks:
                process.do(f"answer {answer_s:g}")
        for number, process in enumerate(self.ranks):
            own = (only or {}).get(number, {})
            options = {"deadline_s": deadline_s, **self._settings, **settings, **own}
            process.tell(f"open {run} {json.dumps(options)}")
        for process in self.ranks:
            flusher = process.hear("open")
            process.flushers += [] if flusher == "None" else [int(flusher)]

    def restore(self) -> list[str]:
        """The steps that the ranks restore."""
        self.tell("restore")
        return [process.hear("restored") for process in self.ranks]

    def tell(self, command: str, ranks: list[int] | None = None) -> None:
        for number in range(len(self.ranks)) if ranks is None else ranks:
            self.ranks[number].tell(command)

    def fails(self, step: int, *ranks: int) -> list[str]:
        """All ranks save that step, or those; what they then die of."""
        chosen = list(ranks or range(len(self.ranks)))
        self.tell(f"try {step}", chosen)
        return [self.ranks[number].failed() for number in chosen]

    def save(self, step: int) -> None:
        """All ranks save that step, and it is committed."""
        self.tell(f"try {step}")
        for process in self.ranks:
            process.hear("committed", str(step))

    def stand_at(self, gate: str, step: int, number: int = 0) -> None:
        """All save that step, and that rank stands at the gate."""
        rank = self.ranks[number]
        rank.do(f"shut {gate}")
        self.tell(f"try {step}")
        expected = {f"at {gate}"} | ({f"committed {step}"} if gate == "tell" else set())
        assert {" ".join(rank.next_words()) for _ in expected} == expected

    def close(self) -> None:
        """All ranks close, in order, and no flusher is left."""
        self.tell("close")
        for process in self.ranks:
            process.hear("done", "close")
        for process in self.ranks:
            for pid in process.flushers:
                wait_for_end(pid)

    def end_all(self, *numbers: int) -> None:
        """These ranks can close, and end as they should; no flusher is left of any."""
        for number in numbers:
            self.ranks[number].do("close")
            self.ranks[number].hang_up()
        for number in numbers:
            self.ranks[number].hear("ends")
            assert self.ranks[number].end() == 0
        for rank in self.ranks:
            for pid in rank.flushers:
                wait_for_end(pid)

    def clean_up(self) -> None:
        for process in [*self.ranks, *([self._owned] if self._owned else [])]:
            process.clean_up()


def wait_for_end(pid: int) -> None:
    """Until that flusher has ended."""
    wait_until(lambda: not is_flusher(pid))


def check(
    run: Path, steps: list[int], *, ranks: int = 2, tidy: bool = True, read: set[str] | None = None
) -> None:
    """These steps are committed, and whole; with `tidy`, nothing else lies about, once a flusher
    has cleaned up, which it does after the save is told. What is in `read` has been found whole
    before and is not read again."""
    catalog = laststep.open(run)
    assert catalog.steps() == steps
    read = set() if read is None else read
    for checkpoint in catalog:
        if checkpoint.folder in read:
            continue
        assert checkpoint.verify().damage == ()
        read.add(checkpoint.folder)
        files = [path.name for path in (run / checkpoint.folder).rglob("*-r*")]
        assert len({name.partition("-r")[2][:5] for name in files}) == ranks, files
        assert len([name for name in files if name.startswith("index-r")]) == ranks, files
    if steps:
        state = laststep.load(run)["state"]
        assert state["n"] == steps[-1]
        assert state["t"].unique().tolist() == [float(steps[-1])]
    if tidy:
        wait_until(lambda: folders(run) == sorted(checkpoint.folder for checkpoint in catalog))


class ReplicaStatus:
    """A job of three ranks with a run that many tests save to, one after the other."""

    def __init__(self, jobs: Jobs, run: Path) -> None:
        self.job = jobs.start(3)
        self.ranks = self.job.ranks
        self.run = run
        self.job.open(run)
        self.job.save(1)
        self.committed = [1]
        self.read: set[str] = set()
        """Folders of those that were found whole: after each test the new ones are read."""
        self._step = self.committed[-1]

    def step(self) -> int:
        """A step that nobody has saved."""
        self._step += 1
        return self._step

    def save(self, step: int | None = None) -> None:
        """All save, and it is committed."""
        step = self.step() if step is None else step
        self.job.save(step)
        self.committed.append(step)

    def stand_at(self, gate: str, number: int = 0) -> int:
        """All save, and that rank stands at the gate; returns the step."""
        step = self.step()
        self.job.stand_at(gate, step, number)
        return step

    def is_committed(self, step: int, *ranks: int) -> None:
        """All ranks hear that it is, or those who have not said so before."""
        for number in ranks or range(len(self.ranks)):
            self.ranks[number].hear("committed", str(step))
        self.committed.append(step)

    def works(self) -> None:
        """The next save works; whatever was committed is there and whole, and nothing else."""
        self.save()
        check(self.run, self.committed, ranks=3, read=self.read)


class Jobs:
    """Starts jobs."""

    def __init__(self) -> None:
        self.zygote = Zygote()
        self._folder = tempfile.TemporaryDirectory(prefix="laststep-ranks-")
        self._count = 0

    def start(self, ranks: int, **how: Any) -> Job:
        self._count += 1
        folder = Path(self._folder.name) / str(self._count)
        folder.mkdir()
        return Job(self.zygote, folder, ranks, **how)

    def fork(self, request: dict[str, Any]) -> Process:
        """A process of its own."""
        self._count += 1
        return Process(self.zygote, request, Path(self._folder.name) / f"{self._count}.log")

    def standing(self) -> ReplicaStatus:
        self._count += 1
        return ReplicaStatus(self, Path(self._folder.name) / f"run{self._count}")

    def close(self) -> None:
        self.zygote.close()
        self._folder.cleanup()
