"""Train by an Accelerator: RUN LOSSES WAY LOADER PLUGIN STEPS, and save every third step.

WAY is `attach` or `items`. Batches, dropout and noise in the dataset draw random numbers of torch,
NumPy and Python; gradients of two batches are accumulated; epochs end in the middle of a run. With
LOADER `hooks`, the script saves and loads the model itself, as those of diffusers do.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import laststep

run, losses, way, loading, plugin, steps = sys.argv[1:7]
SAMPLES, BATCH, ACCUMULATED, EVERY = 72, 4, 2, 3


class Noisy(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(1).item() + np.random.rand() + random.random()  # noqa: NPY002
        return torch.linspace(0, 1, 16) * index / SAMPLES + noise / 100


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self):
        for index in torch.randperm(SAMPLES, generator=self.generator).tolist():
            yield torch.linspace(0, 1, 16) * index / SAMPLES + torch.rand(1) / 100


class Tally:
    """What a script registers."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def save_model(models: list, weights: list, folder: str) -> None:
    if acc.is_main_process:
        for each in models:
            torch.save(acc.unwrap_model(each).state_dict(), Path(folder, "own.pt"))
            weights.pop()


def load_model(models: list, folder: str) -> None:
    while models:
        acc.unwrap_model(models.pop()).load_state_dict(torch.load(Path(folder, "own.pt")))


def accelerator() -> Accelerator:
    config = DataLoaderConfiguration(
        use_seedable_sampler=loading == "seedable",
        use_stateful_dataloader=loading == "stateful",
        dispatch_batches=loading in ("dispatched", "stream"),
    )
    more = {}
    if plugin == "deepspeed":
        from accelerate import DeepSpeedPlugin

        more["deepspeed_plugin"] = DeepSpeedPlugin(
            zero_stage=2, gradient_accumulation_steps=ACCUMULATED, gradient_clipping=1.0
        )
    made = Accelerator(
        cpu=plugin != "gpu",
        dataloader_config=config,
        gradient_accumulation_steps=ACCUMULATED,
        **more,
    )
    if plugin.startswith("fsdp"):  # which Accelerate offers for accelerators only
        made.state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(plugin[4:]), auto_wrap_policy="no_wrap", use_orig_params=True
        )
    return made


set_seed(7)
acc = accelerator()
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 16)
)
if plugin == "fsdp1":  # Accelerate would ask for a device with a number
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
stream = loading == "stream"
loader = DataLoader(
    Stream() if stream else Noisy(), batch_size=BATCH, shuffle=None if stream else True
)
model, optimizer, scheduler, loader = acc.prepare(model, optimizer, scheduler, loader)
if loading == "hooks":
    acc.register_save_state_pre_hook(save_model)
    acc.register_load_state_pre_hook(load_model)
tally = Tally()
acc.register_for_checkpointing(tally)
set_seed(100 + acc.process_index)

ckpt = None
if way == "attach":
    acc = laststep.accelerate.attach(acc, run)
    step = acc.load_state().step or 0  # both count the steps that are done
else:
    ckpt = laststep.Checkpointer(run, items=laststep.accelerate.items(acc))
    step = ckpt.restore().step or 0

micro, saved = 0, None
while step < int(steps):
    for batch in loader:
        micro += 1
        with acc.accumulate(model):
            loss = (model(batch) - batch.flip(1)).square().mean()
            acc.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not acc.sync_gradients:
            continue
        tally.seen += 1
        step += 1
        if acc.is_main_process:
            with Path(losses).open("a") as file:
                file.write(f"{step} {loss.item().hex()}/{tally.seen}\n")
        if step % EVERY == 0:
            if saved is not None:
                saved.wait()  # a kill in this save leaves the one before
            name = f"{run}-{step}" if loading == "hooks" else None
            saved = acc.save_state(name) if ckpt is None else ckpt.save(step)
        if step == int(steps):
            break
if ckpt is not None:
    ckpt.close()
acc.end_training()
