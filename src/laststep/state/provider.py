"""What a state provider is: the object that describes an item's state and puts it back.

Knows nothing of files or copies. Everything that a save or a restore needs follows from `describe`:
the tree is taken apart and the bytes behind every tensor are found; a restore writes them back in
place, or hands the loaded tree to `restore`.

Pieces, the tensors that a provider describes, are named tuples: a save of 100,000 tensors makes as
many of them while training waits.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from laststep.errors import LaststepError, MismatchError
from laststep.process import system

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import torch

    from laststep.state.layouts import Layout
    from laststep.state.tree import Path


Shape = tuple[int, ...]


class BoxPart(NamedTuple):
    """What a piece is that is not a whole tensor but a box of one."""

    tensor: str
    shape: Shape
    start: Shape


class Piece(NamedTuple):
    """A tensor of an item, described; plans are cached under pieces, so they hold no memory."""

    name: str
    dtype: str
    shape: Shape
    size_bytes: int
    device: str
    contiguous: bool
    volatile: bool
    """Whether a forward pass may change it (BatchNorm's statistics): then it is never lazy."""
    part: BoxPart | None = None
    trained: bool = False
    """Whether an optimizer may change it: what is frozen lies together, apart from the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor that shares bytes with others: a strided window into a stored base piece."""

    base: str
    dtype: str
    shape: Shape
    stride: Shape
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """An item's state taken apart: its tree, its pieces, and which names share bytes."""

    tree: object
    pieces: tuple[Piece, ...]
    sources: tuple[torch.Tensor, ...]
    """The live tensor of each piece (possibly strided); nobody here looks into it."""
    ties: dict[str, str] = field(default_factory=dict)
    """A name whose tensor is the same memory as the piece named by the value."""
    views: dict[str, View] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every tensor by its name, those that share bytes included; opaque like `sources`."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """How those lie that this rank holds a part of; `tensors` and `sources` have that part."""
    owners: dict[str, object] = field(default_factory=dict)
    """The live object of each of those, to be handed over when its part has been restored."""


class Absent:
    """Stands in a restored tree for what was not restored: left out, missing or mismatched."""

    def __repr__(self) -> str:
        return "ABSENT"

    def __copy__(self) -> Absent:
        return self  # there is one, and it is known by its identity

    def __deepcopy__(self, memo: object) -> Absent:
        return self

    def __reduce__(self) -> str:
        raise TypeError("ABSENT stands for what was not restored, and is no value to save")


ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An item's state at this moment, by reference: nothing is copied to describe it."""

    value: object
    """Containers, plain values and live tensors or arrays."""
    fresh: tuple[Path, ...] = ()
    """Under these paths restore hands over fresh tensors instead of writing into the live ones."""
    loose: tuple[Path, ...] = ()
    """Under these paths live and stored tensors need not pair up; `check` says what must fit."""
    things: tuple[Path, ...] = ()
    """Where things with a state of their own stand in a dict: a restore does not take them away,
    and one that is not stored is missing."""
    volatile: frozenset[Path] = frozenset()
    """Paths of tensors that a forward pass may change, so that they cannot be captured lazily."""
    standalone: bool = False
    """Gets a data file of its own even when it is small."""


def lies_under(path: Path, prefixes: tuple[Path, ...]) -> bool:
    """Whether a path is one of the prefixes or below one."""
    return any(path[: len(prefix)] == prefix for prefix in prefixes)


def lies_above(path: Path, others: Iterable[Path]) -> bool:
    """Whether a path is one of the others or above one."""
    return any(other[: len(path)] == path for other in others)


def has_absent(entry: object) -> bool:
    """Whether anything in a restored tree was not restored."""
    return entry is ABSENT or any(map(has_absent, _parts(entry)))


def has_loaded(entry: object) -> bool:
    """Whether anything in a restored tree was restored: an empty container is something."""
    parts = _parts(entry)
    return any(map(has_loaded, parts)) if parts else entry is not ABSENT


def _parts(entry: object) -> Collection[object]:
    if isinstance(entry, dict):
        return entry.values()
    return entry if isinstance(entry, list | tuple | deque) else ()


@contextlib.contextmanager
def handing_over(to: str) -> Iterator[None]:
    """`MismatchError` where code of others does not take what is stored. That this process is short
    of memory, or a file cannot be read, says nothing about what is stored."""
    try:
        yield
    except (LaststepError, OSError):
        raise
    except Exception as error:
        if system.is_one(error):
            raise
        why = str(error).partition("\n")[0]
        raise MismatchError(
            f"{to} does not take what is stored",
            found=f"{type(error).__name__}: {why}"[:300],
            remedy="restore into what was saved, or leave it out: only=[…]",
        ) from error


WhenRanksChange = Literal["keep", "derive", "drop", "refuse"] | Callable[[list[Any], int, int], Any]
"""A function gets the states of all ranks that were, a rank, and how many ranks there are now."""


class StateProvider(ABC):
    """Describes an item's state and puts it back; subclass it for state of your own kind."""

    kind: str = "custom"
    """One word for the catalog."""
    passive: bool = False
    """Whether `describe` runs no code but laststep's and torch's own, which change no tensor: then
    the copy of a state that was met before may begin while it is described again."""
    cheap: bool = False
    """Whether `describe` may be called once more than there are saves, to prepare the first one."""

    per_rank: bool = False
    """Whether in a job of several ranks each has a state of its own, such as its place in the data;
    else ranks that hold the same tensors hold the same state, and it is stored once."""
    when_ranks_change: WhenRanksChange = "refuse"
    """What becomes of such a state in a job of another number of ranks: `keep` (a rank takes that
    of its number, if there is one), `derive` (the same, and `derive` makes one for new ranks),
    `drop` (with a warning), `refuse`, or a function that makes a rank's state of all."""

    @abstractmethod
    def describe(self) -> State:
        """The state now. Called on the training thread in `save()`: MUST be quick, and MUST NOT
        change the tensors that it describes, which may be being copied already."""

    @abstractmethod
    def restore(self, value: object) -> None:
        """Take over a loaded tree of the shape that `describe` gave. Tensors restored in place
        are the live ones; what was not restored is `ABSENT`. Called on the training thread."""

    def derive(self, value: object, rank: int) -> None:
        """Take over a state that another rank had, so that this one's differs from it."""
        raise NotImplementedError

    def check(self, stored: object) -> list[str]:
        """What of a stored tree does not fit, in words, before anything is touched."""
        return []

    def refuses(self, stored: object) -> dict[Path, str]:
        """Parts of a stored tree that must be left alone, each with why, in words: what would be
        restored from them does not fit something that they do not hold themselves."""
        return {}

    def lacks(self, stored: object) -> list[Path]:
        """Parts of a stored tree for which there is nothing live: they are left alone. On one rank
        that does not fit, unless another rank has use for them."""
        return []

    def models(self, paths: list[Path]) -> list[object]:
        """For stored tensors without a live counterpart: live ones that they are to lie like over
        the ranks of a job, or None."""
        return [None] * len(paths)

    def devices(self, paths: list[Path]) -> list[str]:
        """Where stored tensors without a live counterpart are to be put."""
        return ["cpu"] * len(paths)

    def parts(self) -> tuple[object, ...]:
        """The objects that this provider speaks for, so that others can find e.g. modules."""
        return ()


class AroundProvider(StateProvider):
    """Stands around another provider, and asks that one everything."""

    _inner: StateProvider

    def describe(self) -> State:
        return self._inner.describe()

    def restore(self, value: object) -> None:
        self._inner.restore(value)

    def derive(self, value: object, rank: int) -> None:
        self._inner.derive(value, rank)

    def check(self, stored: object) -> list[str]:
        return self._inner.check(stored)

    def refuses(self, stored: object) -> dict[Path, str]:
        return self._inner.refuses(stored)

    def lacks(self, stored: object) -> list[Path]:
        return self._inner.lacks(stored)

    def models(self, paths: list[Path]) -> list[object]:
        return self._inner.models(paths)

    def devices(self, paths: list[Path]) -> list[str]:
        return self._inner.devices(paths)

    def parts(self) -> tuple[object, ...]:
        return self._inner.parts()
