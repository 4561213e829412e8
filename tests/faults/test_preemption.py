"""Jobs that are told to end, in every phase of a save: what is there then is what was reported."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import laststep
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rank_jobs import Jobs, Process

EXIT_CODE = 75


class Told:
    """A training, and what it said."""

    def __init__(self, jobs: Jobs, run: Path, **request: Any) -> None:
        self.run = run
        self.process: Process = jobs.fork(
            {
                "what": "preempted", "run": str(run), "steps": 100_000,
                **{"settings": {}, "preemption": {}, **request},
            }
        )  # fmt: skip
        self.words: list[list[str]] = []

    def hear(self, *expected: str) -> list[str]:
        """The rest of the next line that begins so; others are kept."""
        while True:
            words = self.process.next_words()
            assert words != [""], (
                f"it ended with {self.process.end()}; it said {self.words}; its log: {self.process.log.read_text()[-4000:]}"
            )
            if words[: len(expected)] == list(expected):
                return words[len(expected) :]
            self.words.append(words)

    def send(self, name: str = "SIGTERM") -> None:
        os.kill(self.process.pid, getattr(signal, name))

    def report(self) -> dict[str, Any]:
        """What it reports of its end."""
        found: dict[str, Any] = json.loads(" ".join(self.hear("ended")))
        return found

    def end(self, code: int = EXIT_CODE) -> None:
        assert self.process.end() == code, self.process.log.read_text()[-4000:]


@pytest.fixture
def told(jobs: Jobs, run_folder: Path) -> Iterator[Callable[..., Told]]:
    """`told(**request)`: a training on the test's run."""
    started: list[Told] = []

    def go(**request: Any) -> Told:
        started.append(Told(jobs, run_folder, **request))
        return started[-1]

    yield go
    for one in started:
        one.process.clean_up()


def check(run: Path, report: dict[str, Any]) -> None:
    """The run has what the report promises, and it is whole."""
    steps = laststep.open(run).steps() if (run / "laststep.json").exists() or run.exists() else []
    assert (report["step"] in steps) == report["committed"]
    assert (report["problem"] == "") == report["committed"] == (report["at_risk"] == "")
    if steps:
        state = laststep.load(run)["state"]
        assert state["n"] == steps[-1]
        assert state["t"].unique().tolist() == [float(steps[-1])]


@pytest.mark.parametrize("grace", ["30 s", *(pytest.param(f"{s} s", marks=pytest.mark.long) for s in (2, 5, 10))])  # fmt: skip
@pytest.mark.parametrize(
    "phase",
    ["training", "idle", "capture", "seal", "flush", "durable", "commit", "retention", "restore"],
)  # fmt: skip
def test_the_last_step_is_committed_whenever_the_signal_comes(
    told: Callable[..., Told], run_folder: Path, phase: str, grace: str
) -> None:
    trainer = told(phase=phase, preemption={"grace": grace})
    trainer.hear("at", phase)
    trainer.send()
    report = trainer.report()
    trainer.hear("unwound")
    trainer.end()
    check(run_folder, report)
    assert report["cause"] == "SIGTERM"
    assert report["committed"] or grace != "30 s"
