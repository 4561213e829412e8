"""What ranks do in the tests of a tier that takes only some items."""

from __future__ import annotations

import shutil

import torch
import torch.distributed as dist
from tasks import PATIENCE_S
from wraps import Fsdp2

import laststep
from laststep.errors import LaststepError


def replicate(primary: str, weights: str) -> None:
    """Save FSDP2 and its optimizer, of which the model is replicated; then lose the primary."""
    trainer = Fsdp2()
    trainer.step(0)
    with opened(primary, weights, trainer) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
    whole = trainer.full()
    if dist.get_rank() == 0:
        torch.save(whole, f"{primary}.pt")
        shutil.rmtree(primary)


def restore(primary: str, weights: str) -> list[str]:
    """What comes of restoring all over both tiers, and the model alone from the one that has it."""
    trainer, told = Fsdp2(), []
    try:
        with opened(primary, weights, trainer) as ckpt:
            ckpt.restore()
    except LaststepError as error:
        told.append(f"{type(error).__name__}: {error.what}")
    with opened(weights, None, trainer) as ckpt:
        told.append(f"step {ckpt.restore(only=['model']).step}")
        expected, found = torch.load(f"{primary}.pt"), trainer.full()
        weights_of = [name for name in expected if ":" not in name]  # the rest is the optimizer's
        same = all(torch.equal(expected[name], found[name]) for name in weights_of)
        told.append("exact" if same else "other")
    return told


def opened(primary: str, weights: str | None, trainer: Fsdp2) -> laststep.Checkpointer:
    more = [] if weights is None else [laststep.Tier(weights, items=("model",))]
    return laststep.Checkpointer(
        tiers=[primary, *more],
        items=trainer.items(),
        host_memory_bytes=128 << 20,
        options=laststep.Options(progress=False, deadline_s=PATIENCE_S, flush="thread"),
    )
