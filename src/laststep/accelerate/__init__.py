"""Adapter for Accelerate: replaces `save_state` and `load_state` of an Accelerator.

    acc = laststep.accelerate.attach(acc, "runs/a")  # save_state() and load_state() as before

or, with your own Checkpointer,

    laststep.Checkpointer("runs/a", items=laststep.accelerate.items(acc))
"""

from __future__ import annotations

from laststep.accelerate.attached import attach, items

__all__ = ["attach", "items"]
