"""Adapter for Megatron-Core: its state by the names and shapes of whole parameters.

    model=megatron.model(model, optimizer), optimizer=megatron.optimizer(optimizer, model)

Megatron packs parameters into buckets and gives each data-parallel rank an equal range of every
bucket, for which the rank keeps fp32 weights and moments. If tensor parallelism shards a parameter,
the bucket holds this rank's shard. A checkpoint stores the whole fp32 weight under the parameter's
name, with layers numbered across all pipeline stages. After a restore the module's own weights are
computed from it and gathered, as in a step.

Describing the state needs no communication: the location of each parameter is read from the
optimizer, and its sharding from the attributes that Megatron sets. This module imports nothing from
Megatron, except for `SaveStrategy` and `LoadStrategy`, which serve Megatron's own save and load
calls. Tested with Megatron-Core 0.16 to 0.19, on CPUs in place of GPUs.

Not supported, and refused: experts with any but data parallelism; layers with their own way of
sharding, such as Mamba's, and gated layers without a stride; weights that are sharded over more
than tensor parallelism (GTP); frozen parameters that are sharded; the precision-aware optimizer;
Megatron's own FSDP.
"""

from __future__ import annotations

import functools
import importlib
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.adapters.flat_state import AXIS, FlatMember, FlatModule, FlatOptimizer
from laststep.adapters.framework import Framework
from laststep.errors import UsageError
from laststep.megatron.uses import USES
from laststep.state.layouts import Flat, Mesh, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.megatron.strategy import LoadStrategy, SaveStrategy
    from laststep.state.provider import StateProvider

__all__ = ["LoadStrategy", "SaveStrategy", "model", "optimizer"]

FRAMEWORK = Framework(
    package="megatron-core", extra="megatron", oldest="0.16", newest="0.19", uses=USES
)
_SIZES_OF_PARTS = (
    "output_size_per_partition",
    "input_size_per_partition",
    "num_embeddings_per_partition",
)


def __getattr__(name: str) -> object:
    if name in ("LoadStrategy", "SaveStrategy"):
        return getattr(importlib.import_module("laststep.megatron.strategy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def check_version() -> None:
    """Check the version of Megatron-Core, once."""
    FRAMEWORK.check()


def model(model: torch.nn.Module | Sequence[torch.nn.Module], optimizer: object) -> StateProvider:
    """Return a provider of the fp32 weights and buffers of this stage's model chunks."""
    return _MegatronModule(_chunks_of(model), _distributed(optimizer))


def optimizer(
    optimizer: object, model: torch.nn.Module | Sequence[torch.nn.Module]
) -> StateProvider:
    """Return a provider of the inner torch optimizer's state, by the names of the parameters. Raise
    UsageError for a chain of several optimizers."""
    chunks, parts = _chunks_of(model), _distributed(optimizer)
    if len(parts) > 1:
        raise UsageError(
            "cannot take several Megatron optimizers as one",
            found=f"a chain of {len(parts)}",
            remedy="pass optimizer.chained_optimizers as items of their own",
        )
    return FlatOptimizer(parts[0].optimizer, lambda: _members(parts[0], chunks))


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [model] if isinstance(model, torch.nn.Module) else list(model)


class _MegatronModule(FlatModule):
    def __init__(self, chunks: list[torch.nn.Module], optimizers: list[Any]) -> None:
        super().__init__(chunks[0], self._flat)
        self._chunks: list[Any] = chunks  # of Megatron, with methods of its own
        self._optimizers = optimizers

    def restore(self, value: object) -> None:
        super().restore(value)
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()  # noqa: SLF001 (as a step does)
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    def parts(self) -> tuple[object, ...]:
        # Not Megatron's wrapper: its `buffers` attribute holds gradient buffers.
        return tuple(map(_unwrapped, self._chunks))

    def _walk(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return chain.from_iterable(map(_numbered, self._chunks))

    def _flat(self) -> list[FlatMember]:
        parts = [_members(optimizer, self._chunks) for optimizer in self._optimizers]
        return list(chain.from_iterable(parts))

    def _replaced(self, members: list[FlatMember]) -> set[int]:
        buffers = [buffer for optimizer in self._optimizers for buffer in optimizer.buffers]
        flattened = {id(parameter) for buffer in buffers for parameter in buffer.param_index_map}
        sizes = [len(dist.get_process_group_ranks(buffer.tp_group)) for buffer in buffers]
        parts = max(sizes, default=1)
        model = _model_of(self._chunks)
        if parts > 1 and (frozen := model.cut - flattened):
            raise UsageError(
                "cannot save a frozen parameter that is sharded by tensor parallelism",
                where=model.names[min(frozen)][0],
                remedy="train it, or use Megatron's own checkpoints",
            )
        return flattened


def _distributed(optimizer: object) -> list[Any]:
    if "megatron.core" in sys.modules:
        check_version()
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    if not all(hasattr(part, "gbuf_ranges") for part in parts):
        raise UsageError(
            "laststep.megatron is for Megatron's distributed optimizer",
            found=type(optimizer).__name__,
            remedy="turn use_distributed_optimizer on",
        )
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _members(optimizer: Any, chunks: list[torch.nn.Module]) -> Iterator[FlatMember]:
    """Yield the parameters that this rank owns a range of; other ranks describe the others."""
    groups = optimizer.optimizer.param_groups
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    shards: dict[int, torch.Tensor | None] = {}
    for models, mains in (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ):
        groups = zip(getattr(optimizer, models), getattr(optimizer, mains), strict=True)
        for parameters, own in groups:
            shards |= {id(p): shard for p, shard in zip(parameters, own, strict=True)}
    model = _model_of(chunks)
    for buffer in optimizer.buffers:
        parts = dist.get_process_group_ranks(buffer.tp_group)
        ranges = dist.get_process_group_ranks(buffer.data_parallel_group)
        for parameter in buffer.param_index_map:
            names = model.names[id(parameter)]
            _refuse_experts(parameter, names[0], len(parts))
            cut = _cut_of(parameter, model, len(parts))
            if id(parameter) in shards:
                shard = shards[id(parameter)]
                if shard is None:
                    raise UsageError(
                        "Megatron's precision-aware optimizer keeps no fp32 weights to save",
                        remedy="turn use_precision_aware_optimizer off",
                    )
                layout = _layout(buffer, parameter, cut, parts, ranges)
                _check(optimizer, parameter, layout)
                yield FlatMember(
                    parameter=parameter,
                    names=names,
                    group=group_of[id(shard)],
                    shape=layout.shape,
                    layout=layout,
                    memory=shard,
                    elements=slice(0, shard.numel()),
                    holder=shard,
                )


def _layout(
    buffer: Any,
    parameter: torch.Tensor,
    cut: tuple[int, int] | None,
    parts: list[int],
    ranges: list[int],
) -> Flat:
    """Return the layout of a parameter over the ranks that have part of it."""
    start, stop, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    each = bucket.grad_data.numel() // len(ranges)
    offset = start - bucket.offset
    first, last = offset // each, (offset + stop - start - 1) // each
    count = last - first + 1
    # Megatron's groups are lines of a rank grid: another rank's group is ours, shifted.
    ranks = [a + b - dist.get_rank() for a in parts for b in ranges[first : last + 1]]
    mesh = Mesh.of(("tp", AXIS), (len(parts), count), ranks)
    place = (AXIS,), offset - first * each, count * each
    shape = list(parameter.shape)
    if cut is None:
        return Flat(tuple(shape), mesh, *place)
    dim, blocks = cut
    shape[dim] *= len(parts)
    return Flat(tuple(shape), mesh, *place, (Shard(dim), Replicate()), blocks)


def _cut_of(parameter: torch.Tensor, model: _Model, parts: int) -> tuple[int, int] | None:
    """Return how tensor parallelism shards a parameter: along which dimension, in each of how many
    blocks; None if every rank has it whole. Raise UsageError if it cannot be determined."""
    if parts == 1 or id(parameter) not in model.cut:
        return None
    name = model.names[id(parameter)][0]
    dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
    # With a stride of n, a shard consists of one piece of each of n blocks; they are contiguous
    # only along the first dimension. In a gated layer each rank has a part of both halves, but not
    # every Megatron version sets its stride to 2: without it, it looks like any other layer.
    known = _is_part(parameter) and 0 <= dim < parameter.dim() and (stride == 1 or dim == 0)
    if known and not (model.gated and stride == 1 and "linear_fc1" in name.split(".")):
        return dim, stride
    raise UsageError(
        "cannot determine how tensor parallelism shards a parameter",
        where=name,
        expected="partition_dim and partition_stride as Megatron sets them for its linear layers, "
        "with a stride of 2 for a gated linear_fc1",
        found=f"dimension {dim} and stride {stride}, shape {list(parameter.shape)}",
        remedy="make the model with perform_initialization, or train with tensor-parallel size 1",
    )


def _check(optimizer: Any, parameter: torch.Tensor, layout: Flat) -> None:
    """Raise UsageError unless Megatron has the same range for this rank."""
    buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
    said = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
    ours = layout.range_of(dist.get_rank())
    if ours != (said.start, said.end):
        raise UsageError(
            "cannot determine how Megatron shards a parameter",
            expected=f"elements {ours} of a parameter of shape {list(parameter.shape)}",
            found=f"{(said.start, said.end)}",
            remedy="use a release of Megatron-Core that laststep was tested with",
        )


def _refuse_experts(parameter: torch.Tensor, name: str, parts: int) -> None:
    """Raise UsageError for experts over process groups of their own."""
    if getattr(parameter, "allreduce", True) and "experts" not in name.split("."):
        return
    state: Any = sys.modules.get("megatron.core.parallel_state")
    sizes = [
        getattr(state, f"get_expert_{kind}_parallel_world_size", lambda: 1)()
        for kind in ("model", "tensor")
    ]
    if max(parts, *sizes) > 1:
        raise UsageError(
            "cannot lay out the experts of Megatron's models over other than data parallelism",
            where=name,
            found=f"tensor-parallel size {parts}; for experts {sizes[0]}, within them {sizes[1]}",
            remedy="train without that, or use Megatron's own checkpoints",
        )


class _Model(NamedTuple):
    """Facts about the parameters of all modules, by the parameters' ids."""

    names: dict[int, list[str]]
    cut: set[int]
    """Parameters that tensor parallelism shards: those marked as such, and weights of layers that
    have a size per partition. Megatron marks weights of its own layers only when it initializes
    them."""
    gated: bool


def _model_of(chunks: list[torch.nn.Module]) -> _Model:
    names: dict[int, list[str]] = {}
    cut: set[int] = set()
    for prefix, module in chain.from_iterable(map(_numbered, chunks)):
        knows = any(hasattr(module, name) for name in _SIZES_OF_PARTS)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(prefix + name)
            if _is_part(parameter) or (knows and name == "weight"):
                cut.add(id(parameter))
    configs = [getattr(_unwrapped(chunk), "config", None) for chunk in chunks]
    for size in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):  # since 0.19
        shards = max((getattr(config, size, 1) for config in configs), default=1)
        if shards > 1:
            raise UsageError(
                "cannot lay out weights that Megatron shards over more than tensor parallelism",
                found=f"{size} {shards}",
                remedy="train without that, or use Megatron's own checkpoints",
            )
    return _Model(
        names, cut, any(getattr(config, "gated_linear_unit", False) for config in configs)
    )


def _is_part(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _numbered(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a chunk's modules, without wrappers, with their prefixes in the whole model. Megatron
    numbers layers from 0 on every stage; each layer has its number in the whole model, from 1."""
    plain = {"": ""}
    for path, module in _unwrapped(chunk).named_modules(remove_duplicate=False):
        if path:
            above, _, last = path.rpartition(".")
            number = getattr(module, "layer_number", None)
            if last.isdigit() and isinstance(number, int):
                last = str(number - 1)
            plain[path] = f"{plain[above]}{last}."
        yield plain[path], module


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    inner: object = chunk
    while isinstance(inner, torch.nn.Module):
        chunk, inner = inner, getattr(inner, "module", None)
    return chunk
