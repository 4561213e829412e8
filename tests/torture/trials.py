"""One seeded trial after the other, each in a process of its own, and a tally of what came of it.

A part of the torture is a function `trial(folder, seed, tally)`. It injects faults, compares what
is restored with what must be there, and raises `Violation` at the first thing that must never
happen. Everything random in it comes from its seed, so that the same seed does the same again. This
module knows nothing of what a trial does: it starts it in a forked child with a time limit, and
counts. A trial that neither ends nor reports is a hang, one whose process is killed by a signal of
its own doing (a segfault) is a crash; both are findings like any other.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["wrong", "hang", "foreign error", "crash"]


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

    def __str__(self) -> str:
        again = f"python tests/torture/torture.py --part {self.part} --seed {self.seed} --trials 1"
        steps = "".join(f"\n    {step}" for step in self.steps)
        return f"{self.part}: {self.kind}: {self.what}\n  again: {again}\n  steps:{steps}"


class Tally:
    """What a trial did. `step` keeps a line of what is done, for the reader of a finding."""

    def __init__(self) -> None:
        self.faults: collections.Counter[str] = collections.Counter()
        self.notes: collections.Counter[str] = collections.Counter()
        self.compared = 0
        self.trials = 0
        self.findings: list[Finding] = []
        self.steps: list[str] = []

    def fault(self, kind: str, count: int = 1) -> None:
        """Faults of this kind were injected."""
        self.faults[kind] += count

    def checkpoint(self, count: int = 1) -> None:
        """So many checkpoints were compared, every byte."""
        self.compared += count

    def note(self, what: str, count: int = 1) -> None:
        """Something worth a line of the table, such as saves that were torn and said so."""
        self.notes[what] += count

    def step(self, line: str) -> None:
        """What is done next, as a line that a reader can follow."""
        self.steps.append(line)

    def add(self, other: Tally) -> None:
        """Count what another one counted."""
        self.faults += other.faults
        self.notes += other.notes
        self.compared += other.compared
        self.trials += other.trials
        self.findings += other.findings

    def to_json(self) -> str:
        """For the way from a trial's process to ours."""
        return json.dumps(
            [self.faults, self.notes, self.compared, self.steps,
             [dataclasses.asdict(finding) for finding in self.findings]]
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Tally:
        faults, notes, compared, steps, findings = json.loads(text)
        tally = cls()
        tally.faults.update(faults)
        tally.notes.update(notes)
        tally.compared, tally.steps, tally.trials = compared, steps, 1
        tally.findings = [Finding(**finding) for finding in findings]
        return tally


def run(
    part: str,
    trial: Callable[[Path, int, Tally], None],
    folder: Path,
    *,
    seed: int,
    trials: int | None = None,
    seconds: float | None = None,
    limit_s: float = 120.0,
) -> Tally:
    """Trials with seeds from `seed` on, until their number or the time is used up."""
    folder.mkdir(parents=True, exist_ok=True)
    total, began = Tally(), time.monotonic()
    while trials is None or total.trials < trials:
        if seconds is not None and time.monotonic() - began >= seconds:
            break
        total.add(_one(part, trial, folder, seed + total.trials, limit_s))
    return total


def _one(
    part: str,
    trial: Callable[[Path, int, Tally], None],
    folder: Path,
    seed: int,
    limit_s: float,
) -> Tally:
    place = Path(tempfile.mkdtemp(prefix=f"{part}-{seed}-", dir=folder))
    reader, writer = os.pipe()
    dump = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setpgid(0, 0)
        faulthandler.enable(file=dump)
        faulthandler.register(signal.SIGUSR2, file=dump, all_threads=True, chain=False)
        _in_child(part, trial, place, seed, writer)
    os.close(writer)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    text, ended = _read(reader, pid, time.monotonic() + limit_s)
    os.close(reader)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
            time.sleep(1)  # the dump is written by then, or never
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    dump.seek(0)
    stacks = dump.read().decode(errors="replace").splitlines()[-60:]
    dump.close()
    shutil.rmtree(place, ignore_errors=True)
    if text:
        return Tally.from_json(text)
    tally, how = Tally(), f"the process of the trial ended with status {status}"
    tally.trials = 1
    kind, what = ("crash", how) if ended else ("hang", f"no end within {limit_s:.0f} s")
    tally.findings.append(Finding(part=part, seed=seed, kind=kind, what=what, steps=stacks))
    return tally


def _in_child(
    part: str,
    trial: Callable[[Path, int, Tally], None],
    place: Path,
    seed: int,
    writer: int,
) -> None:
    """Run the trial and report; never returns."""
    tally = Tally()
    try:
        try:
            trial(place, seed, tally)
        except Violation as violation:
            tally.findings.append(
                Finding(part=part, seed=seed, kind=violation.kind, what=violation.what,
                        steps=tally.steps)
            )  # fmt: skip
        except BaseException:  # noqa: BLE001 (whatever it is, it must not have come out)
            lines = traceback.format_exc().splitlines()
            tally.findings.append(
                Finding(part=part, seed=seed, kind="foreign error", what=lines[-1],
                        steps=tally.steps + lines[-30:])
            )  # fmt: skip
        with os.fdopen(writer, "w") as pipe:
            pipe.write(tally.to_json() + "\n")
    finally:
        os._exit(0)


def _read(reader: int, pid: int, deadline: float) -> tuple[str, bool]:
    """What the trial reports, one line; and whether it reported or ended in time.

    Not until the other end is closed: processes that the trial forked hold it too.
    """
    parts: list[bytes] = []
    pidfd = os.pidfd_open(pid)
    try:
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([reader, pidfd], [], [], left)
            if reader in ready:
                parts.append(os.read(reader, 1 << 20))
                if parts[-1].endswith(b"\n"):
                    return b"".join(parts).decode(), True
                if parts[-1]:
                    continue
            if ready:
                return "", True
    finally:
        os.close(pidfd)
    return "", False
