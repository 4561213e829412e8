"""Weights on a device that follow from masters there are left out, and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

SIDE = 2048


class Mixed:
    """Weights in bf16, and masters and moments in fp32."""

    def __init__(self) -> None:
        names = [f"w{number}" for number in range(6)]
        kinds = ("exp_avg", "exp_avg_sq", "master")
        self.optimizer = {
            name: {kind: torch.randn(SIDE, SIDE, device="cuda") for kind in kinds} for name in names
        }
        self.model = {
            name: torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for name in names
        }
        self.train(0.0)

    def train(self, by: float) -> None:
        for name, kept in self.optimizer.items():
            for tensor in kept.values():
                tensor.add_(by * torch.randn_like(tensor))
            self.model[name].copy_(kept["master"])


@pytest.mark.parametrize("capture", ["auto", "blocking"])
def test_weights_of_a_device_follow_from_their_masters(run_folder: Path, capture: str) -> None:
    state = Mixed()
    kept = {}
    with laststep.Checkpointer(
        run_folder,
        model=state.model,
        optimizer=state.optimizer,
        options=laststep.Options(derived=True, progress=False, capture=capture),
    ) as ckpt:
        for step, by in enumerate([0.1, 0.0, 1e-9, 0.1]):
            state.train(by)
            report = ckpt.save(step).result()
            (found,) = report.coding
            assert found.raw_bytes == 6 * 2 * SIDE * SIDE, step
            assert found.stored_bytes < 1000
            kept[step] = {name: weight.cpu() for name, weight in state.model.items()}
    for step, expected in kept.items():
        checkpoint = laststep.open(run_folder)[step]
        for name, weight in expected.items():
            assert torch.equal(checkpoint.tensor(f"model/{name}")[:], weight)
    state.train(1.0)
    with laststep.Checkpointer(
        run_folder,
        model=state.model,
        optimizer=state.optimizer,
        options=laststep.Options(derived=True, progress=False),
    ) as ckpt:
        ckpt.restore()
    assert all(torch.equal(state.model[name].cpu(), weight) for name, weight in kept[3].items())
