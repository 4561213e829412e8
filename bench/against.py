"""`python bench/against.py OLD_TREE [ROUNDS]`: this tree against another checkout of laststep.

Each measurement runs in a new process, the two trees in turn, so that a noisy machine disturbs both
alike. Prints the medians, their ratio (above 1: this tree is faster) and the spread of each side.
Cold reads drop the files of the checkpoint from the page cache with `posix_fadvise`. With
AWS_ENDPOINT_URL and AGAINST_BUCKET set, an object store is measured too. AGAINST_SCENARIOS names
fewer scenarios.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = ("large", "many", "lora", "ranks-2", "ranks-4", "memory", "s3", "s3-lora")


def state_of(scenario: str) -> dict[str, object]:
    """Return the state that a scenario saves."""
    import torch

    if scenario == "many":
        return {f"t{n}": torch.full((16,), float(n)) for n in range(100_000)}
    count = 4 if scenario.startswith(("ranks", "s3")) else 16
    state = {f"w{n}": torch.randn(8 << 20) for n in range(count)}
    if scenario.endswith("lora"):
        state |= {f"w{n}.lora": torch.randn(64, 1024) for n in range(count)}
    return state


def checkpointer(run: str, state: dict[str, object], **more: object) -> object:
    """Return a Checkpointer of either tree."""
    import laststep

    if hasattr(laststep, "Options"):
        more["options"] = laststep.Options(progress=False)
    else:
        more["progress"] = False
    return laststep.Checkpointer(run, state=state, **more)


def drop_from_cache(folder: Path) -> None:
    """Make the next read of these files come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: object) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(scenario: str, place: str) -> dict[str, float]:
    """Measure one scenario in this process; on several ranks, in each of them."""
    import torch

    if scenario.startswith("ranks"):
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(torch.distributed.get_rank())
    state, more = state_of(scenario), {}
    run: str | None = place
    if scenario.startswith("memory"):
        run, more["tiers"] = None, ["shm://", place]
    seconds: dict[str, float] = {}
    if scenario == "memory":
        subprocess.run([sys.executable, __file__, "--measure", "memory-lost", place], check=True)
        with checkpointer(run, state, **more) as restoring:
            seconds["restart"] = timed(restoring.restore)
            restoring.save(2).wait()  # frees the memory of the job before
        return seconds
    with checkpointer(run, state, **more) as saving:
        saving.restore()
        saving.save(0).wait()  # the pool and the flusher are there from now on
        for name, tensor in state.items():
            if not scenario.endswith("lora") or name.endswith("lora"):
                tensor.add_(1)
        time.sleep(0.3)
        began = time.perf_counter()
        handle = saving.save(1)
        seconds["save() returns"] = time.perf_counter() - began
        handle.wait()
        seconds["durable"] = time.perf_counter() - began
        if scenario == "memory-lost":
            os._exit(0)  # without close(), as a job that is killed: the snapshot stays in memory
    if scenario.endswith("lora"):
        return seconds
    if "://" not in place:
        drop_from_cache(Path(place))
    for name in ("restore, cold", "restore, warm"):
        with checkpointer(run, state_of(scenario), **more) as restoring:
            seconds[name] = timed(restoring.restore)
    return seconds


def run_once(tree: Path, scenario: str) -> dict[str, float]:
    """Measure one scenario of one tree in new processes."""
    folder = tempfile.mkdtemp(dir=ROOT.parent)
    place = (
        f"s3://{os.environ['AGAINST_BUCKET']}/{time.time_ns()}"
        if scenario.startswith("s3")
        else folder
    )
    ranks = scenario.removeprefix("ranks-") if scenario.startswith("ranks") else ""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launch, __file__, "--measure", scenario, f"{place}/run"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{tree}, {scenario}: {error.stderr[-2000:]}") from error
    finally:
        shutil.rmtree(folder)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: max(line[name] for line in lines) for name in lines[0]}


def main(old: Path, rounds: int) -> None:
    """Print a row for each measurement."""
    print("| measurement | old (s) | new (s) | old / new |\n| --- | --- | --- | --- |")
    for scenario in os.environ.get("AGAINST_SCENARIOS", " ".join(SCENARIOS)).split():
        if scenario.startswith("s3") and "AGAINST_BUCKET" not in os.environ:
            continue
        found: dict[tuple[str, Path], list[float]] = {}
        for number in range(rounds):
            for tree in (old, ROOT) if number % 2 else (ROOT, old):
                for name, value in run_once(tree, scenario).items():
                    found.setdefault((name, tree), []).append(value)
        for name in [name for name, tree in found if tree == ROOT]:
            before, after = found[name, old], found[name, ROOT]
            ratio = statistics.median(before) / statistics.median(after)
            cells = [
                f"{statistics.median(side):.3f} ({min(side):.3f} to {max(side):.3f})"
                for side in (before, after)
            ]
            print(f"| {scenario}: {name} | {cells[0]} | {cells[1]} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        result = json.dumps(measure(*sys.argv[2:4]))
        os.write(1, f"\n{result}\n".encode())  # in one piece: other ranks print too
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 5)
