"""DeepSpeed: an engine that saves and loads with laststep, and the items of its state.

    engine = laststep.deepspeed.attach(engine, "runs/gpt")

or, in a loop that calls a Checkpointer itself,

    Checkpointer(run, model=deepspeed.model(engine), optimizer=deepspeed.optimizer(engine),
                 counts=deepspeed.progress(engine))

What is stored has the names and shapes of the plain model, whatever ZeRO, experts or pipeline
stages make of it on the ranks. Tested with DeepSpeed 0.19.
"""

from laststep.adapters.deepspeed.attach import attach
from laststep.adapters.deepspeed.items import model, optimizer, progress

__all__ = ["attach", "model", "optimizer", "progress"]
