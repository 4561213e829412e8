"""What saves write, move and take where not everything changed.

Four trainings of one GPT: LoRA (all weights frozen, a few per cent are trained beside them), the
first half of the layers frozen, all of it trained, and none of it any more. Each saves five times,
two iterations apart; beside every figure of a later save stands that of the first. Prints a table,
and writes every save to `bench/out/smaller.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import laststep
from bench.hardware import commit, hardware
from bench.state import GPTTraining

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
SAVES = 5
RANK = 8


def lora(training: GPTTraining) -> torch.optim.Optimizer:
    """Freeze everything, and add a low-rank path to each linear layer."""
    module = training.module
    module.requires_grad_(requires_grad=False)
    for layer in list(module.modules()):
        if isinstance(layer, nn.Linear):
            weight = layer.weight
            down = nn.Parameter(1e-2 * torch.randn(RANK, weight.shape[1]).to(weight))
            up = nn.Parameter(torch.zeros(weight.shape[0], RANK).to(weight))
            layer.register_parameter("down", down)
            layer.register_parameter("up", up)
            layer.register_forward_hook(
                lambda layer, given, out: out + given[0] @ layer.down.T @ layer.up.T
            )
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def half_frozen(training: GPTTraining) -> torch.optim.Optimizer:
    layers = training.module.layers
    training.module.embedding.requires_grad_(requires_grad=False)
    layers[: len(layers) // 2].requires_grad_(requires_grad=False)
    trained = [p for p in training.module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def dense(training: GPTTraining) -> torch.optim.Optimizer:
    return training.optimizer  # type: ignore[return-value]


CASES: dict[str, tuple[Callable[[GPTTraining], torch.optim.Optimizer], bool]] = {
    "LoRA": (lora, True),
    "half of the layers frozen": (half_frozen, True),
    "everything changes": (dense, True),
    "nothing changes": (dense, False),
}


def run(case: str, size_bytes: float, device: str, folder: Path) -> list[dict[str, float]]:
    """The saves of one training."""
    change, trains = CASES[case]
    training = GPTTraining(size_bytes, device, batch=1, length=64)
    optimizer = change(training)
    training.step_timer(1, 64)

    def iterate() -> None:
        optimizer.zero_grad()
        training.loss().backward()
        optimizer.step()
        training.finish()

    found = []
    with laststep.Checkpointer(
        folder,
        model=training.module,
        optimizer=optimizer,
        options=laststep.Options(progress=False),
        keep=laststep.Keep(last=2),
    ) as ckpt:
        ckpt.restore()
        iterate()
        time.sleep(size_bytes / 1.2e9 if device == "cuda" else 0)  # until memory is pinned
        for step in range(SAVES):
            if trains or step == 0:
                iterate()
                iterate()
            began = time.perf_counter()
            save = ckpt.save(step)
            stall_s = time.perf_counter() - began
            save.wait()
            report = save.report
            moved = report.size_bytes - report.unchanged_bytes
            found.append(
                {
                    "size_bytes": report.size_bytes,
                    "written_bytes": report.written_bytes or 0,
                    "moved_bytes": moved,
                    "stall_s": stall_s,
                    "lost_s": report.lost_s,
                    "durable_s": report.durable_s or 0.0,
                    "committed_s": report.committed_s or 0.0,
                }
            )
        wanted = {n: t.detach().cpu().clone() for n, t in training.module.state_dict().items()}
    stored = laststep.open(folder).latest()
    for name, tensor in wanted.items():
        if not torch.equal(stored.tensor(f"model/{name}")[:], tensor):
            raise SystemExit(f"{case}: {name} is not what was saved")
    return found


def main() -> None:
    """Run all cases and print what later saves come to beside the first."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="bench/smaller.py", description=__doc__)
    parser.add_argument("--gb", type=float, default=7.28 if cuda else 0.6, help="(%(default)s)")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench" / "out")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    device = "cuda" if cuda else "cpu"
    result = {
        "kind": "smaller",
        "commit": commit(ROOT),
        "hardware": dataclasses.asdict(hardware(given.dir)),
        "cases": {},
    }
    print(f"{'':28}{'state':>9}{'written':>18}{'to the host':>18}{'durable':>17}{'save()':>16}")
    for case in CASES:
        folder = Path(tempfile.mkdtemp(prefix="smaller-", dir=given.dir))
        try:
            saves = run(case, given.gb * 1e9, device, folder / "run")
        finally:
            shutil.rmtree(folder)
        result["cases"][case] = saves
        first, later = saves[0], saves[1:]
        both = {
            name: (first[name], statistics.median(save[name] for save in later)) for name in first
        }
        print(
            f"{case:28}{first['size_bytes'] / 1e9:6.2f} GB"
            + "".join(
                f"{both[name][0] * scale:8.4g} → {both[name][1] * scale:.4g} {unit}".rjust(width)
                for name, scale, unit, width in (
                    ("written_bytes", 1e-6, "MB", 18),
                    ("moved_bytes", 1e-6, "MB", 18),
                    ("durable_s", 1, "s", 17),
                    ("stall_s", 1e3, "ms", 16),
                )
            ),
            flush=True,
        )
        if cuda:
            torch.cuda.empty_cache()
    (given.dir / "smaller.json").write_text(json.dumps(result, indent=1))
