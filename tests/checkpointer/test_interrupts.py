"""Ctrl-C in the midst of save(), and what must not stay behind when a save is over."""

from __future__ import annotations

import gc
import signal
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import laststep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 60.0


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A KeyboardInterrupt out of nowhere, as a person or a preemption handler would raise it."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("flush", ["process", "thread"])
@pytest.mark.parametrize("after_s", [0.001, 0.004, 0.01, 0.02, 0.04])
def test_a_save_after_an_interrupted_one_is_whole(
    run_folder: Path, after_s: float, flush: str
) -> None:
    state = {f"t{i}": torch.zeros(2_250_000) for i in range(12)}
    with laststep.Checkpointer(
        run_folder, items={"state": state}, flush=flush, host_memory_bytes=64 << 20
    ) as checkpointer:
        checkpointer.save(0).wait(PATIENCE_S)
        for step in range(1, 4):
            for tensor in state.values():
                tensor.fill_(step)
            try:
                with interrupted_after(after_s):
                    checkpointer.save(step)
            except KeyboardInterrupt:
                pass
            for tensor in state.values():
                tensor.fill_(-1)  # training goes on: nothing of this may be stored
        for tensor in state.values():
            tensor.fill_(9)
        assert checkpointer.save(9).wait(PATIENCE_S)
    for checkpoint in laststep.open(run_folder):
        for name in state:
            with checkpoint:
                stored = checkpoint.tensor(f"state/{name}")[:]
            assert torch.equal(stored, torch.full_like(stored, checkpoint.step))
    assert laststep.open(run_folder).steps()[-1] == 9


class Fresh:
    """Gives new tensors at every save, as some libraries do."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        tensor = torch.zeros(1000)
        self.given.append(weakref.ref(tensor))
        return {"x": tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


def test_a_save_that_is_over_holds_no_tensors(run_folder: Path) -> None:
    owner = Fresh()
    with laststep.Checkpointer(run_folder, owner=owner, flush="thread") as checkpointer:
        handles = [checkpointer.save(step) for step in range(4)]
        checkpointer.wait()
        gc.collect()
        assert all(handle.report.committed_s for handle in handles)
        assert [ref() for ref in owner.given] == [None] * 4


def test_a_checkpointer_that_could_not_be_made_leaves_the_optimizer_alone(run_folder: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(laststep.Usage, match="Keep"):
        laststep.Checkpointer(run_folder, model=model, optimizer=optimizer, keep=2)  # type: ignore[arg-type]
    for _ in range(5):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
