"""The state of an nn.Module, or of its trained part, under the names of its plain, unwrapped form.

Wrappers that only add a name prefix (torch.compile, DDP, DataParallel) are looked through, so that
state loads from a wrapped module into a plain one and back.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from laststep.constants import with_article
from laststep.errors import UsageError
from laststep.state.provider import ABSENT, State, StateProvider, handing_over
from laststep.state.tensors import same_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.state.tree import Path

_WRAPPERS: Final = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
}
"""Classes of transparent wrappers → the attribute that holds the wrapped module."""
_VERSIONED: Final = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
"""Modules of torch whose overrides only handle versions of their state."""
_SAVING: Final = attrgetter(
    "state_dict", "_save_to_state_dict", "get_extra_state", "_load_from_state_dict"
)


def walk_modules(module: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Return own prefix → (plain prefix, module) of every submodule, wrappers looked through."""
    nodes: dict[str, tuple[str, nn.Module]] = {}

    def visit(node: nn.Module, own: str, plain: str) -> None:
        nodes[own] = plain, node
        if node._modules:
            wrapped = _WRAPPERS.get(type(node).__name__)
            for name, child in node._modules.items():
                if child is not None:
                    visit(child, f"{own}{name}.", plain if name == wrapped else f"{plain}{name}.")

    visit(module, "", "")
    return nodes


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return id of a parameter → its plain name (the first name of a tied one)."""
    names: dict[int, str] = {}
    for plain, node in walk_modules(module).values():
        for name, parameter in node._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), plain + name)
    return names


class ModuleProvider(StateProvider):
    """Parameters, persistent buffers and extra state of a module."""

    kind = "module"

    def __init__(self, module: nn.Module, *, hooks: bool = True) -> None:
        """`hooks=False` ignores hooks on `state_dict()`."""
        self._module = module
        self._hooks = hooks

    def parts(self) -> tuple[object, ...]:
        return (self._module,)

    def describe(self) -> State:
        nodes = walk_modules(self._module)
        value: dict[str, object] = {}
        volatile: list[Path] = []
        self.passive = self._is_standard(nodes)
        if not self.passive:
            entries = self._module.state_dict().items()
            nodes = walk_modules(self._module)  # again, because foreign code has run
            value = {_plain(name, nodes): entry for name, entry in entries}
            volatile = [(plain + name,) for plain, node in nodes.values() for name in node._buffers]
            # Extra state may have any shape, also another one than the stored extra state.
            fresh = tuple((name,) for name in value if name.rpartition(".")[2] == "_extra_state")
            return State(value=value, fresh=fresh, volatile=frozenset(volatile), standalone=True)
        # Equal to state_dict(), without its detach() per tensor.
        for plain, node in nodes.values():
            for name, parameter in node._parameters.items():
                if parameter is not None:
                    value[plain + name] = parameter
            for name, buffer in node._buffers.items():
                if buffer is not None and name not in node._non_persistent_buffers_set:
                    value[plain + name] = buffer
                    volatile.append((plain + name,))
        return State(value=value, volatile=frozenset(volatile), standalone=True)

    def _is_standard(self, nodes: dict[str, tuple[str, nn.Module]]) -> bool:
        """Return True if state_dict() returns just the parameters and persistent buffers."""
        known: set[type] = set()
        for _, node in nodes.values():
            kind = type(node)
            if self._hooks and (node._state_dict_hooks or node._state_dict_pre_hooks):
                return False
            if kind not in known and not (
                kind.__module__ in _VERSIONED
                or _SAVING(kind) == _SAVING(nn.Module)
                or _WRAPPERS.get(kind.__name__) in node._modules
            ):
                return False
            known.add(kind)
        return True

    def check(self, stored: object) -> list[str]:
        return [] if isinstance(stored, dict) else ["is not the state of a module"]

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return  # `check` has already reported it
        nodes = walk_modules(self._module)
        by_hook: dict[str, object] = {}
        if self._hooks or not self._is_standard(nodes):
            live = {
                plain + name: tensor
                for plain, node in nodes.values()
                for name, tensor in (*node._parameters.items(), *node._buffers.items())
            }
            for own in self._module.state_dict():
                name = _plain(own, nodes)
                entry, tensor = value.get(name, ABSENT), live.get(name)
                if isinstance(entry, torch.Tensor) and isinstance(tensor, torch.Tensor):
                    entry = ABSENT if same_memory(entry, tensor) else entry  # restored in place
                if entry is not ABSENT:
                    by_hook[own] = entry
        if by_hook:
            with handing_over(f"load_state_dict of {type(self._module).__name__}"):
                self._module.load_state_dict(by_hook, strict=False)
        elif any(map(is_not, value.values(), repeat(ABSENT))):
            # As load_state_dict does at its end, submodules first, so that values derived from the
            # state, such as caches, are computed again.
            for _, node in reversed(nodes.values()):
                for hook in list(node._load_state_dict_post_hooks.values()):
                    with handing_over(f"a load_state_dict hook of {type(node).__name__}"):
                        hook(node, nn.modules.module._IncompatibleKeys([], []))


def _plain(name: str, nodes: dict[str, tuple[str, nn.Module]]) -> str:
    """Return the plain form of a state_dict key, with its longest known module prefix replaced."""
    prefix = name
    while True:
        cut = prefix.rfind(".", 0, len(prefix) - 1)
        prefix = name[: cut + 1]
        if prefix in nodes:
            return nodes[prefix][0] + name[cut + 1 :]
        if not prefix:
            return name


_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


def trainable(model: nn.Module) -> TrainableProvider:
    """Return an item for the trained part of a module."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            "trainable() needs a module",
            expected="an nn.Module",
            found=with_article(type(model)),
            remedy="pass the model itself",
        )
    return TrainableProvider(model)


class TrainableProvider(ModuleProvider):
    """A module without the parameters that were frozen at every save and restore so far."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._once: set[str] = set()
        """The names that were trained at an earlier save or restore, or when they were stored."""

    def expect(self, stored: Iterable[str]) -> None:
        """Include these stored names, which are about to be restored."""
        self._once.update(stored)

    def describe(self) -> State:
        state = super().describe()
        self._once |= self._names()
        names = self._once.union(path[0] for path in state.fresh)  # with all extra state
        value: dict[str, object] = state.value  # type: ignore[assignment]
        kept = {name: entry for name, entry in value.items() if name in names}
        volatile = frozenset(path for path in state.volatile if path[0] in kept)
        return replace(state, value=kept, volatile=volatile)

    def _names(self) -> set[str]:
        names: set[str] = set()
        is_trained = False
        for prefix, node in walk_modules(self._module).values():
            trained = [
                name
                for name, parameter in node._parameters.items()
                if parameter is not None and parameter.requires_grad
            ]
            buffers = node._buffers if trained else _STATISTICS.intersection(node._buffers)
            names.update(prefix + name for name in (*trained, *buffers))
            is_trained = is_trained or bool(trained)
        if not (is_trained or self._once):
            raise UsageError(
                "the module has no trainable parameters",
                expected="parameters that want a gradient",
                found="none",
                remedy="pass the module itself to save what is frozen",
            )
        return names
