"""Lazy captures whose tensors are replaced, resized, freed or swapped under them: exact or torn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import raises
from guards import guard_slots
from laststep.capture import mover
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20


class Gate:
    """Holds the capture thread before its n-th lazy copy of each save until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.after = 0

    def close(self, after: int) -> None:
        self.after = after
        self.reached.clear()
        self.opened.clear()

    def pass_through(self) -> None:
        self.after -= 1
        if self.after == -1:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, land = Gate(), mover.land

    def held(*arguments: object) -> None:
        made.pass_through()
        land(*arguments)

    monkeypatch.setattr(mover, "land", held)
    guard_slots(monkeypatch.setattr)
    yield made
    made.opened.set()


def step() -> None:
    """An optimizer's step, so that the next save may be lazy."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def larger(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((tensor.numel() + 3 * MIB,), 9.0)


def smaller(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((3,), 9.0)


def one_element(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((1,), 9.0)


def as_large(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 9.0)


def another_dtype(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.double()


def strided(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((2 * tensor.numel(),), 9.0)[::2]


def pointed_elsewhere(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((tensor.numel() + MIB,), 9.0))


def grown_in_place(tensor: torch.Tensor) -> None:
    tensor.resize_(tensor.numel() + MIB)


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def shrunk(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes // 2)


def written(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def swapped_and_back(tensor: torch.Tensor) -> None:
    """As one evaluates with averaged weights; here the copy is made only after it."""
    kept = tensor.clone()
    tensor.fill_(9)
    tensor.copy_(kept)


EXACT = [
    larger,
    smaller,
    one_element,
    as_large,
    another_dtype,
    strided,
    pointed_elsewhere,
    swapped_and_back,
]
TORN = [grown_in_place, freed, shrunk, written]


# In the midst of the large tensor; before it too, in the long run.
@pytest.mark.parametrize("after", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("change", [*EXACT, *TORN])
def test_a_lazy_capture_survives_any_change_of_its_tensors_or_is_torn(
    change: Callable[[torch.Tensor], None], after: int, run_folder: Path, gate: Gate
) -> None:
    """The state passes through a pool of four slots; a large tensor and many small ones."""
    state = {"big": torch.arange(9.0 * MIB)}
    state |= {f"t{n}": torch.full((1000,), float(n)) for n in range(20)}
    whole = {name: tensor.clone() for name, tensor in state.items()}
    checkpointer = laststep.Checkpointer(
        run_folder,
        state=state,
        options=laststep.Options(capture="lazy", flush="thread"),
        host_memory_bytes=64 * MIB,
    )
    step()
    gate.close(1000)
    before = checkpointer.save(0)
    before.captured.wait(PATIENCE_S)
    step()
    gate.close(after)
    handle = checkpointer.save(1)
    assert gate.reached.wait(PATIENCE_S)
    for name in ("big", "t7"):
        change(state[name])
    gate.opened.set()
    if change in EXACT:
        handle.wait(PATIENCE_S)
    else:
        with raises(laststep.TornCaptureError, where="state/"):
            handle.wait(PATIENCE_S)
    state |= {name: tensor.clone() for name, tensor in whole.items()}
    checkpointer.save(2).wait(PATIENCE_S)
    checkpointer.close()
    steps = laststep.open(run_folder).steps()
    assert steps == ([0, 1, 2] if change in EXACT else [0, 2])
    for number in steps:
        found = laststep.load(run_folder, step=number)["state"]
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_weights_swapped_for_their_average_while_they_are_copied_are_torn(
    run_folder: Path, gate: Gate
) -> None:
    state = {"weights": torch.arange(9.0 * MIB)}
    checkpointer = laststep.Checkpointer(
        run_folder,
        state=state,
        options=laststep.Options(capture="lazy", flush="thread"),
        host_memory_bytes=64 * MIB,
    )
    step()
    gate.close(1)
    handle = checkpointer.save(0)
    assert gate.reached.wait(PATIENCE_S)
    kept = state["weights"].clone()
    state["weights"].mul_(0.5)
    gate.opened.set()
    with raises(laststep.TornCaptureError, where="state/weights"):
        handle.wait(PATIENCE_S)
    state["weights"].copy_(kept)
    checkpointer.close()
    assert not handle.committed.done()


def test_a_lazy_save_leaves_storages_resizable(run_folder: Path) -> None:
    """torch forbids to resize what an array was made of, and offloading has to."""
    state = {"x": torch.ones(1000)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(capture="lazy")
    ) as checkpointer:
        step()
        checkpointer.save(0).wait(PATIENCE_S)
        state["x"].untyped_storage().resize_(0)
