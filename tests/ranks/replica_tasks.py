"""Ranks whose replicas are not the same: what they save and what comes back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tasks import Heard, opened
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import laststep
from laststep.capture import contents
from laststep.events import ReplicasDiffer
from laststep.settings import as_keywords

LARGE, WIDE = 5 << 20, 1 << 20
"""Elements: ranks that share the writing of so many float32 write several parts."""


def trained() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A model with statistics of its own on every rank, after a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, WIDE), nn.BatchNorm1d(WIDE)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 2)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.module[1].running_mean.fill_(2 + 100 * dist.get_rank())
    return model, optimizer


def save_statistics(run: str) -> list[str]:
    """Returns what was warned of."""
    model, optimizer = trained()
    with Heard() as warnings, opened(run, model=model, optimizer=optimizer) as c:
        c.save(1).wait()
    return warnings


def load_statistics(run: str) -> set[float]:
    model, optimizer = trained()
    with torch.no_grad():
        model.module[1].running_mean.zero_()
    with opened(run, model=model, optimizer=optimizer) as c:
        c.restore()
    return set(model.module[1].running_mean.tolist())


def save_diverged(run: str, where: list[int], **settings: object) -> dict[str, object]:
    """Some ranks have other weights than the rest; two saves. What was told of it."""
    rank = dist.get_rank()
    state = {
        "big": torch.full((LARGE,), float(rank in where) * rank),
        "same": torch.ones(3),
        "small": torch.full((3,), 7.0 * (rank in where)),
    }
    events: list[ReplicasDiffer] = []

    def note(event: object) -> None:
        if isinstance(event, ReplicasDiffer):
            events.append(event)

    with (
        Heard() as warnings,
        laststep.Checkpointer(
            run,
            state=state,
            **as_keywords(
                {
                    "progress": False,
                    "deadline_s": 30,
                    "flush": "thread",
                    "subscribers": [note],
                    **settings,
                }
            ),
        ) as c,
    ):
        c.save(1).wait()
        c.save(2).wait()
    told = [(one.step, one.tensors, one.ranks) for one in events]
    return {"warnings": [text for text in warnings if "differ" in text], "events": told}


def save_elsewhere(run: str, diverged: bool) -> list[str]:
    """The last rank digests as if its state were on a device, where that is another function;
    rank 1 may have other weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == ranks - 1:
        contents.host_digest = lambda _address, _size_bytes: bytes(16)
        contents._ON_HOST = contents._ON_DEVICE
    state = {"w": torch.full((5,), float(diverged and rank == 1))}
    with (
        Heard() as warnings,
        laststep.Checkpointer(
            run,
            state=state,
            options=laststep.Options(progress=False, deadline_s=30, compare_replicas="always"),
        ) as c,
    ):
        c.save(1).wait()
        c.save(2).wait()
    return [text for text in warnings if "replicas" in text or "differ" in text]


def load_diverged(run: str) -> tuple[set[float], set[float]]:
    state = {"big": torch.empty(LARGE), "same": torch.zeros(3), "small": torch.zeros(3)}
    with opened(run, state=state) as c:
        c.restore()
    return set(state["big"].unique().tolist()), set(state["small"].tolist())


def save_some(run: str) -> list[str]:
    """The first rank has an item of its own, so it describes its state otherwise; the last rank's
    weights differ."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    extra = {"extra": {"e": torch.ones(2)}} if rank == 0 else {}
    state = {"w": torch.full((5,), float(rank == ranks - 1))}
    with Heard() as warnings, opened(run, state=state, **extra) as c:
        c.save(1).wait()
    return [text for text in warnings if "differ" in text]


class Laid(nn.Module):
    """Buffers that lie on a mesh, and differ between its ranks all the same."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        both, cut = torch.zeros(4), torch.zeros(4)
        both, cut = (
            distribute_tensor(both, mesh, [Replicate(), Replicate()]),
            distribute_tensor(cut, mesh, [Replicate(), Shard(0)]),
        )
        both.to_local().fill_(rank)
        cut.to_local().fill_(rank)
        self.register_buffer("both", both)
        self.register_buffer("cut", cut)


def save_laid_buffers(run: str) -> None:
    with opened(run, model=Laid()) as c:
        c.save(1).wait()
