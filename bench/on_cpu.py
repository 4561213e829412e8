"""The benchmark without a GPU: a GPT of about 1.5 GB in fp32 on the CPU."""

from __future__ import annotations

import time
from functools import partial

from bench import bars, options, parts, raw, report
from bench.hardware import hardware
from bench.rotation import Plan, rotate
from bench.state import GPTTraining

DCP_THREADS = 2


def main() -> None:
    """Run what the command line asks for."""
    names = [make().name for make in parts.makers(DCP_THREADS, ("auto",), 0)]
    chosen = options.parse("cpu", gb=1.5, quick_gb=0.1, names=names, budget_s=240)
    parts.run_and_report(chosen, _run)


def _run(chosen: options.Options) -> report.Report:
    deadline = time.monotonic() + chosen.budget_s
    parts.say("raw disk: trying all ways")
    disk = raw.scan(chosen.folder / "raw", min(chosen.size_bytes, 512 << 20))
    result = report.Report(kind="cpu", hardware=hardware(chosen.folder), disk=disk)
    peers = parts.makers(DCP_THREADS, ("auto",), chosen.host_memory_bytes)
    wanted = [make for make in peers if chosen.wants_peer(make().name)]
    if chosen.wants("save") or chosen.wants("load"):
        training = GPTTraining(chosen.size_bytes, "cpu", batch=1, length=16)
        plan = Plan(
            repetitions=chosen.repetitions,
            peer_repetitions=chosen.peer_repetitions,
            baseline_iterations=2 if chosen.quick else 3,
            loads=chosen.wants("load"),
            memory=True,
            deadline=deadline,
        )
        size_bytes = training.size_bytes()
        sample = partial(
            raw.sample, chosen.folder / "raw", size_bytes, disk.best_write, disk.best_read
        )
        main_rotation = rotate(training, wanted, chosen.folder, plan, sample, parts.say)
        result.rotations["main"] = main_rotation
        parts.keep(chosen, result)
        if chosen.wants("every") and chosen.wants_peer("laststep") and not chosen.quick:
            parts.say("a save after every iteration, of the whole state")
            result.every_iteration.append(
                parts.every(chosen, "whole state", training, rounds=1, iterations=4)
            )
        del training
    if chosen.wants("every") and chosen.wants_peer("laststep"):
        result.every_iteration.append(parts.drainable(chosen, disk, "cpu", 0.2))
    if chosen.wants("small"):
        small = parts.small_tensors(chosen, wanted, "cpu", time.monotonic() + 90)
        if small is not None:
            result.rotations["small tensors"] = small
    result.bars = bars.cpu_bars(result.rotations.get("main"), result.rotations.get("small tensors"))
    return result
