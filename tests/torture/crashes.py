"""Cut the power after every system call of a history, in a model of the disk.

The model and what must hold after each cut are those of tests/crash. Each trial takes one history,
every other time a random one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import scenarios
from tally import Violation

if TYPE_CHECKING:
    from tally import Tally

WAYS = 64
"""So many ways to lose what was not synced are tried after each call."""


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """One history, cut after every call."""
    known = scenarios.SCENARIOS
    chosen = known[seed // 2 % len(known)] if seed % 2 else scenarios.random_scenario(seed)
    tally.step(f"{chosen.name}: power cut after every call, up to {WAYS} ways each")
    memory = Path("/dev/shm")  # the model knows what is durable, the disk need not
    place = memory / folder.name if memory.is_dir() else folder
    place.mkdir(exist_ok=True)
    try:
        explored = scenarios.explore(place, budget=WAYS, seed=seed, scenarios=(chosen,))
    except scenarios.Violated as violated:
        raise Violation("wrong", str(violated)) from violated
    finally:
        shutil.rmtree(place, ignore_errors=True)
    tally.fault("power cut after a system call (model)", explored.cuts)
    tally.note("power cut: different states of the disk, each judged", explored.distinct)
    tally.checkpoint(explored.distinct)
