"""Faults of processes and of the system around them: each a small function, each judged alike.

A trial takes some faults of the registry, one after the other on one run, each followed by the
judgement of `scene`. What this machine does not allow is noted, and is no pass.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import shim
import system_disk  # noqa: F401 (enters its faults)
import system_forks  # noqa: F401
import system_process  # noqa: F401
from report import NOT_HERE
from scene import Impossible, Scene
from system_faults import FAULTS
from tally import Violation

if TYPE_CHECKING:
    from pathlib import Path

    from tally import Tally

IN_A_TRIAL = 4


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """Some faults in a row; over the seeds each has its turn."""
    chance = random.Random(seed)
    order = sorted(FAULTS)
    random.Random(0).shuffle(order)
    chosen = [order[(seed * IN_A_TRIAL + place) % len(order)] for place in range(IN_A_TRIAL)]
    control = shim.Control(folder) if shim.is_loaded() else None
    for place, name in enumerate(chosen):
        scene = Scene(_place(folder, place), chance, tally, control)
        inject(name, scene)


def inject(name: str, scene: Scene) -> None:
    """One fault, and the judgement."""
    scene.tally.step(f"{name}:")
    try:
        scene.work(lambda trainer: trainer.save(2))  # something to lose
        FAULTS[name](scene)
    except Impossible as reason:
        scene.tally.note(f"{NOT_HERE}{name}: {reason}")
        return
    except Violation:
        scene.tally.fault(f"system: {name}")
        raise
    finally:
        if scene.control is not None:
            scene.control.disarm()
    if scene.harmless:
        scene.tally.note(f"system: no such call was made: {name}")
    else:
        scene.tally.fault(f"system: {name}")
    scene.judge()


def _place(folder: Path, place: int) -> Path:
    made = folder / f"{place}"
    made.mkdir()
    made.chmod(0o777)  # some trainers are nobody
    return made
