"""What ranks do in the tests of runs in object stores."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from tasks import opened
from wraps import Fsdp2

from laststep.storage import objects


def come_back(run: str, settings: dict[str, str]) -> dict[str, float]:
    """Restore what a job of another size has saved; what the parameters come to."""
    os.environ.update(settings)
    objects._probed.clear()
    trainer = Fsdp2()
    with opened(run, **trainer.items()) as c:
        assert c.restore().step == 2
    return {name: float(tensor.double().sum()) for name, tensor in trainer.full().items()}


def save_and_come_back(run: str, settings: dict[str, str], *, flush: str = "process") -> int:
    """Two saves, and a restore by another Checkpointer; the step that it finds. Each rank has keys
    of its own name where the server takes any."""
    os.environ.update(settings)
    if settings["AWS_ACCESS_KEY_ID"] == "rank":
        os.environ["AWS_ACCESS_KEY_ID"] = f"rank{dist.get_rank()}"
    objects._probed.clear()
    trainer = Fsdp2()
    trainer.step(0)
    with opened(run, flush=flush, **trainer.items()) as c:
        c.restore()
        c.save(1).wait()
        trainer.step(1)
        c.save(2).wait()
    before = trainer.full()
    other = Fsdp2()
    with opened(run, flush=flush, **other.items()) as c:
        restored = c.restore()
    for name, tensor in other.full().items():
        assert torch.equal(tensor, before[name]), name
    assert restored.step is not None
    return restored.step
