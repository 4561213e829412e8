"""The items of a DeepSpeed engine's state: weights, optimizer, counts of steps.

The weight stored under a parameter's name is the fp32 one that the optimizer steps. It loads into a
plain fp32 model, and after a restore the module's weights are computed from it again. The location
of that weight under ZeRO, experts and pipeline stages, and its name, are read from private
attributes of the engine.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from laststep.adapters import flat_state
from laststep.adapters.flat_state import FlatMember, FlatModule, FlatOptimizer, plain_name
from laststep.adapters.framework import Framework
from laststep.deepspeed.uses import USES
from laststep.errors import UsageError
from laststep.state.layouts import Flat
from laststep.state.provider import ABSENT, State, StateProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FRAMEWORK = Framework(
    package="deepspeed", extra="deepspeed", oldest="0.19", newest="0.19", uses=USES
)


def model(engine: Any) -> StateProvider:
    """Return a provider of the fp32 weights and the buffers of an engine's module."""
    _refuse_unsupported(engine)
    return _EngineModule(engine)


def optimizer(engine: Any) -> StateProvider:
    """Return a provider of the state of the engine's torch optimizer."""
    _refuse_unsupported(engine)
    stepped = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def trained() -> Iterator[FlatMember]:
        plain = _names_in(engine.module)
        return (member for member in _members(engine, plain) if member.group >= 0)

    return FlatOptimizer(stepped, trained, live_options=_OF_LAYOUT)


def progress(engine: Any) -> StateProvider:
    """Return a provider of the engine's counts of steps and samples, and the loss scale of fp16."""
    return _StepCounts(engine)


_OF_LAYOUT = frozenset({"name", "moe"})
"""Options by which DeepSpeed identifies a group of experts; they depend on the number of ranks."""


@functools.cache
def check_version() -> None:
    """Check DeepSpeed's version, once: engines may come from Accelerate or Lightning too."""
    FRAMEWORK.check()


def _refuse_unsupported(engine: Any) -> None:
    if "deepspeed" in sys.modules:
        check_version()
    mpu, parts = getattr(engine, "mpu", None), (engine, engine.optimizer)
    sizes = ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size")
    kinds = {type(layer).__name__ for layer in engine.module.modules()}
    unsupported = {
        "no optimizer": engine.optimizer is None,
        "optimizer state on NVMe": any(getattr(part, "swap_optimizer", False) for part in parts),
        "ZenFlow": any(getattr(part, "zenflow", False) for part in parts),
        "tensor parallelism": any(getattr(mpu, size, lambda: 1)() > 1 for size in sizes),
        "AutoEP": "AutoEPMoELayer" in kinds,  # holds its local experts in one tensor
    }
    for what, found in unsupported.items():
        if found:
            raise UsageError(
                f"cannot take the state of a DeepSpeed engine with {what}",
                remedy="turn that off; without an optimizer, pass engine.module to a Checkpointer",
            )


_EXPERTS = "deepspeed_experts."


def _names_in(module: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that maps a name, or a prefix, to the one in the whole model."""
    first: dict[str, int] = {}
    for name, layer in module.named_modules():
        moe: Any = layer
        if hasattr(moe, "ep_group") and hasattr(moe, "experts"):
            place = dist.get_rank(moe.ep_group)
            first[plain_name(f"{name}.experts.")] = place * moe.num_local_experts

    def whole(name: str) -> str:
        name = plain_name(name)
        layer, experts, rest = name.partition(_EXPERTS)
        number, dot, inner = rest.partition(".")
        if not number or layer not in first:
            return name
        return f"{layer}{experts}{first[layer] + int(number)}{dot}{inner}"

    return whole


_BUFFERS = (
    ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"),
    ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
)
"""Attributes of ZeRO stages 1 and 2, and of bf16 with fp32 gradients: the parameters of each group,
the buffer that they are views of, and this rank's range of it in fp32."""


def _members(engine: Any, plain: Callable[[str], str]) -> Iterator[FlatMember]:
    """Yield every parameter that is stepped or sharded; `plain` is what `_names_in` returned."""
    names: dict[int, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain(name))
    for member in _located(engine.optimizer, engine.module):
        if id(member.parameter) not in names:
            raise UsageError("DeepSpeed's optimizer has a parameter that is not in the module")
        member.names = names[id(member.parameter)]
        yield member


def _located(optimizer: Any, module: torch.nn.Module) -> Iterator[FlatMember]:
    if _is_stage3(optimizer):
        yield from _of_stage3(optimizer, module)
        return
    for names in _BUFFERS:
        if hasattr(optimizer, names[0]):
            yield from _of_ranges(optimizer, *(getattr(optimizer, name) for name in names))
            return
    yield from _of_copies(optimizer)


def _round_weights(optimizer: Any) -> None:
    """Compute the module's weights from the fp32 ones, as a step does. Collective."""
    if _is_stage3(optimizer):
        rounded = optimizer.fp16_partitioned_groups_flat
        for low, full in zip(rounded, optimizer.fp32_partitioned_groups_flat, strict=True):
            low.data.copy_(full.data)
        optimizer.invalidate_secondary_tensor()
        gathered = optimizer.persistent_parameters
        if gathered:  # small ones, which every rank keeps whole
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)
    elif any(hasattr(optimizer, names[0]) for names in _BUFFERS):
        optimizer.update_lp_params()
    else:
        for member in _of_copies(optimizer):
            weight = member.part_of(member.memory)
            if isinstance(weight, torch.Tensor) and member.memory is not member.parameter:
                member.parameter.data.copy_(weight)


def _is_stage3(optimizer: object) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _of_ranges(optimizer: Any, groups: Any, buffers: Any, ranges: Any) -> Iterator[FlatMember]:
    meshes = map(flat_state.mesh_over, optimizer.real_dp_process_group)
    for number, (parameters, buffer, own, mesh) in enumerate(
        zip(groups, buffers, ranges, meshes, strict=True)
    ):
        for parameter in parameters:
            offset, total = _offset(parameter, buffer), buffer.numel()
            layout = Flat(tuple(parameter.shape), mesh, (flat_state.AXIS,), offset, total)
            yield _place(parameter, layout, number, own)


def _offset(parameter: torch.Tensor, buffer: torch.Tensor) -> int:
    at = (parameter.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    if not 0 <= at <= buffer.numel() - parameter.numel() or not parameter.is_contiguous():
        raise _elsewhere()
    return at


def _elsewhere() -> UsageError:
    return UsageError(
        "the weights are not in DeepSpeed's flat buffers",
        remedy="bring offloaded states back before saving",
    )


def _place(
    parameter: Any, layout: Flat | None, group: int, own: torch.Tensor, at: int = 0
) -> FlatMember:
    """Locate a parameter, or this rank's part of it, in a buffer in which it starts at `at`."""
    shape, (first, last) = tuple(parameter.shape), (0, parameter.numel())
    if layout is not None:
        shape, (first, last) = layout.shape, flat_state.flat_range(layout, dist.get_rank())
    if at + last > own.numel():
        raise _elsewhere()
    return FlatMember(
        parameter=parameter,
        group=group,
        shape=shape,
        layout=layout,
        memory=own,
        elements=slice(at + first, at + last),
        holder=own,
    )


def _of_stage3(optimizer: Any, module: torch.nn.Module) -> Iterator[FlatMember]:
    """Yield the parameters of stage 3, each of which is sharded by itself."""
    trained = {id(p) for group in optimizer.fp16_groups for p in group}
    for parameter in module.parameters():
        zero: Any = parameter
        mesh = flat_state.mesh_over(zero.ds_process_group)
        total = zero.ds_tensor.ds_numel * mesh.sizes[0]
        layout = Flat(tuple(zero.ds_shape), mesh, (flat_state.AXIS,), 0, total)
        if id(parameter) in trained:
            number, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            own = optimizer.fp32_partitioned_groups_flat[number]
            yield _place(parameter, layout, optimizer.sub_group_to_group_id[number], own, at)
        else:
            yield _place(parameter, layout, -1, zero.ds_tensor)


def _of_copies(optimizer: Any) -> Iterator[FlatMember]:
    """Yield the parameters without ZeRO: every rank has all of them."""
    groups: list[list[Any]] = getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    if flat is not None:
        buffers = optimizer.fp16_groups_flat
        for number, (parameters, low, full) in enumerate(zip(groups, buffers, flat, strict=True)):
            for parameter in parameters:
                yield _place(parameter, None, number, full, _offset(parameter, low))
        return
    of_optimizer = [group["params"] for group in optimizer.param_groups]
    copies = getattr(optimizer, "fp32_groups", of_optimizer)
    for number, (parameters, fulls) in enumerate(zip(groups or copies, copies, strict=True)):
        for parameter, full in zip(parameters, fulls, strict=True):
            yield _place(parameter, None, number, full)


class _EngineModule(FlatModule):
    def __init__(self, engine: Any) -> None:
        plain = _names_in(engine.module)
        super().__init__(engine.module, lambda: list(_members(engine, plain)), plain)
        self._engine = engine

    def restore(self, value: object) -> None:
        super().restore(value)
        _round_weights(self._engine.optimizer)


_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class _StepCounts(StateProvider):
    kind = "progress"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def _parts(self) -> Iterator[tuple[str, object, tuple[str, ...]]]:
        """Yield each part, its owner, and the owner's attributes that change with each step."""
        known = self._engine.optimizer
        scaler = getattr(known, "loss_scaler", None) or getattr(known, "loss_scale_config", None)
        yield "counts", self._engine, _COUNTS
        # Layers of a pipeline derive their seeds from it.
        yield "pipeline", self._engine.module, ("micro_offset",)
        yield "scale", scaler, _SCALE

    def describe(self) -> State:
        value = {
            part: {name: getattr(owner, name) for name in names if hasattr(owner, name)}
            for part, owner, names in self._parts()
        }
        return State(value=value)

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        for part, owner, names in self._parts():
            entries = value.get(part, ABSENT)
            for name in names if isinstance(entries, dict) else ():
                if hasattr(owner, name) and entries.get(name, ABSENT) is not ABSENT:
                    setattr(owner, name, entries[name])
        engine = self._engine
        # Recomputed, since micro-steps per step may change with the number of ranks.
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
