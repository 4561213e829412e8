"""What ranks do in the tests of experts, sequence and context parallelism: the same numbers in
every layout, under AdamW, whose step is the same wherever an element lies."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tasks import opened
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from wraps import whole

EXPERTS, WIDTH, INNER = 6, 10, 7
SHAPES = {
    "dense.weight": (INNER, WIDTH),
    "dense.bias": (INNER,),
    "norm.weight": (WIDTH,),
    "experts.up": (EXPERTS, WIDTH, INNER),
    "experts.down": (EXPERTS, INNER, WIDTH),
}


def numbers(name: str, draw: int) -> torch.Tensor:
    """The whole of a tensor: its first value, or its gradient in a step."""
    seed = sum(map(ord, name)) + 1000 * draw
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


Places = tuple[DeviceMesh, tuple[Shard | Replicate, ...]]


def places(way: str) -> dict[str, Places | None]:
    """How each tensor lies; None: every rank holds all of it."""
    ranks = dist.get_world_size()
    if way == "plain":
        return dict.fromkeys(SHAPES)
    if way == "experts":  # the experts over all ranks, the rest as FSDP2 cuts it
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        return {name: (mesh, (Shard(0),)) for name in SHAPES}
    if way in ("experts_fsdp", "experts_ddp"):  # over two ranks, each part cut again or copied
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "ep"))
        inner = Shard(1) if way == "experts_fsdp" else Replicate()
        flat = mesh["dp", "ep"]._flatten("all")
        return {
            name: (mesh, (inner, Shard(0))) if name.startswith("experts.") else (flat, (Shard(0),))
            for name in SHAPES
        }
    if way == "sequence":  # with tensor parallelism: norms are on all ranks, and on each alike
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        cut = {
            "dense.weight": Shard(0),
            "dense.bias": Shard(0),
            "norm.weight": Replicate(),
            "experts.up": Shard(2),
            "experts.down": Shard(1),
        }
        return {name: (mesh, (cut[name],)) for name in SHAPES}
    assert way == "context"  # FSDP2 over data and context parallel ranks together
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    flat = mesh["dp", "cp"]._flatten("both")
    return {name: (flat, (Shard(0),)) for name in SHAPES}


def laid(tensor: torch.Tensor, place: Places | None) -> torch.Tensor:
    return tensor if place is None else distribute_tensor(tensor, *place)


class Job:
    """Parameters in a layout, and their optimizer."""

    def __init__(self, way: str, *, scale: float = 1.0) -> None:
        self.places = places(way)
        self.net = nn.Module()
        for name in SHAPES:
            value = laid(numbers(name, 0) * scale, self.places[name])
            self.net.register_parameter(name.replace(".", "_"), nn.Parameter(value))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        for name, parameter in zip(SHAPES, self.net.parameters(), strict=True):
            parameter.grad = laid(numbers(name, number), self.places[name])
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        held = [*self.net.parameters()]
        held += [
            self.optimizer.state[p][key]
            for p in self.net.parameters()
            for key in ("exp_avg", "exp_avg_sq")
        ]
        assert all(isinstance(one, DTensor) for one in held) or None in self.places.values()
        return [whole(one.detach()) for one in held]

    def opened(self, run: str) -> object:
        return opened(run, model=self.net, optimizer=self.optimizer)


def save(run: str, way: str) -> None:
    job = Job(way)
    for number in (1, 2):
        job.step(number)
    with job.opened(run) as checkpointer:
        checkpointer.save(2)


def load(run: str, way: str) -> bool:
    """Restore into other numbers, go on, and compare with a job that never stopped."""
    job, other = Job(way, scale=3.0), Job(way)
    with job.opened(run) as checkpointer:
        checkpointer.restore()
    for number in (1, 2, 3):
        other.step(number)
    job.step(3)
    return all(map(torch.equal, job.state(), other.state()))


def experts_of(rank: int, ranks: int) -> list[int]:
    return [number for number in range(EXPERTS) if number % ranks == rank]


def modules(scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Experts that are modules of their own, each on one rank; a router that all have."""
    net = nn.Module()
    net.router = nn.Linear(WIDTH, EXPERTS, bias=False)
    net.experts = nn.ModuleDict()
    for number in experts_of(dist.get_rank(), dist.get_world_size()):
        net.experts[str(number)] = nn.Linear(WIDTH, INNER)
    for name, parameter in net.named_parameters():
        torch.manual_seed(sum(map(ord, name)))
        parameter.data = torch.randn_like(parameter) * scale
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer


def save_modules(run: str) -> None:
    net, optimizer = modules()
    optimizer.step()
    with opened(run, model=net, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)


def load_modules(run: str) -> bool:
    net, optimizer = modules(scale=3.0)
    with opened(run, model=net, optimizer=optimizer) as checkpointer:
        checkpointer.restore()
    other, its_optimizer = modules()
    for one in (its_optimizer, optimizer, its_optimizer):
        one.step()
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.equal(one, same) for one, same in pairs)
