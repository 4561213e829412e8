"""Keep the best two checkpoints of a fine-tuning by validation loss, and the last for resuming.

python examples/finetune_best_k.py runs/finetune
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import laststep

EPOCHS = 12


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/finetune"
    torch.manual_seed(0)
    train, valid = torch.randn(256, 20), torch.randn(128, 20)
    model = nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 20))
    # A learning rate that is far too high at the end: the last epoch is not the best.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.45)

    keep = laststep.Keep(last=1, best=2, metric="valid_loss", mode="min")
    with laststep.Checkpointer(
        run, keep=keep, model=model, optimizer=optimizer, schedule=schedule
    ) as ckpt:
        for epoch in range(ckpt.restore().next_step, EPOCHS):
            loss = (model(train) - train).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                valid_loss = (model(valid) - valid).square().mean().item()
            print(f"epoch {epoch}: validation loss {valid_loss:.4f}")
            ckpt.save(epoch, metrics={"valid_loss": valid_loss})

    kept = list(laststep.open(run))
    best = min(kept, key=lambda checkpoint: checkpoint.metrics["valid_loss"])
    print(f"kept: {[checkpoint.step for checkpoint in kept]}; best: {best.step}")

    # Only the model of the best one, for inference.
    final = nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 20))
    with laststep.Checkpointer(run, model=final) as ckpt:
        ckpt.restore(best.step, only=["model"])
    with torch.no_grad():
        print(f"restored: {(final(valid) - valid).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
