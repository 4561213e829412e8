"""A small training whose whole state is a number, so that any mixture of two states shows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from laststep.settings import as_keywords
from laststep.storage.files import FileReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POOL_BYTES = 64 << 20


class Training:
    """A model, an optimizer, a plain value and a blob above the size of one block."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.plain: dict[str, object] = {"n": -1, "list": [-1]}
        self.blob = {"data": torch.zeros(3 << 20, dtype=torch.uint8), "more": torch.zeros(5)}

    def items(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "plain": self.plain,
            "blob": self.blob,
        }

    @torch.no_grad()
    def become(self, n: int) -> None:
        for parameter in self.model.parameters():
            parameter.fill_(n)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, n)
        self.optimizer.param_groups[0]["lr"] = float(n)
        self.plain["n"] = n
        self.plain["list"][0] = n
        self.blob["data"].fill_(n)
        self.blob["more"].fill_(n)

    def values(self) -> dict[str, set[float]]:
        """Every number in each item."""
        state = self.optimizer.state
        return {
            "model": {x for p in self.model.parameters() for x in p.detach().unique().tolist()},
            "optimizer": {self.optimizer.param_groups[0]["lr"]}.union(
                *(s["momentum_buffer"].unique().tolist() for s in state.values())
            ),
            "plain": {self.plain["n"], self.plain["list"][0]},
            "blob": {*self.blob["data"].unique().tolist(), *self.blob["more"].unique().tolist()},
        }

    def is_wholly(self, n: int) -> bool:
        return all(found == {n} for found in self.values().values())


@pytest.fixture
def training() -> Training:
    made = Training()
    made.become(0)
    return made


@pytest.fixture
def fresh() -> Training:
    return Training()


@pytest.fixture
def opened(run_folder: Path) -> Callable[..., laststep.Checkpointer]:
    """`opened(training, **settings)`: a Checkpointer of the test's run."""

    def make(training: Training, **settings: object) -> laststep.Checkpointer:
        how = {"flush": "thread", "host_memory_bytes": POOL_BYTES, "progress": False, **settings}
        return laststep.Checkpointer(run_folder, items=training.items(), **as_keywords(how))

    return make


@pytest.fixture
def saved(opened: Callable[..., laststep.Checkpointer], run_folder: Path) -> Callable[..., Path]:
    """`saved(1, 2, 3)`: a run with these steps, in each of which all numbers are the step."""

    def make(*steps: int, **settings: object) -> Path:
        training = Training()
        with opened(training, **settings) as checkpointer:
            for step in steps:
                training.become(step)
                checkpointer.save(step)
        return run_folder

    return make


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many bytes were read of each data file so far, by its name."""
    found: dict[str, int] = {}
    read_into, counting = FileReader.read_into, threading.Lock()

    def counted(reader: FileReader, offset: int, into: memoryview) -> int:
        got = read_into(reader, offset, into)
        name = str(reader._path).rsplit("/", 1)[-1]
        with counting:  # several threads read
            found[name] = found.get(name, 0) + len(into)
        return got

    monkeypatch.setattr(FileReader, "read_into", counted)
    return found
