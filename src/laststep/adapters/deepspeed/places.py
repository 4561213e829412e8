"""Where the weights lie that a DeepSpeed engine steps, read from its optimizer: none communicates.

ZeRO steps flat buffers of fp32 weights, of which each rank has a range: in stages 1 and 2 of a
group's parameters behind each other, in stage 3 of each parameter by itself. Without ZeRO there are
copies in fp32 of bf16 and fp16 weights, flat or not, or the weights themselves. Those of experts
lie over the ranks that have the same experts, those of a pipeline over the ranks of a stage.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.adapters.deepspeed.seams import TESTED, need
from laststep.adapters.flat_state import AXIS, flat_range, mesh_over
from laststep.errors import UsageError
from laststep.state.layouts import Flat
from laststep.state.tensors import Laid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.state.boxes import Index

_BUFFERS = (
    ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"),
    ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
)
"""Of stages 1 and 2, and of bf16 with gradients in fp32: the parameters of each group, the buffer
that they are views of, and this rank's range of it in fp32."""


class WeightPlace(NamedTuple):
    """Where a parameter lies in the memory that is stepped."""

    parameter: Any
    shape: Index
    layout: Flat | None
    """Over the ranks; None where this rank has all of it."""
    group: int
    """Its group in the optimizer; -1 for a parameter that is not trained."""
    memory: torch.Tensor
    first: int
    last: int
    """`first` to `last` are its elements of that memory, on this rank."""

    def weight(self) -> Laid | torch.Tensor:
        """The weight as it is stored."""
        part = self.memory.detach().view(-1)[self.first : self.last]
        return part.view(self.shape) if self.layout is None else Laid(part, self.layout)


def places(engine: object) -> Iterator[WeightPlace]:
    """Of all parameters that are stepped, and of those that stage 3 has cut."""
    optimizer = known_optimizer(engine)
    if _is_stage3(optimizer):
        yield from _of_stage3(optimizer, need(engine, "module"))
        return
    for names in _BUFFERS:
        if hasattr(optimizer, names[0]):
            yield from _of_ranges(optimizer, *(need(optimizer, name) for name in names))
            return
    yield from _of_copies(optimizer)


def round_weights(engine: object) -> None:
    """Make the module's weights from the fp32 ones, as a step does: gathers what all keep whole."""
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
        for place in _of_copies(optimizer):
            if place.memory is not place.parameter:
                place.parameter.data.copy_(place.weight())


def known_optimizer(engine: object) -> Any:
    """The engine's optimizer, if it lays state out in a way that is known here."""
    optimizer = need(engine, "optimizer")
    if optimizer is None:
        raise UsageError(
            "this DeepSpeed engine has no optimizer, so there is nothing that it steps",
            remedy="pass engine.module to a Checkpointer",
        )
    for name, what in (("swap_optimizer", "optimizer state on NVMe"), ("zenflow", "ZenFlow")):
        if getattr(optimizer, name, None) or getattr(engine, name, None):
            raise UsageError(
                f"cannot take the state of DeepSpeed with {what}", remedy="turn that off"
            )
    if _tensor_parallel_ranks(getattr(engine, "mpu", None)) > 1:
        raise UsageError("cannot take the state of DeepSpeed over tensor parallelism")
    return optimizer


def _tensor_parallel_ranks(mpu: Any) -> int:
    for name in ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 1


def _is_stage3(optimizer: object) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _of_ranges(optimizer: Any, groups: Any, buffers: Any, ranges: Any) -> Iterator[WeightPlace]:
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
    """Where a parameter begins in the buffer that it is a view of, in whatever order they lie."""
    at = (parameter.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    if not 0 <= at <= buffer.numel() - parameter.numel() or not parameter.is_contiguous():
        raise UsageError(
            "cannot find out how the state lies over the ranks",
            expected=f"parameters that are views of DeepSpeed's flat buffers, as in {TESTED}",
            found=f"one of shape {list(parameter.shape)} that is not",
            remedy="bring offloaded states back before saving",
        )
    return at


def _place(parameter: Any, layout: Flat, group: int, own: torch.Tensor, at: int = 0) -> WeightPlace:
    """`own` is this rank's range of the buffer; `at`, where in it that of this parameter begins."""
    first, last = flat_range(layout, dist.get_rank())
    if at + last > own.numel():
        raise UsageError(
            "ZeRO's fp32 weights are not in memory",
            expected=f"at least {at + last} elements",
            found=str(own.numel()),
            remedy="bring offloaded states back before saving",
        )
    return WeightPlace(parameter, layout.shape, layout, group, own, at + first, at + last)


def _of_stage3(optimizer: Any, module: torch.nn.Module) -> Iterator[WeightPlace]:
    """Each parameter is cut over the ranks by itself; the parts lie in the buffers of subgroups."""
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
            raise UsageError(f"cannot find out how ZeRO cut a parameter of shape {list(shape)}")
        layout = Flat(shape, mesh, (AXIS,), 0, each * mesh.sizes[0])
        if id(parameter) in trained:
            number, at, _ = positions[need(optimizer, "get_param_id")(parameter)]
            yield _place(parameter, layout, group_of[number], own[number], at)
        else:
            yield _place(parameter, layout, -1, part)


def _of_copies(optimizer: Any) -> Iterator[WeightPlace]:
    """Without ZeRO: every rank has all of it."""
    groups: list[list[Any]] = getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    if flat is not None:
        buffers = need(optimizer, "fp16_groups_flat")
        for number, (parameters, low, full) in enumerate(zip(groups, buffers, flat, strict=True)):
            for parameter in parameters:
                first = _offset(parameter, low)
                last = first + parameter.numel()
                yield WeightPlace(
                    parameter, tuple(parameter.shape), None, number, full, first, last
                )
        return
    of_optimizer = [group["params"] for group in need(optimizer, "param_groups")]
    copies = getattr(optimizer, "fp32_groups", of_optimizer)
    for number, (parameters, fulls) in enumerate(zip(groups or copies, copies, strict=True)):
        for parameter, full in zip(parameters, fulls, strict=True):
            size = parameter.numel()
            yield WeightPlace(parameter, tuple(parameter.shape), None, number, full, 0, size)
