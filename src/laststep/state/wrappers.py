"""Look through wrappers of optimizers, schedulers and scalers, as modules look through DDP.

A framework puts an optimizer behind an object of its own, which is an optimizer too and has no
state but that of the one inside. Which one is inside decides what a state means, so it is the one
that is saved, by its own class: the state goes from a wrapped one to a plain one and back, and not
to another class. No framework is known here by name. Only what the two give tells a mere wrapper:
one that adds state of its own, or gives the inner one's in another form, is left as it is.

Loaders are not looked through: one that fetches ahead knows better than the one inside how far
training has come. Imports no torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from laststep.state.tensors import is_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_INSIDE: Final = (
    "optimizer", "_optimizer", "optim", "base_optimizer", "inner_optimizer",
    "scheduler", "_scheduler", "lr_scheduler", "scaler", "_scaler", "grad_scaler",
)  # fmt: skip
"""Under these names frameworks hold what they wrap."""
_MOST = 8
"""So many wrappers around each other are looked through."""


def unwrapped(item: Any) -> Any:
    """What is inside of mere wrappers, or the thing itself."""
    for _ in range(_MOST):
        inner = _optimizer_in(item) if is_optimizer(item) else _inside(item)
        if inner is None:
            break
        item = inner
    return item


def _optimizer_in(wrapper: Any) -> Any | None:
    """The optimizer in another one that has no parameters and no state but its."""
    for inner in _held(wrapper):
        if not is_optimizer(inner):
            continue
        same_groups = list(map(_ids, wrapper.param_groups)) == list(map(_ids, inner.param_groups))
        if same_groups and (wrapper.state is inner.state or _gives_the_same(wrapper, inner)):
            return inner
        log.warning(
            "%s holds the optimizer %s, which has a state of its own: that is not saved with it; "
            "pass that one as an item too", type(wrapper).__name__, type(inner).__name__,
        )  # fmt: skip
    return None


def _inside(wrapper: Any) -> Any | None:
    """The scheduler, scaler or optimizer in an object of no class of torch's, if all that this one
    gives is that one's state."""
    if not hasattr(wrapper, "state_dict") or hasattr(wrapper, "__iter__") or of_torch(wrapper):
        return None
    found = (inner for inner in _held(wrapper) if of_torch(inner))
    return next((inner for inner in found if _gives_the_same(wrapper, inner)), None)


def of_torch(owner: object) -> str | None:
    """The class of torch that an object is, or derives from: a user may rename a class of theirs
    and still resume."""
    found = (k.__name__ for k in type(owner).__mro__ if k.__module__.startswith("torch."))
    return next(found, None)


def _held(wrapper: Any) -> Iterator[Any]:
    """What it may wrap; it has a state to be asked for."""
    for name in _INSIDE:
        try:
            inner = getattr(wrapper, name, None)
        except Exception:  # noqa: BLE001, S112 (a property that cannot answer yet: it wraps nothing)
            continue
        if inner is not None and inner is not wrapper and hasattr(inner, "state_dict"):
            yield inner


def _ids(group: dict[str, Any]) -> list[int]:
    return list(map(id, group["params"]))


def _gives_the_same(wrapper: Any, inner: Any) -> bool:
    try:
        return _same(wrapper.state_dict(), inner.state_dict())
    except Exception:  # noqa: BLE001 (whatever it is: it will come out where it is reported)
        return False


def _same(one: object, other: object) -> bool:
    """Whether two states are the same tensors and equal values; no tensor is compared by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, int | float | str | bytes) and one == other
