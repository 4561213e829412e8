"""Take the state of DeepSpeed's ZeRO, stages 1 to 3, by the names and shapes of the plain model.

    Checkpointer(run, model=deepspeed.model(engine), optimizer=deepspeed.optimizer(engine),
                 counts=deepspeed.progress(engine))

ZeRO steps flat buffers of fp32 weights, of which each rank has a range; with bf16 or fp16 the
module's own weights are rounded from these. What is stored is the fp32 weight, under the name of
the parameter: it loads into a plain fp32 model, and after a restore the module's weights are made
from it again, which gathers those that every rank keeps whole. To describe the state, nothing
communicates: where each parameter lies is read from the optimizer. Imports nothing of DeepSpeed;
checked with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.adapters.flat_state import (
    AXIS,
    FlatMember,
    FlatModule,
    FlatOptimizer,
    Parameters,
    flat_range,
    mesh_over,
    need,
    plain_name,
)
from laststep.errors import Usage
from laststep.state.layouts import Flat
from laststep.state.provider import ABSENT, State, StateProvider
from laststep.state.tensors import Laid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.state.boxes import Index

__all__ = ["model", "optimizer", "progress"]

_TESTED = "DeepSpeed 0.19.8"
_need = functools.partial(need, tested=_TESTED)
_BUFFERS = (
    ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"),
    ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
)
"""Of stages 1 and 2, and of stage 1 with bf16 and gradients in fp32: the parameters of each group,
the buffer that they are views of, and this rank's range of it in fp32."""


def model(engine: object) -> StateProvider:
    """The fp32 weights, and the buffers, of the module that a DeepSpeed engine trains."""
    return _ZeroModule(engine)


def optimizer(engine: object) -> StateProvider:
    """The state of the torch optimizer that ZeRO steps, by the names of the parameters."""
    zero = _zero(engine)
    return FlatOptimizer(_need(zero, "optimizer"), lambda: list(_members(engine)))


def progress(engine: object) -> StateProvider:
    """The engine's counts of steps and samples, and the loss scale of fp16."""
    return _StepCounts(engine)


class _FlatRange(NamedTuple):
    """Where a parameter lies in flat memory."""

    parameter: Any
    shape: Index
    layout: Flat
    group: int
    """Its group in the optimizer; -1 for a parameter that is not trained."""
    memory: torch.Tensor
    first: int
    last: int
    """`first` to `last` are its elements of that memory, on this rank."""

    def laid(self) -> Laid:
        return Laid(self.memory.detach()[self.first : self.last], self.layout)


class _ZeroModule(FlatModule):
    def __init__(self, engine: object) -> None:
        super().__init__(_need(engine, "module"), self._flat)
        self._engine = engine

    def restore(self, value: object) -> None:
        super().restore(value)
        zero = _zero(self._engine)
        if not _is_stage3(zero):
            _need(zero, "update_lp_params")()
            return
        rounded = _need(zero, "fp16_partitioned_groups_flat")
        for low, full in zip(rounded, _need(zero, "fp32_partitioned_groups_flat"), strict=True):
            low.data.copy_(full.data)
        _need(zero, "invalidate_secondary_tensor")()
        gathered = _need(zero, "persistent_parameters")
        if gathered:  # small ones, which every rank keeps whole
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)

    def _flat(self) -> Parameters:
        places = {id(place.parameter): place.laid() for place in _places(self._engine)}
        laid: dict[str, object] = {
            plain_name(name): places[id(parameter)]
            for name, parameter in self._module.named_parameters(remove_duplicate=False)
            if id(parameter) in places
        }
        return Parameters(laid, set(places))


class _StepCounts(StateProvider):
    kind = "progress"

    _COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    _SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def describe(self) -> State:
        counts = {name: _need(self._engine, name) for name in self._COUNTS}
        scaler = getattr(_zero(self._engine), "loss_scaler", None)
        scale = {name: getattr(scaler, name) for name in self._SCALE if hasattr(scaler, name)}
        return State(value={"counts": counts, "scale": scale})

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        scaler = getattr(_zero(self._engine), "loss_scaler", None)
        for owner, entries in ((self._engine, value["counts"]), (scaler, value["scale"])):
            for name, entry in {} if entries is ABSENT else entries.items():
                if entry is not ABSENT:
                    setattr(owner, name, entry)


def _zero(engine: object) -> Any:
    """The engine's optimizer, if it is ZeRO's and lays state out in a way that is known here."""
    zero = _need(engine, "optimizer")
    if not _is_stage3(zero) and not any(hasattr(zero, names[0]) for names in _BUFFERS):
        raise Usage(
            "this DeepSpeed engine does not use ZeRO",
            expected=f"an optimizer of stage 1, 2 or 3, as in {_TESTED}",
            found=type(zero).__name__,
            remedy="pass engine.module and engine.optimizer to the Checkpointer as they are",
        )
    for name, what in (
        ("has_moe_layers", "experts that are spread over the ranks"),
        ("swap_optimizer", "optimizer state on NVMe"),
    ):
        if getattr(zero, name, False) or getattr(engine, name, False):
            raise Usage(f"cannot take the state of ZeRO with {what}", remedy="turn that off")
    if getattr(zero, "model_parallel_world_size", 1) > 1:
        raise Usage("cannot take the state of ZeRO over tensor parallelism")
    return zero


def _is_stage3(zero: object) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _members(engine: object) -> Iterator[FlatMember]:
    names: dict[int, str] = {}
    for name, parameter in _need(engine, "module").named_parameters():
        names[id(parameter)] = plain_name(name)
    for place in _places(engine):
        if place.group >= 0:
            if id(place.parameter) not in names:
                raise Usage(
                    "ZeRO's optimizer has a parameter that is none of the module's",
                    found=f"one of shape {list(place.shape)}",
                    remedy="make the optimizer from the parameters of the module",
                )
            yield FlatMember(
                name=names[id(place.parameter)], group=place.group, dtype=place.memory.dtype,
                shape=place.shape, holder=place.memory, first=place.first, last=place.last,
                size=place.memory.numel(), layout=place.layout,
            )  # fmt: skip


def _places(engine: object) -> Iterator[_FlatRange]:
    zero = _zero(engine)
    if _is_stage3(zero):
        yield from _places_of_stage3(zero, _need(engine, "module"))
        return
    names = next(names for names in _BUFFERS if hasattr(zero, names[0]))
    groups, buffers, ranges = (_need(zero, name) for name in names)
    meshes = map(mesh_over, _need(zero, "real_dp_process_group"))
    for number, (parameters, buffer, own, mesh) in enumerate(
        zip(groups, buffers, ranges, meshes, strict=True)
    ):
        for parameter in parameters:
            layout = Flat(
                tuple(parameter.shape), mesh, (AXIS,), _offset(parameter, buffer), buffer.numel()
            )
            yield _place(parameter, layout, number, own)


def _offset(parameter: torch.Tensor, buffer: torch.Tensor) -> int:
    """Where a parameter begins in the buffer that it is a view of, in whatever order they lie."""
    at = (parameter.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    if not 0 <= at <= buffer.numel() - parameter.numel() or not parameter.is_contiguous():
        raise Usage(
            "cannot find out how the state lies over the ranks",
            expected=f"parameters that are views of ZeRO's flat buffers, as in {_TESTED}",
            found=f"one of shape {list(parameter.shape)} that is not",
            remedy="bring offloaded states back before saving",
        )
    return at


def _place(parameter: Any, layout: Flat, group: int, own: torch.Tensor, at: int = 0) -> _FlatRange:
    """`own` is this rank's range of the buffer; `at`, where in it that of this parameter begins."""
    first, last = flat_range(layout, dist.get_rank())
    if at + last > own.numel():
        raise Usage(
            "ZeRO's fp32 weights are not in memory", expected=f"at least {at + last} elements",
            found=str(own.numel()), remedy="bring offloaded states back before saving",
        )  # fmt: skip
    return _FlatRange(parameter, layout.shape, layout, group, own, at + first, at + last)


def _places_of_stage3(zero: Any, module: torch.nn.Module) -> Iterator[_FlatRange]:
    """Each parameter is cut over the ranks by itself; the parts lie in the buffers of subgroups."""
    positions = _need(zero, "grad_position")
    group_of = _need(zero, "sub_group_to_group_id")
    own = _need(zero, "fp32_partitioned_groups_flat")
    trained = {id(p) for group in _need(zero, "fp16_groups") for p in group}
    for parameter in module.parameters():
        part = _need(parameter, "ds_tensor")
        mesh = mesh_over(_need(parameter, "ds_process_group"))
        shape = tuple(_need(parameter, "ds_shape"))
        each = _need(part, "ds_numel")
        if math.prod(shape) > each * mesh.sizes[0]:
            raise Usage(f"cannot find out how ZeRO cut a parameter of shape {list(shape)}")
        layout = Flat(shape, mesh, (AXIS,), 0, each * mesh.sizes[0])
        if id(parameter) in trained:
            number, at, _ = positions[_need(zero, "get_param_id")(parameter)]
            yield _place(parameter, layout, group_of[number], own[number], at)
        else:
            yield _place(parameter, layout, -1, part)
