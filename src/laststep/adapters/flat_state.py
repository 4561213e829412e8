"""State that lies in flat memory, described by the names and shapes of whole parameters.

What FSDP1, ZeRO and Megatron's distributed optimizer have in common; knows none of them. A
`FlatMember` says where a parameter's elements lie in the memory that the optimizer steps. To the
rest of laststep the state then looks like that of a plain optimizer over whole parameters. Nothing
here communicates; live memory is described by views, so it is captured and restored in place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from laststep.errors import UsageError
from laststep.state.boxes import whole
from laststep.state.layouts import Flat, Layout, Mesh, Replicate, Sharded
from laststep.state.optimizers import OptimizerProvider, is_optimizer_state
from laststep.state.provider import ABSENT, State, StateProvider
from laststep.state.tensors import Laid
from laststep.state.tree import Owned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.state.boxes import Index
    from laststep.state.tree import Path

AXIS = "dp"
"""The name, in layouts, of the mesh dimension of ranks that share a flat buffer."""

Entries = dict[str, object]
"""The state of one parameter, by the optimizer's own keys."""


def need(owner: object, name: str, tested: str) -> Any:
    """An attribute of a framework's object, or `UsageError` that says which versions have it."""
    value: Any = getattr(owner, name, ABSENT)
    if value is ABSENT:
        raise UsageError(
            "cannot find out how the state lies over the ranks",
            where=type(owner).__name__,
            expected=f"an attribute {name!r}, as in {tested}",
            found="none",
            remedy="use such a version, or lay the state out by hand (docs/guides/resharding.md)",
        )
    return value


def mesh_over(group: object) -> Mesh:
    """The ranks of a process group, in its order."""
    ranks = dist.get_process_group_ranks(group)  # type: ignore[arg-type]  # a handle of torch's
    return Mesh.of((AXIS,), (len(ranks),), ranks)


def flat_range(layout: Flat, rank: int) -> tuple[int, int]:
    """Where in this rank's part of the buffer its elements of a tensor lie; (0, 0) for none."""
    held, at = layout.range_of(rank), layout.mesh.coordinate(rank)
    if held is None or at is None:
        return 0, 0
    begin = at[0] * (layout.total // layout.mesh.sizes[0]) - layout.offset
    return held[0] - begin, held[1] - begin


def only_holders(layout: Flat) -> Sharded:
    """The layout of a number that only the ranks have that hold elements of a tensor."""
    each = layout.total // layout.mesh.sizes[0]
    last = layout.offset + max(math.prod(layout.shape), 1) - 1
    ranks = [layout.mesh.rank((at,)) for at in range(layout.offset // each, last // each + 1)]
    return Sharded((), Mesh.of((AXIS,), (len(ranks),), ranks), (Replicate(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMember:
    """A parameter as the model names it, and where this rank's elements of it are stepped."""

    name: str
    group: int
    """Its place among the optimizer's groups."""
    dtype: torch.dtype
    shape: Index
    holder: torch.Tensor
    """The tensor that the optimizer keeps state for: the parameter, or memory that it shares with
    others. It is compared by identity."""
    first: int
    last: int
    """`first` to `last` are its elements of the holder's state, on this rank."""
    size: int
    """How many elements tensors of the holder's state have."""
    layout: Layout | None
    """How it lies over the ranks; None where this rank holds all of it."""
    numbers: Layout | None = None
    """Which ranks have entries that are no tensors over the elements, such as `step`; None: all."""


class _Whole(NamedTuple):
    """Stands for a whole parameter where `OptimizerProvider` expects one."""

    name: str
    dtype: torch.dtype
    shape: Index
    device: torch.device


class _WholeOptimizer:
    """An optimizer as it would be if the parameters were whole."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, object]] = []
        self.state: defaultdict[_Whole, Entries] = defaultdict(dict)
        self.by_name: dict[str, _Whole] = {}

    def look_like(
        self, live: torch.optim.Optimizer, members: list[FlatMember], without: frozenset[str]
    ) -> None:
        """Take the groups and options of a live optimizer; one whole parameter for each member."""
        self.state.clear()
        self.by_name = {m.name: _Whole(m.name, m.dtype, m.shape, m.holder.device) for m in members}
        params: list[list[_Whole]] = [[] for _ in live.param_groups]
        for member in members:
            params[member.group].append(self.by_name[member.name])
        self.param_groups = [
            {k: v for k, v in group.items() if k not in without} | {"params": wholes}
            for group, wholes in zip(live.param_groups, params, strict=True)
        ]

    def names(self) -> dict[int, tuple[str, str]]:
        """The names of the parameters, in the form that `OptimizerProvider` asks for."""
        return {id(whole): ("", name) for name, whole in self.by_name.items()}


class FlatOptimizer(StateProvider):
    """A torch optimizer whose state lies in flat memory, stored as that of whole parameters.

    A parameter that has not been stepped yet is described with the state that its first step
    begins from: then every rank describes the same, and a restore before the first step finds
    memory of just this rank's part.
    """

    kind = "optimizer"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Callable[[], list[FlatMember]],
        live_options: frozenset[str] = frozenset(),
    ) -> None:
        """`members` gives the parameters whose layouts' meshes this rank belongs to. Options of
        groups by these names are not stored, and stay as the live optimizer has them."""
        self._optimizer = optimizer
        self._live_options = live_options | {"params", "param_names"}
        self._find_members = members
        self._holders: list[list[FlatMember]] = []
        self._first: dict[int, Entries] = {}
        """What holders without state were described with, by their ids."""
        self._whole = _WholeOptimizer()
        self._plain = OptimizerProvider(
            self._whole,  # type: ignore[arg-type]  # it has all that is looked at
            self._whole.names,
        )

    def parts(self) -> tuple[object, ...]:
        return (self._optimizer,)

    def describe(self) -> State:
        if not self._holders:
            by_holder: dict[int, list[FlatMember]] = {}
            for member in self._find_members():
                by_holder.setdefault(id(member.holder), []).append(member)
            self._holders = list(by_holder.values())
        self._whole.look_like(
            self._optimizer, list(chain.from_iterable(self._holders)), self._live_options
        )
        self._first = {}
        for members in self._holders:
            for key, entry in self._entries(members[0]).items():
                for member, part in zip(members, _parts(key, entry, members), strict=True):
                    self._whole.state[self._whole.by_name[member.name]][key] = part
        state = self._plain.describe()
        if isinstance(state.value, Owned):
            state = replace(state, value=Owned(type(self._optimizer).__name__, state.value.state))
        return state

    def check(self, stored: object) -> list[str]:
        return self._plain.check(stored)

    def lacks(self, stored: object) -> list[Path]:
        return self._plain.lacks(stored)

    def refuses(self, stored: object) -> dict[Path, str]:
        return self._plain.refuses(stored)

    def devices(self, paths: list[Path]) -> list[str]:
        return self._plain.devices(paths)

    def restore(self, value: object) -> None:
        if not is_optimizer_state(value):
            return
        self._plain.restore(value)
        restored = {
            name
            for name, entries in value["state"].items()
            if entries is not ABSENT and any(entry is not ABSENT for entry in entries.values())
        }
        for members in self._holders:
            self._take_over(members, restored)
        for group, plain in zip(
            self._optimizer.param_groups, self._whole.param_groups, strict=True
        ):
            options = {k: v for k, v in plain.items() if k not in self._live_options}
            group.update(options)

    def _entries(self, member: FlatMember) -> Entries:
        """The state of a member's holder, or what it will begin with."""
        live: Entries = self._optimizer.state.get(member.holder, {})
        if live:
            return live
        first = _beginning(type(self._optimizer).__name__, member, self._group(member))
        if first is None and not member.size:
            first = self._nothing_of(member)
        self._first[id(member.holder)] = first or {}
        return self._first[id(member.holder)]

    def _group(self, member: FlatMember) -> dict[str, object]:
        group: dict[str, object] = self._optimizer.param_groups[member.group]
        return group

    def _nothing_of(self, member: FlatMember) -> Entries:
        """The entries on a rank without elements: those of its group's other parameters, empty."""
        for members in self._holders:
            live: Entries = self._optimizer.state.get(members[0].holder, {})
            if live and members[0].group == member.group:
                return {
                    key: entry.new_zeros(0 if entry.dim() else ())
                    for key, entry in live.items()
                    if isinstance(entry, torch.Tensor)
                }
        return {}

    def _take_over(self, members: list[FlatMember], restored: set[str]) -> None:
        """Make the state of a holder what was restored for its members."""
        holder, size = members[0].holder, members[0].size
        wanted = [(m, self._whole.state.get(self._whole.by_name[m.name], {})) for m in members]
        live: Entries = self._optimizer.state.get(holder, {})
        if not any(entries for _, entries in wanted):
            self._optimizer.state.pop(holder, None)
            return
        if not live:
            if not size or not any(m.name in restored for m in members):
                return
            live = self._optimizer.state[holder]
            live.update(self._first.get(id(holder), {}))
        keys = {key: None for _, entries in wanted for key in entries}
        for key in [key for key in live if key not in keys]:
            del live[key]
        for key in keys:
            parts = [(m, entries[key]) for m, entries in wanted if key in entries]
            live[key] = _joined(key, live.get(key, ABSENT), parts, members)


def _parts(key: str, entry: object, members: list[FlatMember]) -> list[object]:
    """What each member of a holder has of an entry of its state."""
    if not isinstance(entry, torch.Tensor):
        return [entry] * len(members)
    if entry.dim() and (len(members) > 1 or members[0].layout is not None):
        return [_elements(key, entry, member) for member in members]
    if len(members) > 1:
        # Each its own memory: tied, they would come back as one number that all of them count.
        return list(entry.detach().repeat(len(members)).unbind())
    (member,) = members
    if member.numbers is None:
        return [entry]
    return [Laid(entry if member.last > member.first else entry.new_zeros(0), member.numbers)]


def _elements(key: str, entry: torch.Tensor, member: FlatMember) -> object:
    if entry.numel() != member.size:
        raise UsageError(
            f"cannot save the entry {key!r} of an optimizer's state: it is no tensor over the "
            "elements of the parameters",
            where=member.name,
            expected=f"{member.size} elements",
            found=str(entry.numel()),
        )
    part = entry.detach().view(-1)[member.first : member.last]
    return part.view(member.shape) if member.layout is None else Laid(part, member.layout)


def _joined(
    key: str, live: object, parts: list[tuple[FlatMember, object]], members: list[FlatMember]
) -> object:
    """An entry of a holder's state, from what was restored of it for its members."""
    if isinstance(live, torch.Tensor) and (live.dim() > 0 or len(members) == 1):
        # Restored in place.
        for member in members:
            if all(member is not restored for restored, _ in parts):
                live.view(-1)[member.first : member.last].zero_()
        return live
    member, value = parts[0]
    if live is ABSENT and _is_like(key, value, member):
        return _scattered(parts)
    if any(entry != value for _, entry in parts[1:]):
        raise UsageError(
            f"cannot restore {key!r}: parameters that share one flat parameter have different ones",
            where=", ".join(member.name for member, _ in parts[:3]),
            remedy="with FSDP1, wrap the model with use_orig_params=True",
        )
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
        return live.copy_(value)
    return value


def _is_like(key: str, value: object, member: FlatMember) -> bool:
    """Whether an entry is a tensor over the elements of its parameter."""
    return isinstance(value, torch.Tensor) and key != "step" and value.shape == member.shape


def _scattered(parts: list[tuple[FlatMember, object]]) -> torch.Tensor:
    """The elements that this rank holds, cut out of whole tensors. State of which nothing was live
    is restored as whole tensors."""
    wholes = [(member, value) for member, value in parts if isinstance(value, torch.Tensor)]
    holder, size, rank = parts[0][0].holder, parts[0][0].size, dist.get_rank()
    joined = torch.zeros(size, dtype=wholes[0][1].dtype, device=holder.device)
    for member, value in wholes:
        at = member.first
        boxes = [whole(member.shape)] if member.layout is None else member.layout.held(rank)
        for box in boxes:
            part = value[tuple(map(slice, box.start, box.stop))]
            joined[at : at + box.volume] = part.reshape(-1)
            at += box.volume
    return joined.view(holder.shape) if holder.numel() == size else joined


def _beginning(kind: str, member: FlatMember, group: dict[str, object]) -> Entries | None:
    """The state that the first step of an optimizer begins from; None where that is not known."""
    like: tuple[str, ...]
    counts = kind in ("Adam", "AdamW")
    if counts or kind in ("FusedAdam", "DeepSpeedCPUAdam"):
        like = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
    elif kind == "SGD" and not group.get("dampening"):
        like = ("momentum_buffer",) if group.get("momentum") else ()
    else:
        return None
    first: Entries = {}
    if counts:
        on_device = bool(group.get("capturable") or group.get("fused"))
        where = member.holder.device if on_device else torch.device("cpu")
        first["step"] = torch.zeros((), dtype=torch.float32, device=where)
    shape = member.holder.shape if member.layout is None else (member.size,)
    for key in like:
        first[key] = torch.zeros(shape, dtype=member.dtype, device=member.holder.device)
    return first


class FlatModule(StateProvider):
    """A module whose parameters lie in flat memory, stored as whole ones, as a plain module is."""

    kind = "module"

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Callable[[], Parameters],
        name: Callable[[str], str] | None = None,
    ) -> None:
        """`parameters` gives those that lie in flat memory; `name`, what a name, or a prefix of
        names, is in a plain module."""
        self._module = module
        self._parameters = parameters
        self._name = name or plain_name

    def parts(self) -> tuple[object, ...]:
        return (self._module,)

    def describe(self) -> State:
        flat = self._parameters()
        value: dict[str, object] = dict(flat.laid)
        volatile: set[Path] = set()
        fresh: list[Path] = []
        for plain, module in self._walk():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                # By name too: in mid-pass FSDP1 has other tensors in the places of parameters.
                if id(parameter) not in flat.replaced and plain + name not in flat.laid:
                    value[plain + name] = parameter
            hidden = module._non_persistent_buffers_set  # noqa: SLF001 (there is no public way)
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

    def _walk(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module, with what its plain form would put before the names of its parameters."""
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            yield self._name(f"{prefix}."), module


class Parameters(NamedTuple):
    """The parameters of a module that lie in flat memory."""

    laid: dict[str, object]
    """By their plain names, each a `Laid`, or a tensor that is there whole."""
    replaced: set[int]
    """The ids of the parameters in the module that these stand for."""


_EXTRA = "_extra_state"
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """The name of a parameter, or a prefix of names, without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(".")


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state
