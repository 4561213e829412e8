"""Structure fuzz: the state changes its form between saves and under them, in dozens of ways.

A save ends in one of two ways: committed, and then every bit is that of the moment of `save()`; or
with an error of ours, and then the next save of a sound state works. Memory of slots that are the
flusher's is guarded, so that a write past the end of a slot ends the trial.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING

import structure_changes as changes
import torch
from structure_state import World, loaded_as_written
from trials import Violation

import laststep
from guards import guard_slots
from laststep.settings import as_keywords
from laststep.state.tensors import repeats_itself

if TYPE_CHECKING:
    from pathlib import Path

    from trials import Tally

PATIENCE_S = 60
SAVES = 8
CAPTURES = ["auto", "lazy", "blocking", "lazy"]


class _Trial:
    """One run with one Checkpointer, and what each of its saves must hold."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        self.chance, self.tally, self.folder = random.Random(seed), tally, folder / "run"
        captures = [*CAPTURES, "device"] if torch.cuda.is_available() else CAPTURES
        cuda = torch.cuda.is_available() and self.chance.random() < 0.5
        large = self.chance.random() < 0.15
        self.world = World(self.chance, "cuda" if cuda else "cpu", large=large)
        options = {
            "capture": self.chance.choice(captures),
            "flush": "process" if self.chance.random() < 0.1 else "thread",
            "host_memory_bytes": 64 << 20,
        }
        tally.step(f"{self.world.device}, {'large' if large else 'small'}, {options}")
        self.checkpointer = laststep.Checkpointer(
            self.folder,
            model=self.world.model,
            optimizer=self.world.optimizer,
            extra=self.world.extra,
            **as_keywords({"progress": False, **options}),
        )
        self.expected: dict[int, dict[str, object]] = {}
        self.failed: set[int] = set()
        self.handles: dict[int, laststep.SaveHandle] = {}

    def run(self) -> None:
        for number in range(SAVES):
            self._change()
            if self.chance.random() < 0.2:
                self._be_refused(number)
            if self.chance.random() < 0.7:
                self.world.train()
            self._save(number)
        for number in list(self.handles):
            self._await(number)
        self.checkpointer.close()
        self._compare()

    def _change(self) -> None:
        for change in self.chance.sample(changes.BETWEEN, self.chance.randint(0, 4)):
            self.tally.step(f"world.{change.__name__}")
            self.tally.fault(f"between saves: {change.__name__.replace('_', ' ')}")
            with torch.no_grad():
                change(self.world)

    def _be_refused(self, number: int) -> None:
        change = self.chance.choice(changes.REFUSED)
        copies = self.world.copied()
        self.tally.step(f"refused: {change.__name__}")
        self.tally.fault(f"cannot be saved: {change.__name__.replace('_', ' ')}")
        change(self.world)
        try:
            self._hear(number)
        except laststep.UsageError as error:
            self.tally.note("refused by name")
            if not error.where or "extra" not in error.where:
                raise Violation("foreign error", f"not named: {error}") from error
        else:
            raise Violation("wrong", f"saved what cannot be saved: {change.__name__}")
        self.world.heal(copies)

    def _save(self, number: int) -> None:
        self.expected[number], copies = self.world.written_down(), self.world.copied()
        self.tally.step(f"save({number})")
        # Everything live is sound here, so save() itself has no reason to fail.
        handle = self._hear(number)
        self.handles[number] = handle
        under = self.chance.choice(changes.UNDER)
        tensors = [one for one in self.world.tensors() if one.numel() and _changeable(one)]
        tensor = self.chance.choice(tensors)
        self.tally.step(f"under it: {under.__name__} of {tuple(tensor.shape)}")
        self.tally.fault(f"during a save: {under.__name__.replace('_', ' ')}")
        with torch.no_grad():
            under(self.world, tensor)
        if self.chance.random() < 0.5:
            self._await(number)
        else:
            handle.captured.over_within(PATIENCE_S)
        self.world.heal(copies)

    def _hear(self, number: int) -> laststep.SaveHandle:
        """Save, past the reports of saves that failed before, each of which is told once."""
        while True:
            told = [n for n, one in self.handles.items() if n not in self.failed and _failed(one)]
            try:
                return self.checkpointer.save(number)
            except laststep.TornCaptureError as error:
                if not told:
                    raise Violation("wrong", f"torn though nothing changed: {error}") from error
                self.failed.update(told[:1])

    def _await(self, number: int) -> None:
        handle = self.handles.pop(number)
        try:
            if not handle.wait(PATIENCE_S):
                raise Violation("hang", f"save({number}) is not over after {PATIENCE_S} s")
        except laststep.TornCaptureError:
            self.failed.add(number)

    def _compare(self) -> None:
        self.tally.note("torn, and said so", len(self.failed))
        due = self.expected.keys() - self.failed
        steps = set(laststep.open(self.folder).steps()) if due else set()
        if steps != due:
            raise Violation("wrong", f"committed are {steps}, and {due} did not fail")
        for step in steps:
            found = loaded_as_written(laststep.load(self.folder, step=step))
            for part, wanted in self.expected[step].items():
                if found[part] != wanted:
                    raise Violation("wrong", f"step {step}: {part}: {_first(wanted, found[part])}")
            self.tally.checkpoint()


def _failed(handle: laststep.SaveHandle) -> bool:
    return handle.committed.over() and not handle.committed.done()


def _changeable(tensor: torch.Tensor) -> bool:
    """Whether torch lets anybody write into it, not if it was expanded, and resize what it lies in,
    not if that is an array of numpy."""
    return tensor.untyped_storage().resizable() and not repeats_itself(tensor)


def _first(wanted: object, found: object, path: str = "") -> str:
    """Where two values that were written down first differ."""
    if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        if len(wanted) != len(found):
            return f"{path}: {len(wanted)} entries, found {len(found)}"
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            if one != other:
                return _first(one, other, f"{path}/{number}")
    return f"{path}: wanted {str(wanted)[:200]}, found {str(found)[:200]}"


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """One random run, from its seed."""
    torch.set_num_threads(1)  # a trial is forked, and the threads of OpenMP do not survive that
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    guard_slots()
    _Trial(folder, seed, tally).run()
