"""Train a small GPT, kill it twice in the middle of a save, resume, and compare every loss.

python examples/demo.py [FOLDER]

The trainer is `demo_train.py`, always in a process of its own. The first kill hits the trainer
alone, whose flusher then finishes the save; the second hits the flusher too. The exit status is 1
if a loss differs in a single bit from those of a run without interruptions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

STEPS = 60
SAVE_EVERY = 10
KILLS = ((20, "trainer"), (40, "machine"))
VICTIMS = {"trainer": "the trainer", "machine": "the trainer and its flusher"}
MARKER = "demo.json"
PRINT_EVERY = 5

Event = dict[str, object]


@dataclass(frozen=True, slots=True)
class Result:
    """Events of the reference and of the interrupted run, in order."""

    reference: list[Event]
    interrupted: list[Event]

    def losses(self) -> tuple[dict[object, str], list[tuple[object, str]]]:
        """Return the losses of the reference, and all losses of the interrupted run."""
        expected = {e["step"]: str(e["loss"]) for e in self.reference if e["event"] == "loss"}
        found = [(e["step"], str(e["loss"])) for e in self.interrupted if e["event"] == "loss"]
        return expected, found

    def differing(self) -> set[object]:
        """Return the steps whose loss is not that of the reference, or which never ran."""
        expected, found = self.losses()
        wrong = {step for step, loss in found if expected.get(step) != loss}
        return wrong | (expected.keys() - {step for step, _ in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("demo-run"))
    folder: Path = parser.parse_args().folder
    clear(folder)
    result = train(folder)
    report_kills(result)
    report_saves(result)
    report_losses(result)
    if result.differing():
        sys.exit("FAILED: losses differ")
    print("\nThe run is there to look at:")
    for command in ("ls", "show", "verify"):
        print(f"  {program()} {command} {folder}")


def clear(folder: Path) -> None:
    """Remove what an earlier demo left; refuse any other folder."""
    if folder.exists():
        if not (folder / MARKER).is_file():
            sys.exit(f"{folder} exists and is not from a demo; name another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text('{"made by": "examples/demo.py"}\n', encoding="utf-8")


def train(folder: Path) -> Result:
    with tempfile.TemporaryDirectory(prefix="laststep-demo-") as logs:
        reference, interrupted = Path(logs) / "reference", Path(logs) / "interrupted"
        print(f"1. {STEPS} steps without interruption, as the reference …", flush=True)
        start(reference, [])
        run = ["--run", str(folder), "--every", str(SAVE_EVERY)]
        for number, (step, whom) in enumerate(KILLS):
            print(
                f"{number + 2}. {'resumed in a new process' if number else 'the same again'}, "
                f"saving every {SAVE_EVERY} steps; kill -9 of {VICTIMS[whom]} during the save of "
                f"step {step} …",
                flush=True,
            )
            start(interrupted, [*run, "--kill-at", str(step), "--kill", whom], killed=True)
        print(f"{len(KILLS) + 2}. resumed in a new process, to the end …", flush=True)
        start(interrupted, run)
        return Result(events(reference), events(interrupted))


def start(log: Path, arguments: list[str], *, killed: bool = False) -> None:
    """Train in a child process; exit if it does not end as expected."""
    script = Path(__file__).with_name("demo_train.py")
    options = ["--log", str(log), "--steps", str(STEPS), *arguments]
    done = subprocess.run(
        [sys.executable, str(script), *options], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != (-signal.SIGKILL if killed else 0):
        sys.exit(f"training ended with status {done.returncode}\n{done.stderr}")


def events(log: Path) -> list[Event]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def report_kills(result: Result) -> None:
    print()
    kills = [event for event in result.interrupted if event["event"] == "kill"]
    resumes = [event for event in result.interrupted if event["event"] == "restored"][1:]
    for kill, resume in zip(kills, resumes, strict=True):
        step, found = kill["step"], resume["step"]
        if found == step:
            why = "the flusher finished the save after the trainer was dead"
        else:
            why = f"step {step} was never committed, so nobody ever saw it"
        print(f"killed {VICTIMS[str(kill['whom'])]} during the save of step {step}: ", end="")
        print(f"resumed from step {found}; {why}")


def report_saves(result: Result) -> None:
    print(f"\n{'save of step':>12} {'size':>10} {'written':>10} {'training lost':>14}", end="")
    print(f" {'durable after':>14} {'committed after':>16}")
    for event in result.interrupted:
        if event["event"] == "kill":
            print(f"{event['step']:>12} {'-':>10} {'-':>10} {'killed':>14} {'-':>14} {'-':>16}")
        elif event["event"] == "save":
            size, written = (megabytes(event[name]) for name in ("size_bytes", "written_bytes"))
            lost, durable, committed = (
                milliseconds(event[name]) for name in ("lost_s", "durable_s", "committed_s")
            )
            print(f"{event['step']:>12} {size:>10} {written:>10} {lost:>14}", end="")
            print(f" {durable:>14} {committed:>16}")


def megabytes(value: object) -> str:
    return f"{value / 1e6:.2f} MB" if isinstance(value, int) else "-"


def milliseconds(value: object) -> str:
    return f"{value * 1e3:.0f} ms" if isinstance(value, float) else "-"


def report_losses(result: Result) -> None:
    expected, found = result.losses()
    resumed, differing = dict(found), result.differing()
    print(f"\n{'step':>12} {'loss, uninterrupted':>20} {'killed and resumed':>20}")
    for step, loss in expected.items():
        last = resumed.get(step)
        if step in differing or step in range(0, STEPS, PRINT_EVERY) or step == STEPS - 1:
            shown = "-" if last is None else f"{float.fromhex(last):.9f}"
            same = "DIFFERS" if step in differing else "same bits"
            print(f"{step:>12} {float.fromhex(loss):>20.9f} {shown:>20} {same}")
    if not differing:
        print(
            f"\nAll {len(expected)} losses are identical to the last bit "
            f"({len(found)} were computed: {len(found) - len(expected)} steps were done again)."
        )


def program() -> str:
    """Return the name of the command line, or its path if the name would not be found."""
    if shutil.which("laststep"):
        return "laststep"
    beside, here = Path(sys.executable).with_name("laststep"), Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


if __name__ == "__main__":
    main()
