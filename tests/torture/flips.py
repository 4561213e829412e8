"""Flip single bits in the files of a checkpoint, and judge what a restore then does.

A restore may give the state of the newest checkpoint bit by bit, fall back to the older one and say
so, or raise `Corrupt`. It never gives anything else. A flip that changes nothing that is used has
to lie in unused padding, and `verify` must see every flip that a restore sees.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import laststep
import state
from laststep.catalog.run import Run
from laststep.catalog.verify import verify_checkpoint
from laststep.errors import Corrupt
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

OLDER, NEWER = 4, 5


class Violated(Exception):
    """Something happened that must never happen."""


@dataclass(slots=True)
class Flipped:
    """What the flips came to, by file and by outcome."""

    flips: int = 0
    files: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


def torture(folder: Path, *, flips: int, seed: int) -> Flipped:
    """Flip that many bits, one at a time; `Violated` at the first thing that must not be."""
    newer = _make(folder)
    chance = random.Random(seed)
    files = sorted(newer.iterdir())
    result = Flipped()
    for number in range(flips):
        file = chance.choice(files)
        byte, bit = _place(chance, file), chance.randrange(8)
        label = f"flip {number} of seed {seed}: bit {bit} of byte {byte} of {file.name}"
        _flip(file, byte, bit)
        try:
            outcome = _explicit(folder) if number % 4 == 0 else _newest(folder, newer)
            _agree_with_verify(folder, newer, outcome)
        except Violated as error:
            raise Violated(f"{label}: {error}") from error
        finally:
            _flip(file, byte, bit)
        result.flips += 1
        result.files[file.name] += 1
        result.outcomes[outcome] += 1
    if _newest(folder, newer) != "exact, the flip lies in unused padding":
        raise Violated("the checkpoint is not what it was after all flips were undone")
    return result


def _make(folder: Path) -> Path:
    """A run of two checkpoints; the folder of the newer."""
    live = state.new()
    with laststep.Checkpointer(str(folder), flush="thread", progress=False, **live) as checkpointer:
        for step in (OLDER, NEWER):
            state.advance(live, step)
            checkpointer.save(step, metrics={"loss": 0.5}).wait()
    newest = Run.open(DirectoryStore(folder)).newest()
    if newest is None or newest.step != NEWER:
        raise Violated(f"the run has {newest} where step {NEWER} was saved")
    return folder / newest.folder


def _place(chance: random.Random, file: Path) -> int:
    """Any byte; every third one in the first 8 KiB, where headers are, or in the last 4 KiB."""
    size = file.stat().st_size
    where = chance.random()
    if where < 0.2:
        return chance.randrange(min(size, 8192))
    if where < 0.33:
        return chance.randrange(max(0, size - 4096), size)
    return chance.randrange(size)


def _flip(file: Path, byte: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(byte)
        old = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([old ^ (1 << bit)]))


def _restore(folder: Path, step: int | None) -> tuple[state.Live, laststep.Restored]:
    live = state.new()
    with laststep.Checkpointer(str(folder), flush="thread", progress=False, **live) as checkpointer:
        return live, checkpointer.restore(step)


def _explicit(folder: Path) -> str:
    """Ask for the damaged one by its step: there is nothing to fall back to."""
    try:
        live, restored = _restore(folder, NEWER)
    except Corrupt:
        return "asked for: Corrupt"
    _must_be_exact(live, restored, NEWER)
    return "exact, the flip lies in unused padding"


def _newest(folder: Path, newer: Path) -> str:
    """Ask for the newest good one."""
    try:
        live, restored = _restore(folder, None)
    except Corrupt:
        return "newest: Corrupt"
    if restored.step == NEWER:
        _must_be_exact(live, restored, NEWER)
        return "exact, the flip lies in unused padding"
    _must_be_exact(live, restored, OLDER)
    if not any(newer.name in str(skipped) for skipped in restored.skipped):
        raise Violated(f"fell back without naming {newer.name}: {restored.skipped}")
    return "newest: fell back to the older one and said so"


def _must_be_exact(live: state.Live, restored: laststep.Restored, step: int) -> None:
    wrong = state.wrong(live, step)
    if restored.step != step or wrong:
        raise Violated(f"restored {restored.step} where {step} was due, wrong: {wrong}")


def _agree_with_verify(folder: Path, newer: Path, outcome: str) -> None:
    damage = verify_checkpoint(DirectoryStore(folder), newer.name, threads=2).damage
    if not damage and "exact" not in outcome:
        raise Violated(f"{outcome}, but verify finds no damage")
