"""Train with DeepSpeed's ZeRO and save with laststep.

    torchrun --nproc-per-node 2 deepspeed_engine.py

Start it again, with another number of ranks if you like, and it goes on where it has stopped.
"""

import deepspeed
import torch

import laststep

deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2}},
    },
)

engine = laststep.deepspeed.attach(engine, "runs/zero", keep=laststep.Keep(last=3))
folder, client_state = engine.load_checkpoint("runs/zero")  # (None, None) in a new run
if folder is None:
    torch.manual_seed(1 + engine.global_rank)  # other data on each rank

first = engine.global_steps  # completed steps
while engine.global_steps < first + 20:
    inputs = torch.randn(16, 32, device=engine.device)
    loss = (engine(inputs) - inputs[:, :8]).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_steps % 5 == 0:
        engine.save_checkpoint("runs/zero", client_state={"loss": loss.item()})
engine.destroy()  # waits for the last save
if engine.global_rank == 0:
    print(f"steps {first} to {engine.global_steps}, loss {loss.item():.4f}")
