"""State providers: objects that describe an item's state and put it back.

Knows nothing of files or copies. `describe` is all that a save or a restore needs: a save takes the
returned tree apart and finds the bytes of every tensor; a restore writes them back in place, or
passes the loaded tree to `restore`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from laststep.errors import LaststepError, MismatchError
from laststep.process import system

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from laststep.state.tree import Path


class Absent:
    """A placeholder in a restored tree for a value that was skipped, missing or mismatched."""

    def __repr__(self) -> str:
        return "ABSENT"

    def __copy__(self) -> Absent:
        return self  # a singleton, compared by identity

    def __deepcopy__(self, memo: object) -> Absent:
        return self

    def __reduce__(self) -> str:
        raise TypeError("ABSENT marks values that were not restored and cannot be saved")


ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An item's state at this moment, by reference: nothing is copied to describe it."""

    value: object
    """Containers, plain values and live tensors or arrays."""
    fresh: tuple[Path, ...] = ()
    """Paths under which a restore passes new tensors to the provider instead of writing into live
    ones."""
    loose: tuple[Path, ...] = ()
    """Paths under which live and stored tensors need not match one to one; `check` reports
    mismatches."""
    things: tuple[Path, ...] = ()
    """Paths of dict entries that are objects with a state of their own: a restore never deletes
    them, and reports one that is not stored as missing."""
    volatile: frozenset[Path] = frozenset()
    """Paths of tensors that a forward pass may change, so that they cannot be captured lazily."""
    standalone: bool = False
    """True if the item gets its own data file even when it is small."""


def lies_under(path: Path, prefixes: tuple[Path, ...]) -> bool:
    """Return True if a path is one of the prefixes or below one."""
    return any(path[: len(prefix)] == prefix for prefix in prefixes)


def lies_above(path: Path, others: Iterable[Path]) -> bool:
    """Return True if a path is one of the others or above one."""
    return any(other[: len(path)] == path for other in others)


def has_absent(entry: object) -> bool:
    """Return True if any part of a restored tree was not restored."""
    return entry is ABSENT or any(map(has_absent, _parts(entry)))


def has_loaded(entry: object) -> bool:
    """Return True if any part of a restored tree was restored; an empty container counts as
    restored."""
    parts = _parts(entry)
    return any(map(has_loaded, parts)) if parts else entry is not ABSENT


def _parts(entry: object) -> Collection[object]:
    if isinstance(entry, dict):
        return entry.values()
    return entry if isinstance(entry, list | tuple | deque) else ()


@contextlib.contextmanager
def handing_over(to: str) -> Iterator[None]:
    """Convert exceptions of foreign code that rejects the stored state into `MismatchError`. Errors
    of laststep, `OSError` and a lack of memory pass unchanged, because they do not mean that the
    stored state is wrong."""
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
    """True if `describe` runs only code of laststep and torch that changes no tensor. The copy of
    an already known state may then start while the state is described again."""
    cheap: bool = False
    """True if `describe` may be called once in addition to the saves, to prepare the first one."""

    per_rank: bool = False
    """True if each rank of a job has its own state, such as its position in the data. Otherwise
    ranks that hold the same tensors have the same state, and it is stored once."""
    when_ranks_change: WhenRanksChange = "refuse"
    """Policy for a per-rank state in a job with another number of ranks: `keep` (each rank takes
    the state of its number, if there is one), `derive` (like `keep`, and new ranks call `derive`),
    `drop` (with a warning), `refuse`, or a function that computes a rank's state from all
    states."""

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
        or with None if they have no live counterpart. The latter is a mismatch unless another rank
        needs them."""
        return {}

    def destinations(self, paths: list[Path]) -> list[object]:
        """Return, for each stored tensor without a live counterpart, the name of a device, or a
        live tensor whose device and layout the new tensor takes over."""
        return ["cpu"] * len(paths)

    def parts(self) -> tuple[object, ...]:
        """Return the objects behind this provider, so that others can find e.g. modules."""
        return ()


class AroundProvider(StateProvider):
    """Forwards all calls to another provider."""

    _inner: StateProvider

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
