"""Rename the state of a stored optimizer to the names that the live optimizer uses.

A tied parameter has several names, and an optimizer knows it by one of them. Two pipeline stages
hold such a weight as two parameters, each with its own name and state. The ties of the modules show
which names belong to one parameter. A live name that is not stored gets a copy of the state stored
under another name of the same parameter. A stored name that the live optimizer knows by another
name is dropped, and its state must equal the one stored under that other name.

Pure: works on trees and reads no tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.codecs import objects
from laststep.codecs.objects import Tagged, TensorRef
from laststep.state.optimizers import group_of, is_optimizer_state
from laststep.state.tree import OWNED, Path, name_of, owned, owners, path_of, rebuild, tensor_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from laststep.restoring.match import Match


class ModuleNames(NamedTuple):
    """The tensor names of a module, and the groups of names that belong to one tensor."""

    names: Collection[str]
    alike: Mapping[str, tuple[str, ...]]
    """Every name of a tied tensor → all its names."""


Modules = dict[str, ModuleNames]
"""Modules by item name; `group.key` for a module in a group."""


def modules_in(
    item: str, kind: str, tree: object, ties: Mapping[str, str], path: Path = ()
) -> Modules:
    """Return the modules in an item: the item itself, or the parts of a group, here at `path`."""
    if type(tree) is not dict or kind not in ("module", "group"):
        return {}
    modules: Modules = {}
    if kind == "group":
        for key, inner in tree.items():
            modules |= modules_in(f"{item}.{key}", "group", inner, ties, (*path, key))
    alike: dict[str, list[str]] = {}
    for tied, first in ((path_of(a), path_of(b)) for a, b in ties.items()):
        if tied[:-1] == first[:-1] == path:
            alike.setdefault(str(first[-1]), [str(first[-1])]).append(str(tied[-1]))
    by_name = {name: tuple(names) for names in alike.values() for name in names}
    return modules | {item: ModuleNames(tree, by_name)}


def rename(
    match: Match, live: object, in_store: Callable[[], Modules], in_use: Callable[[], Modules]
) -> None:
    """Put the item under the names of the live tree. `in_store` and `in_use` return the modules of
    both sides and are called only if the names of an optimizer differ."""
    for path in owners(match.item.tree):
        theirs, ours = _optimizer_at(match.item.tree, path), _optimizer_at(live, path)
        if theirs is None or ours is None or group_of(theirs).keys() == group_of(ours).keys():
            continue
        _Renaming(match, path, theirs).go(group_of(ours).keys(), in_store(), in_use())


class _Renaming:
    def __init__(self, match: Match, path: Path, stored: dict[str, Any]) -> None:
        self._match = match
        self._path = path
        self._stored = stored
        self._state = dict(stored["state"])
        self._params = [dict(group["params"]) for group in stored["groups"]]
        self._group_of = group_of(stored)
        self._ties: dict[str, str] = {}

    def go(self, live: Collection[str], in_store: Modules, in_use: Modules) -> None:
        stored = tuple(self._group_of)
        for name in live:
            if name not in self._group_of:
                candidates = (n for n in _names_of_same(name, in_store) if n in self._group_of)
                if (other := next(candidates, None)) is not None:
                    self._copy(other, name)
        for name in stored:
            if name not in live:
                candidates = (n for n in _names_of_same(name, in_use) if n in live)
                other = next((n for n in candidates if n in self._group_of), None)
                if other is not None:
                    self._drop(name, other)
        groups = [
            {**group, "params": params}
            for group, params in zip(self._stored["groups"], self._params, strict=True)
        ]
        state, item = {**self._stored, "state": self._state, "groups": groups}, self._match.item
        tree = _with_state(item.tree, self._path, state)
        names, ties = tensor_names(tree), item.ties | self._ties
        self._match.item = replace(item, tree=tree, names=names, ties=ties)

    def _copy(self, name: str, to: str) -> None:
        """Add the state of a stored parameter under another name."""
        number = self._group_of[to] = self._group_of[name]
        self._params[number][to] = self._params[number][name]
        if name in self._state:
            self._state[to], moved = self._moved(name, to)
            ties = self._match.item.ties
            self._ties |= {new: ties.get(old, old) for old, new in moved.items()}
            self._match.apart.update(moved, moved.values())

    def _drop(self, name: str, alias: str) -> None:
        """Drop a stored parameter that is `alias` here; record a difference if states differ."""
        del self._params[self._group_of.pop(name)][name]
        if name not in self._state and alias not in self._state:
            return  # the optimizer has stepped neither yet
        pairs: list[tuple[str, str]] | None = None
        if name in self._state and alias in self._state:
            state, moved = self._moved(name, alias)
            # Compare bytes: 1 == True, 0.0 == -0.0, and nan != nan.
            if objects.encode(state) == objects.encode(self._state[alias]):
                pairs = [(old, self._ties.get(new, new)) for old, new in moved.items()]
        spec_of = self._match.item.spec_of
        if pairs is None or any(spec_of(old) != spec_of(kept) for old, kept in pairs):
            self._match.mismatched.append(
                f"state of {name}: is that of {alias} here, but was stored separately and differs"
            )
        else:
            self._match.aliases += pairs
        self._state.pop(name, None)

    def _moved(self, name: str, to: str) -> tuple[object, dict[str, str]]:
        """Return a parameter's state under another name, and old → new names of its tensors."""
        below = len(self._path) + 2
        moved: dict[str, str] = {}

        def move(old: str) -> object:
            moved[old] = name_of((*self._path, "state", to, *path_of(old)[below:]))
            return TensorRef(moved[old])

        return rebuild(self._state[name], leaf=move, revive=lambda tagged: tagged), moved


def _names_of_same(name: str, modules: Modules) -> list[str]:
    """Return the other names of the parameter that an optimizer knows by `name`: `item:name` in an
    optimizer of several modules; otherwise all modules that have both names must agree."""
    item, _, rest = name.partition(":")
    if item in modules:
        return [f"{item}:{other}" for other in modules[item].alike.get(rest, ()) if other != rest]
    asked = [module for module in modules.values() if name in module.names]
    names = {other: None for module in asked for other in module.alike.get(name, ())}
    return [
        other
        for other in names
        if other != name and all(other in m.alike.get(name, ()) for m in asked if other in m.names)
    ]


def _optimizer_at(tree: object, path: Path) -> dict[str, Any] | None:
    """Return the state of the optimizer at that path; None if there is none."""
    for key in path:
        tree = tree.get(key) if type(tree) is dict else None
    if not isinstance(tree, Tagged) or tree.tag != OWNED:
        return None
    state = owned(tree).state
    return state if is_optimizer_state(state) else None


def _with_state(tree: Any, path: Path, state: object) -> object:
    """Return the tree with the optimizer state at that path replaced."""
    if not path:
        return Tagged(OWNED, [owned(tree).owner, state])
    return {**tree, path[0]: _with_state(tree[path[0]], path[1:], state)}
