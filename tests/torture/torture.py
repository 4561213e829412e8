"""The long torture: `make torture`, or this file with counts of your own.

Three parts, each of which ends at the first thing that must never happen, naming the seed and the
trial with which it comes back: a model of the disk cut after every system call, real kill -9 of
trainers and flushers, and single flipped bits. Prints what it did as a table.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainers are forked; threads would not survive it

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "crash"), str(HERE.parent.parent / "src")]

import flips  # noqa: E402
import kills  # noqa: E402
import scenarios  # noqa: E402

Row = tuple[str, str]


def crash_model(folder: Path, *, budget: int, histories: int, seed: int) -> list[Row]:
    """Every scenario cut after every system call, and random histories on top."""
    chosen = scenarios.SCENARIOS
    chosen += tuple(scenarios.random_scenario(seed + number) for number in range(histories))
    explored = scenarios.explore(folder, budget=budget, seed=seed, scenarios=chosen)
    return [
        ("crash model: scenarios", f"{len(chosen)}"),
        ("crash model: system calls after which power was cut", f"{explored.cuts:,}"),
        ("crash model: states of the disk after a cut", f"{explored.crashes:,}"),
        ("crash model: of these different, each checked", f"{explored.distinct:,}"),
    ]


def real_kills(folder: Path, *, trials: int, seed: int) -> list[Row]:
    """Kill -9 of real processes."""
    done = kills.torture(folder / "killed", trials=trials, seed=seed)
    rows = [
        ("kill -9: trials", f"{done.trials}"),
        ("kill -9: saves committed meanwhile", f"{done.saves}"),
        ("kill -9: a save was under way", f"{done.in_flight}"),
        ("kill -9: a save was committed after the kill", f"{done.finished_after_death}"),
        ("kill -9: the next start did not wait for the old flusher", f"{done.hurried}"),
    ]
    return rows + [(f"kill -9: of {whom}", f"{n}") for whom, n in sorted(done.victims.items())]


def bit_flips(folder: Path, *, count: int, seed: int) -> list[Row]:
    """Single flipped bits."""
    done = flips.torture(folder / "flipped", flips=count, seed=seed)
    rows = [("bit flips", f"{done.flips}")]
    rows += [(f"bit flips: in {name}", f"{n}") for name, n in sorted(done.files.items())]
    return rows + [(f"bit flips: {what}", f"{n}") for what, n in sorted(done.outcomes.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--crashes", type=int, default=200, help="ways to crash after each call")
    parser.add_argument("--histories", type=int, default=50, help="random histories to crash in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; on a real disk, please")
    options = parser.parse_args()
    # What is done here on purpose is a warning each; the table says it all.
    logging.getLogger("laststep").setLevel(logging.CRITICAL)
    rows: list[Row] = [("seed", f"{options.seed}")]
    with tempfile.TemporaryDirectory(prefix="laststep-torture-", dir=options.folder) as made:
        folder = Path(made)
        for name, part in (
            ("kill -9", lambda: real_kills(folder, trials=options.kills, seed=options.seed)),
            ("bit flips", lambda: bit_flips(folder, count=options.flips, seed=options.seed)),
            (
                "crash model",
                lambda: crash_model(
                    folder / "model",
                    budget=options.crashes,
                    histories=options.histories,
                    seed=options.seed,
                ),
            ),
        ):
            started_s = time.monotonic()
            rows += part()
            rows.append((f"{name}: seconds", f"{time.monotonic() - started_s:.0f}"))
            print(f"{name}: nothing was violated", flush=True)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
