"""The state of an nn.Module, under the names that its plain, unwrapped form uses.

Wrappers that only add a name prefix (torch.compile, DDP, DataParallel) are looked through, so that
state loads from a wrapped module into a plain one and back. Names depend only on the structure of a
module and are cached by it; the structure itself is read again each time, without a Python call per
tensor. Imports no torch: a module is duck-typed.

Transparent wrappers of optimizers, schedulers and scalers are looked through as well.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
from contextvars import ContextVar
from itertools import accumulate, chain, compress, pairwise, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from laststep.errors import UsageError
from laststep.state.provider import ABSENT, AroundProvider, State, StateProvider, handing_over
from laststep.state.tensors import is_module, is_optimizer, is_tensor, same_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import torch

    from laststep.state.tree import Path


log = logging.getLogger(__name__)

_INSIDE: Final = (
    "optimizer",
    "_optimizer",
    "optim",
    "base_optimizer",
    "inner_optimizer",
    "scheduler",
    "_scheduler",
    "lr_scheduler",
    "scaler",
    "_scaler",
    "grad_scaler",
)
"""Attribute names under which frameworks keep the object that they wrap."""
_MOST = 8
"""The maximum number of nested wrappers that are looked through."""


class Unwrapped(AroundProvider):
    """Provides the object inside transparent wrappers; checks at each save that they still are
    transparent."""

    def __init__(self, layers: Sequence[Any], inner: StateProvider) -> None:
        self._layers, self._inner = layers, inner
        self.kind, self.cheap, self.passive = inner.kind, inner.cheap, inner.passive
        self.per_rank, self.when_ranks_change = inner.per_rank, inner.when_ranks_change

    def describe(self) -> State:
        _check(self._layers)
        return super().describe()


def layers_of(item: Any) -> list[Any]:
    """Return the object and, while the last one is a transparent wrapper, the object inside it."""
    layers = [item]
    while len(layers) <= _MOST:
        inner = _inside(layers[-1])
        if inner is None:
            break
        layers.append(inner)
    return layers


def _check(layers: Sequence[Any]) -> None:
    """Raise `UsageError` if a wrapper is no longer transparent, because its own state would be
    lost."""
    for wrapper, inner in pairwise(layers):
        if not _is_mere(wrapper, inner):
            raise UsageError(
                "the state of a wrapper or the object inside it has changed",
                expected=(
                    f"{type(wrapper).__name__} to return the state of the "
                    f"{type(inner).__name__} inside it, as when the Checkpointer was "
                    "created"
                ),
                found="another state",
                remedy=(
                    "create a new Checkpointer, or pass the wrapped object and the wrapper's own "
                    "state as two items"
                ),
            )


def _inside(wrapper: Any) -> Any | None:
    """Return the object inside a transparent wrapper, or None.

    If the wrapper is an optimizer, that is an optimizer. If the wrapper is of no torch class, it is
    an optimizer, scheduler or scaler of torch.
    """
    optimizer = is_optimizer(wrapper)
    if not optimizer and (
        not hasattr(wrapper, "state_dict") or hasattr(wrapper, "__iter__") or of_torch(wrapper)
    ):
        return None
    for inner in _held(wrapper):
        if not (is_optimizer(inner) if optimizer else of_torch(inner)):
            continue
        if _is_mere(wrapper, inner):
            return inner
        if optimizer:
            _warn(wrapper, inner)
    return None


def _warn(wrapper: Any, inner: Any) -> None:
    """Warn that state of an optimizer inside another one may be lost: only the outer one's groups
    and parameter state are saved."""
    what = "which has a state of its own: that is not saved with it; pass that one as an item too"
    if wrapper.state is inner.state:
        what = (
            "and gives more than that one's state, or another form of it: only groups and the "
            "state of parameters are saved; write a provider for the rest"
        )
    log.warning("%s holds the optimizer %s, %s", type(wrapper).__name__, type(inner).__name__, what)


def _is_mere(wrapper: Any, inner: Any) -> bool:
    """Return True if the wrapper has no state besides the inner object's. Quick: builds no
    state."""
    if not is_optimizer(wrapper):
        return _hands_over(wrapper, inner)
    mine, its = wrapper.param_groups, inner.param_groups
    if len(mine) != len(its) or not all(map(operator.is_, mine, its)):
        return False
    if wrapper.state is inner.state:
        return _gives_as_torch(wrapper) or _hands_over(wrapper, inner)
    return not wrapper.state and _hands_over(wrapper, inner)


def _gives_as_torch(optimizer: Any) -> bool:
    """Return True if its `state_dict` is torch's own, which returns the groups and the state."""
    of_class = getattr(type(optimizer), "state_dict", None)
    return str(getattr(of_class, "__module__", "")).startswith("torch.")


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


def of_torch(owner: object) -> str | None:
    """Return the name of the torch class that an object is of, or derives from; None if there is
    none. A user may rename their own class and still resume."""
    names = (k.__name__ for k in type(owner).__mro__ if k.__module__.startswith("torch."))
    return next(names, None)


def _held(wrapper: Any) -> Iterator[Any]:
    """Yield the objects with a `state_dict` that it may wrap."""
    for name in _INSIDE:
        try:
            inner = getattr(wrapper, name, None)
        except Exception:  # noqa: BLE001, S112 (a property that is not ready: nothing is wrapped)
            continue
        if inner is not None and inner is not wrapper and hasattr(inner, "state_dict"):
            yield inner


_WRAPPED_AS_MODULE = frozenset({"DistributedDataParallel", "DataParallel"})
_EXTRA = "_extra_state"
_MODULE = ("torch.nn.modules.module", "Module")


def _inner_name(kind: type[torch.nn.Module], children: Collection[str]) -> str | None:
    """Return the attribute under which a transparent wrapper keeps the wrapped module, or None."""
    if kind.__name__ == "OptimizedModule" and "_orig_mod" in children:
        return "_orig_mod"
    if kind.__name__ in _WRAPPED_AS_MODULE and "module" in children:
        return "module"
    return None


def walk_modules(module: torch.nn.Module) -> list[tuple[str, str, torch.nn.Module]]:
    """Return (own prefix, plain prefix, module) of every submodule, wrappers looked through."""
    nodes: list[tuple[str, str, torch.nn.Module]] = []

    def visit(node: torch.nn.Module, own: str, plain: str) -> None:
        nodes.append((own, plain, node))
        wrapped = _inner_name(type(node), node._modules)
        for name, child in node._modules.items():
            if child is not None:
                visit(child, f"{own}{name}.", plain if name == wrapped else f"{plain}{name}.")

    visit(module, "", "")
    return nodes


class _Build(NamedTuple):
    """The structure of a module that determines its names: the submodules in the order of a walk,
    the names in each of them, and which of these names are None."""

    kinds: tuple[type[torch.nn.Module], ...]
    children: tuple[tuple[str, ...], ...]
    no_child: tuple[bool, ...]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    no_tensor: tuple[bool, ...]
    """For each submodule its parameters, then its buffers."""
    hidden: tuple[frozenset[str], ...]
    """The buffers that are not persistent."""


class _Named(NamedTuple):
    """The plain names of a module's tensors, in the order of `_Build.no_tensor`."""

    names: tuple[str, ...]
    are_parameters: tuple[bool, ...]
    are_stored: tuple[bool, ...]
    volatile: frozenset[Path]
    fresh: tuple[Path, ...]
    is_standard: bool
    """True if its classes do not override state_dict()."""


class _Looked(NamedTuple):
    """A module as it is now."""

    module: torch.nn.Module
    named: _Named
    tensors: list[torch.Tensor | None]
    hooked: bool
    """True if there are hooks on its state_dict()."""


_looks: ContextVar[dict[int, _Looked] | None] = ContextVar("looks", default=None)
"""The modules read inside `one_moment`, by id; each entry holds its module, so the id stays
valid."""


@contextlib.contextmanager
def one_moment() -> Iterator[None]:
    """Read each module only once inside this block, however often its names are requested. Modules
    must not change in it: only code of laststep and torch may run."""
    token = _looks.set({})
    try:
        yield
    finally:
        _looks.reset(token)


def _look(module: torch.nn.Module) -> _Looked:
    seen = _looks.get()
    if seen is None:
        return _look_now(module)
    if id(module) not in seen:
        seen[id(module)] = _look_now(module)
    return seen[id(module)]


def _look_now(module: torch.nn.Module) -> _Looked:
    nodes: list[torch.nn.Module] = []
    insides: list[dict[str, Any]] = []

    def visit(node: torch.nn.Module) -> None:
        inside = node.__dict__  # attribute access on a module is slower
        nodes.append(node)
        insides.append(inside)
        for child in inside["_modules"].values():
            if child is not None:
                visit(child)

    visit(module)
    hidden, hooks, pre_hooks, *groups = zip(*map(_MODULES_INSIDE, insides), strict=True)
    if {*map(type, chain.from_iterable(groups))} != {dict}:  # a ScriptModule uses its own type
        groups = [tuple(dict(entries.items()) for entries in group) for group in groups]
    children, parameters, buffers = groups
    modules = chain.from_iterable(map(dict.values, children))
    both = chain.from_iterable(zip(parameters, buffers, strict=True))
    tensors = list(chain.from_iterable(map(dict.values, both)))
    build = _Build(
        kinds=tuple(map(type, nodes)),
        children=tuple(map(tuple, children)),
        no_child=tuple(map(operator.is_, modules, repeat(None))),
        parameters=tuple(map(tuple, parameters)),
        buffers=tuple(map(tuple, buffers)),
        no_tensor=tuple(map(operator.is_, tensors, repeat(None))),
        hidden=tuple(map(frozenset, hidden)),
    )
    return _Looked(module, _named(build), tensors, any(hooks) or any(pre_hooks))


_MODULES_INSIDE: Final = operator.itemgetter(
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_modules",
    "_parameters",
    "_buffers",
)


@functools.lru_cache(maxsize=16)
def _named(build: _Build) -> _Named:
    """Compute the names for the structure of a module."""
    names: list[str] = []
    are_parameters: list[bool] = []
    are_stored: list[bool] = []
    volatile: set[Path] = set()
    for number, prefix in enumerate(_prefixes(build)):
        for name in build.parameters[number]:
            names.append(prefix + name)
            are_parameters.append(not build.no_tensor[len(are_parameters)])
            are_stored.append(are_parameters[-1])
        for name in build.buffers[number]:
            names.append(prefix + name)
            are_parameters.append(False)
            is_there = not build.no_tensor[len(are_stored)]
            are_stored.append(is_there and name not in build.hidden[number])
            if are_stored[-1]:
                volatile.add((names[-1],))
    stored = tuple(compress(names, are_stored))
    return _Named(
        names=tuple(names),
        are_parameters=tuple(are_parameters),
        are_stored=tuple(are_stored),
        volatile=frozenset(volatile),
        fresh=_extra(stored),
        is_standard=all(
            _inner_name(kind, children) is not None or _is_standard_class(kind)  # type: ignore[arg-type]  # mypy: Module's own __hash__
            for kind, children in zip(build.kinds, build.children, strict=True)
        ),
    )


def _prefixes(build: _Build) -> list[str]:
    """Return the plain prefix of each submodule."""
    starts = list(accumulate(map(len, build.children), initial=0))
    prefixes: list[str] = []

    def visit(prefix: str) -> None:
        number = len(prefixes)
        prefixes.append(prefix)
        names = build.children[number]
        wrapped = _inner_name(build.kinds[number], names)
        for name, is_none in zip(names, build.no_child[starts[number] :], strict=False):
            if not is_none:
                visit(prefix if name == wrapped else f"{prefix}{name}.")

    visit("")
    return prefixes


def _extra(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the paths of extra state among these names. Extra state is any value that
    get_extra_state returns, so its shape may differ from the stored one."""
    return tuple((name,) for name in names if name.rpartition(".")[2] == _EXTRA)


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """Return id of a parameter → its plain name (the first name of a tied one)."""
    _module, named, tensors, _hooked = _look(module)
    ids = list(map(id, compress(tensors, named.are_parameters)))
    names = list(compress(named.names, named.are_parameters))
    # Reversed, so that the first name of an id wins.
    return dict(zip(reversed(ids), reversed(names), strict=True))


def loads_in_its_own_way(part: object) -> bool:
    """Return True for a module if any of its submodules customises `load_state_dict`, e.g. to
    translate the names of older checkpoints."""
    return is_module(part) and any(
        node._load_state_dict_pre_hooks or not _loads_as_standard(type(node))
        for _, _, node in walk_modules(part)  # type: ignore[arg-type]
    )


class ModuleProvider(StateProvider):
    """Parameters, persistent buffers and extra state of a module."""

    kind = "module"
    cheap = True

    def __init__(self, module: torch.nn.Module, *, hooks: bool = True) -> None:
        """With `hooks=False`, take parameters and buffers directly from the modules and ignore
        hooks on `state_dict()`."""
        self._module = module
        self._hooks = hooks

    def parts(self) -> tuple[object, ...]:
        return (self._module,)

    def describe(self) -> State:
        _module, named, tensors, hooked = _look(self._module)
        self.passive = named.is_standard and not (hooked and self._hooks)
        if self.passive:
            # Equal to state_dict(), without its detach() per tensor.
            pairs = zip(named.names, tensors, strict=True)
            value: dict[str, object] = dict(compress(pairs, named.are_stored))
            volatile, fresh = named.volatile, named.fresh
        else:
            entries = self._module.state_dict().items()
            (_looks.get() or {}).clear()  # foreign code has run
            nodes = walk_modules(self._module)
            plain_of = _plain_names(nodes)
            value = {_plain(name, plain_of): entry for name, entry in entries}
            volatile = frozenset(
                (plain + name,) for _own, plain, node in nodes for name in node._buffers
            )
            fresh = _extra(value)
        return State(value=value, fresh=fresh, volatile=volatile, standalone=True)

    def check(self, stored: object) -> list[str]:
        return [] if isinstance(stored, dict) else ["is not the state of a module"]

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return  # `check` has already reported it
        nodes = walk_modules(self._module)
        as_they_lie = not self._hooks and _look(self._module).named.is_standard
        live = {} if as_they_lie else self._module.state_dict(keep_vars=False)
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
            with handing_over(f"load_state_dict of {type(self._module).__name__}"):
                self._module.load_state_dict(by_hook, strict=False)
        elif any(entry is not ABSENT for entry in value.values()):
            _run_post_hooks([node for _own, _plain, node in nodes])


def _run_post_hooks(nodes: list[torch.nn.Module]) -> None:
    """Run the post hooks as `load_state_dict` does at its end, submodules first, so that values
    derived from the state, such as caches, are computed again."""
    for node in reversed(nodes):
        for hook in list(node._load_state_dict_post_hooks.values()):
            with handing_over(f"a hook for the end of load_state_dict of {type(node).__name__}"):
                hook(node, sys.modules[_MODULE[0]]._IncompatibleKeys([], []))


@functools.lru_cache(maxsize=1024)
def _is_standard_class(kind: type[torch.nn.Module]) -> bool:
    """Return True if state_dict() of such a module is just its parameters and persistent
    buffers."""
    if kind.__module__ in ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm"):
        return True  # overrides of these only handle versions of their state
    own_ways = ("state_dict", "_save_to_state_dict", "get_extra_state", "_load_from_state_dict")
    return _has_methods_of_torch(kind, own_ways)


def _loads_as_standard(kind: type[torch.nn.Module]) -> bool:
    if kind.__module__.startswith("torch."):
        return True  # overrides of these only handle versions of their state
    return _has_methods_of_torch(kind, ("load_state_dict", "_load_from_state_dict"))


def _has_methods_of_torch(kind: type[torch.nn.Module], names: Iterable[str]) -> bool:
    """Return True if a module class inherits these methods from nn.Module without overriding
    them."""
    root = next(k for k in kind.__mro__ if (k.__module__, k.__name__) == _MODULE)
    return all(getattr(kind, name) is getattr(root, name) for name in names)


def _plain_names(nodes: list[tuple[str, str, torch.nn.Module]]) -> dict[str, str]:
    return {own: plain for own, plain, _ in nodes}


def _plain(name: str, plain_of: dict[str, str]) -> str:
    """Return the plain form of a state_dict key, with its longest known module prefix replaced."""
    prefix = name
    while True:
        cut = prefix.rfind(".", 0, len(prefix) - 1)
        prefix = name[: cut + 1]
        if prefix in plain_of:
            return plain_of[prefix] + name[cut + 1 :]
        if not prefix:
            return name


def _aliases(nodes: list[tuple[str, str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    return {
        plain + name: tensor
        for _own, plain, node in nodes
        for name, tensor in (*node._parameters.items(), *node._buffers.items())
        if tensor is not None
    }
