"""Train with an Accelerator, and go on where the last start has ended: `accelerate_loop.py RUN`."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import laststep

run = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate_loop"
steps = int(sys.argv[-1]) if sys.argv[-1].isdigit() else 40

acc = laststep.accelerate.attach(Accelerator(cpu=True), run)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(torch.randn(64, 16), batch_size=4, shuffle=True)
model, optimizer, loader = acc.prepare(model, optimizer, loader)

step = acc.load_state().step or 0  # the steps that are done; None in a new run
print(f"from step {step}")
while step < steps:
    for batch in loader:  # goes on in the middle of the epoch, in the order that it had
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            acc.save_state(metrics={"loss": loss})  # returns at once
        if step == steps:
            break
acc.end_training()  # waits for the last save
