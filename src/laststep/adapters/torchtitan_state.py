"""The state of torchtitan's parts, so that it fits any cut of the model into stages and shards.

A pipeline stage has several parts of a model, each with optimizers of its own. They are described
as one model and one optimizer, by the names that the whole model would have. Imports nothing of
torchtitan but what it calls a parameter.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn

from laststep.state.modules import ModuleProvider
from laststep.state.optimizers import OptimizerProvider
from laststep.state.provider import ABSENT, State, StateProvider, handing_over
from laststep.state.tree import Owned, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.state.tree import Path


class Parts(StateProvider):
    """The parts of a model on this rank. Their weights are taken as they lie: on `state_dict()`
    torchtitan gathers fused ones from all ranks, to take them apart."""

    kind = "module"
    cheap = True

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self._modules = parts
        self._parts = [ModuleProvider(part, hooks=False) for part in parts]

    def parts(self) -> tuple[object, ...]:
        return tuple(self._modules)

    def describe(self) -> State:
        value: dict[str, object] = {}
        volatile: set[Path] = set()
        for part in self._parts:
            state = part.describe()
            entries: dict[str, object] = state.value  # type: ignore[assignment]
            value.update(zip(_canonical(tuple(entries)), entries.values(), strict=True))
            volatile |= {(canonical_fqn(str(name)),) for (name,) in state.volatile}
        self.passive = all(part.passive for part in self._parts)
        return State(value=value, volatile=frozenset(volatile), standalone=True)

    def check(self, stored: object) -> list[str]:
        return self._parts[0].check(stored)

    def restore(self, value: object) -> None:
        for part in self._parts:
            part.restore(value)


@functools.lru_cache(maxsize=64)
def _canonical(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(canonical_fqn, names))


class Weights(StateProvider):
    """A model that takes weights of any dtype, under the names of its parameters or of torchtitan's
    `state_dict()`, as a run begins with those of another."""

    kind = "module"

    def __init__(self, parts: list[torch.nn.Module], wrapped: Any) -> None:
        self._own = Parts(parts)
        self._wrapped = wrapped

    def describe(self) -> State:
        return State(value=self._wrapped.state_dict(), fresh=((),), standalone=True)

    def _live(self) -> list[dict[str, Any]]:
        own: Any = self._own.describe().value
        return [own, self._wrapped.state_dict()]

    def check(self, stored: object) -> list[str]:
        if not isinstance(stored, dict):
            return ["is not the state of a module"]
        lacking = [sorted(live.keys() - stored) for live in self._live()]
        return [] if [] in lacking else [f"has no stored {', '.join(min(lacking, key=len)[:3])}"]

    def models(self, paths: list[Path]) -> list[object]:
        """Each rank takes what it holds of a weight."""
        own, named = self._live()
        known = named | own
        return [known.get(str(path[0])) for path in paths]

    def restore(self, value: object) -> None:
        with handing_over("the model"):
            self._wrapped.load_state_dict(value)


class _Joined:
    """The optimizers of all parts of a model, as the one that the whole model would have: each has
    a group for each rule of the configuration, with the parameters of its part."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._by_kind: dict[str, list[torch.optim.Optimizer]] = {}
        for optimizer in optimizers:
            self._by_kind.setdefault(type(optimizer).__name__, []).append(optimizer)
        self.kind = "+".join(sorted(self._by_kind))
        self.param_groups: list[dict[str, Any]] = []
        self.state = _States({})

    def look(self) -> None:
        self.param_groups = [
            alike[0] | {key: _chained(group[key] for group in alike) for key in _LISTED}
            for alike in self._alike()
        ]
        optimizers = list(chain.from_iterable(self._by_kind.values()))
        self.state = _States(
            {
                id(p): one
                for one in optimizers
                for group in one.param_groups
                for p in group["params"]
            }
        )
        for one in optimizers:
            self.state.update(one.state)

    def hand_out(self) -> None:
        """Give each optimizer the options that its groups have together."""
        for group, alike in zip(self.param_groups, self._alike(), strict=True):
            for one in alike:
                one.update((key, group[key]) for key in group if key not in _LISTED)

    def _alike(self) -> list[tuple[dict[str, Any], ...]]:
        """Groups of the same rule, of each part one."""
        groups = [[one.param_groups for one in alike] for alike in self._by_kind.values()]
        return [same for of_kind in groups for same in zip(*of_kind, strict=True)]


_LISTED = ("params", "param_names")


def _chained(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


class _States(dict[torch.Tensor, dict[str, Any]]):
    """The state of each parameter, that of its own optimizer itself."""

    def __init__(self, owners: dict[int, torch.optim.Optimizer]) -> None:
        super().__init__()
        self._owners = owners

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._owners[id(parameter)].state[parameter]
        self[parameter] = state
        return state


class Optimizers(OptimizerProvider):
    """The optimizers of all parts, by the names of the parameters."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._joined = _Joined(optimizers)
        super().__init__(self._joined, dict)  # type: ignore[arg-type]  # it has all that is looked at
        self._all = optimizers

    def parts(self) -> tuple[object, ...]:
        return tuple(self._all)

    def describe(self) -> State:
        self._joined.look()
        state = super().describe()
        assert isinstance(state.value, Owned)  # noqa: S101 (an optimizer's is)
        return replace(state, value=Owned(self._joined.kind, state.value.state))

    def restore(self, value: object) -> None:
        super().restore(value)
        self._joined.hand_out()


_LENGTH = struct.Struct("<Q")
_LEAST_BYTES = 4096


class LoaderPlace(StateProvider):
    """The place in the data of each data-parallel rank. What all ranks with the same data have is
    a tensor with that rank's name: so it finds its way whatever other ranks there are."""

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._rooms: dict[str, torch.Tensor] = {}

    def describe(self) -> State:
        value = {
            name: self._written(name, entry) if isinstance(entry, bytes) else entry
            for name, entry in self._loader.state_dict().items()
        }
        return State(value=value, fresh=((),))

    def _written(self, name: str, data: bytes) -> torch.Tensor:
        """Bytes, and how many, in memory with room for some more: as long as a state has tensors of
        the same sizes, ranks need not agree anew."""
        framed = _LENGTH.pack(len(data)) + data
        room = self._rooms.get(name)
        if room is None or len(room) < len(framed):
            size = max(_LEAST_BYTES, 1 << len(framed).bit_length())
            room = self._rooms[name] = torch.zeros(size, dtype=torch.uint8)
        room[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        return room

    def check(self, stored: object) -> list[str]:
        ours = self._loader.dp_world_size
        theirs = stored.get("world_size") if isinstance(stored, dict) else None
        if ours == theirs:
            return []
        out = "exclude_from_loading=['dataloader']"
        what = f"was saved by {theirs} data-parallel ranks, and here are {ours}"
        return [f"{what}: keep their number, or leave it out: {out}"]

    def lacks(self, stored: object) -> list[Path]:
        """What other data-parallel ranks have."""
        if not isinstance(stored, dict) or self.check(stored):
            return []
        return [
            (name,)
            for name, entry in stored.items()
            if isinstance(entry, TensorSpec) and name not in self._rooms
        ]

    def restore(self, value: object) -> None:
        with handing_over(type(self._loader).__name__):
            self._loader.load_state_dict(
                {name: _read(entry) for name, entry in value.items() if entry is not ABSENT}  # type: ignore[attr-defined]
            )
            # Now it makes its iterator, for which it draws a random number, and not when training
            # begins: by then the generators have to be where they were.
            self._loader.state_dict()


def _read(entry: Any) -> Any:
    if not isinstance(entry, torch.Tensor):
        return entry
    data = entry.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length]
