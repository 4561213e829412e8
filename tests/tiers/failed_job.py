"""A job with shared memory, and one that fails after its saves: what it kept there stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch


def job(base: Path, run: Path, state: torch.Tensor, *replicas: Path) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        tiers=[f"shm://{base}", *map(str, (run, *replicas))],
        items={"state": {"all": state}},
        options=laststep.Options(progress=False, flush="thread"),
        host_memory_bytes=160 << 20,
    )


def fail_after(
    ckpt: laststep.Checkpointer,
    state: torch.Tensor,
    saves: Mapping[int, float],
    until: Callable[[], object] = bool,
) -> None:
    """Restore, save each step with all elements of that value, and fail."""

    def train() -> None:
        with ckpt:
            ckpt.restore()
            for step, value in saves.items():
                state.fill_(value)
                ckpt.save(step).result()
            until()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
