"""Three jobs of Ray Train in one cluster: FOLDER. What comes of them lies there as JSON.

`whole` is never disturbed. Of `killed`, the first worker is killed while a save is under way, and
Ray starts all of them again. `alone` is one worker that goes on with the run of `killed`, which
does not lie in its own experiment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import laststep
from laststep.events import Captured

FOLDER = Path(sys.argv[1]).resolve()
STEPS, KILLED, MORE = 10, 6, 13


def train(config: dict) -> None:
    rank = ray.train.get_context().get_world_rank()
    folder = Path(config["folder"])

    def die_once(event: object) -> None:
        mark = folder / "was_killed"
        if config["dies"] and isinstance(event, Captured) and event.step == KILLED and rank == 0:
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    run = [config["run"]] if config["run"] else []
    with laststep.ray.Checkpointer(
        *run,
        model=model,
        optimizer=optimizer,
        rng=laststep.RNG(),
        options=laststep.Options(subscribers=[die_once]),
    ) as ckpt:
        for step in range(ckpt.restore().next_step, config["steps"]):
            batch = torch.randn(4, 8)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(f"{step} {loss.item().hex()}\n")
            if step % 2 == 0:
                handle = ckpt.save(step)
                if step == KILLED - 2:
                    handle.wait()  # it is there for the second start
            ckpt.report({"loss": loss.item(), "step": step})


def job(name: str, workers: int, steps: int, run: str = "", *, dies: bool = False) -> None:
    folder = FOLDER / name
    folder.mkdir()
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "steps": steps, "run": run, "dies": dies},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="experiment",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    path = None if result.checkpoint is None else result.checkpoint.path
    told = {"path": path, "metrics": result.metrics}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    job("whole", 2, STEPS)
    job("killed", 2, STEPS, dies=True)
    job("alone", 1, MORE, run=str(FOLDER / "killed" / "experiment" / "laststep"))
    ray.shutdown()
