"""State of torchtitan's model parts, independent of how stages and shards split the model.

A pipeline stage has several parts of a model, each with its own optimizers. They are described as
one model and one optimizer, under the names that the whole model would have. The only import from
torchtitan is the function that maps parameter names.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn

from laststep.state.modules import ModuleProvider
from laststep.state.optimizers import OptimizerProvider
from laststep.state.provider import ABSENT, State, StateProvider, handing_over
from laststep.state.tree import Owned, TensorSpec

if TYPE_CHECKING:
    from laststep.state.tree import Path


class Parts(StateProvider):
    """The parts of a model on this rank. Weights are read directly: torchtitan's `state_dict()`
    would gather fused weights from all ranks to split them."""

    kind = "module"

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


_LISTED = ("params", "param_names")


class Optimizers(OptimizerProvider):
    """The optimizers of all parts, joined into the one that the whole model would have. Each has
    one group per rule of the configuration, with the parameters of its part."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._joined = SimpleNamespace(param_groups=[], state={})
        super().__init__(self._joined, dict)  # type: ignore[arg-type]  # it has all attributes used
        self._all = optimizers

    def parts(self) -> tuple[object, ...]:
        return tuple(self._all)

    def describe(self) -> State:
        self._joined.param_groups = [
            alike[0]
            | {key: list(chain.from_iterable(group[key] for group in alike)) for key in _LISTED}
            for alike in self._alike()
        ]
        self._joined.state = {}
        for optimizer in self._all:
            self._joined.state.update(optimizer.state)
        state = super().describe()
        assert isinstance(state.value, Owned)  # noqa: S101 (always so for an optimizer)
        kind = "+".join(sorted({type(optimizer).__name__ for optimizer in self._all}))
        return replace(state, value=Owned(kind, state.value.state))

    def restore(self, value: object) -> None:
        joined = self._joined.state
        for optimizer in self._all:  # each makes the state that its parameters do not have yet
            for parameter in chain.from_iterable(g["params"] for g in optimizer.param_groups):
                joined[parameter] = optimizer.state[parameter]
        super().restore(value)
        for optimizer in self._all:
            for parameter in [each for each in optimizer.state if not joined.get(each)]:
                del optimizer.state[parameter]  # it was not stored
        for group, alike in zip(self._joined.param_groups, self._alike(), strict=True):
            for own in alike:
                own.update((key, group[key]) for key in group if key not in _LISTED)

    def _alike(self) -> list[tuple[dict[str, Any], ...]]:
        """Return the groups of each rule, one from each part."""
        by_kind: dict[str, list[list[dict[str, Any]]]] = {}
        for optimizer in self._all:
            by_kind.setdefault(type(optimizer).__name__, []).append(optimizer.param_groups)
        return [same for groups in by_kind.values() for same in zip(*groups, strict=True)]


_LENGTH = struct.Struct("<Q")
_LEAST_BYTES = 4096


class LoaderPlace(StateProvider):
    """Position in the data of each data-parallel rank. Ranks that read the same data share a tensor
    named after their data-parallel rank, so it is found again whatever other ranks there are."""

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
        """Return a tensor with the length and the bytes, with room to grow. As long as the sizes of
        tensors stay the same, ranks need not agree on a new layout."""
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

    def skips(self, stored: object) -> dict[Path, str | None]:
        if not isinstance(stored, dict) or self.check(stored):
            return {}
        return {
            (name,): None
            for name, entry in stored.items()
            if isinstance(entry, TensorSpec) and name not in self._rooms
        }

    def restore(self, value: object) -> None:
        with handing_over(type(self._loader).__name__):
            self._loader.load_state_dict(
                {name: _read(entry) for name, entry in value.items() if entry is not ABSENT}  # type: ignore[attr-defined]
            )
            # Make the loader create its iterator now, which draws a random number. If it did so
            # when training starts, it would advance the restored generators.
            self._loader.state_dict()


def _read(entry: Any) -> Any:
    if not isinstance(entry, torch.Tensor):
        return entry
    data = entry.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length]
