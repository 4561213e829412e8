"""What shared memory and replicas cost a training, and how soon it is back.

Each repetition has three processes. One trains with a folder alone, then with shared memory, that
folder and another one behind it, in turns: iterations of about the same length, a save every few of
them, and what all of them took beyond the median without any save. It ends by kill -9. The second
restores out of shared memory, the third from the cold folder. Prints a table, and writes everything
to `bench/out/tiers.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import laststep
from bench.files import make_cold
from bench.hardware import commit, hardware
from bench.state import GPTTraining
from laststep.memory import segments

ROOT = Path(__file__).resolve().parents[1]
SAVES = 3
BETWEEN = 8
"""Iterations from one save to the next; a processor takes long for one, and has a quarter."""


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def opened(
    training: GPTTraining, folder: Path, *, several: bool, host_bytes: int
) -> laststep.Checkpointer:
    home = str(folder / ("home" if several else "alone"))
    far = laststep.Tier(str(folder / "far"), keep=laststep.Keep(last=1))
    tiers: list[str | laststep.Tier] = ["shm://", home, far] if several else [home]
    return laststep.Checkpointer(
        tiers=tiers,
        items=training.items(),
        host_memory_bytes=host_bytes,
        options=laststep.Options(progress=False),
        keep=laststep.Keep(last=1),
    )


def made(options: argparse.Namespace) -> GPTTraining:
    training = GPTTraining(options.gb * 1e9, options.device, batch=1, length=64)
    if options.device != "cpu":
        training.pace_for(options.iteration_s, length=1024)
    return training


def train(options: argparse.Namespace) -> None:
    """Train with one place and with three, and end as if the machine had killed it."""
    training, folder = made(options), Path(options.dir)
    between = BETWEEN if options.device != "cpu" else BETWEEN // 4
    usual = statistics.median(training.iteration_s(2 * between))
    host_bytes = int(2.4 * training.size_bytes()) + (256 << 20)
    for several in (False, True):
        ckpt = opened(training, folder, several=several, host_bytes=host_bytes)
        ckpt.restore()
        training.iteration_s(between)
        for step in range(SAVES):
            began = time.perf_counter()
            handle = ckpt.save(step)
            training.iteration_s(between)
            lost_s = time.perf_counter() - began - between * usual
            report = handle.result()
            say(
                kind="save",
                several=several,
                step=step,
                lost_s=lost_s,
                stall_s=report.stall_s,
                captured_s=report.captured_s,
                sealed_s=report.tiers.get("shm://"),
                committed_s=report.committed_s,
                size_bytes=report.size_bytes,
            )
        noise_s = sum(training.iteration_s(between)) - between * usual
        say(kind="noise", several=several, lost_s=noise_s)
        if not several:
            ckpt.close()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(options: argparse.Namespace, *, from_memory: bool) -> None:
    """Come back: out of shared memory, or from the cold folder."""
    training, folder = made(options), Path(options.dir)
    host_bytes = int(2.4 * training.size_bytes()) + (256 << 20)
    if not from_memory:
        make_cold(folder / "alone")
    ckpt = opened(training, folder, several=from_memory, host_bytes=host_bytes)
    began = time.perf_counter()
    found = ckpt.restore()
    if options.device != "cpu":
        torch.cuda.synchronize()
    say(
        kind="restore",
        from_memory=from_memory,
        seconds=time.perf_counter() - began,
        step=found.step,
    )
    ckpt.close()


def repetition(options: argparse.Namespace) -> list[dict[str, object]]:
    folder = Path(tempfile.mkdtemp(dir=options.out, prefix="tiers-"))
    facts: list[dict[str, object]] = []
    try:
        for part in ("train", "memory", "disk"):
            command = [
                sys.executable,
                str(ROOT / "bench" / "tiers.py"),
                "--part",
                part,
                "--dir",
                str(folder),
                "--gb",
                str(options.gb),
                "--device",
                options.device,
                "--iteration-s",
                str(options.iteration_s),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # it kills itself
            facts += [json.loads(line) for line in done.stdout.splitlines()]
    finally:
        for segment in segments.found(run=str(folder / "home")):
            segment.remove()
        shutil.rmtree(folder)
    return facts


def spread(values: list[float], unit: float = 1e3, digits: int = 3) -> str:
    low, middle, high = (
        f"{unit * value:.{digits}g}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/tiers.py", description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--iteration-s", type=float, default=0.115)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--part")
    parser.add_argument("--dir")
    options = parser.parse_args()
    if options.part is not None:
        if options.part == "train":
            train(options)
        else:
            restore(options, from_memory=options.part == "memory")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [repetition(options) for _ in range(options.reps)]
    result = {
        "kind": "tiers",
        "commit": commit(ROOT),
        "gb": options.gb,
        "repetitions": runs,
        "hardware": dataclasses.asdict(hardware(options.out)),
    }
    (options.out / "tiers.json").write_text(json.dumps(result, indent=1, default=str))
    facts = [fact for run in runs for fact in run]
    for several in (False, True):
        saves = [f for f in facts if f["kind"] == "save" and f["several"] is several]
        noise = [f["lost_s"] for f in facts if f["kind"] == "noise" and f["several"] is several]
        name = "shared memory, folder, folder" if several else "folder alone"
        for title, key in (
            ("lost", "lost_s"),
            ("save()", "stall_s"),
            ("captured", "captured_s"),
            ("committed", "committed_s"),
        ):
            first = [f[key] for f in saves if f["step"] == 0]
            later = [f[key] for f in saves if f["step"] != 0]
            print(f"{name:32}{title:12} first {spread(first):28} later {spread(later)} ms")
        print(f"{name:32}{'noise':12} {spread(noise)} ms")
    sealed = [f for f in facts if f["kind"] == "save" and f["several"]]
    print("sealed after captured", spread([f["sealed_s"] - f["captured_s"] for f in sealed]), "ms")
    back = {
        w: [f["seconds"] for f in facts if f["kind"] == "restore" and f["from_memory"] is w]
        for w in (True, False)
    }
    ratio = statistics.median(back[False]) / statistics.median(back[True])
    print(f"back from memory {spread(back[True])} ms, from the cold folder {spread(back[False])}")
    print(f"that is {ratio:.1f} times as fast")
