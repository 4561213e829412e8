"""What did not change stays on the device, and is stored all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.capture.kernels import Fingerprint, kernels_on, prepare_kernels
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

MB = 1 << 20
PATIENCE_S = 60


class Lora(torch.nn.Module):
    """Much that is frozen, between a little that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.ModuleList(
            torch.nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(12)
        )
        self.base.requires_grad_(False)
        self.down = torch.nn.ParameterList(
            torch.nn.Parameter(1e-4 * torch.randn(8, 2048, device="cuda")) for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down in zip(self.base, self.down, strict=True):
            x = torch.tanh(base(x)) + (x @ down.T).sum(1, keepdim=True)
        return x


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Lora()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 2048, device="cuda")).square().mean().backward()
        self.optimizer.step()

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: t.detach().cpu().clone() for name, t in self.model.state_dict().items()}


def is_stored(run: Path, step: int, wanted: dict[str, torch.Tensor]) -> bool:
    stored = laststep.open(run)[step]
    assert not stored.verify().damage
    return all(torch.equal(stored.tensor(f"model/{n}")[:], t) for n, t in wanted.items())


@pytest.mark.parametrize("flush", ["process", "thread"])
def test_what_is_frozen_crosses_to_the_host_once(tmp_path: Path, flush: str) -> None:
    training = Training()
    wanted = {}
    with laststep.Checkpointer(
        tmp_path,
        model=training.model,
        optimizer=training.optimizer,
        options=laststep.Options(flush=flush),
    ) as ckpt:
        ckpt.restore()
        for step in range(5):
            training.step()
            wanted[step] = training.copied()
            handle = ckpt.save(step)
            handle.wait(PATIENCE_S)
            size, stayed = handle.report.size_bytes, handle.report.unchanged_bytes
            assert (stayed > 150 * MB) == (step > 0), (step, size, stayed)
            if step == 2:
                with torch.no_grad():
                    training.model.base[5].weight[7, 7] += 1  # one element of what is frozen
    for step, state in wanted.items():
        assert is_stored(tmp_path, step, state)


def kill(flusher: Callable[[], int]) -> None:
    victim = flusher()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: is_dead(victim))


def is_dead(process: int) -> bool:
    try:
        return not Path(f"/proc/{process}/cmdline").read_bytes()  # nobody has waited for it yet
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_after_the_death_of_the_flusher_everything_crosses_once_more(
    tmp_path: Path, flusher: Callable[[], int]
) -> None:
    training = Training()
    with laststep.Checkpointer(
        tmp_path, model=training.model, optimizer=training.optimizer
    ) as ckpt:
        ckpt.restore()
        for step in range(4):
            training.step()
            wanted = training.copied()
            handle = ckpt.save(step)
            handle.wait(PATIENCE_S)
            assert (handle.report.unchanged_bytes > 0) == (step in (1, 3))
            assert is_stored(tmp_path, step, wanted)
            if step == 1:
                kill(flusher)


def test_a_state_that_changes_throughout_is_moved_and_written_whole(tmp_path: Path) -> None:
    state = {"w": torch.randn(48 * MB // 4, device="cuda")}
    with laststep.Checkpointer(tmp_path, state=state) as ckpt:
        ckpt.restore()
        for step in range(3):
            state["w"] += 1
            handle = ckpt.save(step)
            handle.wait(PATIENCE_S)
            assert handle.report.unchanged_bytes == 0
    assert torch.equal(laststep.open(tmp_path)[2].tensor("state/w")[:], state["w"].cpu())


@pytest.mark.parametrize("at", [0, 1, 2, 4, 8])
def test_digests_see_every_single_byte_and_every_pair(at: int) -> None:
    device = torch.device("cuda", 0)
    prepare_kernels(device)
    kernels = kernels_on(device)
    assert kernels is not None
    size = 3 * 4096 + 5
    data = torch.randint(256, (at + size,), dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream()
    digests = Fingerprint([(data.data_ptr() + at, size)], kernels, stream, strong=True)
    before = digests.sums(0, 1)[1].cpu()
    assert torch.equal(before, digests.sums(0, 1)[1].cpu())
    for byte in range(0, size, 97):
        data[at + byte] ^= 1
        assert not torch.equal(before, digests.sums(0, 1)[1].cpu())
        data[at + byte] ^= 1
    swapped = data.clone()
    swapped[at : at + 8], swapped[at + 8 : at + 16] = data[at + 8 : at + 16], data[at : at + 8]
    other = Fingerprint([(swapped.data_ptr() + at, size)], kernels, stream, strong=True)
    assert not torch.equal(before, other.sums(0, 1)[1].cpu())
