"""Keep the best two checkpoints of a fine-tuning by validation loss, and the last for resuming.

python examples/finetune_best_k.py runs/finetune
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import laststep

EPOCHS = 12


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 1))


def examples(count: int, teacher: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 20)
    return x, teacher(x).detach() + 0.5 * torch.randn(count, 1)


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/finetune"
    torch.manual_seed(0)
    teacher = nn.Linear(20, 1)
    train_x, train_y = examples(48, teacher)
    valid_x, valid_y = examples(256, teacher)
    model = make_model()
    # Few and noisy examples: in the end it overfits a little, and the last epoch is not the best.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * EPOCHS)

    keep = laststep.Keep(last=1, best=2, metric="valid_loss", mode="min")
    with laststep.Checkpointer(
        run, keep=keep, model=model, optimizer=optimizer, schedule=schedule
    ) as ckpt:
        for epoch in range(ckpt.restore().next_step, EPOCHS):
            loss = (model(train_x) - train_y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                valid_loss = (model(valid_x) - valid_y).square().mean().item()
            print(f"epoch {epoch}: validation loss {valid_loss:.4f}")
            ckpt.save(epoch, metrics={"valid_loss": valid_loss})

    kept = list(laststep.open(run))
    best = min(kept, key=lambda checkpoint: checkpoint.metrics["valid_loss"])
    print(f"kept: {[checkpoint.step for checkpoint in kept]}; best: {best.step}")

    # Only the model of the best one, for inference.
    final = make_model()
    with laststep.Checkpointer(run, model=final) as ckpt:
        ckpt.restore(best.step, only=["model"])
    with torch.no_grad():
        print(f"restored: {(final(valid_x) - valid_y).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
