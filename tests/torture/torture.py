"""The long torture: `make torture`, or this file with options of your own.

    torture.py                              all parts, two hours
    torture.py --minutes 10                 all parts, in the same shares
    torture.py --part model --seed 7 --trials 1     one trial of one part, as a finding names it

Each part is a module beside this one with a function `trial(folder, seed, tally)`. Trials are
seeded, run in processes of their own, and are judged by what docs/guides/guarantees.md promises.
All parts are run whatever is found. Prints one table, and each finding with its seed, the command
that does it again and its steps. The status is 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainers are forked; threads would not survive it
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # as in the Makefile

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent),
    str(HERE.parent / "crash"),
    str(HERE.parent.parent / "src"),
]

import report  # noqa: E402
import shim  # noqa: E402
import trials  # noqa: E402
from tally import Finding, Tally  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module of trials, and its share of the time."""

    name: str
    module: str
    share: float
    """Of the whole time."""
    at_once: int = 2
    """How many trials run side by side; one where a trial measures time."""
    limit_s: float = 120.0
    """A trial that takes longer hangs."""
    shimmed: bool = False
    """Whether system calls are made to fail, by a library that is loaded before all others."""


PARTS = (
    Part(name="kills", module="kills", share=0.08),
    Part(name="flips", module="flips", share=0.06),
    Part(name="crashes", module="crashes", share=0.03),
    Part(name="model", module="model", share=0.13, limit_s=300.0),
    Part(name="system", module="system", share=0.13, limit_s=300.0, shimmed=True),
    Part(name="structure", module="structure", share=0.05),
    Part(name="formats", module="formats", share=0.03),
    Part(name="jobs", module="job_model", share=0.06, limit_s=300.0),
    # Alone, since it measures: it has half of the time, an hour of two.
    Part(name="soak", module="soak", share=0.43, at_once=1, limit_s=float("inf")),
)


def main() -> int:
    options = _options()
    # What is done here on purpose is a warning each; the table says it all.
    logging.getLogger("laststep").setLevel(logging.CRITICAL)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="laststep-torture-", dir=options.folder) as folder:
        if options.part is None:
            results = _all(options, Path(folder))
        else:
            part = next(part for part in PARTS if part.name == options.part)
            if part.shimmed and not shim.is_loaded():
                shim.start_again_with_it()  # never returns where there is a compiler
            results = {part.name: _one(part, options, Path(folder))}
    results = {name: report.Result(tally=tally, seconds=s) for name, (tally, s) in results.items()}
    text = report.table(results, seed=options.seed, seconds=time.monotonic() - began)
    print(text, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report.plain(results, seed=options.seed), indent=1))
    return 1 if any(result.tally.findings for result in results.values()) else 0


def _one(part: Part, options: argparse.Namespace, folder: Path) -> tuple[Tally, float]:
    """The trials of one part, from this process."""
    os.environ["LASTSTEP_TORTURE_SECONDS"] = str(options.minutes * 60)  # for a trial that lasts
    trial = importlib.import_module(part.module).trial
    timed = options.trials is None
    began = time.monotonic()
    tally = trials.run(
        part.name,
        trial,
        folder,
        seed=options.seed,
        trials=1 if part.name == "soak" and timed else options.trials,
        seconds=options.minutes * 60 if timed else None,
        limit_s=min(part.limit_s, options.minutes * 60 + 600),
        at_once=part.at_once,
    )
    return tally, time.monotonic() - began


def _all(options: argparse.Namespace, folder: Path) -> dict[str, tuple[Tally, float]]:
    """All parts, one after the other, each from a process of its own."""
    results: dict[str, tuple[Tally, float]] = {}
    for part in PARTS:
        result = folder / f"{part.name}.json"
        command = [
            sys.executable,
            str(HERE / "torture.py"),
            "--part",
            part.name,
            "--json",
            str(result),
            "--seed",
            str(options.seed),
            "--minutes",
            str(options.minutes * part.share),
        ]
        if options.folder is not None:
            command += ["--folder", str(options.folder)]
        if options.trials is not None:
            command += ["--trials", str(options.trials)]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        results[part.name] = _heard(part, result, done), time.monotonic() - began
        found = len(results[part.name][0].findings)
        print(f"{part.name}: {found or 'no'} finding{'' if found == 1 else 's'}", flush=True)
    return results


def _heard(part: Part, result: Path, done: subprocess.CompletedProcess[str]) -> Tally:
    if result.exists():
        return Tally.from_plain(json.loads(result.read_text())["parts"][part.name])
    tally = Tally()
    tally.findings.append(
        Finding(
            part=part.name,
            seed=0,
            kind="crash",
            what=f"the part ended with {done.returncode}",
            steps=(done.stdout + done.stderr).splitlines()[-40:],
        )
    )
    return tally


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="in all; default: 120")
    parser.add_argument("--part", choices=[part.name for part in PARTS])
    parser.add_argument("--seed", type=int, default=0, help="of the first trial of each part")
    parser.add_argument("--trials", type=int, help="of each part, in place of a time")
    parser.add_argument("--folder", type=Path, help="where to work; on a real disk, please")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
