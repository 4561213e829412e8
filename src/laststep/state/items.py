"""Choose a provider for each thing that a user passes as an item.

The choice looks at what a thing can do, not at its class, except where torch's own classes need a
way of their own. Mere wrappers are looked through.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from laststep.checks import plain, shown
from laststep.errors import Usage
from laststep.state.late import Late
from laststep.state.members import EntryProvider, GroupProvider
from laststep.state.modules import ModuleProvider, parameter_names
from laststep.state.optimizers import Names, OptimizerProvider
from laststep.state.provider import StateProvider
from laststep.state.tensors import is_module, is_optimizer, is_tensor, is_tensor_type
from laststep.state.tree import MAX_DEPTH, PLAIN
from laststep.state.values import (
    HasStateDict,
    PerRank,
    ScalerProvider,
    StateDictProvider,
    ValueProvider,
    refuse_immutable,
)
from laststep.state.wrappers import Unwrapped, layers_of
from laststep.terms import is_item_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PART = re.compile(r"(.+)-r?[0-9]{5,}")
"""How the files of an item are named that is split, or that several ranks have."""


def providers_for(items: Mapping[str, object]) -> dict[str, StateProvider]:
    """A provider for each item; optimizers learn the names of parameters from the modules, and from
    dicts that hold them."""
    if not items:
        raise Usage(
            "there is nothing to save", remedy="pass items, e.g. model=model, optimizer=optimizer"
        )
    items = {plain(name): item for name, item in items.items()}  # type: ignore[misc]
    for name in items:
        if not is_item_name(name):
            raise Usage(
                "an item's name becomes a file's name",
                expected="letters, digits, '_', '-' and '.', at most 64, and not 'shared'",
                found=shown(name), remedy="choose another name",
            )  # fmt: skip
        part = _PART.fullmatch(name)
        if part is not None and (part[1] in items or part[1] == "shared"):
            raise Usage(
                "an item's name is that of a part of another one's file",
                expected=f"not {part[1]!r} and a number behind it", found=repr(name),
                remedy="choose another name",
            )  # fmt: skip

    def names() -> dict[int, tuple[str, str]]:
        return _names_of_parameters(items)

    return {name: _provider(name, item, names) for name, item in items.items()}


def _things_in(
    items: Mapping[Any, object], outer: str = "", depth: int = 0
) -> Iterator[tuple[str, str, Any]]:
    """Every thing in the items, groups and providers looked into: what it lies in, the key that it
    has there, and the thing. The two are not joined, as both may have dots in them."""
    for key, item in items.items():
        if isinstance(item, PerRank):
            yield from _things_in({key: item.item}, outer, depth)
        elif isinstance(item, Late):
            yield from _things_in({key: item.thing()}, outer, depth)
        elif isinstance(item, StateProvider):
            yield from ((outer, key, part) for part in item.parts())
        elif type(item) is dict and depth < MAX_DEPTH and _is_group(item, any_keys=True):
            yield from _things_in(item, _item(outer, key), depth + 1)
        else:
            yield outer, key, item


def _item(outer: str, key: object) -> str:
    """What an optimizer calls something that lies in an item, or is one."""
    return f"{outer}.{key}" if outer else str(key)


def _names_of_parameters(items: Mapping[str, object]) -> dict[int, tuple[str, str]]:
    """id of a parameter → (item, name); asked at each save: parameters can be replaced, and so can
    what stands in a dict."""
    names: dict[int, tuple[str, str]] = {}
    # Modules first: a parameter that lies in a dict too has the same name with and without that.
    for outer, key, thing in sorted(_things_in(items), key=lambda thing: not is_module(thing[2])):
        if is_tensor(thing):
            names.setdefault(id(thing), (outer, str(key)))
        elif is_module(thing):
            for parameter, name in parameter_names(thing).items():
                names.setdefault(parameter, (_item(outer, key), name))
        elif type(thing) is dict:
            for tensor, name in _tensors_in(thing):
                names.setdefault(tensor, (_item(outer, key), name))
    return names


def _tensors_in(
    value: dict[Any, Any], outer: str = "", depth: int = 0
) -> Iterator[tuple[int, str]]:
    """id → name of the tensors in a dict, and in dicts within it, as `named_parameters()` has them:
    mostly they are the weights of a module, or some of them, under their names."""
    for key, inner in value.items():
        if is_tensor(inner):
            yield id(inner), f"{outer}{key}"
        elif type(inner) is dict and depth < MAX_DEPTH:
            yield from _tensors_in(inner, f"{outer}{key}.", depth + 1)


def _is_group(value: dict[Any, Any], depth: int = 0, *, any_keys: bool = False) -> bool:
    """A dict that holds something with a state of its own, rather than plain state. Its keys are
    strings when an item is made of it; later `any_keys` may have come to it."""
    # Their types tell that thousands of tensors are none: this is asked at each save.
    if all(kind in PLAIN or is_tensor_type(kind) for kind in set(map(type, value.values()))):
        return False
    named = any_keys or all(isinstance(key, str) for key in value)
    return named and any(_has_own_state(inner, depth) for inner in value.values())


def _has_own_state(value: object, depth: int = 0) -> bool:
    if type(value) is dict:
        return depth < MAX_DEPTH and _is_group(value, depth + 1)
    if type(value) in PLAIN or is_tensor(value):
        return False
    if isinstance(value, type):  # it has the methods, and nothing to call them on
        return False
    return isinstance(value, StateProvider | HasStateDict) or is_module(value)


def _provider(name: str, item: Any, names: Names) -> StateProvider:
    if isinstance(item, PerRank):
        return item.around(_provider(name, item.item, names))
    if isinstance(item, Late):
        return item.around(lambda thing: _provider(name, thing, names))
    if isinstance(item, type):
        raise Usage(
            f"item {name!r} is a class, which has no state", expected="an object of it",
            found=repr(item), remedy=f"make one, and pass it: {item.__name__}(…)",
        )  # fmt: skip
    if isinstance(item, StateProvider):
        return item
    if is_module(item):
        return ModuleProvider(item)
    layers = layers_of(item)
    if len(layers) > 1:
        return Unwrapped(layers, _provider(name, layers[-1], names))
    if is_optimizer(item):
        return OptimizerProvider(item, names)
    if type(item).__name__ == "GradScaler" and hasattr(item, "_growth_tracker"):
        return ScalerProvider(item)
    if isinstance(item, HasStateDict):
        return StateDictProvider(item)
    if type(item) is dict and _is_group(item):
        return GroupProvider(item, lambda key: _member(item, key, f"{name}.{key}", names))
    refuse_immutable(name, item)
    return ValueProvider(item)


def _member(group: dict[Any, Any], key: object, name: str, names: Names) -> StateProvider:
    if _has_own_state(group[key]):
        return _provider(name, group[key], names)
    return EntryProvider(group, key)
