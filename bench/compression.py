"""`python bench/compression.py`: what compression saves, and what it costs, on real training state.

A GPT is trained on the pages of this project, on the CPU. Then, in one run:

- dense training: what `max` makes of fp32 state and of bf16 weights, and the CPU time of encoding
- bf16 weights, steps of 1e-6: what the next save comes to
- a fast disk and a line of 200 MB/s: time to durable with `adaptive` beside none, and time lost
- state in which nothing is to be gained: the cost of looking for what did not change
- a thousand saves of LoRA with pruning: sizes, files and times of the first and of the last hundred

Every figure is a median of several saves, with the spread beside it. Needs `laststep[compress]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

import laststep  # noqa: E402
from bench import throttled  # noqa: E402
from bench.hardware import commit, hardware  # noqa: E402
from bench.state import GPT  # noqa: E402
from laststep.flush import base as last_save  # noqa: E402
from laststep.settings import as_keywords  # noqa: E402
from laststep.storage.registry import register_store  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.flush.saves import SaveReport

SEQUENCES, LENGTH = 4, 128
MB_PER_S = 200


class TextTraining:
    """A GPT that learns letters."""

    def __init__(self, width: int, layers: int, lr: float = 1e-3) -> None:
        torch.manual_seed(0)
        text = b"".join(page.read_bytes() for page in sorted(ROOT.glob("docs/**/*.md")))
        self._letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.model = GPT(layers, width, 256)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def train(self, steps: int) -> float:
        for _ in range(steps):
            starts = torch.randint(len(self._letters) - LENGTH, (SEQUENCES,)).tolist()
            loss = self.model(torch.stack([self._letters[at : at + LENGTH] for at in starts]))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def items(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def bf16(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().bfloat16() for name, p in self.model.named_parameters()}


def spread(values: list[float], scale: float = 1.0, unit: str = "") -> str:
    """The median, and from the least to the most."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle * scale:.3g}{unit} ({low * scale:.3g} to {high * scale:.3g})"


def ratio(report: SaveReport) -> float:
    """The bytes of the state to those that were written for it."""
    return report.size_bytes / (report.written_bytes or 1)


@contextmanager
def folder(parent: Path) -> Iterator[Path]:
    """A folder of its own, removed with all in it."""
    place = Path(tempfile.mkdtemp(prefix="compression-", dir=parent))
    try:
        yield place / "run"
    finally:
        shutil.rmtree(place)


def dense(training: TextTraining, parent: Path, reps: int) -> dict[str, object]:
    """Everything encoded, of fp32 state and of bf16 weights, each save beside no other."""
    found: dict[str, list[float]] = {"fp32": [], "bf16": [], "encode_gb_s": [], "restore_s": []}
    raw_restore_s: list[float] = []
    for _ in range(reps):
        training.train(2)
        for name, items in (("fp32", training.items()), ("bf16", {"weights": training.bf16()})):
            with folder(parent) as run, checkpointer(run, items, "max") as ckpt:
                report = ckpt.save(0).result()
            found[name].append(ratio(report))
            took_s = sum(coding.encode_s for coding in report.coding)
            found["encode_gb_s"].append(report.size_bytes / took_s / 1e9)
        for mode, seconds in (("max", found["restore_s"]), ("none", raw_restore_s)):
            with folder(parent) as run:
                with checkpointer(run, training.items(), mode) as ckpt:
                    ckpt.save(0).result()
                with checkpointer(run, training.items(), mode) as ckpt:
                    began = time.perf_counter()
                    ckpt.restore()
                    seconds.append(time.perf_counter() - began)
    print(
        f"dense, max: fp32 state {spread(found['fp32'])} times smaller (bar 1.18), bf16 weights "
        f"{spread(found['bf16'])} (1.45), encoded at {spread(found['encode_gb_s'])} GB/s a core; "
        f"restored in {spread(found['restore_s'])} s beside {spread(raw_restore_s)}"
    )
    return {**found, "raw_restore_s": raw_restore_s}


def low_rate(training: TextTraining, parent: Path, reps: int) -> dict[str, object]:
    """bf16 weights of a fine-tuning: masters move by 1e-6, weights are their roundings."""
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-6
    weights = training.bf16()
    found: dict[str, list[float]] = {}
    for mode in ("max", "adaptive"):
        with folder(parent) as run, checkpointer(run, {"weights": weights}, mode) as ckpt:
            found[mode] = []
            for step in range(reps + 3):
                training.train(1)
                for name, tensor in training.bf16().items():
                    weights[name].copy_(tensor)
                found[mode].append(ratio(ckpt.save(step).result()))
        print(
            f"bf16 weights, steps of 1e-6, {mode}: each save smaller by "
            + ", ".join(f"{one:.3g}" for one in found[mode])
            + " times (bar 20)"
        )
    return found


def durable(training: TextTraining, parent: Path, reps: int, *, slow: bool) -> dict[str, object]:
    """Time to durable with and without, in turns; the first of each is left out."""
    seconds: dict[str, list[float]] = {"none": [], "adaptive": []}
    lost: dict[str, list[float]] = {"none": [], "adaptive": []}
    ratios, why = [], []
    with folder(parent) as raw_run, folder(parent) as run:
        places = {"none": raw_run, "adaptive": run}
        urls = {
            mode: throttled.url_of(place, MB_PER_S) if slow else str(place)
            for mode, place in places.items()
        }
        with (
            checkpointer(urls["none"], training.items(), "none") as raw,
            checkpointer(urls["adaptive"], training.items(), "adaptive") as adaptive,
        ):
            for step in range(reps + 1):
                for mode, ckpt in (("none", raw), ("adaptive", adaptive)):
                    training.train(1)
                    time.sleep(0.5)  # cores are idle between saves, as beside a device
                    report = ckpt.save(step).result()
                    if step:
                        seconds[mode].append(report.durable_s or 0.0)
                        lost[mode].append(report.lost_s)
                    if step and mode == "adaptive":
                        ratios.append(ratio(report))
                        why += [f"{coding.picked}: {coding.why}" for coding in report.coding]
    share = statistics.median(seconds["adaptive"]) / statistics.median(seconds["none"])
    print(
        f"{'a line of 200 MB/s' if slow else 'the disk'}: durable in "
        f"{spread(seconds['adaptive'])} s with adaptive, {spread(seconds['none'])} without: "
        f"{share:.2f} times, at {spread(ratios)} times smaller; lost "
        f"{spread(lost['adaptive'], 1e3)} ms beside {spread(lost['none'], 1e3)}"
    )
    print(f"    {why[-1]}")
    return {"durable_s": seconds, "lost_s": lost, "ratios": ratios, "why": why}


def looking(training: TextTraining, parent: Path, reps: int) -> dict[str, object]:
    """Dense state: saves that look for what did not change beside such that cannot borrow."""
    seconds: dict[str, list[float]] = {"looks": [], "does not": []}
    lost: dict[str, list[float]] = {"looks": [], "does not": []}
    least = last_save.LEAST_BYTES
    with (
        folder(parent) as one,
        folder(parent) as other,
        checkpointer(one, training.items(), "none", flush="thread") as looks,
        checkpointer(other, training.items(), "none", flush="thread") as blind,
    ):
        for step in range(reps + 1):
            for name, ckpt in (("looks", looks), ("does not", blind)):
                training.train(1)
                last_save.LEAST_BYTES = least if name == "looks" else 1 << 62
                report = ckpt.save(step).result()
                if step:
                    seconds[name].append(report.durable_s or 0.0)
                    lost[name].append(report.lost_s)
    last_save.LEAST_BYTES = least
    print(
        f"looking for changes in dense state: durable in {spread(seconds['looks'])} s beside "
        f"{spread(seconds['does not'])} without; lost {spread(lost['looks'], 1e3)} ms beside "
        f"{spread(lost['does not'], 1e3)}"
    )
    return {"durable_s": seconds, "lost_s": lost}


def many(parent: Path, saves: int, mode: str) -> dict[str, object]:
    """Saves of adapters beside a frozen base, two kept at a time."""
    torch.manual_seed(0)
    base = {str(n): torch.randn(1024, 1024) for n in range(8)}
    adapters = {str(n): torch.randn(2, 8, 1024) for n in range(8)}
    took, sizes, files, restores = [], [], [], []
    with folder(parent) as run:
        items = {"base": base, "adapters": adapters}
        with checkpointer(run, items, mode, keep=laststep.Keep(last=2)) as ckpt:
            for step in range(saves):
                for tensor in adapters.values():
                    tensor.add_(torch.randn_like(tensor), alpha=0.01)
                began = time.perf_counter()
                ckpt.save(step).result()
                took.append(time.perf_counter() - began)
                if step % (saves // 10) < 2:
                    sizes.append(run_bytes(run))
                    newest = max(run.glob("step-*"), key=lambda place: place.name)
                    files.append(len(list(newest.iterdir())))
                    began = time.perf_counter()
                    ckpt.restore()
                    restores.append(time.perf_counter() - began)
    tenth = max(saves // 10, 1)
    print(
        f"{saves} saves of LoRA with pruning, {mode}: a save {spread(took[1:tenth], 1e3)} ms in "
        f"the first tenth, {spread(took[-tenth:], 1e3)} in the last; run {spread(sizes, 1e-6)} "
        f"MB, a restore {spread(restores, 1e3)} ms, {spread(files)} files"
    )
    return {"save_s": took, "run_bytes": sizes, "files": files, "restore_s": restores}


def run_bytes(run: Path) -> int:
    """Of every file of a run once, however many names it has; some are being deleted."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(run):
        for name in names:
            with suppress(FileNotFoundError):
                status = Path(parent, name).stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def checkpointer(
    run: object, items: dict[str, object], mode: str, **settings: object
) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run,
        items=items,
        compression=mode,
        new_lineage=True,
        **as_keywords({"progress": False, **settings}),
    )


def main() -> None:
    """Run all cases, and write every figure to bench/out/compression.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512, help="of the GPT (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of training (%(default)s)")
    parser.add_argument("--reps", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--saves", type=int, default=1000, help="of LoRA (%(default)s)")
    parser.add_argument("--only", default="", help="cases, with commas between them")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench" / "out")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    register_store(throttled.SCHEME, "bench.throttled:SlowStore")
    training = TextTraining(given.width, given.layers)
    loss = training.train(given.steps)
    size = 12 * sum(p.numel() for p in training.model.parameters())
    print(f"a state of {size / 1e6:.0f} MB after {given.steps} steps, loss {loss:.2f}", flush=True)
    reps, parent = given.reps, given.dir
    cases: dict[str, Callable[[], dict[str, object]]] = {
        "dense": lambda: dense(training, parent, reps),
        "disk": lambda: durable(training, parent, 2 * reps, slow=False),
        "line": lambda: durable(training, parent, reps, slow=True),
        "looking": lambda: looking(training, parent, 2 * reps),
        "many": lambda: many(parent, given.saves, "none"),
        "many encoded": lambda: many(parent, given.saves, "max"),
        "low rate": lambda: low_rate(training, parent, reps),  # the last: it changes the rate
    }
    wanted = [name.strip() for name in given.only.split(",")] if given.only else list(cases)
    result: dict[str, object] = {
        "kind": "compression",
        "commit": commit(ROOT),
        "size_bytes": size,
        "hardware": dataclasses.asdict(hardware(given.dir)),
        "cases": {name: cases[name]() for name in wanted},
    }
    (given.dir / "compression.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
