"""What ranks do in the tests of checkpoints that are in shared memory."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from tasks import PATIENCE_S
from wraps import Fsdp2

import laststep
from laststep.errors import LaststepError
from laststep.tiers.nearest import NearestStore

_open = NearestStore.open


def leave_in_memory(base: str, run: str) -> None:
    """Save FSDP2 and its optimizer, and fail; all that was whole is kept beside the run."""
    trainer = Fsdp2()
    trainer.step(0)
    with contextlib.suppress(ZeroDivisionError), opened(base, run, trainer) as ckpt:
        ckpt.save(1).wait()
        1 / 0  # noqa: B018 (it fails)
    whole = trainer.full()
    if dist.get_rank() == 0:
        torch.save(whole, f"{run}.pt")


def restore(base: str, run: str, blind: int | None = None, without: int | None = None) -> str:
    """What comes of a restore: "exact", "other", or the error. That rank is `blind` to what the
    first has found in memory, as on another node, or is `without` a tier there."""
    rank = dist.get_rank()
    NearestStore.open = _open_elsewhere if rank == blind else _open
    trainer = Fsdp2()
    try:
        with opened(None if rank == without else base, run, trainer) as ckpt:
            ckpt.restore()
            expected, found = torch.load(f"{run}.pt"), trainer.full()
            same = all(torch.equal(expected[name], found[name]) for name in expected)
            return "exact" if same and expected.keys() == found.keys() else "other"
    except LaststepError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        NearestStore.open = _open


def opened(base: str | None, run: str, trainer: Fsdp2) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        tiers=[run] if base is None else [f"shm://{base}", run],
        items=trainer.items(),
        host_memory_bytes=128 << 20,
        options=laststep.Options(progress=False, deadline_s=PATIENCE_S, flush="thread"),
    )


def _open_elsewhere(store: NearestStore, named: dict[str, tuple[str, ...]]) -> None:
    _open(store, {folder: [f"/nowhere{place}" for place in named[folder]] for folder in named})
