"""A run that is killed again and again, at any moment, has the losses of one that never was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN = Path(__file__).with_name("train.py")
SOURCE = TRAIN.parent.parent.parent / "src"
STEPS = 24


class Trainer:
    """Trains in a new process for each call, see `train.py`."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [os.environ["WARM_PYTHON"], str(TRAIN)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, log: Path, loader: str, *arguments: object) -> int:
        """How that process ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        options = ("--log", log, "--loader", loader, *arguments)
        self._server.stdin.write("\t".join(map(str, options)) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.close()


def losses(log: Path) -> list[tuple[int, str]]:
    lines = (line.split() for line in log.read_text().splitlines())
    return [(int(step), loss) for event, step, loss in lines if event == "loss"]


def starts(log: Path) -> list[int]:
    lines = (line.split() for line in log.read_text().splitlines())
    return [int(step) for event, step, _ in lines if event == "start"]


def moments(seed: int) -> list[tuple[int, float]]:
    """Three steps to die at, and how long after the step: often in the midst of its save."""
    chance = random.Random(seed)
    # Right in save(), while its flush is under way, and anywhere in the steps after it.
    delays = [chance.uniform(0, 0.003), chance.uniform(0.003, 0.03), chance.uniform(0, 0.1)]
    chance.shuffle(delays)
    at = [chance.randrange(2, 9), chance.randrange(9, 16), chance.randrange(16, STEPS)]
    return list(zip(at, delays, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "flush", "seed"),
    [
        pytest.param("plain", "process", 1, marks=pytest.mark.long),
        pytest.param("plain", "thread", 2, marks=pytest.mark.long),
        pytest.param(
            "torchdata",
            "process",
            3,
            marks=pytest.mark.skipif(find_spec("torchdata") is None, reason="needs torchdata"),
        ),
    ],
)
def test_killed_at_any_moment_the_losses_are_those_of_a_run_that_never_stopped(
    loader: str, flush: str, seed: int, trainer: Trainer, tmp_path: Path, run_folder: Path
) -> None:
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    assert trainer.train(plain, loader) == 0
    expected = dict(losses(plain))
    assert len(expected) == STEPS
    run = ("--run", run_folder, "--flush", flush)
    for step, delay_s in moments(seed):
        kill = ("--kill-at", step, "--kill-after-s", delay_s)
        assert trainer.train(saved, loader, *run, *kill) == -signal.SIGKILL
    assert trainer.train(saved, loader, *run) == 0
    found = losses(saved)
    assert [entry for entry in found if expected[entry[0]] != entry[1]] == []
    assert {step for step, _ in found} == set(expected)
    assert starts(saved)[-1] > 0  # something was really resumed
