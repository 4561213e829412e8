"""The smallest training that can be killed at any moment: run it, kill it, run it again.

python examples/minimal.py runs/minimal
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import laststep

STEPS = 500


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/minimal"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    ckpt = laststep.Checkpointer(run, model=model, optimizer=optimizer, rng=laststep.RNG())
    start = ckpt.restore().next_step  # newest checkpoint that verifies; 0 in a new run
    print(f"starting at step {start}")
    for step in range(start, STEPS):
        inputs = torch.randn(32, 16)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            ckpt.save(step, metrics={"loss": loss.item()})  # returns at once
            print(f"step {step}: loss {loss.item():.4f}")
    ckpt.close()  # waits, and raises what failed


if __name__ == "__main__":
    main()
