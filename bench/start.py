"""`python bench/start.py`: how soon a job that starts can commit, each time in a fresh process.

The flusher's start (in CPU time until it is up, since wall time tells more of what else runs), and
the first commit of ten small tensors beside later ones, to a new run. Before each save there is a
pause, as training makes one: right after another commit all caches are warm, and a processor that
did nothing for a while takes twice as long for the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

LATER = 6
PAUSE_S = 0.5


def measure(folder: str) -> dict[str, list[float]]:
    """In this process: one start, one first commit, some later ones, in milliseconds."""
    import torch

    import laststep

    state = {f"t{n}": torch.zeros(1000) for n in range(10)}
    with laststep.Checkpointer(
        f"{folder}/run", state=state, options=laststep.Options(progress=False)
    ) as checkpointer:
        began = time.perf_counter()
        checkpointer.restore()
        restored_s = time.perf_counter() - began
        pid = checkpointer._client.helper_pid  # noqa: SLF001 (nothing public tells it)
        tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
        start_ns = sum(int(task.read_text().split()[0]) for task in tasks)
        commits_s = []
        for step in range(1 + LATER):
            time.sleep(PAUSE_S)
            save = checkpointer.save(step)
            save.wait()
            commits_s.append(save.report.committed_s or 0.0)
    return {
        "flusher's start, CPU": [start_ns / 1e6],
        "restore() with nothing to restore": [restored_s * 1e3],
        "first commit": [commits_s[0] * 1e3],
        "later commit": [seconds * 1e3 for seconds in commits_s[1:]],
    }


def main() -> None:
    """Print minimum, median and maximum of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(chosen.one)))
        return
    parent = ROOT / "bench" / "out"
    parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = {}
    for _ in range(chosen.starts):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            done = subprocess.run(
                [sys.executable, __file__, "--one", folder], stdout=subprocess.PIPE, check=True
            )
        for name, values in json.loads(done.stdout).items():
            found.setdefault(name, []).extend(values)
    print(f"{'ms':36} {'min':>7} {'median':>7} {'max':>7}")
    for name, values in found.items():
        row = (min(values), statistics.median(values), max(values))
        print(f"{name:36} {row[0]:7.1f} {row[1]:7.1f} {row[2]:7.1f}")
    first, later = (statistics.median(found[f"{which} commit"]) for which in ("first", "later"))
    print(f"a first commit takes {first / later:.2f} times as long as a later one")


if __name__ == "__main__":
    main()
