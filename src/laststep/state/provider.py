"""State providers: objects that describe an item's state and put it back.

A save takes the tree that `describe` returned apart and finds the bytes of every tensor; a restore
writes them back in place, or passes the loaded tree to `restore`. Modules and optimizers have
modules of their own; here are the providers of everything else.
"""

from __future__ import annotations

import contextlib
import enum
import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from laststep.checks import shown
from laststep.codecs.digests import digest
from laststep.constants import with_article
from laststep.errors import LaststepError, MismatchError, UsageError
from laststep.process import system
from laststep.state.tensors import put_tensor
from laststep.state.tree import Owned, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from laststep.state.tree import Path


class Absent(enum.Enum):
    """A placeholder in a restored tree for a value that was skipped, missing or mismatched."""

    ABSENT = "ABSENT"

    def __reduce_ex__(self, protocol: object) -> str:  # type: ignore[override]
        raise TypeError("ABSENT marks values that were not restored and cannot be saved")


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An item's state at this moment, by reference: nothing is copied to describe it."""

    value: object
    """Containers, plain values and live tensors or arrays."""
    fresh: tuple[Path, ...] = ()
    """Paths under which a restore passes new tensors instead of writing into live ones."""
    loose: tuple[Path, ...] = ()
    """Paths under which tensors need not match one to one; `check` reports mismatches."""
    things: tuple[Path, ...] = ()
    """Paths of dict entries that are objects with a state of their own: a restore never deletes
    them, and reports one that is not stored as missing."""
    volatile: frozenset[Path] = frozenset()
    """Paths of tensors that a forward pass may change, so that they cannot be captured lazily."""
    standalone: bool = False
    """True if the item gets its own data file even when it is small."""


def lies_under(path: Path, prefixes: tuple[Path, ...]) -> bool:
    return any(path[: len(prefix)] == prefix for prefix in prefixes)


def lies_above(path: Path, paths: Iterable[Path]) -> bool:
    return any(other[: len(path)] == path for other in paths)


def has_absent(entry: object) -> bool:
    """Return True if any part of a restored tree was not restored."""
    return entry is ABSENT or any(map(has_absent, _parts(entry)))


def has_loaded(entry: object) -> bool:
    """Return True if any part of a tree was restored; an empty container counts as restored."""
    parts = _parts(entry)
    return any(map(has_loaded, parts)) if parts else entry is not ABSENT


def _parts(entry: object) -> Collection[object]:
    if isinstance(entry, dict):
        return entry.values()
    return entry if isinstance(entry, list | tuple | deque) else ()


@contextlib.contextmanager
def handing_over(to: str) -> Iterator[None]:
    """Convert exceptions of foreign code that rejects the stored state into `MismatchError`."""
    try:
        yield
    except (LaststepError, OSError):
        raise
    except Exception as error:
        if system.is_one(error):
            raise
        why = str(error).partition("\n")[0]
        raise MismatchError(
            f"{to} rejects the stored state",
            found=f"{type(error).__name__}: {why}"[:300],
            remedy="restore into the kind of object that was saved, or leave it out: only=[…]",
        ) from error


WhenRanksChange = Literal["keep", "derive", "drop", "refuse"] | Callable[[list[Any], int, int], Any]
"""A policy, or a function of (the states of all former ranks, a rank, the number of ranks now)."""


class StateProvider(ABC):
    """Describes an item's state and puts it back; subclass it for your own kind of state."""

    kind: str = "custom"
    """One word for the catalog."""
    passive: bool = False
    """True if `describe` changes no tensor: a copy of the known state may start beside it."""
    per_rank: bool = False
    """True if each rank of a job has its own state, such as its position in the data. Otherwise
    ranks that hold the same tensors have the same state, and it is stored once."""
    mixed: bool = False
    """True for a group in which only some members are per-rank: several ranks cannot save that."""
    when_ranks_change: WhenRanksChange = "refuse"
    """Policy for a per-rank state in a job with another number of ranks: `keep` (each rank takes
    the state of its number, if there is one), `derive` (like `keep`, and new ranks call `derive`),
    `drop` (with a warning), `refuse`, or a function."""

    @abstractmethod
    def describe(self) -> State:
        """Return the current state. Called on the training thread in `save()`: MUST be quick, and
        MUST NOT change the described tensors, because their copy may already have started."""

    @abstractmethod
    def restore(self, value: object) -> None:
        """Take over a loaded tree of the shape that `describe` returned. Tensors that were restored
        in place are the live ones; values that were not restored are `ABSENT`. Called on the
        training thread."""

    def derive(self, value: object, rank: int) -> None:
        """Take over a state of another rank, changed so that this rank's state differs from it."""
        raise NotImplementedError

    def check(self, stored: object) -> list[str]:
        """Return the mismatches of a stored tree as texts, before anything is changed."""
        return []

    def skips(self, stored: object) -> dict[Path, str | None]:
        """Return the parts of a stored tree to skip, with the reason if they must not be restored,
        or None if they have no live counterpart, a mismatch unless another rank needs them."""
        return {}

    def destinations(self, paths: list[Path]) -> list[object]:
        """Return, for each stored tensor without a live counterpart, the name of a device, or a
        live tensor whose device and layout the new tensor takes over."""
        return ["cpu"] * len(paths)

    def parts(self) -> tuple[object, ...]:
        """Return the objects behind this provider, so that others can find e.g. modules."""
        return ()


def _forwarded(name: str) -> Any:
    return property(lambda self: self._inner_property(name))


class AroundProvider(StateProvider):
    """Forwards all calls to another provider."""

    _inner: StateProvider

    kind = _forwarded("kind")
    passive = _forwarded("passive")
    per_rank = _forwarded("per_rank")
    when_ranks_change = _forwarded("when_ranks_change")
    mixed = _forwarded("mixed")

    def _inner_property(self, name: str) -> object:
        return getattr(self._inner, name)

    def describe(self) -> State:
        return self._inner.describe()

    def restore(self, value: object) -> None:
        self._inner.restore(value)

    def derive(self, value: object, rank: int) -> None:
        self._inner.derive(value, rank)

    def check(self, stored: object) -> list[str]:
        return self._inner.check(stored)

    def skips(self, stored: object) -> dict[Path, str | None]:
        return self._inner.skips(stored)

    def destinations(self, paths: list[Path]) -> list[object]:
        return self._inner.destinations(paths)

    def parts(self) -> tuple[object, ...]:
        return self._inner.parts()


@runtime_checkable
class HasStateDict(Protocol):
    """LR schedulers, scalers, stateful loaders, and any other object with these methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class StateDictProvider(StateProvider):
    """Saves an object through its `state_dict` and restores it through its `load_state_dict`."""

    kind = "stateful"

    def __init__(self, owner: HasStateDict) -> None:
        self._owner = owner
        self._gave_dict = False
        self.passive = type(owner).__module__.startswith("torch.optim")
        # Each rank reads different data; any other object has the same state on all ranks.
        self.per_rank = hasattr(owner, "dataset") or hasattr(owner, "__iter__")

    def parts(self) -> tuple[object, ...]:
        return (self._owner,)

    def describe(self) -> State:
        state = self._owner.state_dict()
        self._gave_dict = isinstance(state, dict)
        return State(value=_owned(self._owner, state), fresh=((),))

    def skips(self, stored: object) -> dict[Path, str | None]:
        if isinstance(stored, dict) or not self._gave_dict:
            return {}
        return {(): f"is {with_article(type(self._owner))}, the stored one is a plain value"}

    def restore(self, value: object) -> None:
        with handing_over(f"load_state_dict of {type(self._owner).__name__}"):
            self._owner.load_state_dict(value)  # type: ignore[arg-type]


def of_torch(owner: object) -> str | None:
    """Return the torch class that an object is of, or derives from by any name."""
    names = (k.__name__ for k in type(owner).__mro__ if k.__module__.startswith("torch."))
    return next(names, None)


def _owned(owner: object, state: object) -> object:
    kind = _kind_of_torch(owner)
    return state if kind is None else Owned(kind, state)


def _kind_of_torch(owner: object) -> str | None:
    """Return the torch class of an object; for a scheduler of schedulers with theirs."""
    kind = of_torch(owner)
    inner = getattr(owner, "_schedulers", None)
    if kind is None or not isinstance(inner, list | tuple):
        return kind
    return f"{kind}({', '.join(_kind_of_torch(part) or '…' for part in inner)})"


class ScalerProvider(StateDictProvider):
    """A torch.amp.GradScaler, without the device synchronisation of its own `state_dict`."""

    kind = "scaler"

    def __init__(self, scaler: Any) -> None:
        super().__init__(scaler)
        self.passive = True

    def describe(self) -> State:
        scaler: Any = self._owner
        if not scaler.is_enabled() or scaler._scale is None:
            return State(value=_owned(scaler, scaler.state_dict()), fresh=((),))
        value = {
            "scale": scaler._scale,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": scaler._growth_tracker,
        }
        return State(value=_owned(scaler, value), fresh=((),))

    def check(self, stored: object) -> list[str]:
        keys = set(stored) if isinstance(stored, dict) else {None}
        # A disabled scaler has no state.
        if keys in (set(), _OF_SCALER) and all(map(_is_number, stored.values())):  # type: ignore[attr-defined]
            return []
        return ["is not the state of a gradient scaler"]

    def restore(self, value: object) -> None:
        if not isinstance(value, dict) or not value:
            return
        with handing_over("the gradient scaler"):
            plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
            if not self.check(plain):  # else `check` has already reported it
                self._owner.load_state_dict(plain)


_OF_SCALER: Final = {
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
}


def _is_number(value: object) -> bool:
    if isinstance(value, TensorSpec):
        return value.shape in ((), (1,))
    return isinstance(value, int | float) and not isinstance(value, bool)


class RNG(StateProvider):
    """The random number generators of Python, NumPy and torch (CPU and CUDA)."""

    kind = "rng"
    passive = True
    per_rank = True
    when_ranks_change = "derive"

    def describe(self) -> State:
        kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
        numpy = (str(kind), np.array(keys), int(position), int(has_gauss), float(cached))
        cuda: list[torch.Tensor] = []
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            cuda = torch.cuda.get_rng_state_all()
        value = {
            "python": random.getstate(),
            "numpy": numpy,
            "torch": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }
        return State(value=value, fresh=((),))

    def check(self, stored: object) -> list[str]:
        if isinstance(stored, dict) and {"python", "numpy", "torch"} <= stored.keys():
            return []
        return ["is not the state of random number generators"]

    def restore(self, value: object) -> None:
        if self.check(value):
            return  # `check` has already reported it
        states: dict[str, Any] = value  # type: ignore[assignment]
        with handing_over("a random number generator"):
            if not 0 <= states["numpy"][2] <= 624:  # NumPy would read out of bounds
                raise ValueError(f"position {states['numpy'][2]} of 624 keys")
            torch.set_rng_state(states["torch"]["cpu"])
            if states["torch"]["cuda"] and torch.cuda.is_available():
                count = torch.cuda.device_count()
                torch.cuda.set_rng_state_all(states["torch"]["cuda"][:count])
            random.setstate(states["python"])
            np.random.set_state(states["numpy"])  # noqa: NPY002 (the global state is saved)

    def derive(self, value: object, rank: int) -> None:
        if self.check(value):
            return
        seed = digest(repr((value["python"], rank)).encode())  # type: ignore[index]
        random.seed(seed)
        np.random.seed(int.from_bytes(seed[:4], "little"))  # noqa: NPY002 (as above)
        torch.manual_seed(int.from_bytes(seed[:8], "little"))


class ValueProvider(StateProvider):
    """Nested dicts, lists and tuples of tensors, arrays and plain values, restored in place."""

    kind = "value"
    passive = True

    def __init__(self, value: object) -> None:
        self._value = value

    def describe(self) -> State:
        return State(value=self._value)

    def check(self, stored: object) -> list[str]:
        alike = (dict, (list, deque))  # types whose stored values can be written into live ones
        if any(isinstance(self._value, kind) and not isinstance(stored, kind) for kind in alike):
            return [f"is {with_article(type(self._value))}, the stored one is not"]
        return []

    def restore(self, value: object) -> None:
        with handing_over(with_article(type(self._value))):
            if put(self._value, value) is not self._value and not self.check(value):
                raise MismatchError(
                    f"{with_article(type(self._value))} cannot be changed in place",
                    remedy="pass one that can be written, or a dict that holds it",
                )


def put(live: Any, loaded: Any) -> Any:
    """Write `loaded` into `live` where that is mutable, and return the value to use in its place.

    A value that was only partly loaded replaces nothing, so the result contains no ABSENT, unless
    nothing is live: then it may itself be ABSENT.
    """
    if not has_loaded(loaded):
        return live
    if type(live) in (dict, OrderedDict) and isinstance(loaded, dict):
        return _put_entries(live, loaded)
    if isinstance(live, list | deque) and isinstance(loaded, list | deque):
        merged = [put(a, b) for a, b in zip(live, loaded, strict=False)]
        if has_absent(loaded):  # a partial restore only changes elements that exist
            merged += list(live)[len(loaded) :]
        else:
            merged += list(loaded)[len(live) :]
        live.clear()
        live.extend(merged)
        return live
    if isinstance(live, tuple) and isinstance(loaded, tuple) and len(live) == len(loaded):
        merged = [put(a, b) for a, b in zip(live, loaded, strict=True)]
        return live._make(merged) if hasattr(live, "_make") else type(live)(merged)
    if isinstance(live, np.ndarray) and isinstance(loaded, np.ndarray):
        if live.shape != loaded.shape or not live.flags.writeable:
            return loaded
        live[...] = loaded
        return live
    if isinstance(live, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return put_tensor(live, loaded)
    return live if has_absent(loaded) else loaded


def put_entry(owner: dict[Any, Any], key: object, loaded: object) -> None:
    entry = put(owner.get(key, ABSENT), loaded)
    if entry is not ABSENT:
        owner[key] = entry


def _put_entries(live: dict[Any, Any], loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Make a live dict equal to a stored one: newer entries go, those ABSENT in `loaded` stay."""
    entries = {key: put(live.get(key, ABSENT), inner) for key, inner in loaded.items()}
    if all(inner is not ABSENT for inner in loaded.values()):
        live.clear()  # assignment would keep an equal key of another type: 1 and True
    for key in [key for key in live if key not in loaded]:
        del live[key]
    live.update((key, entry) for key, entry in entries.items() if entry is not ABSENT)
    return live


class PerRank(AroundProvider):
    """Marks an item as per-rank: every rank saves its own state, such as its position in the data.
    `PerRank(loader, when_ranks_change="drop")`; without `when_ranks_change` the item decides."""

    per_rank = True
    mixed = False

    def __init__(self, item: object, *, when_ranks_change: WhenRanksChange | None = None) -> None:
        known = ("keep", "drop", "refuse")
        if when_ranks_change not in (*known, None) and not callable(when_ranks_change):
            raise UsageError(
                "invalid value of when_ranks_change",
                expected=f"one of {', '.join(known)}, or "
                "a function of all ranks' states, a rank and the number of ranks",
                found=shown(when_ranks_change),
                remedy="choose one of these, or leave it out",
            )
        self.item = item
        self._said = when_ranks_change

    def around(self, inner: StateProvider) -> PerRank:
        """Return a copy with this provider, because several Checkpointers may share the item."""
        made = PerRank(self.item, when_ranks_change=self._said)
        made._inner = inner
        return made

    def _inner_property(self, name: str) -> object:
        if name == "when_ranks_change" and self._said is not None:
            return self._said
        return super()._inner_property(name)
