"""Trainings that are told to end, to talk to, and what must be true of their reports."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import laststep

if TYPE_CHECKING:
    from pathlib import Path

    from rank_jobs import Jobs, Process

EXIT_CODE = 75
GRACE = "5 min"
"""Longer than a test takes, however busy the machine is."""


class Told:
    """A training, and what it said."""

    def __init__(self, jobs: Jobs, run: Path, **request: Any) -> None:
        usual = {"what": "preempted", "run": str(run), "steps": 100_000, "settings": {}}
        preemption = {"grace": GRACE, **request.pop("preemption", {})}
        self.process: Process = jobs.fork({**usual, "preemption": preemption, **request})
        self.said: list[list[str]] = []

    def hear(self, *expected: str) -> list[str]:
        """The rest of the next line that begins so; those before it are in `said`."""
        while (words := self.process.next_words())[: len(expected)] != list(expected):
            if words == [""]:
                log = self.process.log.read_text()[-4000:]
                raise AssertionError(f"it ended: {self.process.end()}; {self.said}; its log: {log}")
            self.said.append(words)
        return words[len(expected) :]

    def send(self, name: str = "SIGTERM") -> None:
        os.kill(self.process.pid, getattr(signal, name))

    def end_grace(self) -> None:
        """End the grace now, however much of it is left."""
        self.process.tell("the grace is over")

    def report(self) -> dict[str, Any]:
        """What it reports of its end."""
        found: dict[str, Any] = json.loads(" ".join(self.hear("ended")))
        return found

    def end(self, code: int = EXIT_CODE) -> None:
        assert self.process.end() == code, self.process.log.read_text()[-4000:]


class Ranks:
    """A job of several such trainings."""

    def __init__(self, jobs: Jobs, run: Path, ranks: int, **request: Any) -> None:
        self.store = jobs.fork({"what": "host", "address": "127.0.0.1"})
        port = int(self.store.hear("port"))
        only = request.pop("only", {})
        self.ranks = [
            Told(jobs, run, rank=rank, ranks=ranks, port=port, **{**request, **only.get(rank, {})})
            for rank in range(ranks)
        ]
        self.run = run

    def go(self) -> None:
        """Until all have met, and train."""
        for rank in self.ranks:
            rank.hear("steps")


def steps(run: Path) -> list[int]:
    """What `ls` shows."""
    try:
        return laststep.open(run).steps()
    except laststep.NotFoundError:
        return []


def check(run: Path, report: dict[str, Any]) -> None:
    """The run has what the report promises, and it is whole."""
    found = steps(run)
    assert (report["step"] in found) == report["committed"]
    assert (report["problem"] == "") == report["committed"]
    if found:
        state = laststep.load(run)["state"]
        assert state["n"] == found[-1]
        assert state["t"].unique().tolist() == [float(found[-1])]
