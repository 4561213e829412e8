"""The parts that both benchmarks share: who takes part, small tensors, a save every iteration."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench import report
from bench.files import remove
from bench.hardware import commit
from bench.ours import Laststep
from bench.peers import DCP, DCPProcess, DCPThread, Safetensors, TorchSave
from bench.rotation import Make, Plan, Rotation, rotate
from bench.scenarios import EveryIteration, every_iteration
from bench.state import GPTTraining, SmallTensors, Training
from bench.third_party import TorchCheckpointing, TorchSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.options import Options
    from bench.raw import DiskLimits

_STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
SMALL = ("laststep", "torch.save", "safetensors", "dcp")
"""Who takes part in the measurement of small tensors."""


def makers(dcp_threads: int, captures: tuple[str, ...], host_memory_bytes: int) -> list[Make]:
    """Every peer, ours first."""
    return [
        *(partial(Laststep, capture, host_memory_bytes) for capture in captures),
        TorchSave,
        Safetensors,
        partial(DCP, dcp_threads),
        partial(DCPThread, dcp_threads),
        partial(DCPProcess, dcp_threads),
        TorchSnapshot,
        TorchCheckpointing,
    ]


def say(text: str) -> None:
    """Progress, for whoever is waiting."""
    print(f"{time.monotonic() - _STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def small_tensors(
    chosen: Options, wanted: list[Make], device: str, deadline: float
) -> Rotation | None:
    """Many tensors of 1 KiB, where the work for each tensor is all there is."""
    taking_part = [make for make in wanted if make().name in SMALL]
    if not taking_part:
        return None
    say("small tensors")
    plan = Plan(
        repetitions=min(2, chosen.repetitions),
        peer_repetitions=chosen.peer_repetitions,
        baseline_iterations=4,
        loads=False,
        memory=False,
        deadline=deadline,
    )
    training = SmallTensors(5_000 if chosen.quick else 100_000, 1024, device)
    return rotate(training, taking_part, chosen.folder, plan, None, say)


def drainable(chosen: Options, disk: DiskLimits, device: str, iteration_s: float) -> EveryIteration:
    """A save every iteration of a state that the disk can take in half an iteration."""
    say("a save after every iteration, at a pace that the disk can follow")
    rate = max(sample.size_bytes / sample.write_s for sample in disk.scan)
    training = GPTTraining(0.5 * rate * iteration_s, device, batch=1, length=64)
    training.pace_for(iteration_s, length=64 if device == "cpu" else 1024)
    return every(chosen, "drains", training, rounds=1 if chosen.quick else 3, iterations=8)


def every(
    chosen: Options, name: str, training: Training, *, rounds: int, iterations: int
) -> EveryIteration:
    """A save after each of `iterations`, with room for two states in host memory."""
    peer = Laststep("auto", max(256 << 20, int(2.5 * training.size_bytes())))
    return every_iteration(
        name, training, peer, chosen.folder / "every", rounds=rounds, iterations=iterations
    )


def run_and_report(chosen: Options, run: Callable[[Options], report.Report]) -> None:
    """Run, clean up whatever happens, print and write."""
    # DCP warns at every call that there is one process, as was asked for.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    started = time.monotonic()
    try:
        result = run(chosen)
    finally:
        remove(chosen.folder)
    result.seconds = time.monotonic() - started
    report.show(result)
    keep(chosen, result)
    print(f"written to {chosen.json}")


def keep(chosen: Options, result: report.Report) -> None:
    """Write what there is so far: a run that is cut off loses only the part it was in."""
    result.commit = commit(ROOT)
    paths = ("folder", "json")  # of no meaning to another reader
    result.options = {key: value for key, value in asdict(chosen).items() if key not in paths}
    result.seconds = result.seconds or time.monotonic() - _STARTED
    report.write_json(result, chosen.json)
