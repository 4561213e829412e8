"""Load a state that lies in the page cache with DCP: `python bench/dcp.py --gb 1`.

Torch's own storage and a run take turns in one process, into the same tensors. Before each load all
files are read once, so that both find them in memory; a first load of each does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from bench.hardware import commit, hardware  # noqa: E402
from laststep.dcp import Reader, Writer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=chosen.dir, prefix="laststep-dcp-") as folder:
        seconds = _measure(Path(folder), chosen.gb, chosen.reps)
    for name, took in seconds.items():
        print(f"{name}: {_median(took):.3f} s ({min(took):.3f} to {max(took):.3f})")
    print(f"ours / theirs: {_median(seconds['laststep']) / _median(seconds['torch']):.2f}")
    if chosen.json:
        report = {
            "kind": "dcp",
            "commit": commit(ROOT),
            "date": time.strftime("%Y-%m-%d"),
            "hardware": asdict(hardware(chosen.dir)),
            "gb": chosen.gb,
            "warm load, s": seconds,
        }
        chosen.json.write_text(json.dumps(report, indent=1))


def _measure(folder: Path, gb: float, reps: int) -> dict[str, list[float]]:
    count = max(1, int(gb * 1e9 / (4 * WIDTH * WIDTH)))
    state = {"model": {f"layers.{n}": torch.randn(WIDTH, WIDTH) for n in range(count)}}
    dcp.save(state, checkpoint_id=folder / "torch")
    dcp.save(state, storage_writer=Writer(folder / "laststep", step=0))
    into = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    ways: dict[str, Callable[[], dcp.StorageReader]] = {
        "torch": lambda: dcp.FileSystemReader(folder / "torch"),
        "laststep": lambda: Reader(folder / "laststep"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(reps + 1):
        for name, reader in ways.items():
            _warm(folder)
            began = time.perf_counter()
            dcp.load(into, storage_reader=reader())
            seconds[name].append(time.perf_counter() - began)
    return {name: took[1:] for name, took in seconds.items()}


def _warm(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def _median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
