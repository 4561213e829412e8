"""What the trials of the torture came to: faults by kind, checkpoints compared, findings.

A tally in a trial's process is written to a file line by line, as things happen, and read back by
the process that started the trial. Knows nothing of either.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["wrong", "hang", "foreign error", "crash"]
KINDS: tuple[Kind, ...] = ("wrong", "hang", "crash", "foreign error")


class Violation(Exception):
    """Something that must never happen: wrong bytes, a lost step, an error that is not ours."""

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind
        self.what = what


@dataclasses.dataclass(slots=True, kw_only=True)
class Finding:
    """A violation, with all that is needed to see it again."""

    part: str
    seed: int
    kind: str
    what: str
    steps: list[str]

    @property
    def again(self) -> str:
        """The command that does the same once more."""
        return f"python tests/torture/torture.py --part {self.part} --seed {self.seed} --trials 1"

    def __str__(self) -> str:
        steps = "".join(f"\n    {step}" for step in self.steps)
        return f"{self.part}: {self.kind}: {self.what}\n  again: {self.again}\n  steps:{steps}"


class Tally:
    """What was done. `step` keeps a line of what is done next, for the reader of a finding."""

    def __init__(self, lines: IO[str] | None = None, *, part: str = "", seed: int = 0) -> None:
        self.faults: collections.Counter[str] = collections.Counter()
        self.notes: collections.Counter[str] = collections.Counter()
        self.compared = 0
        self.trials = 0
        self.findings: list[Finding] = []
        self.steps: list[str] = []
        self._lines = lines
        self._part, self._seed = part, seed

    def fault(self, kind: str, count: int = 1) -> None:
        """Faults of this kind were injected."""
        self.faults[kind] += count
        self._write("fault", kind, count)

    def checkpoint(self, count: int = 1) -> None:
        """So many checkpoints were compared, every byte."""
        self.compared += count
        self._write("checkpoint", count)

    def note(self, what: str, count: int = 1) -> None:
        """Something worth a line of the table, such as saves that were torn and said so."""
        self.notes[what] += count
        self._write("note", what, count)

    def step(self, line: str) -> None:
        """What is done next, as a line that a reader can follow."""
        self.steps.append(line)
        self._write("step", line)

    def flaw(self, kind: Kind, what: str) -> None:
        """Something that must never happen did; the trial goes on, and tells it once."""
        if all(_alike(finding.what) != _alike(what) for finding in self.findings):
            self.find(
                Finding(
                    part=self._part, seed=self._seed, kind=kind, what=what, steps=list(self.steps)
                )
            )

    def find(self, finding: Finding) -> None:
        """A finding, kept."""
        self.findings.append(finding)
        self._write("find", dataclasses.asdict(finding))

    def end(self) -> None:
        """The trial is over, and all that it had to tell is told."""
        self._write("end")

    def _write(self, *entry: object) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(entry) + "\n")
            self._lines.flush()

    @classmethod
    def from_log(cls, log: Path) -> tuple[Tally, bool]:
        """What a trial wrote, and whether it came to its end."""
        tally, ended = cls(), False
        tally.trials = 1
        for line in log.read_text(encoding="utf-8").splitlines():
            if not line.endswith("]"):
                break  # it died in the middle of it
            name, *values = json.loads(line)
            if name == "find":
                tally.find(Finding(**values[0]))
            elif name == "end":
                ended = True
            else:
                getattr(tally, name)(*values)
        return tally, ended

    def add(self, other: Tally) -> None:
        """Count what another one counted."""
        self.faults += other.faults
        self.notes += other.notes
        self.compared += other.compared
        self.trials += other.trials
        self.findings += other.findings

    def to_plain(self) -> dict[str, object]:
        """As values that JSON has."""
        return {
            "trials": self.trials,
            "faults": dict(self.faults),
            "notes": dict(self.notes),
            "compared": self.compared,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, object]) -> Tally:
        tally = cls()
        tally.trials, tally.compared = plain["trials"], plain["compared"]
        tally.faults.update(plain["faults"])
        tally.notes.update(plain["notes"])
        tally.findings = [Finding(**finding) for finding in plain["findings"]]
        return tally


def _alike(what: str) -> str:
    """The same for texts that differ in numbers only."""
    return re.sub(r"\d+", "0", what)
