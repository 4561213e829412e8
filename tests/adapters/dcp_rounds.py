"""States that go through torch.distributed.checkpoint into a run and back, in one process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import laststep
from laststep.dcp import Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from laststep.errors import LaststepError

ALONE = [
    # Of torch.distributed.checkpoint itself, in a process that is no rank.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


def save(state: dict[str, Any], run: Path, step: int = 0, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.save(state, storage_writer=Writer(run, step=step, **options), planner=planner)


def load(state: dict[str, Any], run: Path, step: int | None = None, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.load(state, storage_reader=Reader(run, step, **options), planner=planner)


@contextlib.contextmanager
def failing(kind: type[LaststepError], *values: object) -> Iterator[None]:
    """Expect that DCP raises an error of ours, of this kind, which names all these values."""
    with pytest.raises(CheckpointException) as caught:
        yield
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, kind), repr(error)
    assert all(str(value) in str(error) for value in values), error


def steps(run: Path) -> list[int]:
    return laststep.open(run).steps()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 40)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def untrained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        flat = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for t in (a, b)]
        flat = [t.view(torch.uint8) for t in flat]
        return torch.equal(*flat)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b
