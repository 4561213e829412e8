"""Flip single bits in the files of a checkpoint, and judge what a restore then does.

Every byte that docs/format.md puts under a digest is mapped before anything is flipped. After a
flip in one of these a restore falls back to the older checkpoint and says so, or raises
`CorruptError`, and `verify` finds the damage. Restores do not read the headers of data files: a
flip in one of those hurts none, and `verify` names the header. Only a flip outside of all of them
may go unnoticed, and then the restore gives the state of the newest checkpoint bit by bit. Nothing
else ever happens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from tally import Tally, Violation

import laststep
import state
from laststep.catalog.attempt import read_index
from laststep.catalog.run import Run
from laststep.constants import MANIFEST_NAME
from laststep.errors import CorruptError
from laststep.format import manifest
from laststep.format.index import RAW
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

FLIPS = 50
"""So many in a trial, one after the other, each undone before the next."""

OLDER, NEWER = 4, 5
EXACT = "exact"
OUTSIDE = "exact, the byte is under no digest"
SPARE = "exact, the bit means nothing in what is encoded"
IN_A_HEADER = "exact, and verify names the header"
HEADER = "a header"
ENCODED = "an encoded block"
"""A digest covers what it decodes to; a few bits of zstandard's frames are ignored by all."""


class Covered(NamedTuple):
    """Bytes of a file that one digest covers."""

    start: int
    stop: int
    what: str


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """Flip bits of the newer of two checkpoints, one at a time, and see what becomes of it."""
    flip(folder / "run", seed, tally, flips=FLIPS)


def flip(run: Path, seed: int, tally: Tally, *, flips: int) -> None:
    """That many."""
    newer = _make(run)
    chance = random.Random(seed)
    files = sorted(newer.iterdir())
    covered = {file.name: covered_bytes(newer, file.name) for file in files}
    for number in range(flips):
        file = chance.choice(files)
        byte, bit = _place(chance, file), chance.randrange(8)
        tally.step(f"flip bit {bit} of byte {byte} of {file.name}")
        tally.fault(f"bit flipped in {file.name}")
        _flip(file, byte, bit)
        outcome = _explicit(run) if number % 4 == 0 else _newest(run, newer)
        outcome = _judge(outcome, byte, covered[file.name])
        _agree_with_verify(run, newer, outcome)
        tally.note(f"bit flipped: {outcome}")
        tally.checkpoint()
        _flip(file, byte, bit)
    if _newest(run, newer) != EXACT:
        raise Violation("wrong", "the checkpoint is not what it was after all flips were undone")


def covered_bytes(folder: Path, name: str) -> tuple[Covered, ...]:
    """What of a file of a sound checkpoint is under a digest, by the manifest and the index; of a
    file that was written for an earlier checkpoint, what this one needs of it."""
    size = (folder / name).stat().st_size
    decided = manifest.decode((folder / MANIFEST_NAME).read_bytes(), where=str(folder))
    if not isinstance(decided, manifest.Commit):
        raise Violation("wrong", f"{folder} is no checkpoint")
    if name in (MANIFEST_NAME, "index-r00000"):
        # A manifest is its content and the digest of that, and so is an index: no more.
        return (Covered(0, size, name),)
    index = read_index(DirectoryStore(folder.parent), folder.name, decided, 0)
    number = next((n for n, file in enumerate(index.files) if file.name == name), None)
    if number is None:
        return ()  # the format knows no such file
    ranges: set[Covered] = set()
    if name.endswith(".safetensors"):
        length = int.from_bytes((folder / name).read_bytes()[:8], "little")
        ranges.add(Covered(0, 8 + length, HEADER))
    for stored in index.layouts:
        refs = stored.refs()
        for ref in [*refs, *(ref.base.block for ref in refs if ref.base is not None)]:
            if ref.file == number:
                what = "a block" if ref.encoding == RAW else ENCODED
                ranges.add(Covered(ref.offset, ref.offset + ref.size_bytes, what))
    return tuple(sorted(ranges))


def _judge(outcome: str, byte: int, covered: tuple[Covered, ...]) -> str:
    """The outcome, if it is one that a flip of that byte may have."""
    under = [part.what for part in covered if part.start <= byte < part.stop]
    if under == [HEADER]:
        if outcome != EXACT:
            raise Violation("wrong", f"{outcome}, but the byte is in {under}")
        return IN_A_HEADER
    if outcome != EXACT:
        return outcome
    if under == [ENCODED]:
        return SPARE
    if under:
        raise Violation("wrong", f"restored as if nothing had changed, but the byte is in {under}")
    return OUTSIDE


def _make(folder: Path) -> Path:
    """A run of two checkpoints; the folder of the newer."""
    live = state.new()
    with laststep.Checkpointer(
        str(folder),
        options=laststep.Options(flush="thread", progress=False),
        compression=state.COMPRESSION,
        **live,
    ) as checkpointer:
        for step in (OLDER, NEWER):
            state.advance(live, step)
            checkpointer.save(step, metrics={"loss": 0.5}).wait()
    newest = Run.open(DirectoryStore(folder)).newest()
    if newest is None or newest.step != NEWER:
        raise Violation("wrong", f"the run has {newest} where step {NEWER} was saved")
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
    with laststep.Checkpointer(
        str(folder), options=laststep.Options(flush="thread", progress=False), **live
    ) as checkpointer:
        return live, checkpointer.restore(step)


def _explicit(folder: Path) -> str:
    """Ask for the damaged one by its step: there is nothing to fall back to."""
    try:
        live, restored = _restore(folder, NEWER)
    except CorruptError:
        return "asked for: Corrupt"
    _must_be_exact(live, restored, NEWER)
    return EXACT


def _newest(folder: Path, newer: Path) -> str:
    """Ask for the newest good one."""
    try:
        live, restored = _restore(folder, None)
    except CorruptError:
        return "newest: Corrupt"
    if restored.step == NEWER:
        _must_be_exact(live, restored, NEWER)
        return EXACT
    _must_be_exact(live, restored, OLDER)
    if not any(newer.name in str(skipped) for skipped in restored.skipped):
        raise Violation("wrong", f"fell back without naming {newer.name}: {restored.skipped}")
    return "newest: fell back to the older one and said so"


def _must_be_exact(live: state.Live, restored: laststep.Restored, step: int) -> None:
    wrong = state.wrong(live, step)
    if restored.step != step or wrong:
        raise Violation("wrong", f"restored {restored.step} where {step} was due, wrong: {wrong}")


def _agree_with_verify(folder: Path, newer: Path, outcome: str) -> None:
    damage = verify_checkpoint(DirectoryStore(folder), newer.name, threads=2).damage
    if bool(damage) == (outcome in (OUTSIDE, SPARE)):
        raise Violation("wrong", f"{outcome}, but verify finds {damage or 'no damage'}")
    if (outcome == IN_A_HEADER) != ([wrong.what for wrong in damage] == ["header"]):
        raise Violation("wrong", f"{outcome}, but verify finds {damage}")
