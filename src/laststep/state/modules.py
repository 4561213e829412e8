"""The state of an nn.Module, by the names that its plain, unwrapped form would use.

Wrappers that only add a name (torch.compile, DDP, DataParallel) are looked through, so that state
loads from a wrapped module into a plain one and back. Imports no torch: a module is duck-typed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from laststep.state.provider import ABSENT, State, StateProvider
from laststep.state.tensors import is_module, is_tensor, same_memory

if TYPE_CHECKING:
    import torch

_WRAPPED_AS_MODULE = frozenset({"DistributedDataParallel", "DataParallel"})
_EXTRA = "_extra_state"
_MODULE = ("torch.nn.modules.module", "Module")


def _inner_name(module: torch.nn.Module) -> str | None:
    """The attribute under which a mere wrapper holds the module it wraps."""
    kind = type(module)
    if kind.__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod"
    if kind.__name__ in _WRAPPED_AS_MODULE and "module" in module._modules:
        return "module"
    return None


def walk_modules(module: torch.nn.Module) -> list[tuple[str, str, torch.nn.Module]]:
    """(own prefix, plain prefix, module) of every submodule, wrappers looked through."""
    found: list[tuple[str, str, torch.nn.Module]] = []

    def visit(node: torch.nn.Module, own: str, plain: str) -> None:
        found.append((own, plain, node))
        wrapped = _inner_name(node)
        for name, child in node._modules.items():
            if child is not None:
                visit(child, f"{own}{name}.", plain if name == wrapped else f"{plain}{name}.")

    visit(module, "", "")
    return found


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """id of a parameter → its plain name (the first, where it is tied)."""
    names: dict[int, str] = {}
    for _own, plain, node in walk_modules(module):
        for name, parameter in node._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), plain + name)
    return names


def loads_in_its_own_way(part: object) -> bool:
    """Whether it is a module of which any takes a hand in `load_state_dict`, e.g. to translate the
    names of older checkpoints."""
    return is_module(part) and any(
        node._load_state_dict_pre_hooks or not _loads_as_standard(type(node))
        for _, _, node in walk_modules(part)  # type: ignore[arg-type]
    )


class ModuleProvider(StateProvider):
    """Parameters, persistent buffers and extra state of a module."""

    kind = "module"
    cheap = True

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def parts(self) -> tuple[object, ...]:
        return (self._module,)

    def describe(self) -> State:
        value: dict[str, object] = {}
        volatile: set[tuple[object, ...]] = set()
        nodes = walk_modules(self._module)
        self.passive = all(_is_standard(node) for _, _, node in nodes)
        if self.passive:
            # What state_dict() would give, without its one detach() per tensor.
            for _own, plain, node in nodes:
                value.update({plain + n: p for n, p in node._parameters.items() if p is not None})
                hidden = node._non_persistent_buffers_set
                for name, buffer in node._buffers.items():
                    if buffer is not None and name not in hidden:
                        value[plain + name] = buffer
                        volatile.add((plain + name,))
        else:
            plain_of = _plain_names(nodes)
            for name, entry in self._module.state_dict().items():
                value[_plain(name, plain_of)] = entry
            for _own, plain, node in nodes:
                volatile.update((plain + name,) for name in node._buffers)
        # Extra state is what get_extra_state gives: it need not have the shape it was stored in.
        fresh = tuple((name,) for name in value if name.rpartition(".")[2] == _EXTRA)
        return State(value=value, fresh=fresh, volatile=frozenset(volatile), standalone=True)

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        live = self._module.state_dict(keep_vars=False)
        nodes = walk_modules(self._module)
        plain_of = _plain_names(nodes)
        own_of = {_plain(name, plain_of): name for name in live}
        aliases = _aliases(nodes)
        by_hook: dict[str, object] = {}
        for name, entry in value.items():
            own = own_of.get(name)
            if own is None or entry is ABSENT:
                continue
            alias = aliases.get(name)
            if is_tensor(entry) and alias is not None and same_memory(entry, alias):
                continue  # restored in place
            by_hook[own] = entry
        if by_hook:
            self._module.load_state_dict(by_hook, strict=False)


def _is_standard(node: torch.nn.Module) -> bool:
    """Whether state_dict() of this module is just its parameters and persistent buffers."""
    if node._state_dict_hooks or node._state_dict_pre_hooks:
        return False
    if _inner_name(node) is not None:
        return True
    return _is_standard_class(type(node))  # type: ignore[arg-type]  # mypy: Module's own __hash__


@functools.cache
def _is_standard_class(kind: type[torch.nn.Module]) -> bool:
    if kind.__module__ in ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm"):
        return True  # these only look at versions of their state
    root = next(k for k in kind.__mro__ if (k.__module__, k.__name__) == _MODULE)
    own_ways = ("state_dict", "_save_to_state_dict", "get_extra_state", "_load_from_state_dict")
    return all(getattr(kind, name) is getattr(root, name) for name in own_ways)


def _loads_as_standard(kind: type[torch.nn.Module]) -> bool:
    if kind.__module__.startswith("torch."):
        return True  # these only look at versions of their state
    root = next(k for k in kind.__mro__ if (k.__module__, k.__name__) == _MODULE)
    own_ways = ("load_state_dict", "_load_from_state_dict")
    return all(getattr(kind, name) is getattr(root, name) for name in own_ways)


def _plain_names(nodes: list[tuple[str, str, torch.nn.Module]]) -> dict[str, str]:
    return {own: plain for own, plain, _ in nodes}


def _plain(name: str, plain_of: dict[str, str]) -> str:
    """A state_dict key in its plain form: its longest known module prefix replaced."""
    prefix = name
    while True:
        cut = prefix.rfind(".", 0, len(prefix) - 1)
        prefix = name[: cut + 1]
        if prefix in plain_of:
            return plain_of[prefix] + name[cut + 1 :]
        if not prefix:
            return name


def _aliases(nodes: list[tuple[str, str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for _own, plain, node in nodes:
        for group in (node._parameters, node._buffers):
            found.update({plain + name: t for name, t in group.items() if t is not None})
    return found
