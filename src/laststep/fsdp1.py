"""Save FSDP1 (`FullyShardedDataParallel`) under the names and shapes of the plain model.

    Checkpointer(run, model=fsdp1.model(model), optimizer=fsdp1.optimizer(optimizer, model))

FSDP1 concatenates the parameters of each unit into a flat parameter and gives each rank an equal
range of it. The position of each parameter is read from the flat parameter itself, without
communication. The full-precision weights are stored, whatever `mixed_precision` computes with.
Tested with torch 2.13: with and without `use_orig_params`, with the four public sharding strategies
and with parameters tied within a unit.
"""

from __future__ import annotations

import functools
import itertools
import math
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.adapters.flat_state import (
    AXIS,
    FlatMember,
    FlatModule,
    FlatOptimizer,
    flat_range,
    mesh_over,
    need,
    only_holders,
    plain_name,
)
from laststep.errors import UsageError
from laststep.state.layouts import Flat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from laststep.state.boxes import Index
    from laststep.state.provider import StateProvider

__all__ = ["model", "optimizer"]

_TESTED = "FSDP1 of torch 2.13"
_need = functools.partial(need, tested=_TESTED)


def model(model: torch.nn.Module) -> StateProvider:
    """Return a provider for the weights and buffers of a model that is, or contains,
    FullyShardedDataParallel."""
    return _Fsdp1Module(model)


def optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> StateProvider:
    """Return a provider for the state of an optimizer over the parameters of such a model."""
    return FlatOptimizer(optimizer, lambda: _members(optimizer, model))


class _PlainParameter(NamedTuple):
    """A parameter of the plain model inside a flat parameter."""

    names: list[str]
    """Several names if it is tied within the unit."""
    shape: Index
    layout: Flat | None
    """None if the flat parameter is not sharded: each rank holds all of it."""
    first: int
    last: int
    """First and last (exclusive) element within this rank's shard of the flat parameter."""
    live: torch.Tensor | None
    """With `use_orig_params`, the parameter that the optimizer steps; else None."""


class _Unit(NamedTuple):
    """A module that FSDP1 wrapped, with the parameters that it flattened."""

    handle: Any
    originals: list[_PlainParameter]

    @property
    def flat(self) -> torch.Tensor:
        parameter: torch.Tensor = self.handle.flat_param
        return parameter

    def members(self, group_of: Mapping[int, int]) -> Iterator[FlatMember]:
        """Yield its parameters; `group_of` maps ids of tensors to groups of the optimizer."""
        # This rank's shard in full precision: the flat parameter itself may be unsharded now.
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat).detach()
        for original in self.originals:
            live, layout, numbers = original.live, original.layout, None
            memory, first, last = shard, original.first, original.last
            holder = self.flat if live is None else live
            group = group_of.get(id(holder), -1)
            if live is not None:
                memory, first, last = shard[first:last], 0, last - first
                if layout is not None and group >= 0:
                    # A rank does not step parameters of which it holds no element.
                    numbers = only_holders(layout)
            yield FlatMember(
                parameter=live,
                names=original.names,
                group=group,
                shape=original.shape,
                layout=layout,
                memory=memory,
                first=first,
                last=last,
                holder=holder,
                numbers=numbers,
            )

    def is_gathered(self) -> bool:
        """Return True if a forward or backward pass has left the unsharded flat parameter in
        memory."""
        ready = hasattr(self.flat, "_local_shard") and self.handle.uses_sharded_strategy
        return ready and not self.handle.needs_unshard()


class _Fsdp1Module(FlatModule):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, self._flat)
        self._units: list[_Unit] = []

    def restore(self, value: object) -> None:
        super().restore(value)
        for unit in self._units:
            if unit.is_gathered():
                # Free the unsharded copy: the next pass would compute with the old weights.
                unit.handle.reshard(free_unsharded_flat_param=True)
                unit.handle.post_reshard()

    def _flat(self) -> list[FlatMember]:
        self._units = self._units or _units(self._module)
        return [member for unit in self._units for member in unit.members({})]

    def _replaced(self, members: list[FlatMember]) -> set[int]:
        return super()._replaced(members) | {id(unit.flat) for unit in self._units}


def _members(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[FlatMember]:
    """Return every parameter of the plain model that the optimizer steps."""
    group_of = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
    flat = chain.from_iterable(unit.members(group_of) for unit in _units(model))
    members = [member for member in flat if member.group >= 0]
    known = {id(member.holder) for member in members}
    for name, parameter in model.named_parameters():
        if id(parameter) in group_of and id(parameter) not in known:
            members.append(
                FlatMember(
                    parameter=parameter,
                    names=[plain_name(name)],
                    group=group_of[id(parameter)],
                    shape=tuple(parameter.shape),
                    layout=None,
                    memory=parameter,
                    first=0,
                    last=parameter.numel(),
                    holder=parameter,
                )
            )
    lost = len(group_of.keys() - {id(member.holder) for member in members})
    if lost:
        raise UsageError(
            "the optimizer has parameters that are not in the model",
            found=str(lost),
            remedy="make the optimizer from the parameters of the wrapped model",
        )
    return members


def _units(model: torch.nn.Module) -> list[_Unit]:
    wrapped = {
        prefix: module
        for prefix, module in model.named_modules()
        if type(module).__name__ == "FullyShardedDataParallel"
    }
    if not wrapped:
        raise UsageError(
            "there is no FSDP1 in this model",
            expected="a FullyShardedDataParallel",
            found=type(model).__name__,
            remedy="pass a model of another kind as it is",
        )
    handles = ((_need(module, "_handle"), prefix) for prefix, module in wrapped.items())
    return [_unit(handle, prefix) for handle, prefix in handles if handle is not None]


def _unit(handle: Any, prefix: str) -> _Unit:
    """Determine the position of each parameter of a unit in its flat parameter."""
    flat = _need(handle, "flat_param")
    fqns, shapes, sizes, padding, here = (
        list(_need(flat, name))
        for name in (
            "_fqns",
            "_shapes",
            "_numels_with_padding",
            "_is_padding_mask",
            "_shard_param_infos",
        )
    )
    _refuse_unusual(flat, fqns)
    starts = [
        at
        for at, is_padding in zip(itertools.accumulate(sizes, initial=0), padding, strict=False)
        if not is_padding
    ]
    live = _need(flat, "_params") or [None] * len(fqns)
    names = {_joined(prefix, name): [_joined(prefix, name)] for name in fqns}
    for info in _need(flat, "_shared_param_infos"):
        first = names[_joined(prefix, info.prim_module_name, info.prim_param_name)]
        first.append(_joined(prefix, info.module_name, info.param_name))
    originals = [
        _original(handle, known, tuple(shape), start, info, parameter)
        for known, shape, start, info, parameter in zip(
            names.values(), shapes, starts, here, live, strict=True
        )
    ]
    return _Unit(handle, originals)


def _joined(*parts: str) -> str:
    return plain_name(".".join(filter(None, parts)))


def _original(
    handle: Any, names: list[str], shape: Index, start: int, info: Any, live: torch.Tensor | None
) -> _PlainParameter:
    count = math.prod(shape)
    if not _need(handle, "uses_sharded_strategy"):
        return _PlainParameter(names, shape, None, start, start + count, live)
    mesh = mesh_over(_need(handle, "process_group"))
    each = math.prod(_need(handle.flat_param, "_sharded_size"))
    layout = Flat(shape, mesh, (AXIS,), start, each * mesh.sizes[0])
    first, last = flat_range(layout, dist.get_rank())
    said = (info.offset_in_shard, info.offset_in_shard + info.numel_in_shard) if info[0] else (0, 0)
    if (first, last) != said:
        raise UsageError(
            "cannot determine how the state is sharded over the ranks",
            where=names[0],
            expected=f"elements {first} to {last} of the flat parameter, as {_TESTED} has it",
            found=f"{said[0]} to {said[1]}",
            remedy="use that version",
        )
    return _PlainParameter(names, shape, layout, first, last, live)


def _refuse_unusual(flat: Any, names: list[str]) -> None:
    """Raise `UsageError` for a parameter that was flattened in memory order instead of element
    order, or that is a shard of another tensor."""
    for name, contiguous, extension in zip(
        names, _need(flat, "_contiguities"), _need(flat, "_param_extensions"), strict=True
    ):
        if not contiguous:
            raise UsageError(
                "cannot save a parameter that FSDP1 flattened in memory order",
                where=name,
                expected="a contiguous parameter",
                remedy="make it contiguous before the model is wrapped, or use FSDP2",
            )
        if extension is not None:
            raise UsageError(
                "cannot save FSDP1 over tensor parallelism",
                where=name,
                remedy="use FSDP2 (fully_shard), which needs no adapter",
            )
