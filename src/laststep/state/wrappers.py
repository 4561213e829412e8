"""Look through wrappers of optimizers, schedulers and scalers, as modules look through DDP.

A framework puts an optimizer behind an object of its own, which is an optimizer too and has no
state but that of the one inside. Which one is inside decides what a state means, so it is the one
that is saved, by its own class: the state goes from a wrapped one to a plain one and back, and not
to another class. No framework is known here by name.

That two states are equal says nothing: before the first step both are empty. A mere wrapper hands
over what the inner one gives, the very object, and an optimizer has the very groups and the very
state of the inner one. One that adds state of its own, or gives the inner one's in another form, is
left as it is; one that begins to do so is an error at the next save.

Loaders are not looked through: one that fetches ahead knows better than the one inside how far
training has come. Imports no torch.
"""

from __future__ import annotations

import logging
import operator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from laststep.errors import Usage
from laststep.state.provider import AroundProvider, State, StateProvider
from laststep.state.tensors import is_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

_INSIDE: Final = (
    "optimizer", "_optimizer", "optim", "base_optimizer", "inner_optimizer",
    "scheduler", "_scheduler", "lr_scheduler", "scaler", "_scaler", "grad_scaler",
)  # fmt: skip
"""Under these names frameworks hold what they wrap."""
_MOST = 8
"""So many wrappers around each other are looked through."""


class Unwrapped(AroundProvider):
    """Provides what is inside of mere wrappers; checks at each save that they still are that."""

    def __init__(self, layers: Sequence[Any], inner: StateProvider) -> None:
        self._layers, self._inner = layers, inner
        self.kind, self.cheap, self.passive = inner.kind, inner.cheap, inner.passive
        self.per_rank, self.when_ranks_change = inner.per_rank, inner.when_ranks_change

    def describe(self) -> State:
        _check(self._layers)
        return super().describe()


def layers_of(item: Any) -> list[Any]:
    """The thing itself, and what is inside of it while that is a mere wrapper."""
    layers = [item]
    while len(layers) <= _MOST:
        inner = _inside(layers[-1])
        if inner is None:
            break
        layers.append(inner)
    return layers


def _check(layers: Sequence[Any]) -> None:
    """`Usage` where one that was a mere wrapper is none any more: its state would be lost."""
    for wrapper, inner in pairwise(layers):
        if not _is_mere(wrapper, inner):
            raise Usage(
                "a wrapper that had no state of its own has one now, or holds something else",
                expected=f"that {type(wrapper).__name__} gives what the {type(inner).__name__} in "
                "it gives, as it did when the Checkpointer was made",
                found="another state",
                remedy="make a new Checkpointer, or pass what is inside instead of the wrapper, "
                "and the wrapper's own state as another item",
            )


def _inside(wrapper: Any) -> Any | None:
    """The optimizer in a mere wrapper that is one too, or the optimizer, scheduler or scaler of
    torch's in one that is of no class of torch's."""
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
    """Of an optimizer groups and state are saved: say what another one in it may lose by that."""
    what = "which has a state of its own: that is not saved with it; pass that one as an item too"
    if wrapper.state is inner.state:
        what = (
            "and gives more than that one's state, or another form of it: only groups and the "
            "state of parameters are saved; write a provider for the rest"
        )
    log.warning("%s holds the optimizer %s, %s", type(wrapper).__name__, type(inner).__name__, what)


def _is_mere(wrapper: Any, inner: Any) -> bool:
    """Whether all that the wrapper has is the inner one's. Quick: no state is put together."""
    if not is_optimizer(wrapper):
        return _hands_over(wrapper, inner)
    mine, its = wrapper.param_groups, inner.param_groups
    if len(mine) != len(its) or not all(map(operator.is_, mine, its)):
        return False
    if wrapper.state is inner.state:
        return _gives_as_torch(wrapper) or _hands_over(wrapper, inner)
    return not wrapper.state and _hands_over(wrapper, inner)


def _gives_as_torch(optimizer: Any) -> bool:
    """Whether its `state_dict` is torch's own, which gives its groups and its state."""
    of_class = getattr(type(optimizer), "state_dict", None)
    return str(getattr(of_class, "__module__", "")).startswith("torch.")


class _StandIn:
    """In the place of what is wrapped: gives a state that nobody else has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.given: dict[str, Any] = {}

    def state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        return self.given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _hands_over(wrapper: Any, inner: Any) -> bool:
    """Whether the wrapper's `state_dict` returns what the inner one's does, and leaves it as it is.
    A twin of the wrapper is asked, so neither of the two is touched."""
    if hasattr(type(wrapper), "__del__"):
        return False  # the end of a twin would be taken for the wrapper's
    stand_in = _StandIn(inner)
    try:
        twin = object.__new__(type(wrapper))
        for name, value in vars(wrapper).items():
            twin.__dict__[name] = stand_in if value is inner else value
        return twin.state_dict() is stand_in.given and not stand_in.given
    except Exception:  # noqa: BLE001 (whatever it is: it will come out where it is reported)
        return False


def of_torch(owner: object) -> str | None:
    """The class of torch that an object is, or derives from: a user may rename a class of theirs
    and still resume."""
    names = (k.__name__ for k in type(owner).__mro__ if k.__module__.startswith("torch."))
    return next(names, None)


def _held(wrapper: Any) -> Iterator[Any]:
    """What it may wrap; it has a state to be asked for."""
    for name in _INSIDE:
        try:
            inner = getattr(wrapper, name, None)
        except Exception:  # noqa: BLE001, S112 (a property that cannot answer yet: it wraps nothing)
            continue
        if inner is not None and inner is not wrapper and hasattr(inner, "state_dict"):
            yield inner
