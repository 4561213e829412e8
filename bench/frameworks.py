"""`python bench/frameworks.py`: training time lost by a save, a framework's own way against ours.

Each framework trains the same transformer three ways: without saving, with its own saving, with
laststep's adapter. A process of its own for each, in rotation. A save has lost what the steps from
it to the next one took beyond as many steps of the training without saves in the same round: so the
call and all that slows later steps count, and the end of the program does not. What the way without
saving "loses" is the noise. What steps lose before the first save, while memory is made ready, is
listed by itself. Run it in the environment of `make test-frameworks`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from bench.hardware import commit, hardware  # noqa: E402
from bench.spread import spread  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("none", "own", "ours")
SAVES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, and how long it trains: a save ends before the next, and the last before the end."""

    width: int
    layers: int
    heads: int
    rows: int
    tokens: int
    every: int
    """Steps from save to save, and after the last one."""

    @property
    def steps(self) -> int:
        return (SAVES + 1) * self.every


SIZES = {
    "small": Size(width=512, layers=8, heads=8, rows=2, tokens=64, every=12),
    "1b": Size(width=2048, layers=18, heads=16, rows=8, tokens=512, every=15),
}
"""34 million parameters, and 1.0 billion."""


class Clock:
    """When each step began."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.begins: list[float] = []

    def tick(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.begins.append(time.perf_counter())


def llama(size: Size, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=size.width,
        intermediate_size=size.width * 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        made: torch.nn.Module = LlamaForCausalLM(config)
    return made


def samples(size: Size) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    rows = torch.randint(0, 8192, (size.rows * size.steps, size.tokens))
    return [{"input_ids": row, "labels": row} for row in rows]


def train_hf(way: str, folder: str, size: Size, device: str, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            clock.tick()

        def on_step_end(self, _: object, state: Any, control: Any, **__: object) -> None:
            if state.global_step == size.steps:  # it would save at its end, which takes long
                control.should_save = False

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=size.steps,
        save_steps=size.every,
        logging_strategy="no",
        save_strategy="no" if way == "none" else "steps",
        per_device_train_batch_size=size.rows,
        use_cpu=device == "cpu",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
    )
    trainer = Trainer(
        llama(size, device), arguments, train_dataset=samples(size), callbacks=[Ticks()]
    )
    if way == "ours":
        import laststep

        laststep.hf.attach(trainer, run=f"{folder}/run")
    trainer.train()


def train_lightning(way: str, folder: str, size: Size, device: str, clock: Clock) -> None:
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(size, device)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Ticks(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: object, **__: object) -> None:
            clock.tick()

    callbacks: list[Any] = [Ticks()]
    if way == "own":
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=size.every, save_top_k=-1))
    elif way == "ours":
        import laststep

        callbacks.append(laststep.lightning.Checkpoint(f"{folder}/run", every=size.every))
    trainer = lightning.Trainer(
        max_steps=size.steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu" if device == "cpu" else "gpu",
        enable_checkpointing=way != "none",
        default_root_dir=folder,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(samples(size), batch_size=size.rows))  # type: ignore[arg-type]


def train_accelerate(way: str, folder: str, size: Size, device: str, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    model = llama(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(samples(size), batch_size=size.rows)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if way == "ours":
        import laststep

        accelerator = laststep.accelerate.attach(accelerator, f"{folder}/run")
    for step, batch in enumerate(loader, start=1):
        clock.tick()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % size.every == 0 and step < size.steps and way != "none":
            accelerator.save_state(f"{folder}/{step}")
    accelerator.end_training()


def train_deepspeed(way: str, folder: str, size: Size, device: str, clock: Clock) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl")
    model = llama(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = {
        "train_micro_batch_size_per_gpu": size.rows,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if way == "ours":
        import laststep

        engine = laststep.deepspeed.attach(engine, f"{folder}/run")
    loader = torch.utils.data.DataLoader(samples(size), batch_size=size.rows)  # type: ignore[arg-type]
    for step, batch in enumerate(loader, start=1):
        clock.tick()
        moved = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        engine.backward(engine(**moved).loss)
        engine.step()
        if step % size.every == 0 and step < size.steps and way != "none":
            engine.save_checkpoint(folder, tag=f"global_step{step}")


PACKAGES = {
    "hf": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}
FRAMEWORKS: dict[str, Callable[[str, str, Size, str, Clock], None]] = {
    "hf": train_hf,
    "lightning": train_lightning,
    "accelerate": train_accelerate,
    "deepspeed": train_deepspeed,
}


def one(framework: str, way: str, folder: str, size: str, device: str) -> None:
    """Train once, and write when each step began."""
    clock = Clock(device)
    FRAMEWORKS[framework](way, folder, SIZES[size], device, clock)
    print("BEGINS", json.dumps(clock.begins), flush=True)


def begins(framework: str, way: str, size: str, device: str) -> list[float]:
    """When each step of a training in a process of its own began."""
    with tempfile.TemporaryDirectory(prefix="laststep-", ignore_cleanup_errors=True) as to:
        command = [sys.executable, __file__, "--one", framework, way, to, size, device]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        if framework == "deepspeed":
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29571",
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
            }
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("BEGINS ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{framework} {way}: {done.stderr[-3000:]}")
    return [float(begin) for begin in json.loads(lines[0].removeprefix("BEGINS "))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What one training has lost."""

    step_s: float
    """The median of its steps."""
    before_s: float
    """Before its first save."""
    saves_s: list[float]


def lost(began: list[float], every: int, step_s: float) -> Lost:
    """What steps took beyond `step_s`. Save number n, from 1, is made between the step `n * every`
    and the next.

    The first three steps of a process are slower and count for nothing; a save's time begins with
    the last step before it and ends with the last step before the next one.
    """
    steps = steps_of(began)
    windows = [steps[n * every - 1 : (n + 1) * every - 1] for n in range(SAVES + 1)]
    windows[0] = steps[3 : every - 1]
    before_s, *saves_s = [sum(window) - len(window) * step_s for window in windows]
    return Lost(step_s=statistics.median(steps), before_s=before_s, saves_s=saves_s)


def steps_of(began: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(began)]


def main() -> None:
    """Measure, print a table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.one:
        one(*asked.one)
        return
    found: dict[str, Any] = {}
    for framework in asked.frameworks.split(","):
        if importlib.util.find_spec(PACKAGES[framework]) is None:
            print(framework, "not installed", flush=True)
            continue
        trainings: dict[str, list[Lost]] = {way: [] for way in WAYS}
        for _ in range(asked.repeat):
            step_s = 0.0
            for way in WAYS:
                began = begins(framework, way, asked.size, asked.device)
                if way == "none":
                    step_s = statistics.median(steps_of(began)[3:])
                trainings[way].append(lost(began, SIZES[asked.size].every, step_s))
                print(framework, way, trainings[way][-1], flush=True)
        found[framework] = {
            "lost_s": {
                way: asdict(spread(s for one in every for s in one.saves_s))  # type: ignore[arg-type]
                for way, every in trainings.items()
            },
            "trainings": {way: [asdict(one) for one in every] for way, every in trainings.items()},
        }
        print(framework, json.dumps(found[framework]["lost_s"]), flush=True)
        if asked.json:
            result = {
                "commit": commit(ROOT),
                "hardware": asdict(hardware(Path(tempfile.gettempdir()))),
                "size": asked.size,
                "device": asked.device,
                "saves": SAVES,
                "frameworks": found,
            }
            asked.json.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
