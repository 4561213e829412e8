"""Trains with a DeepSpeed engine that saves every second step: RUN LOSSES WAY STEPS."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from deepspeed_ways import engine_of, start, step_of

import laststep

run, losses, way, steps = sys.argv[1:5]
logging.basicConfig(level=logging.WARNING)
rank, _ = start()
engine = laststep.deepspeed.attach(engine_of(way), run)
folder, client = engine.load_checkpoint(run)
if folder is None:
    torch.manual_seed(1 + rank)
else:
    assert client["data"].tolist() == [engine.global_steps] * 3
while engine.global_steps < int(steps):
    loss = step_of(engine, way)
    if rank == 0:
        with Path(losses).open("a") as file:
            file.write(f"{engine.global_steps} {loss.hex()}\n")
    if engine.global_steps % 2 == 0:
        engine.checkpointer.wait()  # steps are so quick that no save would be over before the kill
        data = torch.full((3,), engine.global_steps)
        engine.save_checkpoint(run, client_state={"data": data, "rank": rank})
engine.destroy()
