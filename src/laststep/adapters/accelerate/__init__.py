"""Checkpoints of what an Accelerator has prepared, in place of its `save_state` and `load_state`.

    acc = laststep.accelerate.attach(acc, "runs/a")  # save_state() and load_state() as before

or, with a Checkpointer of one's own,

    laststep.Checkpointer("runs/a", items=laststep.accelerate.items(acc))
"""

from __future__ import annotations

from laststep.adapters.accelerate.attached import attach
from laststep.adapters.accelerate.prepared import items

__all__ = ["attach", "items"]
