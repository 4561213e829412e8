"""Train with Ray Train, and go on after a worker has died: `ray_train.py FOLDER`."""

import sys
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import laststep


def train(config: dict) -> None:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + ray.train.get_context().get_world_rank())
    with laststep.ray.Checkpointer(model=model, optimizer=optimizer, rng=laststep.RNG()) as ckpt:
        for step in range(ckpt.restore().next_step, config["steps"]):
            batch = torch.randn(8, 16)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                ckpt.save(step, metrics={"loss": loss})  # returns at once
                ckpt.report({"loss": loss.item()})  # with what is committed by now


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": 40},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="linear",
            storage_path=str(Path(sys.argv[1]).resolve()),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    checkpoint = trainer.fit().checkpoint
    weight = laststep.load(checkpoint.path)["model"]["weight"]
    print(f"the weights of {Path(checkpoint.path).name}: {tuple(weight.shape)}")
    ray.shutdown()
