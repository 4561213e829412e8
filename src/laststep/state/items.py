"""Choose a provider for each object that a user passes as an item.

The choice depends on the methods of an object, not on its class, except for torch classes that need
special treatment. Transparent wrappers are looked through. Also defines groups of items, and items
that do not exist yet (`Deferred`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.checks import plain, shown
from laststep.constants import is_item_name, with_article
from laststep.errors import UsageError
from laststep.state import provider
from laststep.state.loaders import LoaderProvider, is_torchdata
from laststep.state.modules import ModuleProvider, parameter_names
from laststep.state.optimizers import Names, OptimizerProvider
from laststep.state.provider import ABSENT, AroundProvider, PerRank, State, StateProvider
from laststep.state.tree import MAX_DEPTH, PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from laststep.state.tree import Path


log = logging.getLogger(__name__)

_OPTIMIZERS = ("optimizer", "_optimizer", "optim", "base_optimizer", "inner_optimizer")
_OTHERS = ("scheduler", "_scheduler", "lr_scheduler", "scaler", "_scaler", "grad_scaler")
_INSIDE: Final = _OPTIMIZERS + _OTHERS
"""Attribute names under which frameworks keep the object that they wrap."""
_MAX_WRAPPERS = 8


class Unwrapped(AroundProvider):
    """Provides the object inside wrappers. Checks at each save that they still are transparent,
    because their own state would be lost."""

    def __init__(self, layers: Sequence[Any], inner: StateProvider) -> None:
        self._layers, self._inner = layers, inner

    def describe(self) -> State:
        for wrapper, inner in pairwise(self._layers):
            if not _is_transparent(wrapper, inner):
                raise UsageError(
                    "the state of a wrapper or the object inside it has changed",
                    expected=f"{type(wrapper).__name__} to return the state of the "
                    f"{type(inner).__name__} inside it, as when the Checkpointer was created",
                    remedy="create a new Checkpointer, or pass two items",
                )
        return super().describe()


def layers_of(item: Any) -> list[Any]:
    """Return the object and, while the last one is a transparent wrapper, the object inside it."""
    layers = [item]
    while len(layers) <= _MAX_WRAPPERS and (inner := _inside(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _inside(wrapper: Any) -> Any | None:
    """Return the object inside a transparent wrapper, or None. In an optimizer that is an
    optimizer; in an object of no torch class an optimizer, scheduler or scaler of torch."""
    optimizer = isinstance(wrapper, Optimizer)
    if not optimizer and (
        not hasattr(wrapper, "state_dict")
        or hasattr(wrapper, "__iter__")
        or provider.of_torch(wrapper)
    ):
        return None
    for name in _INSIDE:
        try:
            inner = getattr(wrapper, name, None)
        except Exception:  # noqa: BLE001, S112 (a property that is not ready: nothing is wrapped)
            continue
        if inner is None or inner is wrapper or not hasattr(inner, "state_dict"):
            continue
        if not (isinstance(inner, Optimizer) if optimizer else provider.of_torch(inner)):
            continue
        if _is_transparent(wrapper, inner):
            return inner
        if optimizer:
            log.warning(
                "%s holds the optimizer %s, but has another state: only its own groups and "
                "parameter state are saved; pass the inner one as an item too, or write a provider",
                type(wrapper).__name__,
                type(inner).__name__,
            )
    return None


def _is_transparent(wrapper: Any, inner: Any) -> bool:
    """Return True if the wrapper has no state besides the inner object's. Builds no state."""
    if not isinstance(wrapper, Optimizer):
        return _hands_over(wrapper, inner)
    groups, inner_groups = wrapper.param_groups, inner.param_groups
    if len(groups) != len(inner_groups) or not all(map(operator.is_, groups, inner_groups)):
        return False
    if wrapper.state is not inner.state:
        return not wrapper.state and _hands_over(wrapper, inner)
    # torch's own state_dict() returns the groups and the state, which are the inner one's.
    of_class = getattr(type(wrapper), "state_dict", None)
    is_torchs = str(getattr(of_class, "__module__", "")).startswith("torch.")
    return is_torchs or _hands_over(wrapper, inner)


class _StandIn:
    """Replaces the wrapped object in a copy of the wrapper, and returns a unique state."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.given: dict[str, Any] = {}

    def state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        return self.given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _hands_over(wrapper: Any, inner: Any) -> bool:
    """Return True if the wrapper's `state_dict` returns the inner object's state unchanged. Calls
    it on a copy of the wrapper with a stand-in, so neither object is touched."""
    if hasattr(type(wrapper), "__del__"):
        return False  # deleting the copy would run the wrapper's finalizer
    stand_in = _StandIn(inner)
    try:
        copy = object.__new__(type(wrapper))
        for name, value in vars(wrapper).items():
            copy.__dict__[name] = stand_in if value is inner else value
        return copy.state_dict() is stand_in.given and not stand_in.given
    except Exception:  # noqa: BLE001 (any error: it is raised again where it can be reported)
        return False


def make_deferred(outer: StateProvider) -> StateProvider:
    """Create the providers of deferred items, also inside groups, because only then are their
    properties known. Return the innermost provider, without the wrapping ones."""
    while isinstance(outer, AroundProvider):
        outer = outer._inner
    if isinstance(outer, GroupProvider):
        for member in outer._members.values():
            make_deferred(member)
    return outer


class GroupProvider(StateProvider):
    """A dict as one item: plain entries, looked up at each save and replaced on restore, and
    objects with a state of their own, for whose keys `make` creates providers. A job of several
    ranks refuses a group with per-rank and other members."""

    kind = "group"

    def __init__(self, owner: dict[Any, Any], make: Callable[[Any], StateProvider]) -> None:
        self._owner = owner
        self._make = make
        self._made: dict[Any, tuple[object, StateProvider]] = {}
        """Objects of the dict when it was last read, and their providers."""

    @property
    def _members(self) -> dict[Any, StateProvider]:
        """The providers of objects in the dict; an object that is still there keeps its own."""
        made = {}
        for key, thing in self._owner.items():
            if _has_own_state(thing):
                known = self._made.get(key)
                if known is None or known[0] is not thing:
                    known = thing, self._make(key)
                made[key] = known
        self._made = made
        return {key: member for key, (_thing, member) in made.items()}

    @property
    def passive(self) -> bool:  # type: ignore[override]
        return all(member.passive for member in self._members.values())

    @property
    def per_rank(self) -> bool:  # type: ignore[override]
        return self._said("per_rank") == {True}

    @property
    def mixed(self) -> bool:  # type: ignore[override]
        inside = any(member.mixed for member in self._members.values())
        return inside or len(self._said("per_rank")) > 1

    @property
    def when_ranks_change(self) -> str:  # type: ignore[override]
        """The policy of the members if it is the same word for all, else `refuse`."""
        said = self._said("when_ranks_change")
        policy = said.pop() if len(said) == 1 else "refuse"
        return policy if isinstance(policy, str) else "refuse"

    def _said(self, attribute: str) -> set[object]:
        """Return the values of an attribute of all members and plain entries."""
        members = self._members
        said = {getattr(member, attribute) for member in members.values()}
        plain = len(members) < len(self._owner)
        return said | {getattr(StateProvider, attribute)} if plain else said

    def derive(self, value: object, rank: int) -> None:
        for key, member in self._stored_in(value).items():
            if value[key] is not ABSENT:  # type: ignore[index]
                member.derive(value[key], rank)  # type: ignore[index]

    def parts(self) -> tuple[object, ...]:
        return tuple(part for member in self._members.values() for part in member.parts())

    def describe(self) -> State:
        members = self._members
        states = {key: member.describe() for key, member in members.items()}
        things: list[Path] = []
        for key, member in members.items():
            inner = states[key].things if isinstance(member, GroupProvider) else ((),)
            things += [(key, *path) for path in inner]
        return State(
            value=self._owner | {key: state.value for key, state in states.items()},
            fresh=tuple((key, *path) for key, state in states.items() for path in state.fresh),
            loose=tuple((key, *path) for key, state in states.items() for path in state.loose),
            things=tuple(things),
            volatile=frozenset(
                (k, *path) for k, state in states.items() for path in state.volatile
            ),
        )

    def check(self, stored: object) -> list[str]:
        if not isinstance(stored, dict):
            return ["is not a group"]
        return [
            f"{key} {text}"
            for key, member in self._stored_in(stored).items()
            for text in member.check(stored[key])
        ]

    def skips(self, stored: object) -> dict[Path, str | None]:
        return {
            (key, *path): None if reason is None else f"{key} {reason}"
            for key, member in self._stored_in(stored).items()
            for path, reason in member.skips(stored[key]).items()  # type: ignore[index]
        }

    def _stored_in(self, stored: object) -> dict[Any, StateProvider]:
        """Return the members that have an entry in a stored tree."""
        if not isinstance(stored, dict):
            return {}
        return {key: member for key, member in self._members.items() if key in stored}

    def destinations(self, paths: list[Path]) -> list[object]:
        found: list[object] = ["cpu"] * len(paths)
        for key, member in self._members.items():  # one call each: an optimizer names everything
            inside = [number for number, path in enumerate(paths) if path[:1] == (key,)]
            places = member.destinations([paths[number][1:] for number in inside])
            for number, place in zip(inside, places, strict=True):
                found[number] = place
        return found

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        members = self._members
        for key, member in members.items():
            if value.get(key, ABSENT) is not ABSENT:
                member.restore(value[key])
        for key in [key for key in self._owner if key not in members and key not in value]:
            del self._owner[key]  # added after the checkpoint, deleted as in a plain dict
        with provider.handing_over("an entry of a dict"):
            for key, entry in value.items():
                if key not in members:
                    provider.put_entry(self._owner, key, entry)


class Deferred(AroundProvider):
    """An item given by a function that returns it: `Deferred(lambda: trainer.optimizer)`.

    Each save and restore calls the function, which returns None while the item does not exist yet.
    `make` converts the result into the item, once while the function returns the same object.
    """

    def __init__(
        self, held: Callable[[], object], make: Callable[[Any], object] | None = None
    ) -> None:
        for function in (held,) if make is None else (held, make):
            if not callable(function):
                raise UsageError(
                    "a deferred item is not a function",
                    expected="a function that gives the item",
                    found=shown(function),
                    remedy="pass Deferred(lambda: item), or the item itself",
                )
        self._held, self._make = held, make
        self._known: list[object] = [None, None]
        """The last object that the function returned, and the item made from it."""
        self._provide: Callable[[object], StateProvider] | None = None
        self._made: tuple[object, StateProvider] | None = None
        """The last item that was used, and its provider."""

    def around(self, provide: Callable[[object], StateProvider]) -> Deferred:
        """Return a copy for one Checkpointer, which creates its provider with `provide`. All copies
        share the item that was made from an object."""
        made = Deferred(self._held, self._make)
        made._known, made._provide = self._known, provide
        return made

    def thing(self) -> object:
        """Return the item, or None if it does not exist yet."""
        held = self._held()
        if held is not self._known[0]:
            if self._held() is not held:
                raise UsageError(
                    "a deferred item is another one each time that it is asked for",
                    expected="a function that returns the item",
                    found=shown(held),
                    remedy="return one that is kept; for a part of it: "
                    "Deferred(lambda: self.model, laststep.trainable)",
                )
            item = held if self._make is None or held is None else self._make(held)
            self._known[:] = held, item
        return self._known[1]

    def is_there(self) -> bool:
        """Create the item's provider if it exists. Errors are left to the next save."""
        with contextlib.suppress(Exception):
            return self._inner is not None
        return False

    @property
    def _inner(self) -> StateProvider:  # type: ignore[override]
        thing = self.thing()
        if self._made is None or self._made[0] is not thing:
            if thing is None or self._provide is None:
                raise UsageError(
                    "a deferred item does not exist yet",
                    expected="what its function gives",
                    found="None",
                    remedy="save and restore it once it is made, or leave it out: "
                    "restore(only=[…])",
                )
            self._made = (thing, self._provide(thing))
        return self._made[1]

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def parts(self) -> tuple[object, ...]:
        return () if self._made is None else self._inner.parts()

    def _inner_property(self, name: str) -> object:
        """Return the default of a property until the item exists."""
        return getattr(StateProvider if self._made is None else self._inner, name)


_PART = re.compile(r"(.+)-r?[0-9]{5,}")
"""Names of the files of an item that is split or that several ranks have."""


def providers_for(items: Mapping[str, object]) -> dict[str, StateProvider]:
    """Return a provider for each item; optimizers find the names of their parameters in all."""
    if not items:
        raise UsageError(
            "there is nothing to save", remedy="pass items, e.g. model=model, optimizer=optimizer"
        )
    items = {plain(name): item for name, item in items.items()}  # type: ignore[misc]
    for name in items:
        is_valid = is_item_name(name)
        part = _PART.fullmatch(name) if is_valid else None
        if not is_valid or (part is not None and part[1] in {"shared", *items}):
            raise UsageError(
                "invalid item name",
                expected="letters, digits, '_', '-' and '.', at most 64, and not 'shared' or the "
                "name of another item's file",
                found=shown(name),
                remedy="choose another name",
            )
    names = functools.partial(_names_of_parameters, items)
    return {name: _provider(name, item, names) for name, item in items.items()}


def _things_in(
    items: Mapping[Any, object], outer: str = "", depth: int = 0
) -> Iterator[tuple[str, str, Any]]:
    """Yield (container, key, object) of all items and members; both names may contain dots."""
    for key, item in items.items():
        if isinstance(item, PerRank):
            yield from _things_in({key: item.item}, outer, depth)
        elif isinstance(item, Deferred):
            yield from _things_in({key: item.thing()}, outer, depth)
        elif isinstance(item, StateProvider):
            for part in item.parts():
                yield outer, key, part
        elif type(item) is dict and depth < MAX_DEPTH and _is_group(item, any_keys=True):
            yield from _things_in(item, _item(outer, key), depth + 1)
        else:
            yield outer, key, item


def _item(outer: str, key: object) -> str:
    return f"{outer}.{key}" if outer else str(key)


def _names_of_parameters(items: Mapping[str, object]) -> dict[int, tuple[str, str]]:
    """Return id of a parameter → (item, name), as of now: parameters can be replaced."""
    names: dict[int, tuple[str, str]] = {}
    things = list(_things_in(items))
    for outer, key, thing in things:
        if isinstance(thing, nn.Module):
            for parameter, name in parameter_names(thing).items():
                names.setdefault(parameter, (_item(outer, key), name))
    # After modules, so that a parameter that is also in a dict has the same name without the dict.
    for outer, key, thing in things:
        if isinstance(thing, Tensor):
            names.setdefault(id(thing), (outer, str(key)))
        elif type(thing) is dict:
            for tensor, name in _tensors_in(thing):
                names.setdefault(tensor, (_item(outer, key), name))
    return names


def _tensors_in(
    value: dict[Any, Any], outer: str = "", depth: int = 0
) -> Iterator[tuple[int, str]]:
    """Yield (id, name) of the tensors in nested dicts, with dots as in `named_parameters()`."""
    for key, inner in value.items():
        if isinstance(inner, Tensor):
            yield id(inner), f"{outer}{key}"
        elif type(inner) is dict and depth < MAX_DEPTH:
            yield from _tensors_in(inner, f"{outer}{key}.", depth + 1)


def _is_group(value: dict[Any, Any], depth: int = 0, *, any_keys: bool = False) -> bool:
    """Return True if a dict holds an object with a state of its own, rather than plain state. Its
    keys must be strings when it becomes an item; with `any_keys` others may have been added."""
    # The set of types rules out a dict of thousands of tensors quickly: this runs at each save.
    if all(kind in PLAIN or issubclass(kind, Tensor) for kind in set(map(type, value.values()))):
        return False
    named = any_keys or all(isinstance(key, str) for key in value)
    return named and any(_has_own_state(inner, depth) for inner in value.values())


def _has_own_state(value: object, depth: int = 0) -> bool:
    if type(value) is dict:
        return depth < MAX_DEPTH and _is_group(value, depth + 1)
    if type(value) in PLAIN or isinstance(value, Tensor):
        return False
    if isinstance(value, type):  # it has the methods, but no instance to call them on
        return False
    return isinstance(value, StateProvider | provider.HasStateDict | nn.Module)


def _provider(name: str, item: Any, names: Names) -> StateProvider:
    if isinstance(item, PerRank):
        return item.around(_provider(name, item.item, names))
    if isinstance(item, Deferred):
        return item.around(lambda thing: _provider(name, thing, names))
    if isinstance(item, type):
        raise UsageError(
            f"item {name!r} is a class, which has no state",
            expected="an object of it",
            found=repr(item),
            remedy=f"make one, and pass it: {item.__name__}(…)",
        )
    if isinstance(item, StateProvider):
        return item
    if isinstance(item, nn.Module):
        return ModuleProvider(item)
    layers = layers_of(item)
    if len(layers) > 1:
        return Unwrapped(layers, _provider(name, layers[-1], names))
    if isinstance(item, Optimizer):
        return OptimizerProvider(item, names)
    if type(item).__name__ == "GradScaler" and hasattr(item, "_growth_tracker"):
        return provider.ScalerProvider(item)
    if is_torchdata(item):
        return LoaderProvider(item)
    if isinstance(item, provider.HasStateDict):
        return provider.StateDictProvider(item)
    if type(item) is dict and _is_group(item):
        return GroupProvider(item, lambda key: _provider(f"{name}.{key}", item[key], names))
    if isinstance(item, dict | list | deque | np.ndarray | Tensor):
        return provider.ValueProvider(item)
    remedy = f"pass a dict: {name}={{'value': …}}, or leave it out"
    if any(kind.__module__ == "torch.utils.data.dataloader" for kind in type(item).__mro__):
        remedy = "use torchdata's StatefulDataLoader, which has a position, or leave it out"
    raise UsageError(
        f"item {name!r} is {with_article(type(item))}, which cannot be restored in place",
        expected="a module, an optimizer, an object with state_dict() and load_state_dict(), "
        "a StateProvider, a dict, a list, a tensor or an array",
        remedy=remedy,
    )
