"""Save FSDP1 (`FullyShardedDataParallel`) under the names and shapes of the plain model.

    Checkpointer(run, model=fsdp1.model(model), optimizer=fsdp1.optimizer(optimizer, model))

FSDP1 concatenates the parameters of each unit into a flat parameter and gives each rank an equal
range of it. The position of each parameter is read from the flat parameter itself, without
communication. The full-precision weights are stored, whatever `mixed_precision` computes with.
Tested with torch 2.13: with and without `use_orig_params`, with the four public sharding strategies
and with parameters tied within a unit.
"""

# ruff: noqa: SLF001 (FSDP1 has no public names for its flat parameters)

from __future__ import annotations

import itertools
import math
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.adapters import flat_state
from laststep.adapters.flat_state import FlatMember, FlatModule, FlatOptimizer, plain_name
from laststep.errors import UsageError
from laststep.state.layouts import Flat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.state.boxes import Index
    from laststep.state.provider import StateProvider

__all__ = ["model", "optimizer"]


def model(model: torch.nn.Module) -> StateProvider:
    """Return a provider for the weights and buffers of a model that contains FSDP1."""
    return _Fsdp1Module(model)


def optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> StateProvider:
    """Return a provider for the state of an optimizer over the parameters of such a model."""
    return FlatOptimizer(optimizer, lambda: _members(optimizer, model))


class _Unit(NamedTuple):
    """A module that FSDP1 wrapped, with the parameters that it flattened."""

    handle: Any
    members: list[FlatMember]
    places: list[slice]
    """The elements of each member in this rank's shard of the flat parameter."""

    def located(self) -> list[FlatMember]:
        """Return the parameters, with the memory that they are in now."""
        flat = self.handle.flat_param
        # This rank's shard in full precision: the flat parameter itself may be unsharded now.
        shard: torch.Tensor = getattr(flat, "_local_shard", flat).detach()
        for member, place in zip(self.members, self.places, strict=True):
            member.memory = shard if member.parameter is None else shard[place]
        return self.members


class _Fsdp1Module(FlatModule):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, self._flat)
        self._units: list[_Unit] = []

    def restore(self, value: object) -> None:
        super().restore(value)
        for handle, _, _ in self._units:
            is_ready = hasattr(handle.flat_param, "_local_shard") and handle.uses_sharded_strategy
            if is_ready and not handle.needs_unshard():
                # A pass has left the unsharded flat parameter in memory. Free it: the next pass
                # would compute with the old weights.
                handle.reshard(free_unsharded_flat_param=True)
                handle.post_reshard()

    def _flat(self) -> list[FlatMember]:
        self._units = self._units or _units(self._module, {})
        return list(chain.from_iterable(unit.located() for unit in self._units))

    def _replaced(self, members: list[FlatMember]) -> set[int]:
        return super()._replaced(members) | {id(unit.handle.flat_param) for unit in self._units}


def _members(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[FlatMember]:
    """Return every parameter of the plain model that the optimizer steps."""
    group_of = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
    flat = chain.from_iterable(unit.located() for unit in _units(model, group_of))
    members = [member for member in flat if member.group >= 0]
    known = {id(member.holder) for member in members}
    for name, parameter in model.named_parameters():
        if id(parameter) in group_of and id(parameter) not in known:
            known.add(id(parameter))
            members.append(
                FlatMember(
                    parameter=parameter,
                    names=[plain_name(name)],
                    group=group_of[id(parameter)],
                    shape=tuple(parameter.shape),
                    layout=None,
                    memory=parameter,
                    elements=slice(0, parameter.numel()),
                    holder=parameter,
                )
            )
    if lost := len(group_of.keys() - known):
        raise UsageError(
            f"the optimizer has {lost} parameters that are not in the model",
            remedy="make it from the parameters of the wrapped model",
        )
    return members


def _units(model: torch.nn.Module, group_of: Mapping[int, int]) -> list[_Unit]:
    """Return the units of a model. `group_of` maps ids of tensors to groups of the optimizer."""
    wrapped: dict[str, Any] = {
        prefix: module
        for prefix, module in model.named_modules()
        if type(module).__name__ == "FullyShardedDataParallel"
    }
    if not wrapped:
        raise UsageError(
            "there is no FullyShardedDataParallel in this model",
            remedy="pass a model of another kind as it is",
        )
    handles = ((module._handle, prefix) for prefix, module in wrapped.items())
    return [_unit(handle, prefix, group_of) for handle, prefix in handles if handle is not None]


def _unit(handle: Any, prefix: str, group_of: Mapping[int, int]) -> _Unit:
    """Determine the position of each parameter of a unit in its flat parameter."""
    flat = handle.flat_param
    if not all(flat._contiguities) or any(flat._param_extensions):
        raise UsageError(
            "cannot save a parameter that FSDP1 flattened in memory order, or a shard of it",
            where=", ".join(flat._fqns),
            expected="contiguous parameters, without tensor parallelism",
            remedy="use FSDP2 (fully_shard), which needs no adapter",
        )
    ends = itertools.accumulate(flat._numels_with_padding, initial=0)
    starts = [at for at, pads in zip(ends, flat._is_padding_mask, strict=False) if not pads]
    live = flat._params or [None] * len(flat._fqns)
    names = {_joined(prefix, name): [_joined(prefix, name)] for name in flat._fqns}
    for info in flat._shared_param_infos:
        tied = names[_joined(prefix, info.prim_module_name, info.prim_param_name)]
        tied.append(_joined(prefix, info.module_name, info.param_name))
    members, places = [], []
    shapes, infos = map(tuple, flat._shapes), flat._shard_param_infos
    for known, shape, start, info, parameter in zip(
        names.values(), shapes, starts, infos, live, strict=True
    ):
        layout, place = _place(handle, shape, start, info)
        holder, first = (flat, place.start) if parameter is None else (parameter, 0)
        group = group_of.get(id(holder), -1)
        numbers = None
        if parameter is not None and layout is not None and group >= 0:
            # A rank steps no parameter of which it has no element.
            numbers = flat_state.only_holders(layout)
        members.append(
            FlatMember(
                parameter=parameter,
                names=known,
                group=group,
                shape=shape,
                layout=layout,
                memory=flat,
                elements=slice(first, first + place.stop - place.start),
                holder=holder,
                numbers=numbers,
            )
        )
        places.append(place)
    return _Unit(handle, members, places)


def _joined(*parts: str) -> str:
    return plain_name(".".join(filter(None, parts)))


def _place(handle: Any, shape: Index, start: int, info: Any) -> tuple[Flat | None, slice]:
    """Return a parameter's layout, None if not sharded, and its elements in this rank's shard."""
    if not handle.uses_sharded_strategy:
        return None, slice(start, start + math.prod(shape))
    mesh = flat_state.mesh_over(handle.process_group)
    total = math.prod(handle.flat_param._sharded_size) * mesh.sizes[0]
    layout = Flat(shape, mesh, (flat_state.AXIS,), start, total)
    first, last = flat_state.flat_range(layout, dist.get_rank())
    said = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
    if said != (first, last - first):
        raise UsageError(
            "cannot determine how FSDP1 shards a parameter",
            expected=f"elements {first} to {last} of the flat parameter",
            found=str(info),
            remedy="use torch 2.13",
        )
    return layout, slice(first, last)
