"""The benchmark on one GPU: 1.21 billion parameters in bf16 under AdamW, 7.28 GB of state."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from bench import bars, options, parts, raw, report
from bench.device import DeviceReader, copy_limits
from bench.hardware import hardware
from bench.rotation import Make, Plan, Rotation, rotate
from bench.state import GPTTraining

if TYPE_CHECKING:
    from collections.abc import Callable

DCP_THREADS = 8
CAPTURES = ("auto", "lazy")
LONG_S, SHORT_S = 0.115, 0.035
LENGTH = 1024


def main() -> None:
    """Run what the command line asks for."""
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a CUDA device; bench/cpu.py does without")
    names = [make().name for make in parts.makers(DCP_THREADS, CAPTURES, 0)]
    chosen = options.parse("gpu", gb=7.28, quick_gb=1.0, names=names, budget_s=270)
    parts.run_and_report(chosen, _run)


def _run(chosen: options.Options) -> report.Report:
    deadline = time.monotonic() + chosen.budget_s
    parts.say("raw disk: trying all ways")
    disk = raw.scan(chosen.folder / "raw", min(chosen.size_bytes, 1536 << 20))
    result = report.Report(
        kind="gpu", hardware=hardware(chosen.folder), disk=disk, copies=copy_limits()
    )
    peers = parts.makers(DCP_THREADS, CAPTURES, chosen.host_memory_bytes)
    wanted = [make for make in peers if chosen.wants_peer(make().name)]
    ours = [make for make in wanted if make().name.startswith(bars.OURS)]
    if chosen.wants("save") or chosen.wants("load"):
        _rotations(chosen, result, disk, wanted, ours, deadline)
        parts.keep(chosen, result)
    if chosen.wants("every") and ours:
        result.every_iteration.append(parts.drainable(chosen, disk, "cuda", 0.1))
        torch.cuda.empty_cache()
        parts.keep(chosen, result)
    if chosen.wants("small"):
        small = parts.small_tensors(chosen, wanted, "cuda", time.monotonic() + 120)
        if small is not None:
            result.rotations["small tensors"] = small
            parts.keep(chosen, result)
    if chosen.wants("save") and ours:
        _short(chosen, result, ours)
    result.bars = bars.gpu_bars(
        result.rotations.get("long iterations"),
        result.rotations.get("short iterations"),
        result.rotations.get("small tensors"),
        result.every_iteration,
        result.copies,
        chosen.host_memory_bytes,
    )
    return result


def _rotations(
    chosen: options.Options,
    result: report.Report,
    disk: raw.DiskLimits,
    wanted: list[Make],
    ours: list[Make],
    deadline: float,
) -> None:
    """All peers at long iterations, and ours after every iteration."""
    training = GPTTraining(chosen.size_bytes, "cuda", batch=1, length=LENGTH)
    batch = training.pace_for(LONG_S, LENGTH)
    parts.say(f"long iterations: batch {batch}")
    result.rotations["long iterations"] = _rotation(
        chosen,
        training,
        wanted,
        _raw_sample(chosen, training, disk),
        deadline,
        repetitions=chosen.repetitions,
        measure_all=True,
    )
    parts.keep(chosen, result)
    if ours and chosen.wants("every"):
        parts.say("a save after every iteration, of the whole state")
        result.every_iteration.append(
            parts.every(chosen, "whole state", training, rounds=1, iterations=4)
        )


def _short(chosen: options.Options, result: report.Report, ours: list[Make]) -> None:
    """Ours at iterations that are as short as their launches allow."""
    training = GPTTraining(chosen.size_bytes, "cuda", batch=1, length=LENGTH)
    batch = training.pace_for(SHORT_S, LENGTH)
    parts.say(f"short iterations: batch {batch}")
    result.rotations["short iterations"] = _rotation(
        chosen, training, ours, None, time.monotonic() + 60, repetitions=1, measure_all=False
    )


def _raw_sample(
    chosen: options.Options, training: GPTTraining, disk: raw.DiskLimits
) -> Callable[[], raw.DiskSample]:
    reader = DeviceReader(disk.best_read)
    return partial(
        raw.sample,
        chosen.folder / "raw",
        training.size_bytes(),
        disk.best_write,
        disk.best_read,
        to_device=reader.read_s,
    )


def _rotation(
    chosen: options.Options,
    training: GPTTraining,
    makers: list[Make],
    sample: Callable[[], raw.DiskSample] | None,
    deadline: float,
    *,
    repetitions: int,
    measure_all: bool,
) -> Rotation:
    plan = Plan(
        repetitions=repetitions,
        peer_repetitions=chosen.peer_repetitions,
        baseline_iterations=8,
        loads=measure_all and chosen.wants("load"),
        memory=measure_all,
        deadline=deadline,
    )
    return rotate(training, makers, chosen.folder, plan, sample, parts.say)
