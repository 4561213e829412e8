"""Adapter for DeepSpeed: an engine that saves and loads with laststep, and its items.

    engine = laststep.deepspeed.attach(engine, "runs/gpt")

Tensors are stored with the names and shapes of the plain model, however ZeRO, experts or pipeline
stages split it over the ranks. A loop of your own passes the items to a Checkpointer.
"""

from laststep.deepspeed.attach import attach
from laststep.deepspeed.items import model, optimizer, progress

__all__ = ["attach", "model", "optimizer", "progress"]
