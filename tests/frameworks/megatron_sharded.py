"""A state as Megatron's models describe it, over ranks: FOLDER save|load|others [parallel].

With `parallel`, Megatron's wrappers spread the work over replicas.

A dense weight cut in columns, one that all ranks have, experts of which each rank has some, moments
of each under the names of the optimizer, an object for each rank, and plain values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from laststep.megatron import LoadStrategy, SaveStrategy

sys.path += [str(Path(__file__).parents[1] / name) for name in ("adapters", "ranks")]
from megatron_training import pretend_cuda

EXPERTS, WIDTH = 4, 8


def whole(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def described(*, empty):
    """The sharded state of this rank, and what its parts are to be."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state, parts = {}, {}

    def add(name, part, *offsets, **more):
        parts[name] = part
        data = torch.zeros_like(part) if empty else part.clone()
        state[name] = ShardedTensor.from_rank_offsets(name, data, *offsets, **more)

    for number, key in enumerate(("weight", "optimizer.exp_avg", "optimizer.exp_avg_sq")):
        columns = whole(number, WIDTH, WIDTH).chunk(ranks)[rank].contiguous()
        add(f"dense.{key}", columns, (0, rank, ranks))
        for expert in range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks):
            part = whole(100 * number + expert, WIDTH, 3)
            name = f"expert.{expert}.{key}"
            add(name, part, (0, expert, EXPERTS), prepend_axis_num=1)
            state[name].key = f"experts.{key}"
    add("norm.weight", whole(77, WIDTH), replica_id=rank)
    state["rng"] = ShardedObject("rng", {"of": rank}, (ranks,), (rank,), replica_id=0)
    if not empty:
        state["iteration"], state["args"] = 12, {"lr": 0.5}
    return state, parts


def main(folder, what, way="plain"):
    dist.init_process_group("gloo")
    if way == "parallel":  # the wrappers exchange what they load through a GPU
        pretend_cuda()
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    if what == "save":
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        strategy = SaveStrategy()
        if way == "parallel":
            strategy = FullyParallelSaveStrategyWrapper(strategy)
        dist_checkpointing.save(described(empty=False)[0], folder, sharded_strategy=strategy)
    else:
        state, parts = described(empty=True)
        if what == "others":
            del state["rng"]  # of which there is one for each rank that saved
        strategy = LoadStrategy()
        if way == "parallel":
            strategy = FullyParallelLoadStrategyWrapper(strategy)
        loaded = dist_checkpointing.load(state, folder, sharded_strategy=strategy)
        same = all(torch.equal(loaded[name], part) for name, part in parts.items())
        keys = sorted(serialization.load_sharded_metadata(folder, LoadStrategy()))
        facts = [same, loaded.get("rng"), loaded["iteration"], loaded["args"], keys]
        Path(f"{folder}.{what}{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
