"""Put the state of a stored optimizer under the names that the live one has for its parameters.

A tied parameter has several names, and an optimizer knows it by one. Two stages of a pipeline hold
such a weight as two parameters, each with a name and a state of its own. Which names are of one
parameter is said by the ties of the modules. Then a live name takes a copy of what is stored under
another name; a stored name that the live optimizer knows by another goes, and what is stored under
it must be the same as under the other.

Pure: works on trees, and reads no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.codecs import objects
from laststep.codecs.objects import Tagged, TensorRef
from laststep.state.optimizers import group_of, is_optimizer_state
from laststep.state.tree import OWNED, Path, name_of, owned, owners, path_of, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from laststep.state.tree import StoredItem


class ModuleNames(NamedTuple):
    """The names that a module has, and which of them are of one tensor."""

    names: Collection[str]
    alike: Mapping[str, tuple[str, ...]]
    """Every name of a tied tensor → all names of it."""


Modules = dict[str, ModuleNames]
"""By their items' names, `group.key` where they are in a group."""


def modules_in(item: str, kind: str, tree: object, ties: Mapping[str, str]) -> Modules:
    """The modules in an item, of its tree and ties: itself, or the parts of a group."""
    return _modules_in(item, kind, tree, {path_of(a): path_of(b) for a, b in ties.items()}, ())


def _modules_in(
    item: str, kind: str, tree: object, ties: Mapping[Path, Path], path: Path
) -> Modules:
    if type(tree) is not dict or kind not in ("module", "group"):
        return {}
    modules: Modules = {}
    if kind == "group":
        for key, inner in tree.items():
            modules |= _modules_in(f"{item}.{key}", "group", inner, ties, (*path, key))
    alike: dict[str, list[str]] = {}
    for tied, first in ties.items():
        if tied[:-1] == first[:-1] == path:
            alike.setdefault(str(first[-1]), [str(first[-1])]).append(str(tied[-1]))
    by_name = {name: tuple(names) for names in alike.values() for name in names}
    return modules | {item: ModuleNames(tree, by_name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """A stored item by the live names."""

    item: StoredItem
    apart: frozenset[str] = frozenset()
    """Tensors that were of one parameter and may be of two now: each gets memory of its own."""
    twins: tuple[tuple[str, str], ...] = ()
    """(a stored tensor that is no longer in the tree, the one that it has to be the same as)."""
    differing: tuple[str, ...] = ()
    """What would be twins and is of another form, in words."""


def rename(
    item: StoredItem, live: object, in_store: Callable[[], Modules], in_use: Callable[[], Modules]
) -> Renamed:
    """The item by the names of the live tree. The modules of both sides are only asked for where
    the names of an optimizer differ."""
    renamed = Renamed(item=item)
    for path in owners(item.tree):
        theirs, ours = _optimizer_at(item.tree, path), _optimizer_at(live, path)
        if theirs is None or ours is None or group_of(theirs).keys() == group_of(ours).keys():
            continue
        renaming = _Renaming(renamed, path, theirs)
        renaming.go(group_of(ours).keys(), in_store(), in_use())
        renamed = renaming.result()
    return renamed


class _Renaming:
    """The state of one stored optimizer, on its way to the live names."""

    def __init__(self, so_far: Renamed, path: Path, stored: dict[str, Any]) -> None:
        self._so_far = so_far
        self._path = path
        self._stored = stored
        self._state = dict(stored["state"])
        self._params = [dict(group["params"]) for group in stored["groups"]]
        self._group_of = group_of(stored)
        self._ties: dict[str, str] = {}
        self._apart: set[str] = set()
        self._twins: list[tuple[str, str]] = []
        self._differing: list[str] = []

    def go(self, live: Collection[str], in_store: Modules, in_use: Modules) -> None:
        stored = tuple(self._group_of)
        for name in live:
            if name not in self._group_of:
                others = (n for n in _names_of_same(name, in_store) if n in self._group_of)
                if (other := next(others, None)) is not None:
                    self._copy(other, name)
        for name in stored:
            if name not in live:
                others = (n for n in _names_of_same(name, in_use) if n in live)
                other = next((n for n in others if n in self._group_of), None)
                if other is not None:
                    self._drop(name, other)

    def result(self) -> Renamed:
        done, item = self._so_far, self._so_far.item
        groups = [
            {**group, "params": params}
            for group, params in zip(self._stored["groups"], self._params, strict=True)
        ]
        state = {**self._stored, "state": self._state, "groups": groups}
        return Renamed(
            item=replace(
                item, tree=_with_state(item.tree, self._path, state), ties=item.ties | self._ties
            ),
            apart=done.apart | self._apart,
            twins=(*done.twins, *self._twins),
            differing=(*done.differing, *self._differing),
        )

    def _copy(self, name: str, to: str) -> None:
        """Have the state of a stored parameter under a further name."""
        number = self._group_of[to] = self._group_of[name]
        self._params[number][to] = self._params[number][name]
        if name in self._state:
            self._state[to], moved = self._moved(name, to)
            ties = self._so_far.item.ties
            self._ties |= {new: ties.get(old, old) for old, new in moved.items()}
            self._apart.update(moved, moved.values())

    def _drop(self, name: str, twin: str) -> None:
        """Take a stored parameter away, of which the live one is known by its twin's name."""
        del self._params[self._group_of.pop(name)][name]
        if name not in self._state and twin not in self._state:
            return  # neither was stepped yet
        pairs: list[tuple[str, str]] | None = None
        if name in self._state and twin in self._state:
            state, moved = self._moved(name, twin)
            # By their bytes: 1 and True are equal, and so are 0.0 and -0.0; nan is not even itself.
            if objects.encode(state) == objects.encode(self._state[twin]):
                pairs = [(old, self._ties.get(new, new)) for old, new in moved.items()]
        spec_of = self._so_far.item.spec_of
        if pairs is None or any(spec_of(old) != spec_of(kept) for old, kept in pairs):
            self._differing.append(
                f"state of {name}: is that of {twin} here, but was stored apart and differs"
            )
        else:
            self._twins += pairs
        self._state.pop(name, None)

    def _moved(self, name: str, to: str) -> tuple[object, dict[str, str]]:
        """The state of a parameter as if it had that other name, and its tensors: old → new."""
        below = len(self._path) + 2
        moved: dict[str, str] = {}

        def move(ref: TensorRef) -> object:
            new = name_of((*self._path, "state", to, *path_of(ref.name)[below:]))
            moved[ref.name] = new
            return TensorRef(new)

        return rebuild(self._state[name], leaf=move, revive=lambda tagged: tagged), moved


def _names_of_same(name: str, modules: Modules) -> list[str]:
    """The other names of the parameter that an optimizer calls so. An optimizer of several modules
    says `item:name`; one of a single module does not say which, so all that have both names must
    agree."""
    item, _, rest = name.partition(":")
    if item in modules:
        return [f"{item}:{other}" for other in modules[item].alike.get(rest, ()) if other != rest]
    asked = [module for module in modules.values() if name in module.names]
    others = {other: None for module in asked for other in module.alike.get(name, ())}
    return [
        other
        for other in others
        if other != name and all(other in m.alike.get(name, ()) for m in asked if other in m.names)
    ]


def _optimizer_at(tree: object, path: Path) -> dict[str, Any] | None:
    """The state of an optimizer at that path, if there is one."""
    for key in path:
        tree = tree.get(key) if type(tree) is dict else None
    if not isinstance(tree, Tagged) or tree.tag != OWNED:
        return None
    state = owned(tree).state
    return state if is_optimizer_state(state) else None


def _with_state(tree: Any, path: Path, state: object) -> object:
    """The tree with another state in the place of the optimizer's at that path."""
    if not path:
        return Tagged(OWNED, [owned(tree).owner, state])
    return {**tree, path[0]: _with_state(tree[path[0]], path[1:], state)}
