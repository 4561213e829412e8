"""Train with FSDP2 on CPUs or GPUs: stop it, or kill it, and run it with other ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 --steps 1000
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, Sampler

import laststep

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, BATCH, WIDTH = 512, 16, 32
"""`BATCH` is that of all ranks: it must be divisible by their number."""


class Numbers(Dataset[torch.Tensor]):
    """Sample i is always the same, so a resumed job need not repeat random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class RestOfEpoch(Sampler[int]):
    """This rank's part of the samples that `position` leaves in its epoch."""

    def __init__(self, length: int, position: dict[str, int], rank: int, ranks: int) -> None:
        self.length, self.position = length, position
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(self.position["epoch"])
        rest = torch.randperm(self.length, generator=order)[self.position["samples"] :]
        rest = rest[: len(self) * self.ranks]  # the same number on each rank
        return iter(rest[self.rank :: self.ranks].tolist())

    def __len__(self) -> int:
        return (self.length - self.position["samples"]) // self.ranks


def build(device: torch.device, ranks: int) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on all ranks
    blocks = (nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in "123")
    model = nn.Sequential(*blocks).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def cut(log: Path, next_step: int) -> None:
    """Remove the lines of steps that this job will repeat."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    log.write_text("".join(line for line in whole if json.loads(line)["step"] < next_step))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)  # not --run: torchrun takes it for --run-path
    parser.add_argument("--steps", type=int, default=1000)
    wanted = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = build(device, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50)
    position = {"epoch": 0, "samples": 0}  # samples of all ranks: an item that they share
    data = Numbers()
    sampler = RestOfEpoch(len(data), position, rank, ranks)
    loader = DataLoader(data, batch_size=BATCH // ranks, sampler=sampler)

    with laststep.Checkpointer(
        wanted.folder / "run",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        position=position,
        rng=laststep.RNG(),
        every="10 min",
        preemption=True,  # on SIGTERM: save, then exit with code 75
        keep=laststep.Keep(last=2),
    ) as ckpt:
        step = ckpt.restore().next_step
        log = wanted.folder / "losses.jsonl"
        if rank == 0:
            print(f"starting at step {step} with {ranks} ranks", flush=True)
            log.parent.mkdir(parents=True, exist_ok=True)
            cut(log, step)
        while step < wanted.steps:
            for batch in loader:
                inputs = batch.to(device)
                loss = (model(inputs) - inputs.flip(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                position["samples"] += len(batch) * ranks

                mean = loss.detach() / ranks
                dist.all_reduce(mean)
                if rank == 0:
                    with log.open("a") as lines:
                        print(json.dumps({"step": step, "loss": mean.item()}), file=lines)
                ckpt.step(step, metrics={"loss": mean}, last=step == wanted.steps - 1)
                step += 1
                if step == wanted.steps:
                    break
            else:
                position.update(epoch=position["epoch"] + 1, samples=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
