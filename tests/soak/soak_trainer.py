"""The trainer of the soak: saves about every second, and says what it has been promised.

It prints one line per thing that happened: `restored STEP`, `holds TIER STEP`, `takes {…}`,
`failed …`; and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import sys
import threading
import time
from pathlib import Path

import torch

import laststep
from laststep.memory import segments

MB = 1 << 20
LOOKS_S = 5.0


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # whole, whichever thread speaks


def state_of(step: int) -> dict[str, torch.Tensor]:
    """What is saved at a step: a part that changes, and one that does not."""
    return {
        "weight": torch.full((4 * MB,), float(step)),
        "small": torch.full((7,), step, dtype=torch.int64),
        "frozen": torch.arange(MB, dtype=torch.float32),
    }


def is_of(state: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(state[name], value) for name, value in state_of(step).items())


def tell(event: object) -> None:
    match event:
        case laststep.events.TierHolds():
            say("holds", event.tier, event.step)
        case laststep.events.Committed():
            say("holds", "primary", event.step)


def children_of(parent: int) -> list[int]:
    """The processes whose parent is `parent`, zombies too."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            stat = (folder / "stat").read_text()
            # The second field is the command in parentheses, which may contain anything.
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                children.append(int(folder.name))
    return children


def look(primary: str) -> None:
    """Say what this process and its flusher take."""
    pids = [os.getpid(), *children_of(os.getpid())]
    resident = [
        int(line.split()[1]) // 1024
        for pid in pids
        for line in _lines(f"/proc/{pid}/status")
        if line.startswith("RssAnon")
    ]
    takes = {
        "memory_mb": sum(resident),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "shared_mb": sum(one.size_bytes for one in segments.found(run=primary)) // MB,
    }
    say("takes", json.dumps(takes))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # a flusher that was killed just now
        return []


def train(primary: str, far: str, chance: random.Random) -> None:
    few, state = laststep.Keep(last=3), state_of(-1)
    tiers = ["shm://", laststep.Tier(primary, keep=few), laststep.Tier(far, keep=few)]
    with laststep.Checkpointer(
        tiers=tiers,
        state=state,
        host_memory_bytes=192 * MB,
        options=laststep.Options(progress=False, subscribers=[tell]),
    ) as ckpt:
        found = ckpt.restore()
        if found.step is not None and not is_of(state, found.step):
            say("failed: what was restored is not what was saved at step", found.step)
            os._exit(4)
        say("restored", -1 if found.step is None else found.step)
        step, looked_s = found.next_step, time.monotonic()
        while not select.select([0], [], [], 2 * chance.random())[0]:
            for name, value in state_of(step).items():
                state[name].copy_(value)
            try:
                ckpt.save(step)
            except laststep.LaststepError as error:  # an earlier one failed: it is told once
                say("told", type(error).__name__)
            step += 1
            if time.monotonic() > looked_s + LOOKS_S:
                looked_s = time.monotonic()
                look(primary)


if __name__ == "__main__":
    try:
        train(sys.argv[1], sys.argv[2], random.Random(int(sys.argv[3])))
    except laststep.LaststepError as error:
        say("failed:", type(error).__name__, " ".join(str(error).split()))
        sys.exit(3)
