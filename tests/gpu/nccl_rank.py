"""One of two ranks that share one GPU: `python nccl_rank.py TASK RANK PORT RUN`.

NCCL refuses two ranks on one device of one host, so each is told another name for its host; they
then talk over loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import laststep
from laststep.errors import StorageError
from laststep.ranks import group, transports

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.device("cuda", 0)
RANKS, TENSORS, SIDE = 2, 4, 2048
"""Four of 16 MiB, and many small ones."""
DEADLINE_S = 8.0
transports.LIMIT_S = 5.0


def state(cut: int | None, *, filled: bool) -> dict[str, torch.Tensor]:
    """The same numbers on the device, cut along a dimension or held whole."""
    mesh = init_device_mesh("cuda", (RANKS,))
    found: dict[str, torch.Tensor] = {}
    shapes = [(SIDE, SIDE)] * TENSORS + [(8, 6)] * 40
    for number, shape in enumerate(shapes):
        one = torch.arange(number, number + shape[0] * shape[1], device=CUDA).view(shape).float()
        if not filled:
            one = torch.zeros_like(one)
        if cut is None:
            found[f"w{number}"] = one
            continue
        local = one.chunk(RANKS, cut)[dist.get_rank()].contiguous()
        found[f"w{number}"] = DTensor.from_local(local, mesh, [Shard(cut)], run_check=False)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()]).to_local()
    return tensor


@contextlib.contextmanager
def opened(run: str, items: dict[str, torch.Tensor]) -> Iterator[laststep.Checkpointer]:
    with laststep.Checkpointer(
        run, items={"state": items}, options=laststep.Options(progress=False, deadline_s=DEADLINE_S)
    ) as checkpointer:
        yield checkpointer


def save(run: str, cut: int | None) -> dict[str, object]:
    with opened(run, state(cut, filled=True)) as checkpointer:
        checkpointer.save(1)
    return {}


def load(run: str, cut: int | None, worth_bytes: int = 0) -> dict[str, object]:
    """Restore, compare, and tell what went over NCCL."""
    group.WORTH_BYTES = worth_bytes
    came: list[torch.device] = []
    wait, broadcast = transports.Transit.wait, transports.Transport.broadcast

    def waiting(self: transports.Transit) -> torch.Tensor:
        got = wait(self)
        came.append(got.device)
        return got

    def telling(
        self: transports.Transport, who: int, data: torch.Tensor | None, size_bytes: int
    ) -> torch.Tensor:
        got = broadcast(self, who, data, size_bytes)
        came.append(got.device)
        return got

    transports.Transit.wait, transports.Transport.broadcast = waiting, telling
    wanted = state(cut, filled=False)
    with opened(run, wanted) as checkpointer:
        checkpointer.restore()
    right = all(
        torch.equal(whole(wanted[name]), whole(one))
        for name, one in state(cut, filled=True).items()
    )
    return {
        "right": right,
        "on_device": CUDA in came,
        "alive": torch.ones(2, device=CUDA).sum().item(),
    }


def load_where_nccl_fails(run: str) -> dict[str, object]:
    """Rank 1 does not come to the connection, so the other waits for it."""
    all_reduce = dist.all_reduce

    def failing(tensor: torch.Tensor, *arguments: object, **more: object) -> object:
        if tensor.is_cuda and dist.get_rank() == 1:
            raise RuntimeError("no transport")
        return all_reduce(tensor, *arguments, **more)

    dist.all_reduce = failing
    return load(run, 1)


def load_and_lose_a_rank(run: str) -> dict[str, object]:
    """Rank 1 ends when the first bytes are to be passed on."""
    swap = transports.DeviceTransport.swap

    def dying(self: transports.DeviceTransport, *args: object) -> transports.Transit:
        if dist.get_rank() == 1:
            os._exit(9)
        return swap(self, *args)

    transports.DeviceTransport.swap = dying
    group.WORTH_BYTES = 0
    began = time.monotonic()
    with opened(run, state(1, filled=False)) as checkpointer:
        try:
            checkpointer.restore()
        except StorageError as error:
            return {
                "error": str(error),
                "seconds": time.monotonic() - began,
                "alive": torch.ones(2, device=CUDA).sum().item(),
            }
    return {"error": "none"}


TASKS = {
    "save_rows": lambda run: save(run, 0),
    "save_whole": lambda run: save(run, None),
    "load_columns": lambda run: load(run, 1),
    "load_columns_little": lambda run: load(run, 1, 1 << 40),
    "load_whole": lambda run: load(run, None),
    "load_where_nccl_fails": load_where_nccl_fails,
    "load_and_lose_a_rank": load_and_lose_a_rank,
}


def main() -> None:
    task, rank, port, run = sys.argv[1:]
    torch.cuda.set_device(CUDA)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(rank),
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    print(json.dumps(TASKS[task](run)), flush=True)
    if task == "load_and_lose_a_rank":
        return  # there is nobody left to take leave of
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
