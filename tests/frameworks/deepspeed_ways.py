"""Small DeepSpeed engines of every kind, on CPU ranks or on one GPU.

A way is words with `+` between: `zero0` to `zero3`, `bf16`, `fp16`, `offload`, `twice` (two
micro-steps for a step), `moe`, `pipe`; `steady`: without dropout, and with the same data on any
number of ranks.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as by_experts
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WIDTH = 12
ROWS = 8
"""In the data of a step, over all ranks."""

# It computes right here, and slowly: DeepSpeed asks whether there are instructions for fp16.
get_accelerator().is_fp16_supported = lambda: True


def start() -> tuple[int, int]:
    """This rank, and how many there are; one, where no launcher says so."""
    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(backend, verbose=False)
    return dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropped)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return rows + self.drop(self.down(torch.relu(self.up(rows))))


class Tied(nn.Module):
    """The first and the last layer of a pipeline, which are one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


class Net(nn.Module):
    def __init__(self, dropped: float, experts: int) -> None:
        super().__init__()
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.last = Block(dropped), nn.Linear(WIDTH, WIDTH)
        self.experts = None
        if experts:
            expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            self.experts = MoE(
                WIDTH,
                expert,
                num_experts=experts,
                ep_size=min(dist.get_world_size(), 2),
                drop_tokens=bool(dropped),
                use_rts=bool(dropped),
                min_capacity=0,
            )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self.first(self.fixed(rows))
        if self.experts is not None:
            inner = self.experts(inner)[0]
        return self.last(inner)


def engine_of(way: str) -> Any:
    words = way.split("+")
    torch.manual_seed(0)
    dropped = 0.0 if "steady" in words else 0.25
    stage = next((int(word[-1]) for word in words if word.startswith("zero")), 0)
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 20}
    if "offload" in words:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    stages = min(dist.get_world_size(), 2) if "pipe" in words else 1
    ranks = dist.get_world_size() // stages
    micro = 2 if "twice" in words or "pipe" in words else 1
    config = {
        "train_micro_batch_size_per_gpu": ROWS // ranks // micro,
        "gradient_accumulation_steps": micro,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
        "bf16": {"enabled": "bf16" in words},
        "fp16": {"enabled": "fp16" in words, "initial_scale_power": 21, "hysteresis": 1},
        "gradient_clipping": 0.0 if "fp16" in words else 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 20, "warmup_type": "linear"},
        },
    }
    if "pipe" in words:
        specs = [
            TiedLayerSpec("both", Tied),
            LayerSpec(Block, dropped),
            LayerSpec(Block, dropped),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            TiedLayerSpec("both", Tied),
        ]
        net: Any = PipelineModule(
            specs,
            num_stages=stages,
            loss_fn=nn.MSELoss(),
            partition_method="uniform",
            base_seed=7,
            seed_layers=True,
        )
    else:
        net = Net(dropped, 4 if "moe" in words else 0)
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = by_experts([{"params": trained, "name": "all"}]) if "moe" in words else trained
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config
    )
    return engine


def step_of(engine: Any, way: str) -> float:
    """One step on the next data; the loss, over all ranks."""
    words = way.split("+")
    steady = "steady" in words
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one = torch.Generator().manual_seed(engine.global_steps) if steady or "pipe" in words else None
    micro = engine.gradient_accumulation_steps()
    if "pipe" in words:
        data = torch.randn(ROWS, WIDTH, generator=one).chunk(engine.dp_world_size)
        own = data[engine.grid.get_data_parallel_rank()].to(engine.device, _dtype(engine))
        pairs = iter([(rows, rows.flip(-1)) for rows in own.chunk(micro)])
        return float(engine.train_batch(data_iter=pairs))
    data = torch.randn(ROWS, WIDTH, generator=one) if one else torch.randn(ROWS // ranks, WIDTH)
    own = (data.chunk(ranks)[rank] if one else data).to(engine.device, _dtype(engine))
    total = torch.zeros((), device=engine.device)
    for rows in own.chunk(micro):
        loss = (engine(rows) - rows.flip(-1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / micro
    dist.all_reduce(total)
    return float(total / ranks)


def _dtype(engine: Any) -> torch.dtype:
    """Of the module's weights."""
    return next(p.dtype for p in engine.module.parameters() if p.requires_grad)
