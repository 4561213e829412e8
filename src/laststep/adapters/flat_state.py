"""State in flat memory, described by the names and shapes of whole parameters.

Shared by the adapters for FSDP1, ZeRO and Megatron's distributed optimizer; knows none of them. A
`FlatMember` locates a parameter's elements in the memory that the optimizer steps. To the rest of
laststep the state then looks like that of a plain optimizer over whole parameters. Nothing here
communicates. Live memory is described by views, so it is captured and restored in place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.errors import UsageError
from laststep.state.layouts import Flat, Layout, Mesh, Replicate, Sharded
from laststep.state.optimizers import OptimizerProvider, is_optimizer_state
from laststep.state.provider import ABSENT, State, StateProvider
from laststep.state.tensors import LocalShard
from laststep.state.tree import Owned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from laststep.state.boxes import Index
    from laststep.state.tree import Path

AXIS = "dp"
"""The name, in layouts, of the mesh dimension of ranks that share a flat buffer."""

Entries = dict[str, object]
"""The state of one parameter, by the optimizer's own keys."""


def mesh_over(group: dist.ProcessGroup) -> Mesh:
    ranks = dist.get_process_group_ranks(group)
    return Mesh.of((AXIS,), (len(ranks),), ranks)


def flat_range(layout: Flat, rank: int) -> tuple[int, int]:
    """Return the range of a tensor's elements in this rank's part of the buffer, or (0, 0)."""
    held, at = layout.range_of(rank), layout.mesh.coordinate(rank)
    if held is None or at is None:
        return 0, 0
    begin = at[0] * (layout.total // layout.mesh.sizes[0]) - layout.offset
    return held[0] - begin, held[1] - begin


def only_holders(layout: Flat) -> Sharded:
    """Return the layout of a number that only the ranks with elements of a tensor have."""
    each = layout.total // layout.mesh.sizes[0]
    last = layout.offset + max(math.prod(layout.shape), 1) - 1
    ranks = [layout.mesh.rank((at,)) for at in range(layout.offset // each, last // each + 1)]
    return Sharded((), Mesh.of((AXIS,), (len(ranks),), ranks), (Replicate(),))


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: each save makes them anew
class FlatMember:
    """A parameter of a module, and the location of this rank's elements of it in flat memory."""

    parameter: Any
    """The live parameter; None if it exists only in the flat memory."""
    names: Sequence[str] = ()
    """Its names in the plain module; several if it is tied."""
    group: int
    """Index of the parameter's group in the optimizer; -1 for a frozen parameter."""
    shape: Index
    layout: Layout | None
    """Sharding over the ranks; None if this rank has the whole parameter."""
    memory: torch.Tensor
    """The flat memory that the weights are in."""
    elements: slice
    """The parameter's elements in `memory` and in the holder's state."""
    holder: torch.Tensor
    """The tensor that the optimizer keeps state for, which several parameters may share."""
    numbers: Layout | None = None
    """The ranks that have entries such as `step`, which is one number; None: all ranks."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def size(self) -> int:
        return self.memory.numel()

    def part_of(self, flat: torch.Tensor) -> LocalShard | torch.Tensor:
        """Return this rank's elements as they are stored, as a view of `flat`."""
        part = flat.detach().view(-1)[self.elements]
        return part.view(self.shape) if self.layout is None else LocalShard(part, self.layout)


class _Whole(NamedTuple):
    """Represents a whole parameter where `OptimizerProvider` expects one."""

    name: str
    dtype: torch.dtype
    shape: Index
    device: torch.device


_STATES: dict[str, tuple[str, ...]] = {
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "FusedAdam": ("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPUAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "SGD": (),
}
"""The entries, all zero at first, of the supported optimizers and of classes derived from them."""
_OPTIONAL = {"amsgrad": "max_exp_avg_sq", "momentum": "momentum_buffer", "centered": "grad_avg"}


class FlatOptimizer(OptimizerProvider):
    """A torch optimizer whose state is in flat memory, stored as that of whole parameters.

    A parameter without state is described with the state that its first step would start from, so
    that all ranks describe the same and a restore has memory for exactly this rank's part.
    """

    passive = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Callable[[], Iterable[FlatMember]],
        live_options: frozenset[str] = frozenset(),
    ) -> None:
        """Wrap an optimizer. `members` returns the parameters that it steps, if this rank is in the
        mesh of the layout. `live_options` of groups are not stored: they keep their live values."""
        self._whole = SimpleNamespace(param_groups=[], state=defaultdict(dict))
        """The optimizer as it would be if the parameters were whole."""
        self._by_name: dict[str, _Whole] = {}
        super().__init__(self._whole, self._names)  # type: ignore[arg-type]  # it has all used
        kinds = (kind.__name__ for kind in type(optimizer).__mro__)
        known = next((kind for kind in kinds if kind in _STATES), None)
        if known is None or any(group.get("dampening") for group in optimizer.param_groups):
            raise UsageError(
                "cannot take the state of this optimizer from flat memory",
                expected=f"{', '.join(_STATES)} without dampening",
                found=type(optimizer).__name__,
            )
        self._states = _STATES[known]
        self._live = optimizer
        self._live_options = live_options | {"params", "param_names"}
        self._find_members = members
        self._holders: list[list[FlatMember]] = []
        self._first: dict[int, Entries] = {}
        """The state that holders without state were described with, by their ids."""

    def parts(self) -> tuple[object, ...]:
        return (self._live,)

    def _names(self) -> dict[int, tuple[str, str]]:
        return {id(whole): ("", name) for name, whole in self._by_name.items()}

    def describe(self) -> State:
        if not self._holders:
            by_holder: dict[int, list[FlatMember]] = {}
            for member in self._find_members():
                by_holder.setdefault(id(member.holder), []).append(member)
            self._holders = list(by_holder.values())
        params: list[list[_Whole]] = [[] for _ in self._live.param_groups]
        self._whole.state.clear()
        self._by_name = {}
        for m in chain.from_iterable(self._holders):
            parameter = _Whole(m.name, m.memory.dtype, m.shape, m.holder.device)
            self._by_name[m.name] = parameter
            params[m.group].append(parameter)
        self._whole.param_groups = [
            {k: v for k, v in group.items() if k not in self._live_options} | {"params": of_group}
            for group, of_group in zip(self._live.param_groups, params, strict=True)
        ]
        self._first = {}
        for members in self._holders:
            for key, entry in self._entries(members[0]).items():
                for member, part in zip(members, _parts(key, entry, members), strict=True):
                    self._whole.state[self._by_name[member.name]][key] = part
        state = super().describe()
        if isinstance(state.value, Owned):
            state = replace(state, value=Owned(type(self._live).__name__, state.value.state))
        return state

    def restore(self, value: object) -> None:
        if not is_optimizer_state(value):
            return
        super().restore(value)
        restored = {
            name
            for name, entries in value["state"].items()
            if entries is not ABSENT and any(entry is not ABSENT for entry in entries.values())
        }
        for members in self._holders:
            self._take_over(members, restored)
        for group, plain in zip(self._live.param_groups, self._whole.param_groups, strict=True):
            group.update({k: v for k, v in plain.items() if k not in self._live_options})

    def _entries(self, member: FlatMember) -> Entries:
        """Return the state of a member's holder, or the state that it will start from."""
        holder = member.holder
        live: Entries = self._live.state.get(holder, {})
        if live:
            return live
        group = self._live.param_groups[member.group]
        first: Entries = {}
        shape = holder.shape if member.layout is None else (member.size,)
        for key in (*self._states, *(_OPTIONAL[name] for name in _OPTIONAL if group.get(name))):
            first[key] = torch.zeros(shape, dtype=member.memory.dtype, device=holder.device)
        if "step" in first:
            on_device = bool(group.get("capturable") or group.get("fused"))
            first["step"] = torch.zeros((), device=holder.device if on_device else "cpu")
        self._first[id(holder)] = first
        return first

    def _take_over(self, members: list[FlatMember], restored: set[str]) -> None:
        holder, size = members[0].holder, members[0].size
        wanted = [(m, self._whole.state.get(self._by_name[m.name], {})) for m in members]
        live: Entries = self._live.state.get(holder, {})
        if not any(entries for _, entries in wanted):
            self._live.state.pop(holder, None)
            return
        if not live:
            if not size or not any(m.name in restored for m in members):
                return
            live = self._live.state[holder]
            live.update(self._first.get(id(holder), {}))
        keys = {key: None for _, entries in wanted for key in entries}
        for key in [key for key in live if key not in keys]:
            del live[key]
        for key in keys:
            parts = [(m, entries[key]) for m, entries in wanted if key in entries]
            live[key] = _joined(key, live.get(key, ABSENT), parts, members)


def _parts(key: str, entry: object, members: list[FlatMember]) -> list[object]:
    if not isinstance(entry, torch.Tensor):
        return [entry] * len(members)
    if entry.dim() and (len(members) > 1 or members[0].layout is not None):
        if entry.numel() != members[0].size:
            raise UsageError(
                f"cannot save the entry {key!r} of an optimizer's state: it has other elements "
                "than the parameters",
                where=members[0].name,
                expected=f"{members[0].size} elements",
                found=str(entry.numel()),
            )
        return [member.part_of(entry) for member in members]
    if len(members) > 1:
        # Separate memory for each: tied, they would be restored as one shared counter.
        return list(entry.detach().repeat(len(members)).unbind())
    (member,) = members
    if member.numbers is None:
        return [entry]
    is_held = member.elements.stop > member.elements.start
    return [LocalShard(entry if is_held else entry.new_zeros(0), member.numbers)]


def _joined(
    key: str, live: object, parts: list[tuple[FlatMember, object]], members: list[FlatMember]
) -> object:
    """Return an entry of a holder's state, joined from the restored parts of its members."""
    if isinstance(live, torch.Tensor) and (live.dim() > 0 or len(members) == 1):
        # Restored in place.
        for member in members:
            if all(member is not restored for restored, _ in parts):
                live.view(-1)[member.elements].zero_()
        return live
    member, value = parts[0]
    if live is ABSENT and isinstance(value, torch.Tensor) and value.dim():
        raise UsageError(
            f"cannot restore {key!r}: the optimizer here has no such state",
            where=member.name,
            remedy="make it with the options that it was saved with",
        )
    if any(entry != value for _, entry in parts[1:]):
        raise UsageError(
            f"cannot restore {key!r}: parameters that share one flat parameter have different ones",
            where=", ".join(member.name for member, _ in parts[:3]),
            remedy="with FSDP1, wrap the model with use_orig_params=True",
        )
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
        return live.copy_(value)
    return value


class FlatModule(StateProvider):
    kind = "module"

    def __init__(
        self,
        module: torch.nn.Module,
        members: Callable[[], list[FlatMember]],
        name: Callable[[str], str] | None = None,
    ) -> None:
        """Wrap a module. `name` maps a name, or a prefix of names, to that in a plain module."""
        self._module = module
        self._members = members
        self._name = name or plain_name

    def parts(self) -> tuple[object, ...]:
        return (self._module,)

    def describe(self) -> State:
        members = self._members()
        replaced = self._replaced(members)
        flat: dict[str, object] = {}
        for member in members:
            flat |= dict.fromkeys(member.names, member.part_of(member.memory))
        value = dict(flat)
        volatile: set[Path] = set()
        fresh: list[Path] = []
        for plain, module in self._walk():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                # By name too: during a pass FSDP1 puts other tensors in place of parameters.
                if id(parameter) not in replaced and plain + name not in flat:
                    value[plain + name] = parameter
            hidden = module._non_persistent_buffers_set  # noqa: SLF001 (there is no public name)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if name not in hidden:
                    value[plain + name] = buffer
                    volatile.add((plain + name,))
            if _has_extra_state(module):
                value[plain + _EXTRA] = module.get_extra_state()
                fresh.append((plain + _EXTRA,))
        return State(value=value, fresh=tuple(fresh), volatile=frozenset(volatile), standalone=True)

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        for plain, module in self._walk():
            extra = value.get(plain + _EXTRA, ABSENT)
            if _has_extra_state(module) and extra is not ABSENT:
                module.set_extra_state(extra)

    def _replaced(self, members: list[FlatMember]) -> set[int]:
        """Return the ids of the module's parameters that are in flat memory, on any rank."""
        return {id(member.parameter) for member in members}

    def _walk(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield every module with the prefix of its parameters' names in the plain module."""
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            yield self._name(f"{prefix}."), module


_EXTRA = "_extra_state"
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Remove the parts that wrappers add to the name of a parameter or to a prefix of names."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(".")


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state
