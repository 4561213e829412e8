"""What ranks do in the tests of saves that write only what changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from reading_tasks import SIDE, big
from tasks import opened
from torch.distributed.tensor import DTensor


def state_of(step: int, cut: int) -> dict[str, torch.Tensor]:
    """The state that was saved as that step: each changes a row of the second tensor."""
    state = big(cut)
    for number in range(step + 1):
        row = torch.full((SIDE,), float(number))
        tensor = state["w1"]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[number] = row
        mesh, places = tensor.device_mesh, tensor.placements
        state["w1"] = DTensor.from_local(
            whole.chunk(dist.get_world_size(), cut)[dist.get_rank()].contiguous(), mesh, places
        )
    return state


def save_often(
    run: str, cut: int, steps: list[int], flush: str = "thread", compression: str = "none"
) -> list[int]:
    """The bytes that this rank wrote at each."""
    state = big(cut)
    written = []
    with opened(run, state=state, flush=flush, compression=compression) as c:
        c.restore()
        for step in steps:
            changed = state_of(step, cut)["w1"]
            state["w1"].to_local().copy_(changed.to_local())
            handle = c.save(step)
            handle.wait()
            written.append(handle.report.written_bytes or 0)
    return written


def load_and_compare(run: str, cut: int, step: int) -> bool:
    state = big(cut)
    for tensor in state.values():
        tensor.to_local().zero_()
    with opened(run, state=state) as c:
        c.restore(step=step)
    wanted = state_of(step, cut)
    return all(torch.equal(state[n].to_local(), wanted[n].to_local()) for n in wanted)
