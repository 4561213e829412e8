"""One small model with AdamW, laid out over the ranks of a job in all the ways that people do.

Every rank sees the same data, so all layouts train alike but for the order of sums. Sizes are odd:
shards are uneven, and with four ranks some are empty. What a rank holds is put together here
without laststep: by DTensor itself, or by joining ranges.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (everybody calls it so)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from laststep import State, StateProvider
from laststep.state.layouts import Flat, Mesh
from laststep.state.tensors import LocalShard
from laststep.state.tree import Owned

WORDS, WIDTH, INNER = 5, 10, 12

Tensors = dict[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Net(nn.Module):
    """A tied weight, a parameter without dimensions, one shorter than there are ranks, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.up: nn.Module | None = nn.Linear(WIDTH, INNER)
        self.down: nn.Module | None = nn.Linear(INNER, WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)
        self.mix = nn.Parameter(torch.randn(2, WIDTH))
        self.gate = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.head.weight = self.embed.weight

    def first(self, words: torch.Tensor) -> torch.Tensor:
        inner = F.embedding(words, whole(self.embed.weight))
        return inner + self.down(F.gelu(self.up(inner)))

    def last(self, inner: torch.Tensor) -> torch.Tensor:
        mix, gate = whole(self.mix), whole(self.gate)
        inner = inner * mix[0] + mix[1]
        inner = (inner.unflatten(-1, (5, 2)) * gate[:, None]).flatten(-2)
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(inner.mean((0, 1)), 0.25)
        return F.linear(inner, whole(self.head.weight)) * self.scale

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(words))


def batch(number: int) -> torch.Tensor:
    return torch.randint(WORDS, (4, 7), generator=torch.Generator().manual_seed(100 + number))


def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def adam(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


class Trainer:
    """A model and its optimizer; the subclasses lay them out."""

    ranks: tuple[int, ...] = (1, 2, 3, 4)

    def __init__(self) -> None:
        self.net = Net()
        self.model = self.wrap(self.net)
        self.optimizer = adam(self.model.parameters())

    def wrap(self, net: Net) -> nn.Module:
        return net

    def items(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> float:
        words = batch(number)
        loss = loss_of(self.model(words), words)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def held(self) -> Tensors:
        """All that this rank can put together, by plain names."""
        found = {name: whole(t.detach()) for name, t in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            for key, tensor in self.optimizer.state[parameter].items():
                found[f"{name}:{key}"] = whole(tensor)
        return found

    def full(self) -> Tensors:
        """All of the state, on all ranks; copies that ranks have of the same must be the same."""
        mine = {name: tensor.detach().clone() for name, tensor in self.held().items()}
        everybody: list[Tensors] = [{}] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        found: Tensors = {}
        for held in everybody:
            for name, tensor in held.items():
                assert torch.equal(found.setdefault(name, tensor), tensor), name
        return found


class Plain(Trainer):
    """All on every rank, in step only because all do the same."""


class Ddp(Trainer):
    def wrap(self, net: Net) -> nn.Module:
        return DistributedDataParallel(net)


def fully(net: Net, mesh: Any) -> Net:
    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh, ignored_params={net.scale})  # it refuses what has no dimension
    return net


class Fsdp2(Trainer):
    def wrap(self, net: Net) -> nn.Module:
        return fully(net, init_device_mesh("cpu", (dist.get_world_size(),)))


class Hsdp(Trainer):
    ranks = (2, 4)

    def wrap(self, net: Net) -> nn.Module:
        shape = (2, dist.get_world_size() // 2)
        return fully(net, init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")))


def parallel(net: Net, mesh: Any) -> Net:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    words = distribute_tensor(net.embed.weight.detach(), mesh, [Shard(0)])
    net.embed.weight = net.head.weight = nn.Parameter(words)
    return net


class Tp(Trainer):
    ranks = (2, 3, 4)

    def wrap(self, net: Net) -> nn.Module:
        parallel(net, mesh := init_device_mesh("cpu", (dist.get_world_size(),)))
        net.mix = nn.Parameter(distribute_tensor(net.mix.detach(), mesh, [Shard(1)]))
        net.gate = nn.Parameter(distribute_tensor(net.gate.detach(), mesh, [Replicate()]))
        return net


class Fsdp2Tp(Trainer):
    """FSDP2 cuts again what TP has cut: strided shards; and what TP leaves alone lies on two meshes
    of two ranks each."""

    ranks = (4,)

    def wrap(self, net: Net) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        return fully(parallel(net, mesh["tensor"]), mesh["data"])


class Pipeline(Trainer):
    """Two stages, of one rank each or two; the tied weight is on both."""

    ranks = (2, 4)

    def wrap(self, net: Net) -> nn.Module:
        each = dist.get_world_size() // 2
        self.stage, place = divmod(dist.get_rank(), each)
        self.other = (1 - self.stage) * each + place
        self.both = [dist.new_group([n, n + each]) for n in range(each)][place]
        if self.stage == 0:
            net.head = None
            del net.mix, net.gate, net.scale, net.seen, net.mean
        else:
            net.up = net.down = None
        return net

    def step(self, number: int) -> float:
        words = batch(number)
        loss = torch.zeros(())
        if self.stage == 0:
            inner = self.net.first(words)
            dist.send(inner.detach(), self.other)
            dist.recv(back := torch.empty_like(inner), self.other)
            inner.backward(back)
        else:
            inner = torch.empty(*words.shape, WIDTH)
            dist.recv(inner, self.other)
            loss = loss_of(self.net.last(inner.requires_grad_()), words)
            loss.backward()
            dist.send(inner.grad, self.other)
        dist.all_reduce((self.net.embed or self.net.head).weight.grad, group=self.both)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), group=self.both)
        return loss.item()


class PipelineTwoNames(Pipeline):
    """The same, but to the last stage the tied weight is the head's alone: each stage has a name
    and an optimizer's state of its own for it."""

    def wrap(self, net: Net) -> nn.Module:
        super().wrap(net)
        if self.stage:
            net.embed = None
        return net

    def held(self) -> Tensors:
        """The moments under one name, as in other layouts: those of both stages are the same."""
        moments = "head.weight:", "embed.weight:"
        return {name.replace(*moments): tensor for name, tensor in super().held().items()}


class Range:
    """A named tensor that was flattened into a buffer, of which this rank holds a range."""

    def __init__(self, name: str, like: torch.Tensor, offset: int, total: int) -> None:
        ranks = dist.get_world_size()
        mesh = Mesh.of(("flat",), (ranks,), range(ranks))
        self.name, self.shape = name, tuple(like.shape)
        self.layout = Flat(self.shape, mesh, ("flat",), offset, total)
        each = total // ranks
        start = dist.get_rank() * each
        self.first = min(max(start, offset), offset + like.numel())
        self.last = max(min(start + each, offset + like.numel()), self.first)
        self.offset = offset
        self.here = slice(self.first - start, self.last - start)
        """Of this rank's part of the buffer; of no length where it holds nothing."""

    def laid(self, local: torch.Tensor) -> LocalShard:
        return LocalShard(local, self.layout)

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """All of it, from all ranks."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self.first - self.offset, local.clone()))
        flat = torch.empty(math.prod(self.shape), dtype=local.dtype)
        for at, part in parts:
            if part.numel():
                flat[at : at + part.numel()] = part
        return flat.view(self.shape)


class Given(StateProvider):
    """A tree of live tensors, written into in place."""

    def __init__(self, kind: str, value: object) -> None:
        self.kind = kind
        self.value = value

    def describe(self) -> State:
        return State(value=self.value)

    def restore(self, value: object) -> None:
        pass


def optimizer_state(optimizer: Any, names: dict[str, tuple[str, dict[str, object]]]) -> Given:
    """State as laststep stores that of an AdamW, of these parameters: their form, their entries."""
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    value = {
        "state": {name: entries for name, (_, entries) in names.items()},
        "groups": [{"params": {n: form for n, (form, _) in names.items()}, "options": options}],
    }
    return Given("optimizer", Owned("AdamW", value))


def form(shape: tuple[int, ...]) -> str:
    return f"float32{list(shape)}"


class Zero1(Trainer):
    """The optimizer's state lies in a flat buffer that the ranks share; the model is everywhere."""

    ranks = (1, 2, 3, 4)

    def __init__(self) -> None:
        self.net = self.model = Net()
        named = dict(self.net.named_parameters())
        ranks, rank = dist.get_world_size(), dist.get_rank()
        used = 3 + sum(p.numel() + 1 for p in named.values())  # room at the front, and between
        total = -(-used // ranks) * ranks
        flat, at, self.ranges = torch.zeros(total), 3, []
        for name, parameter in named.items():
            flat[at : at + parameter.numel()] = parameter.detach().flatten()
            self.ranges.append(Range(name, parameter, at, total))
            at += parameter.numel() + 1
        self.each = total // ranks
        self.part = nn.Parameter(flat[rank * self.each : (rank + 1) * self.each].clone())
        self.optimizer = adam([self.part])
        self.part.grad = torch.zeros_like(self.part)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()  # makes the state
        self.optimizer.param_groups[0]["lr"] = 0.05
        self.state = self.optimizer.state[self.part]
        self.state["step"].zero_()

    def items(self) -> dict[str, object]:
        entries = {
            one.name: (
                form(one.shape),
                {
                    "step": self.state["step"].clone() if number else self.state["step"],
                    "exp_avg": one.laid(self.state["exp_avg"][one.here]),
                    "exp_avg_sq": one.laid(self.state["exp_avg_sq"][one.here]),
                },
            )
            for number, one in enumerate(self.ranges)
        }
        return {"model": self.shown_model(), "optimizer": optimizer_state(self.optimizer, entries)}

    def shown_model(self) -> object:
        return self.net

    def load_part(self) -> None:
        """After a restore, or a step of somebody else: the flat parameters from the model's."""
        for one, parameter in zip(self.ranges, self.net.parameters(), strict=True):
            cut = slice(one.first - one.offset, one.last - one.offset)
            self.part.data[one.here] = parameter.detach().flatten()[cut]

    def step(self, number: int) -> float:
        words = batch(number)
        self.load_part()
        loss = loss_of(self.net(words), words)
        loss.backward()
        for one, parameter in zip(self.ranges, self.net.parameters(), strict=True):
            cut = slice(one.first - one.offset, one.last - one.offset)
            self.part.grad[one.here] = parameter.grad.flatten()[cut]
        self.optimizer.step()
        self.net.zero_grad()
        self.spread()
        return loss.item()

    def spread(self) -> None:
        for one, parameter in zip(self.ranges, self.net.parameters(), strict=True):
            parameter.data.copy_(one.joined(self.part.detach()[one.here]))

    def held(self) -> Tensors:
        found: Tensors = dict(self.net.state_dict())
        for one in self.ranges:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{one.name}:{key}"] = one.joined(self.state[key][one.here])
            found[f"{one.name}:step"] = self.state["step"]
        return found


class Zero3(Zero1):
    """The parameters lie in such a buffer too; those of the model are only made for a step."""

    def shown_model(self) -> object:
        value: dict[str, object] = {
            one.name: one.laid(self.part.detach()[one.here]) for one in self.ranges
        }
        value["head.weight"] = value["embed.weight"]
        return Given("module", value | dict(self.net.named_buffers()))

    def load_part(self) -> None:
        self.spread()

    def held(self) -> Tensors:
        self.spread()
        return super().held()


class Fsdp1(Trainer):
    """FullyShardedDataParallel with use_orig_params: its flat buffers, seen as ranges."""

    ranks = (2, 3, 4)

    def wrap(self, net: Net) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("up", "down"):
                wrapped = FullyShardedDataParallel(
                    getattr(net, name), use_orig_params=True, device_id=torch.device("cpu")
                )
                setattr(net, name, wrapped)
            return FullyShardedDataParallel(
                net, use_orig_params=True, ignored_states=[net.scale], device_id=torch.device("cpu")
            )

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Range, nn.Parameter]] = []
        for module in FullyShardedDataParallel.fsdp_modules(self.model):
            handle = module._handle
            flat = handle.flat_param
            total, at, named = flat.numel() * dist.get_world_size(), 0, iter(flat._fqns)
            prefix = next(n for n, m in self.model.named_modules() if m is module)
            infos = zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)
            shapes, parameters = iter(flat._shapes), iter(flat._params)
            for size, padding in infos:
                if not padding:
                    name = f"{prefix}.{next(named)}".replace("_fsdp_wrapped_module.", "")
                    name = name.removeprefix(".").removeprefix("_fsdp_wrapped_module")
                    like = torch.empty(next(shapes))
                    self.parts.append((Range(name, like, at, total), next(parameters)))
                at += size
        for _, parameter in self.parts:
            empty = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            self.optimizer.state[parameter].update(empty)
        scale = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.tensor(0.0),
            "exp_avg_sq": torch.tensor(0.0),
        }
        self.optimizer.state[self.net.scale].update(scale)

    def items(self) -> dict[str, object]:
        value: dict[str, object] = {r.name: r.laid(p.detach().flatten()) for r, p in self.parts}
        value["head.weight"] = value["embed.weight"]
        value |= {"scale": self.net.scale, **dict(self.net.named_buffers())}
        state = self.optimizer.state
        entries = {
            one.name: (
                form(one.shape),
                {
                    "step": state[p]["step"],
                    "exp_avg": one.laid(state[p]["exp_avg"].flatten()),
                    "exp_avg_sq": one.laid(state[p]["exp_avg_sq"].flatten()),
                },
            )
            for one, p in self.parts
        }
        entries["scale"] = (form(()), state[self.net.scale])
        given = optimizer_state(self.optimizer, entries)
        return {"model": Given("module", value), "optimizer": given}

    def step(self, number: int) -> float:
        result = super().step(number)
        for _, parameter in self.parts:  # an empty one has no gradient, so its steps go uncounted
            self.optimizer.state[parameter]["step"].fill_(self.count())
        return result

    def count(self) -> float:
        return float(self.optimizer.state[self.net.scale]["step"])

    def held(self) -> Tensors:
        found: Tensors = dict(self.net.named_buffers())
        state = self.optimizer.state
        found["scale"] = self.net.scale
        found |= {f"scale:{key}": entry for key, entry in state[self.net.scale].items()}
        for one, p in self.parts:
            found[one.name] = one.joined(p.detach().flatten())
            found[f"{one.name}:step"] = state[p]["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{one.name}:{key}"] = one.joined(state[p][key].flatten())
        found["head.weight"] = found["embed.weight"]
        return found


WAYS: dict[str, type[Trainer]] = {
    "plain": Plain,
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "hsdp": Hsdp,
    "tp": Tp,
    "fsdp2tp": Fsdp2Tp,
    "pipeline": Pipeline,
    "pipeline_two_names": PipelineTwoNames,
    "zero1": Zero1,
    "zero3": Zero3,
    "fsdp1": Fsdp1,
}
