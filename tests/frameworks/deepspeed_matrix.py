"""Saves in many ways, or loads what another number of ranks has saved: FOLDER OUT save|load WAY…

`save`: of each way an engine is trained, saved, trained on; a new one loads that and goes on.
Writes the losses of both. `load`: an engine loads what is in FOLDER, saves it to FOLDER.N as it
is there, and goes on.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed_ways import engine_of, start, step_of

import laststep

folder, out, what, *ways = sys.argv[1:]
logging.basicConfig(level=logging.WARNING)
rank, ranks = start()


def attached(way: str, run: str) -> object:
    return laststep.deepspeed.attach(
        engine_of(way), run, options=laststep.Options(flush="thread", progress=False)
    )


def trained(engine: object, way: str) -> list[str]:
    losses = [step_of(engine, way).hex() for _ in range(3)]
    engine.destroy()
    return losses


def save(way: str, run: str) -> dict[str, list[str]]:
    engine = attached(way, run)
    assert engine.load_checkpoint(run) == (None, None)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        step_of(engine, way)
    assert engine.save_checkpoint(run) is True
    uninterrupted = trained(engine, way)
    engine = attached(way, run)
    assert engine.load_checkpoint(run)[1] == {}
    assert engine.global_steps == 3
    return {"uninterrupted": uninterrupted, "resumed": trained(engine, way)}


def load(way: str, run: str) -> dict[str, list[str]]:
    if rank == 0:
        shutil.copytree(run, f"{run}.{ranks}")
    dist.barrier()
    engine = attached(way, f"{run}.{ranks}")
    assert engine.load_checkpoint(run)[0] is not None
    assert engine.global_steps == 3
    assert engine.save_checkpoint(f"{run}.{ranks}") is True
    return {"resumed": trained(engine, way)}


found = {way: {"save": save, "load": load}[what](way, f"{folder}/{way}") for way in ways}
if rank == 0:
    Path(out).write_text(json.dumps(found))
