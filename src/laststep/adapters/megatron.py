"""Take the state of Megatron-Core's distributed optimizer by the names and shapes of parameters.

    model=megatron.model(model, optimizer), optimizer=megatron.optimizer(optimizer, model)

Megatron puts parameters one after the other into buckets and gives each data-parallel rank an equal
range of every bucket, of which it keeps fp32 weights and moments. Of what tensor parallelism has
cut, a bucket has this rank's part. What is stored is the whole fp32 weight, under the name of the
parameter, with layers numbered through all pipeline stages; after a restore the module's own
weights are made from it and gathered, as in a step. To describe the state, nothing communicates:
where each parameter lies is read from the optimizer, and how it was cut from the attributes that
Megatron gives it. Imports nothing of Megatron, but for `SaveStrategy` and `LoadStrategy`, which are
for its own calls; checked with Megatron-Core 0.16.1, on CPUs that it takes for GPUs.

Not covered, and refused: experts over any parallelism but data; layers that are cut in ways of
their own, such as Mamba's, and gated ones that do not say so; frozen parameters that are cut; the
precision-aware optimizer; Megatron's own FSDP.
"""

from __future__ import annotations

import functools
import importlib
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.adapters.flat_state import (
    AXIS,
    FlatMember,
    FlatModule,
    FlatOptimizer,
    Parameters,
    need,
)
from laststep.errors import UsageError
from laststep.state.layouts import Flat, Mesh, Replicate, Shard
from laststep.state.tensors import Laid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.adapters.megatron_strategy import LoadStrategy, SaveStrategy
    from laststep.state.provider import StateProvider

__all__ = ["LoadStrategy", "SaveStrategy", "model", "optimizer"]

_TESTED = "Megatron-Core 0.16"
_need = functools.partial(need, tested=_TESTED)
_STATE = "megatron.core.parallel_state"
_CUTTING_AXIS = "tp"
_SIZES_OF_PARTS = (
    "output_size_per_partition",
    "input_size_per_partition",
    "num_embeddings_per_partition",
)


def __getattr__(name: str) -> object:
    if name in ("LoadStrategy", "SaveStrategy"):
        return getattr(importlib.import_module("laststep.adapters.megatron_strategy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def model(model: torch.nn.Module | Sequence[torch.nn.Module], optimizer: object) -> StateProvider:
    """The fp32 weights, and the buffers, of the chunks of a model on this pipeline stage."""
    return _MegatronModule(_chunks_of(model), _distributed(optimizer))


def optimizer(
    optimizer: object, model: torch.nn.Module | Sequence[torch.nn.Module]
) -> StateProvider:
    """The state of the torch optimizer inside, by the names of the parameters."""
    chunks, parts = _chunks_of(model), _distributed(optimizer)
    if len(parts) > 1:
        raise UsageError(
            "cannot take several Megatron optimizers as one",
            found=f"a chain of {len(parts)}",
            remedy="pass optimizer.chained_optimizers as items of their own",
        )
    return FlatOptimizer(_need(parts[0], "optimizer"), lambda: list(_members(parts[0], chunks)))


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [model] if isinstance(model, torch.nn.Module) else list(model)


class _ParameterRange(NamedTuple):
    """A parameter of which this rank has a range, and that in fp32."""

    names: list[str]
    """Several where it is tied."""
    layout: Flat
    shard: torch.Tensor


class _MegatronModule(FlatModule):
    def __init__(self, chunks: list[torch.nn.Module], optimizers: list[Any]) -> None:
        super().__init__(chunks[0], self._flat)
        self._chunks = chunks
        self._optimizers = optimizers

    def restore(self, value: object) -> None:
        super().restore(value)
        for optimizer in self._optimizers:
            _need(optimizer, "_copy_main_params_to_model_params")()
        for chunk in self._chunks:
            _need(chunk, "start_param_sync")(force_sync=True)

    def parts(self) -> tuple[object, ...]:
        # Megatron's wrapper is no module to go by: its `buffers` are those of gradients.
        return tuple(map(_unwrapped, self._chunks))

    def _walk(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return chain.from_iterable(map(_numbered, self._chunks))

    def _flat(self) -> Parameters:
        laid: dict[str, object] = {}
        flattened: set[int] = set()
        for optimizer in self._optimizers:
            flattened |= {id(p) for b in _need(optimizer, "buffers") for p in b.param_index_map}
            for place in _places(optimizer, self._chunks):
                part = Laid(place.shard.detach().view(-1), place.layout)
                laid |= dict.fromkeys(place.names, part)
        self._refuse_frozen_parts(flattened)
        return Parameters(laid, flattened)

    def _refuse_frozen_parts(self, flattened: set[int]) -> None:
        """`UsageError` for cut parameters that no optimizer has: they would be taken for whole
        ones."""
        buffers = [buffer for optimizer in self._optimizers for buffer in optimizer.buffers]
        if all(len(_ranks(buffer, "tp_group")) == 1 for buffer in buffers):
            return
        model = _model_of(self._chunks)
        frozen = model.cut - flattened
        if frozen:
            raise UsageError(
                "cannot save a frozen parameter that tensor parallelism has cut",
                where=model.names[min(frozen)][0],
                remedy="train it, or use Megatron's own checkpoints",
            )


def _distributed(optimizer: object) -> list[Any]:
    """The distributed optimizers that an optimizer of Megatron's is made of."""
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    for part in parts:
        _need(part, "gbuf_ranges")
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _members(optimizer: Any, chunks: list[torch.nn.Module]) -> Iterator[FlatMember]:
    """The parameters of which this rank has a range; ranks that have one describe the others."""
    groups = optimizer.optimizer.param_groups
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    for place in _places(optimizer, chunks):
        size = place.shard.numel()
        yield FlatMember(
            name=place.names[0],
            group=group_of[id(place.shard)],
            dtype=place.shard.dtype,
            shape=place.layout.shape,
            holder=place.shard,
            first=0,
            last=size,
            size=size,
            layout=place.layout,
        )


def _places(optimizer: Any, chunks: list[torch.nn.Module]) -> Iterator[_ParameterRange]:
    shards: dict[int, torch.Tensor | None] = {}
    for models, mains in (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ):
        groups = zip(_need(optimizer, models), _need(optimizer, mains), strict=True)
        for parameters, own in groups:
            shards |= {id(p): shard for p, shard in zip(parameters, own, strict=True)}
    model = _model_of(chunks)
    for buffer in _need(optimizer, "buffers"):
        parts, ranges = _ranks(buffer, "tp_group"), _ranks(buffer, "data_parallel_group")
        for parameter in _need(buffer, "param_index_map"):
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
                yield _ParameterRange(names, layout, shard)


def _ranks(buffer: Any, group: str) -> list[int]:
    return dist.get_process_group_ranks(_need(buffer, group))


class _Cut(NamedTuple):
    """How tensor parallelism cuts a parameter: along which dimension, each of how many blocks."""

    dim: int
    blocks: int


def _layout(
    buffer: Any, parameter: torch.Tensor, cut: _Cut | None, parts: list[int], ranges: list[int]
) -> Flat:
    """How a parameter lies over those ranks whose range of its bucket holds some of it."""
    start, stop, number = buffer.param_index_map[parameter]
    bucket = _need(buffer, "buckets")[number]
    each = _need(bucket, "grad_data").numel() // len(ranges)
    offset = start - _need(bucket, "offset")
    first, last = offset // each, (offset + stop - start - 1) // each
    count = last - first + 1
    # Megatron's groups are the lines of a grid: those of the others are this rank's, moved.
    ranks = [a + b - dist.get_rank() for a in parts for b in ranges[first : last + 1]]
    mesh = Mesh.of((_CUTTING_AXIS, AXIS), (len(parts), count), ranks)
    place = (AXIS,), offset - first * each, count * each
    shape = list(parameter.shape)
    if cut is None:
        return Flat(tuple(shape), mesh, *place)
    shape[cut.dim] *= len(parts)
    return Flat(tuple(shape), mesh, *place, (Shard(cut.dim), Replicate()), cut.blocks)


def _cut_of(parameter: torch.Tensor, model: _Model, parts: int) -> _Cut | None:
    """As the attributes of a parameter say; None where all tensor-parallel ranks have it whole."""
    if parts == 1 or id(parameter) not in model.cut:
        return None
    name = model.names[id(parameter)][0]
    dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
    # With a stride, a part is one piece of each of so many blocks; only along the first dimension
    # do these lie one after the other. Not every Megatron gives a gated layer, of which each rank
    # has a part of both halves, its stride of 2: without, it looks like any other.
    known = _is_part(parameter) and 0 <= dim < parameter.dim() and (stride == 1 or dim == 0)
    if known and not (model.gated and stride == 1 and "linear_fc1" in name.split(".")):
        return _Cut(dim, stride)
    raise UsageError(
        "cannot find out how tensor parallelism cuts a parameter",
        where=name,
        expected=f"partition_dim and partition_stride as {_TESTED} sets them for linear layers, "
        "with a stride of 2 for a gated linear_fc1",
        found=f"dimension {dim} and stride {stride}, shape {list(parameter.shape)}",
        remedy="make the model with perform_initialization, or train with tensor-parallel size 1",
    )


def _check(optimizer: Any, parameter: torch.Tensor, layout: Flat) -> None:
    """Check that Megatron has the same range of a parameter for this rank as we computed."""
    buffer, dtype, bucket = _need(optimizer, "model_param_gbuf_map")[parameter]
    said = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
    ours = layout.range_of(dist.get_rank())
    if ours != (said.start, said.end):
        raise UsageError(
            "cannot find out how the state lies over the ranks",
            expected=f"elements {ours} of a parameter of shape {list(parameter.shape)}",
            found=f"{(said.start, said.end)}",
            remedy=f"use {_TESTED}",
        )


def _refuse_experts(parameter: torch.Tensor, name: str, parts: int) -> None:
    """`UsageError` for experts that ranks have some of, or parts of, over groups of their own."""
    if getattr(parameter, "allreduce", True) and "experts" not in name.split("."):
        return
    state: Any = sys.modules.get(_STATE)
    experts, expert_parts = (
        getattr(state, f"get_expert_{kind}_parallel_world_size", lambda: 1)()
        for kind in ("model", "tensor")
    )
    for size, what in ((parts, "tensor"), (experts, "expert"), (expert_parts, "expert tensor")):
        if size > 1:
            raise UsageError(
                f"cannot lay out the experts of Megatron's models over {what} parallelism",
                where=name,
                found=f"{what}-parallel size {size}",
                remedy=f"train with {what}-parallel size 1, or use Megatron's own checkpoints",
            )


class _Model(NamedTuple):
    """What the modules say of their parameters, by the ids of these."""

    names: dict[int, list[str]]
    """Several where one is tied."""
    cut: set[int]
    """What tensor parallelism cuts: what is marked so, and weights of layers that know their part.
    Megatron marks the weights of its own only when it initializes them."""
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
    return _Model(
        names, cut, any(getattr(config, "gated_linear_unit", False) for config in configs)
    )


def _is_part(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _numbered(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a chunk, wrappers looked through. On every pipeline stage Megatron counts its
    layers from 0, and each knows its number in the whole model, from 1."""
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
