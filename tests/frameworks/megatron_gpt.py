"""Train a small GPT of Megatron-Core, saved by its own calls: RUN LOSSES WAY STEPS.

A way is words with `+` between: `tp` or `ep`: two ranks cut layers, or have experts each; `moe`;
`bf16`; `fused`: the optimizer is a stand-in for Apex's FusedAdam, which counts steps in its groups.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

run, losses, way, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split("+"), sys.argv[4]
SEED, VOCABULARY, LENGTH, ROWS, EVERY = 7, 32, 8, 4, 3


class FusedAdam(torch.optim.Optimizer):
    """Computes as torch's AdamW does, with the state and the options of Apex's."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **more):
        more = {"bias_correction": True, "adam_w_mode": True, **more}
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **more}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            owned = [p for p in group["params"] if p.grad is not None]
            for p in owned:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            torch.optim._functional.adamw(
                owned,
                [p.grad for p in owned],
                [self.state[p]["exp_avg"] for p in owned],
                [self.state[p]["exp_avg_sq"] for p in owned],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in owned],
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


sys.path.append(str(Path(__file__).parents[1] / "adapters"))
sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from megatron_training import pretend_cuda  # noqa: E402

if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("gloo")
pretend_cuda()
torch.Tensor.cuda = lambda tensor, *_, **__: tensor

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core import optimizer as optimizers  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import distrib_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

import laststep  # noqa: E402

size = {
    "tensor_model_parallel_size": 2 if "tp" in way and dist.get_world_size() > 1 else 1,
    "expert_model_parallel_size": 2 if "ep" in way and dist.get_world_size() > 1 else 1,
}
parallel_state.initialize_model_parallel(**size)
# Nothing here draws random numbers of a GPU.
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
moe_utils.te_general_gemm = None  # it is asked for where Transformer Engine is not installed too
set_states = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states


def set_states_but_steps(self, parameter, tensors):
    """Into torch's AdamW Megatron has put the number of steps before: one tensor for all, which
    each of them would count on. Then it asks for another."""
    group, place = self.model_param_group_index_map[parameter]
    live = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
    if "step" in live:
        live["step"] = live["step"].clone()
    set_states(self, parameter, {**live, **tensors})


distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_steps
if "fused" in way:
    optimizers.Adam = distrib_optimizer.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
half = "bf16" in way
config = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    use_cpu_initialization=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    bf16=half,
    pipeline_dtype=torch.float32,
    params_dtype=torch.bfloat16 if half else torch.float32,
    gradient_accumulation_fusion=False,
    num_moe_experts=4 if "moe" in way else None,
    add_bias_linear="moe" not in way,
    moe_router_load_balancing_type="none",
    moe_router_topk=2,
    finalize_model_grads_func=finalize_model_grads,
    **size,
)
torch.manual_seed(SEED)
net = GPTModel(
    config,
    get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
    VOCABULARY,
    LENGTH,
    share_embeddings_and_output_weights=True,
)
if half:
    net.bfloat16()
options = DistributedDataParallelConfig(use_distributed_optimizer=True)
model = DistributedDataParallel(config, options, net)
optimizer = optimizers.get_megatron_optimizer(
    optimizers.OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        use_distributed_optimizer=True,
        bf16=half,
        params_dtype=config.params_dtype,
        clip_grad=1.0,
    ),
    [model],
)


def sharded(*, loads: bool) -> dict[str, object]:
    how = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,  # with experts there are two of them on several ranks
    }
    weights = model.module.sharded_state_dict(metadata=how)
    state = optimizer.sharded_state_dict(weights, is_loading=loads, metadata=how)
    return {"model": weights, "optimizer": state}


def newest() -> Path | None:
    """As Megatron-LM's tracker has it: the last one that is whole."""
    return max((file.parent for file in run.glob("iter_*/metadata.json")), default=None)


def begin_counting() -> None:
    """Megatron asks an optimizer of torch's for its number of steps before it has taken one."""
    for one in optimizer.chained_optimizers:
        for p in (p for group in one.optimizer.param_groups for p in group["params"]):
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            one.optimizer.state[p] = {"step": torch.zeros(()), **moments}


iteration, strategy = 0, laststep.megatron.SaveStrategy()
folder = newest()
if folder is not None:
    if "fused" not in way:
        begin_counting()
    loaded = dist_checkpointing.load(
        sharded(loads=True), folder, sharded_strategy=laststep.megatron.LoadStrategy()
    )
    iteration = loaded["iteration"]
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["rng"])
replicas = parallel_state.get_data_parallel_world_size()
while iteration < int(steps):
    words = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    own = words.chunk(replicas)[parallel_state.get_data_parallel_rank()]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    places = torch.arange(LENGTH).expand(len(own), LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    loss = model(own[:, :-1], places, mask, labels=own[:, 1:]).float().mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    iteration += 1
    total = loss.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    if dist.get_rank() == 0:
        with losses.open("a") as file:
            file.write(f"{iteration} {(total.item() / replicas).hex()}\n")
    if iteration % EVERY == 0:
        folder = run / f"iter_{iteration:07}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = {**sharded(loads=False), "iteration": iteration, "rng": torch.get_rng_state()}
        dist_checkpointing.save(state, folder, sharded_strategy=strategy)
dist.destroy_process_group()
