"""The items of a DeepSpeed engine's state: weights, optimizer, counts of steps.

The weight stored under a parameter's name is the fp32 one that the optimizer steps. It loads into a
plain fp32 model, and after a restore the module's weights are computed from it again. The location
of that weight under ZeRO, experts and pipeline stages, and its name, are read from private
attributes of the engine. A missing attribute is an error that names it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from laststep.adapters import flat_state
from laststep.adapters.flat_state import (
    AXIS,
    FlatMember,
    FlatModule,
    FlatOptimizer,
    flat_range,
    mesh_over,
    plain_name,
)
from laststep.adapters.framework import Framework
from laststep.errors import UsageError
from laststep.state.layouts import Flat
from laststep.state.provider import ABSENT, State, StateProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


FRAMEWORK = Framework(package="deepspeed", extra="deepspeed", tested="0.19")
TESTED = "DeepSpeed 0.19.8"

need = functools.partial(flat_state.need, tested=TESTED)
"""Return an attribute of a DeepSpeed object; raise `UsageError` if it is missing."""


_EXPERTS = "deepspeed_experts."


def names_in(module: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that maps a name, or a prefix, to the one in the whole model."""
    first: dict[str, int] = {}
    for name, layer in module.named_modules():
        if type(layer).__name__ == "AutoEPMoELayer":  # it holds its local experts in one tensor
            raise UsageError(
                "cannot take the state of DeepSpeed with AutoEP",
                where=name,
                remedy="use layers of deepspeed.moe",
            )
        if hasattr(layer, "ep_group") and hasattr(layer, "experts"):
            place = dist.get_rank(need(layer, "ep_group"))
            first[plain_name(f"{name}.experts.")] = place * need(layer, "num_local_experts")

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


def members(engine: object, plain: Callable[[str], str]) -> Iterator[FlatMember]:
    """Yield every parameter that is stepped or sharded; `plain` is what `names_in` returned."""
    module = need(engine, "module")
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain(name))
    for member in _located(known_optimizer(engine), module):
        member.names = names.get(id(member.parameter), ())
        if not member.names:
            raise UsageError(
                "DeepSpeed's optimizer has a parameter that is not in the module",
                found=f"one of shape {list(member.shape)}",
                remedy="make the optimizer from the parameters of the module",
            )
        yield member


def _located(optimizer: Any, module: torch.nn.Module) -> Iterator[FlatMember]:
    """Yield the parameters without their names."""
    if _is_stage3(optimizer):
        yield from _of_stage3(optimizer, module)
        return
    for names in _BUFFERS:
        if hasattr(optimizer, names[0]):
            yield from _of_ranges(optimizer, *(need(optimizer, name) for name in names))
            return
    yield from _of_copies(optimizer)


def round_weights(engine: object) -> None:
    """Compute the module's weights from the fp32 ones, as a step does. Collective: gathers
    parameters that every rank keeps whole."""
    optimizer = known_optimizer(engine)
    if _is_stage3(optimizer):
        rounded = need(optimizer, "fp16_partitioned_groups_flat")
        for low, full in zip(rounded, need(optimizer, "fp32_partitioned_groups_flat"), strict=True):
            low.data.copy_(full.data)
        need(optimizer, "invalidate_secondary_tensor")()
        gathered = need(optimizer, "persistent_parameters")
        if gathered:  # small ones, which every rank keeps whole
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)
    elif any(hasattr(optimizer, names[0]) for names in _BUFFERS):
        need(optimizer, "update_lp_params")()
    else:
        for member in _of_copies(optimizer):
            weight = member.weight()
            if isinstance(weight, torch.Tensor) and member.memory is not member.parameter:
                member.parameter.data.copy_(weight)


def known_optimizer(engine: object) -> Any:
    """Return the engine's optimizer. Raise UsageError if it is not supported."""
    optimizer = need(engine, "optimizer")
    if optimizer is None:
        raise UsageError(
            "this DeepSpeed engine has no optimizer", remedy="pass engine.module to a Checkpointer"
        )
    for name, what in (("swap_optimizer", "optimizer state on NVMe"), ("zenflow", "ZenFlow")):
        if getattr(optimizer, name, None) or getattr(engine, name, None):
            raise UsageError(
                f"cannot take the state of DeepSpeed with {what}", remedy="turn that off"
            )
    mpu = getattr(engine, "mpu", None)
    for name in ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if getattr(mpu, name, lambda: 1)() > 1:
            raise UsageError("cannot take the state of DeepSpeed over tensor parallelism")
    return optimizer


def _is_stage3(optimizer: object) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _of_ranges(optimizer: Any, groups: Any, buffers: Any, ranges: Any) -> Iterator[FlatMember]:
    meshes = map(mesh_over, need(optimizer, "real_dp_process_group"))
    for number, (parameters, buffer, own, mesh) in enumerate(
        zip(groups, buffers, ranges, meshes, strict=True)
    ):
        for parameter in parameters:
            layout = Flat(
                tuple(parameter.shape), mesh, (AXIS,), _offset(parameter, buffer), buffer.numel()
            )
            yield _place(parameter, layout, number, own)


def _offset(parameter: torch.Tensor, buffer: torch.Tensor) -> int:
    """Return the offset of a parameter in the buffer that it is a view of."""
    at = (parameter.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    if not 0 <= at <= buffer.numel() - parameter.numel() or not parameter.is_contiguous():
        raise UsageError(
            "cannot determine how the state is sharded over the ranks",
            expected=f"parameters that are views of DeepSpeed's flat buffers, as in {TESTED}",
            found=f"one of shape {list(parameter.shape)} that is not",
            remedy="bring offloaded states back before saving",
        )
    return at


def _place(
    parameter: Any, layout: Flat | None, group: int, own: torch.Tensor, at: int = 0
) -> FlatMember:
    """Locate a parameter, or this rank's part of it, in a buffer in which it starts at `at`."""
    shape, (first, last) = tuple(parameter.shape), (0, parameter.numel())
    if layout is not None:
        shape, (first, last) = layout.shape, flat_range(layout, dist.get_rank())
    if at + last > own.numel():
        raise UsageError(
            "ZeRO's fp32 weights are not in memory",
            expected=f"at least {at + last} elements",
            found=str(own.numel()),
            remedy="bring offloaded states back before saving",
        )
    return FlatMember(
        parameter=parameter,
        group=group,
        shape=shape,
        layout=layout,
        memory=own,
        first=at + first,
        last=at + last,
        holder=own,
    )


def _of_stage3(optimizer: Any, module: torch.nn.Module) -> Iterator[FlatMember]:
    """Yield the parameters of stage 3, each of which is sharded by itself."""
    positions = need(optimizer, "grad_position")
    group_of = need(optimizer, "sub_group_to_group_id")
    own = need(optimizer, "fp32_partitioned_groups_flat")
    trained = {id(p) for group in need(optimizer, "fp16_groups") for p in group}
    for parameter in module.parameters():
        part = need(parameter, "ds_tensor")
        mesh = mesh_over(need(parameter, "ds_process_group"))
        shape = tuple(need(parameter, "ds_shape"))
        each = need(part, "ds_numel")
        if math.prod(shape) > each * mesh.sizes[0]:
            raise UsageError(
                f"cannot determine how ZeRO sharded a parameter of shape {list(shape)}"
            )
        layout = Flat(shape, mesh, (AXIS,), 0, each * mesh.sizes[0])
        if id(parameter) in trained:
            number, at, _ = positions[need(optimizer, "get_param_id")(parameter)]
            yield _place(parameter, layout, group_of[number], own[number], at)
        else:
            yield _place(parameter, layout, -1, part)


def _of_copies(optimizer: Any) -> Iterator[FlatMember]:
    """Yield the parameters without ZeRO: every rank has all of them."""
    groups: list[list[Any]] = getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    if flat is not None:
        buffers = need(optimizer, "fp16_groups_flat")
        for number, (parameters, low, full) in enumerate(zip(groups, buffers, flat, strict=True)):
            for parameter in parameters:
                yield _place(parameter, None, number, full, _offset(parameter, low))
        return
    of_optimizer = [group["params"] for group in need(optimizer, "param_groups")]
    copies = getattr(optimizer, "fp32_groups", of_optimizer)
    for number, (parameters, fulls) in enumerate(zip(groups or copies, copies, strict=True)):
        for parameter, full in zip(parameters, fulls, strict=True):
            yield _place(parameter, None, number, full)


_OF_LAYOUT = frozenset({"name", "moe"})
"""Options by which DeepSpeed identifies a group of experts; they depend on the number of ranks."""


def model(engine: object) -> EngineModule:
    """Return a provider of the fp32 weights and the buffers of an engine's module."""
    return EngineModule(engine)


def optimizer(engine: object) -> StateProvider:
    """Return a provider of the state of the engine's torch optimizer."""
    known = known_optimizer(engine)
    stepped = getattr(known, "optimizer", known)

    def trained() -> Iterator[FlatMember]:
        plain = names_in(need(engine, "module"))
        return (member for member in members(engine, plain) if member.group >= 0)

    return FlatOptimizer(stepped, trained, live_options=_OF_LAYOUT)


def progress(engine: object) -> StateProvider:
    """Return a provider of the engine's counts of steps and samples, and the loss scale of fp16."""
    return _StepCounts(engine)


class EngineModule(FlatModule):
    """The module of an engine, stored as a plain module."""

    def __init__(self, engine: object) -> None:
        module = need(engine, "module")
        plain = names_in(module)
        super().__init__(module, lambda: list(members(engine, plain)), plain)
        self._engine = engine
        self.leaves_frozen = False
        """Omit frozen parameters."""

    def describe(self) -> State:
        state = super().describe()
        if self.leaves_frozen and isinstance(state.value, dict):
            for name, parameter in self._module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.value.pop(self._name(name), None)
        return state

    def restore(self, value: object) -> None:
        super().restore(value)
        round_weights(self._engine)


_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class _StepCounts(StateProvider):
    kind = "progress"

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def _parts(self) -> Iterator[tuple[str, object, tuple[str, ...]]]:
        """Yield each part, its owner, and the owner's attributes that change with each step."""
        known = known_optimizer(self._engine)
        scaler = getattr(known, "loss_scaler", None) or getattr(known, "loss_scale_config", None)
        yield "counts", self._engine, _COUNTS
        # Layers of a pipeline derive their seeds from it.
        yield "pipeline", need(self._engine, "module"), ("micro_offset",)
        yield "scale", scaler, _SCALE

    def describe(self) -> State:
        for name in _COUNTS:
            need(self._engine, name)
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
        engine: Any = self._engine
        # Recomputed, since micro-steps per step may change with the number of ranks.
        engine.micro_steps = engine.global_steps * need(engine, "gradient_accumulation_steps")()
