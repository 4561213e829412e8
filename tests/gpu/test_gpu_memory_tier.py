"""State of a device in shared memory: what did not change is there once, and comes back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.memory import segments
from laststep.tiers import snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

MB = 1 << 20


@pytest.fixture
def base() -> Iterator[Path]:
    """Where segments lie: in memory, since a device writes there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {
        "frozen": torch.arange(24 * MB, dtype=torch.float32, device="cuda"),
        "trained": torch.full((6 * MB,), value, device="cuda"),
    }


def opened(base: Path, run: Path, state: dict[str, torch.Tensor]) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        tiers=[f"shm://{base}", str(run)],
        state=state,
        host_memory_bytes=512 * MB,
        options=laststep.Options(progress=False),
    )


def fail_after(base: Path, run: Path, steps: int) -> list[laststep.SaveReport]:
    """Save so many steps, and end by an error; what the saves came to."""
    state, reports = state_of(0.0), []

    def train() -> None:
        with opened(base, run, state) as ckpt:
            ckpt.restore()
            for step in range(steps):
                state["trained"].fill_(step)
                reports.append(ckpt.save(step).result())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    return reports


def test_what_did_not_change_is_in_memory_once_and_all_of_it_comes_back(
    base: Path, run_folder: Path
) -> None:
    reports = fail_after(base, run_folder, 3)
    assert all("shm://" in report.tiers for report in reports)
    assert reports[-1].unchanged_bytes > 80 * MB  # it did not cross to the host again
    (segment,) = segments.found(str(base))
    (save,) = snapshots.records_in(segment)
    assert save.at.step == 2
    for file in run_folder.glob("step-*/*.safetensors"):
        with file.open("r+b") as stored:
            stored.seek(file.stat().st_size // 2)
            stored.write(b"damage")  # so that it can come out of memory alone
    state = state_of(-1.0)
    state["frozen"].zero_()
    with opened(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 2
    assert torch.equal(state["frozen"], state_of(0.0)["frozen"])
    assert bool((state["trained"] == 2).all())
