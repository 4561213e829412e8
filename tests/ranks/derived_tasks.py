"""What ranks do in the tests of weights that follow from their masters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tasks import PATIENCE_S
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import laststep

SIDE = 1024


def state_of(cut: int | None, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Three masters, and what they are rounded to, cut alike; or held by every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place = Replicate() if cut is None else Shard(cut)
    torch.manual_seed(seed)
    masters = {f"w{n}": torch.randn(SIDE, SIDE + n) for n in range(3)}
    return {
        "model": {
            n: distribute_tensor(m.to(torch.bfloat16), mesh, [place]) for n, m in masters.items()
        },
        "masters": {n: distribute_tensor(m, mesh, [place]) for n, m in masters.items()},
    }


def opened(run: str, state: dict[str, dict[str, torch.Tensor]]) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run,
        items=state,
        options=laststep.Options(
            progress=False, deadline_s=PATIENCE_S, flush="thread", derived=True
        ),
    )


def save(run: str, cut: int | None, seed: int = 0) -> int:
    """The bytes that this rank left out."""
    state, wanted = state_of(cut), state_of(cut, seed)
    with opened(run, state) as c:
        c.restore()
        for item, tensors in state.items():
            for name, tensor in tensors.items():
                tensor.to_local().copy_(wanted[item][name].to_local())
        handle = c.save(1 + seed)
        handle.wait()
        report = handle.report
    return sum(found.raw_bytes - found.stored_bytes for found in report.coding)


def load_and_compare(run: str, cut: int | None, only: list[str] | None, seed: int = 0) -> bool:
    state, wanted = state_of(cut, 77), state_of(cut, seed)
    with opened(run, state) as c:
        c.restore(only=only)
    items = ["model"] if only else ["model", "masters"]
    return all(
        torch.equal(state[item][n].to_local(), wanted[item][n].to_local())
        for item in items
        for n in wanted[item]
    )
