"""Training with Megatron's distributed optimizer: its own, and a stand-in that is always there.

Megatron-Core needs CUDA; here it takes the CPU for a GPU. The stand-in has the same attributes,
lays parameters out by the same rules, and trains on real ranks with gloo. Run by the ranks.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tasks  # of tests/ranks, as `wraps`
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from wraps import INNER, WAYS, WIDTH, Net, Tensors, Trainer, adam, batch, loss_of

from laststep import megatron

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("bf16", "fp32")
CUTS = {
    "embed.weight": (1, 1),
    "up.weight": (0, 2),
    "up.bias": (0, 2),
    "down.weight": (1, 1),
    "mix": (0, 1),
}
"""What tensor parallelism cuts: along which dimension, and with what stride. `up` is cut as a gated
layer is, each of its halves by itself."""
REAL_CUTS = {"up.weight": (0, 1), "up.bias": (0, 1), "down.weight": (1, 1)}


class Range(SimpleNamespace):
    start: int
    end: int


class Buffer:
    """Parameters from the last to the first, in buckets that are padded for the ranks."""

    param_dtype, grad_dtype = KINDS

    def __init__(
        self, parameters: list[nn.Parameter], group: Any, tp_group: Any, bucket_elements: int
    ) -> None:
        self.data_parallel_group = group
        self.tp_group = tp_group
        self.param_index_map: dict[nn.Parameter, tuple[int, int, int]] = {}
        self.buckets: list[SimpleNamespace] = []
        at = begin = 0
        for parameter in reversed(parameters):
            self.param_index_map[parameter] = (at, at + parameter.numel(), len(self.buckets))
            at += parameter.numel()
            if at - begin >= bucket_elements or parameter is parameters[0]:
                at = begin + -(-(at - begin) // (64 * group.size())) * 64 * group.size()
                data = torch.zeros(at - begin)
                self.buckets.append(SimpleNamespace(offset=begin, grad_data=data))
                begin = at

    def ranges(self, rank: int) -> list[dict[str, Any]]:
        """For each bucket, which elements of which parameters a rank has."""
        found: list[dict[str, Any]] = [{"param_map": {}} for _ in self.buckets]
        for parameter, (start, end, number) in self.param_index_map.items():
            bucket = self.buckets[number]
            each = bucket.grad_data.numel() // self.data_parallel_group.size()
            first = max(bucket.offset + rank * each, start)
            last = min(bucket.offset + (rank + 1) * each, end)
            if first < last:
                place = {"param": Range(start=first - start, end=last - start)}
                found[number]["param_map"][parameter] = place
        return found


class DistributedOptimizer:
    """fp32 weights of this rank's ranges, some of them copies, some views of the parameters."""

    def __init__(
        self, parameters: list[nn.Parameter], group: Any, tp_group: Any, inner: Any
    ) -> None:
        self.buffers = [Buffer(parameters, group, tp_group, 150)]
        self.gbuf_ranges = [{KINDS: self.buffers[0].ranges(group.rank())}]
        self.model_param_gbuf_map = {
            p: (0, KINDS, number)
            for number, bucket in enumerate(self.gbuf_ranges[0][KINDS])
            for p in bucket["param_map"]
        }
        own = {p: self.range_of(p) for p in self.model_param_gbuf_map}
        halves = [p for number, p in enumerate(own) if number % 2]
        others = [p for number, p in enumerate(own) if not number % 2]
        self.model_float16_groups, self.model_fp32_groups = [halves], [others]
        self.shard_fp32_from_float16_groups = [[own[p].clone() for p in halves]]
        self.shard_fp32_groups = [[own[p] for p in others]]
        shards = [*self.shard_fp32_groups[0], *self.shard_fp32_from_float16_groups[0]]
        self.optimizer = inner([{"params": shards}])  # a rank may have none

    def range_of(self, parameter: nn.Parameter) -> torch.Tensor:
        at = place_of(self, parameter)
        return parameter.detach().view(-1)[at.start : at.end]

    def _copy_main_params_to_model_params(self) -> None:
        copies = self.shard_fp32_from_float16_groups[0]
        for parameter, shard in zip(self.model_float16_groups[0], copies, strict=True):
            self.range_of(parameter).copy_(shard)


def place_of(distributed: Any, parameter: nn.Parameter) -> Any:
    """Which elements of a parameter this rank has; None for none."""
    if parameter not in distributed.model_param_gbuf_map:
        return None
    buffer, kinds, bucket = distributed.model_param_gbuf_map[parameter]
    return distributed.gbuf_ranges[buffer][kinds][bucket]["param_map"][parameter]["param"]


class Chunk(nn.Module):
    """What Megatron wraps a model with."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net
        self.distributed: DistributedOptimizer | None = None

    def start_param_sync(self, *, force_sync: bool) -> None:
        assert force_sync
        for parameter in self.module.parameters():
            at = place_of(self.distributed, parameter)
            mine = at and (at.start, self.distributed.range_of(parameter))
            for start, part in gathered(mine, self.distributed.buffers[0].data_parallel_group):
                parameter.detach().view(-1)[start : start + part.numel()] = part


def gathered(mine: Any, group: Any = None) -> list[Any]:
    """What the ranks have that have something."""
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, mine, group)
    return [one for one in everybody if one is not None]


class Megatron(Trainer):
    parts = 1
    """The tensor-parallel size."""
    cuts = CUTS
    inner: Any = staticmethod(adam)

    def __init__(self) -> None:
        self.net = Net()
        if self.parts > 1:
            self.cut()
        self.chunk = self.model = Chunk(self.net)
        ranks, each = range(dist.get_world_size()), self.parts
        across = [dist.new_group(ranks[n :: self.parts]) for n in ranks[:each]]
        within = [dist.new_group(ranks[n : n + each]) for n in ranks[::each]]
        there, here = divmod(dist.get_rank(), each)
        self.distributed = DistributedOptimizer(
            list(self.net.parameters()), across[here], within[there], self.inner
        )
        self.chunk.distributed = self.distributed
        self.optimizer = self.distributed.optimizer

    def cut(self) -> None:
        """Leave this rank's parts in the model, with the attributes that Megatron gives them."""
        for name, whole in list(self.net.named_parameters()):
            if name in self.cuts:
                part = nn.Parameter(whole.detach().view(-1)[self.numbers(name, whole)])
                part.tensor_model_parallel = True
                part.partition_dim, part.partition_stride = self.cuts[name]
                owner, _, last = name.rpartition(".")
                setattr(self.net.get_submodule(owner), last, part)
        self.net.head.weight = self.net.embed.weight

    def numbers(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a parameter that this rank's part has, as it has them."""
        numbers = torch.arange(whole.numel()).view(whole.shape)
        if self.parts == 1 or name not in self.cuts:
            return numbers
        dim, stride = self.cuts[name]
        place = dist.get_rank() % self.parts
        own = [block.chunk(self.parts, dim)[place] for block in numbers.chunk(stride, dim)]
        return torch.cat(own, dim)

    def items(self) -> dict[str, object]:
        return {
            "model": megatron.model([self.chunk], self.distributed),
            "optimizer": megatron.optimizer(self.distributed, self.chunk),
        }

    def shards(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters, and this rank's ranges of them in fp32."""
        one = self.distributed
        models = itertools.chain(*one.model_fp32_groups, *one.model_float16_groups)
        mains = itertools.chain(*one.shard_fp32_groups, *one.shard_fp32_from_float16_groups)
        return zip(models, mains, strict=True)

    def gradients(self, number: int) -> float:
        """Megatron computes with parts; here they are put together for it."""
        held, whole, words = self.held(), Net(), batch(number)
        whole._buffers = self.net._buffers
        for name, parameter in whole.named_parameters():
            parameter.data.copy_(held[name])
        loss = loss_of(whole(words), words)
        loss.backward()
        for name, parameter in self.net.named_parameters():
            one = whole.get_parameter(name)
            parameter.grad = one.grad.view(-1)[self.numbers(name, one)]
        return loss.item()

    def step(self, number: int) -> float:
        loss = self.gradients(number)
        for parameter, shard in self.shards():
            at = place_of(self.distributed, parameter)
            shard.grad = parameter.grad.view(-1)[at.start : at.end].clone()
        self.optimizer.step()
        self.net.zero_grad()
        self.distributed._copy_main_params_to_model_params()
        self.chunk.start_param_sync(force_sync=True)
        return loss

    def held(self) -> Tensors:
        found: Tensors = dict(self.net.named_buffers())
        shards = {id(parameter): shard for parameter, shard in self.shards()}
        wholes = dict(Net().named_parameters())
        for name, parameter in self.net.named_parameters():
            shard, mine = shards.get(id(parameter)), None
            numbers = self.numbers(name, wholes[name])
            if shard is not None:
                entries = {"": shard.detach(), **self.optimizer.state.get(shard, {})}
                at = place_of(self.distributed, parameter)
                mine = (numbers.view(-1)[at.start : at.end], entries)
            for places, entries in gathered(mine):
                for key, entry in entries.items():
                    full = f"{name}:{key}".removesuffix(":")
                    if key == "step":
                        assert found.setdefault(full, entry) == entry
                        continue
                    whole = found.setdefault(full, torch.full(wholes[name].shape, torch.nan))
                    whole.view(-1)[places] = entry
            own = found[name].view(-1)[numbers].to(parameter.dtype)
            assert torch.equal(parameter.detach(), own), name
        found["head.weight"] = found["embed.weight"]
        return found


class OnCpu(TorchFunctionMode):
    """Has what asks for a CUDA device get the CPU."""

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)


def pretend_cuda() -> None:
    """For the rest of this process, have Megatron-Core take the CPU for a GPU."""
    type_of = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *to: Any, **more: Any) -> Any:
        if to or more:
            return type_of(tensor, *to, **more)
        return f"torch.cuda.{type_of(tensor).rpartition('.')[2]}"

    torch.Tensor.type = cuda_type
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = torch.cuda.synchronize = lambda *_: None  # not used with gloo
    OnCpu().__enter__()


class RealMegatron(Megatron):
    half = False

    def __init__(self) -> None:
        pretend_cuda()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel(self.parts)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=self.parts,
        )
        self.net = Net()
        if self.half:
            self.net.bfloat16()
        if self.parts > 1:
            self.make_parallel(config)
        options = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=150)
        self.chunk = self.model = DistributedDataParallel(config, options, self.net)
        self.chain = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.05,
                weight_decay=0.1,
                use_distributed_optimizer=True,
                clip_grad=0.0,
                bf16=self.half,
                params_dtype=torch.bfloat16 if self.half else torch.float32,
            ),
            [self.chunk],
        )
        (self.distributed,) = self.chain.chained_optimizers
        self.optimizer = self.distributed.optimizer

    def make_parallel(self, config: Any) -> None:
        """Put Megatron's own layers in the places of two."""
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        wholes = dict(self.net.named_parameters())
        options = {
            "config": config,
            "init_method": nn.init.zeros_,
            "bias": True,
            "skip_bias_add": False,
        }
        up = ColumnParallelLinear(WIDTH, INNER, **options)
        down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, **options)
        for name, layer in (("up", up), ("down", down)):
            for key, parameter in layer.named_parameters():
                whole = wholes[f"{name}.{key}"]
                numbers = self.numbers(f"{name}.{key}", whole)
                parameter.data.copy_(whole.detach().view(-1)[numbers])
            layer.register_forward_hook(lambda _, __, output: output[0])  # without a bias
            setattr(self.net, name, layer)

    def items(self) -> dict[str, object]:
        return {
            "model": megatron.model([self.chunk], self.chain),
            "optimizer": megatron.optimizer(self.chain, [self.chunk]),
        }

    def step(self, number: int) -> float:
        self.chunk.zero_grad_buffer()
        self.chain.zero_grad()
        words = batch(number)
        loss = loss_of(self.chunk(words).float(), words)
        loss.backward()
        self.chunk.finish_grad_sync()
        self.chain.step()
        return loss.item()


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """One of which laststep does not know what its first step begins from."""
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9)


class TwoGroups(Trainer):
    """Weights decay, as in Megatron, but for those of one dimension."""

    def __init__(self) -> None:
        self.net = self.model = Net()
        parameters = list(self.net.parameters())
        self.optimizer = adam(
            [
                {"params": [p for p in parameters if p.dim() != 1]},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ]
        )


WAYS |= {
    "megatron": Megatron,
    "real": RealMegatron,
    "two-groups": TwoGroups,
    "real-half": type("RealHalf", (RealMegatron,), {"half": True}),
    "real-tp": type("RealParallel", (RealMegatron,), {"parts": 2, "cuts": REAL_CUTS}),
    "megatron-tp": type("TensorParallel", (Megatron,), {"parts": 2}),
    "rmsprop-tp": type("Unknown", (Megatron,), {"parts": 2, "inner": staticmethod(rmsprop)}),
}
save_as, load_as, load_by_itself = tasks.save_as, tasks.load_as, tasks.load_by_itself
