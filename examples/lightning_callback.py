"""A training of Lightning's that can be killed at any moment: run it, kill it, run it again.

python examples/lightning_callback.py runs/lightning
"""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import laststep


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
    pl.seed_everything(0)
    samples = TensorDataset(torch.randn(512, 16))
    checkpoint = laststep.lightning.Checkpoint(run, every=10, monitor="val_loss", top_k=2)
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(samples, 32, shuffle=True), DataLoader(samples, 128))
    print(f"step {trainer.global_step}, the best is {checkpoint.best_model_path}")


if __name__ == "__main__":
    main()
