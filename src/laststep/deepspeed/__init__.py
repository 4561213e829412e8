"""Adapter for DeepSpeed: an engine that saves and loads with laststep, and its items.

    engine = laststep.deepspeed.attach(engine, "runs/gpt")

or, in a loop that calls a Checkpointer itself,

    Checkpointer(run, model=deepspeed.model(engine), optimizer=deepspeed.optimizer(engine),
                 counts=deepspeed.progress(engine))

Tensors are stored with the names and shapes of the plain model, however ZeRO, experts or pipeline
stages split it over the ranks. Tested with DeepSpeed 0.19.
"""

from laststep.deepspeed.attach import attach
from laststep.deepspeed.items import model, optimizer, progress

__all__ = ["attach", "model", "optimizer", "progress"]
