"""A training of Lightning's: `RUN LOSSES name=value…` appends its losses; `WAYS` has the names.

Dropout and augmentation draw random numbers, the loader shuffles, the scheduler looks at
validation, and weights are averaged by a hook at the end of each batch.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import laststep

SAMPLES, WIDTH, BATCH = 48, 8, 4


class Samples(Dataset):
    """Each time that one is taken, it is another: by all generators of random numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.randn(WIDTH) * 0.1 + random.random() * 0.01
        return torch.full((WIDTH,), index / SAMPLES) + noise


class Stream(IterableDataset):
    """Has no length, so that Lightning fetches a batch ahead; it goes on where it was."""

    def __init__(self):
        self.numbers = iter(range(10**9))

    def __iter__(self):
        for _ in range(SAMPLES):
            number = next(self.numbers)
            yield torch.full((WIDTH,), number % SAMPLES / SAMPLES) + torch.rand(WIDTH)


class StatefulStream(Stream):
    """Knows where it is."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield torch.full((WIDTH,), self.place / SAMPLES) + torch.rand(WIDTH)
            if self.place % SAMPLES == 0:
                return

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Net(pl.LightningModule):
    norm = torch.nn.BatchNorm1d

    def __init__(self, losses: str) -> None:
        super().__init__()
        self.save_hyperparameters({"width": WIDTH})
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 32),
            self.norm(32),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, WIDTH),
        )
        self.register_buffer("average", torch.zeros(WIDTH))
        self.losses, self.draws = losses, []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch + self.average.mean()).square().mean()
        self.log("train_loss", loss, batch_size=BATCH)
        self._loss = float(loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.mul_(0.9).add_(_whole(self.net[3].bias.detach()), alpha=0.1)
        self.write()

    def write(self):
        if self.global_rank == 0:
            with Path(self.losses).open("a") as file:
                batches = self.trainer.fit_loop.total_batch_idx
                file.write(f"{batches} {self._loss.hex()}/{self.lr_of()}\n")

    def lr_of(self):
        return ",".join(f"{group['lr']:.6g}" for group in self.optimizers().param_groups)

    def on_train_epoch_start(self):
        self.draws.append(torch.rand(()).item())  # a hook may draw as well

    def validation_step(self, batch, batch_idx):
        noisy = batch + torch.rand(WIDTH, device=batch.device)
        self.log("val_loss", (self.net(noisy) - batch).square().mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", (self.net(batch) - batch).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        warm = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return [optimizer], [{"scheduler": warm, "monitor": "val_loss"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["draws"] = self.draws
        checkpoint["mean"] = {"of": self.average * 2}

    def on_load_checkpoint(self, checkpoint):
        self.draws, self.loaded = checkpoint["draws"], checkpoint["mean"]["of"]


class Fetching(Net):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Sharded(Net):
    """By FSDP2, which leaves buffers to each rank; the first one's are stored."""

    norm = torch.nn.LayerNorm

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class OnTheCPU(pl.strategies.FSDPStrategy):
    """Lightning asks for a GPU of FSDPStrategy itself, and not of what derives from it."""


class Flat(Net):
    """By FSDP1, which does without a GPU if it is told to."""

    norm = torch.nn.LayerNorm

    def configure_model(self):
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.net = FullyShardedDataParallel(
            self.net, device_id=torch.device("cpu"), use_orig_params=True
        )

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.write()


class Partitioned(Net):
    """By ZeRO, of which a weight may be empty here."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.write()


def strategy(name: str):
    if name == "fsdp2":
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return pl.strategies.ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return OnTheCPU(use_orig_params=True) if name == "fsdp" else name


class Tells(pl.Callback):
    """Prints a sum of the weights with which training begins."""

    def on_train_start(self, trainer, module):
        weights = [_whole(entry) for entry in module.state_dict().values()]  # of all ranks
        if trainer.global_rank == 0:
            print(f"restored {sum(one.double().abs().sum().item() for one in weights):.4f}")


class Paces(pl.Callback):
    """Waits with step 14 until step 10 is committed: a training that is killed has something."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        while trainer.global_step == 13 and not any(
            self._run.glob("step-00000010.*/manifest.json")
        ):
            time.sleep(0.01)


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loader(way: str):
    if way == "stream":
        return DataLoader(Stream(), batch_size=BATCH)
    if way == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True)
    if way == "stream_stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(StatefulStream(), batch_size=BATCH)
    workers = 2 if way == "workers" else 0
    return DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=workers)


WAYS = {
    "loader": "plain",
    "every": 5,
    "epochs": 4,
    "steps": -1,
    "accumulate": 1,
    "validate": 1.0,
    "strategy": "auto",
    "resume": True,
    "limit": 1.0,
    "step": "plain",
    "paced": 0,
    "on": "cpu",
}


def train(run: str | None, losses: str, callbacks=(), ckpt_path=None, **asked: object) -> Net:
    """Until it ends, or from where it was; returns the model."""
    ways = {**WAYS, **asked}
    pl.seed_everything(7, verbose=False)
    ours = (
        []
        if run is None
        else [laststep.lightning.Checkpoint(run, every=ways["every"], resume=ways["resume"])]
    )
    more = [pl.callbacks.EarlyStopping("val_loss", patience=50), pl.callbacks.Timer(), Tells()]
    if run is not None and ways["paced"]:
        more.append(Paces(run))
    trainer = pl.Trainer(
        accelerator=ways["on"],
        deterministic=True,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy(ways["strategy"]),
        max_epochs=ways["epochs"],
        max_steps=ways["steps"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=ways["accumulate"],
        val_check_interval=ways["validate"],
        limit_train_batches=ways["limit"],
        callbacks=[*ours, *more, *callbacks],
    )
    kinds = {"fetching": Fetching, "fsdp2": Sharded, "fsdp": Flat}
    kinds |= dict.fromkeys(("deepspeed_stage_2", "deepspeed_stage_3"), Partitioned)
    net = kinds.get(ways["strategy"], kinds.get(ways["step"], Net))(losses)
    validation = DataLoader(Samples(), batch_size=BATCH)
    trainer.fit(net, loader(ways["loader"]), validation, ckpt_path=ckpt_path)
    return net


def main() -> None:
    """Settings as `name=value`."""
    logging.basicConfig(level=logging.INFO)
    warnings.simplefilter("ignore")
    run, losses, *more = sys.argv[1:]
    asked = dict(one.split("=") for one in more)
    train(run, losses, **{name: type(WAYS[name])(value) for name, value in asked.items()})


if __name__ == "__main__":
    main()
