"""Walk a state, and recognise one that has the same structure as at the last save.

Between two saves a training run keeps its tensors and changes its numbers. A walk copies the plain
values and records a trace of everything else: which containers and keys it meets, in order. If a
state leaves the same trace as the last one, it has the same names in the same order, and only the
memory of its leaves remains to be compared (`TensorPlaces`). Traces are lists that
are filled and compared as a whole, because this runs while training waits. Holds no leaf between
saves; imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, compress
from typing import TYPE_CHECKING, Final

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import UsageError
from laststep.state.tree import MAX_DEPTH, OWNED, PLAIN, Owned, Path, name_of, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_Part = dict[object, object]
"""The tree of a container of leaves, or of a container of such containers. Trees are never changed,
so the trees of several saves share their parts."""

_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple, Owned})
_NO_LEAVES: Final = PLAIN | _CONTAINERS
_DICT: Final = frozenset({dict})
_EXACT: Final = frozenset({str, int, bool, bytes, type(None)})
"""Key types for which equal keys are identical. Keys of other types may be equal and yet differ,
such as 0.0 and -0.0, or (1,) and (True,)."""


class _Different(Exception):
    """The state is not the known one; never leaves this module."""


class _Walk:
    """Walks through a state once; `keys` and `sizes` are the trace that it leaves."""

    def __init__(self, parts: Iterator[_Part]) -> None:
        self._parts = parts
        self.leaves: list[object] = []
        self.keys: list[object] = []
        """For every sequence of leaves: its path, the names of its rows, and the keys in the
        rows."""
        self.sizes: list[int] = []
        """The numbers of these entries."""

    def container(self, node: object, path: Path) -> object:
        if len(path) >= MAX_DEPTH:  # `copy_tree` then raises an error with the path
            raise _Different
        kind = type(node)
        if kind is Owned:
            if type(node.state) not in _CONTAINERS:  # type: ignore[attr-defined]
                raise _Different
            return Tagged(OWNED, [node.owner, self.container(node.state, path)])  # type: ignore[attr-defined]
        if kind is dict:
            return self._entries(node, path)  # type: ignore[arg-type]
        if kind is OrderedDict:
            return OrderedDict(self._entries(dict(node), path))  # type: ignore[call-overload]
        copied = self._entries(dict(enumerate(node)), path)  # type: ignore[arg-type]
        return kind(copied.values())  # type: ignore[call-arg]

    def _entries(self, named: dict[object, object], path: Path) -> dict[object, object]:
        kinds = set(map(type, named.values()))
        if kinds <= PLAIN:
            return dict(named)
        if kinds.isdisjoint(_NO_LEAVES):
            return self._stretch(path, (), (named,))
        if kinds == _DICT:  # optimizer state: thousands of dicts, walked in bulk
            rows: Collection[dict[object, object]] = named.values()  # type: ignore[assignment]
            inner = set(map(type, chain.from_iterable(map(dict.values, rows))))
            if inner and inner.isdisjoint(_NO_LEAVES):
                return self._stretch(path, named, rows)
        copied: dict[object, object] = {}
        for key, value in named.items():
            if type(value) in PLAIN:
                copied[key] = value
            elif type(value) in _CONTAINERS:
                copied[key] = self.container(value, (*path, key))
            else:
                copied[key] = self._stretch(path, (), ({key: value},)).get(key)
        return copied

    def _stretch(
        self, path: Path, names: Collection[object], rows: Collection[dict[object, object]]
    ) -> _Part:
        """Record consecutive leaves: one container of leaves, or all containers of leaves in
        `names`."""
        self.leaves += chain.from_iterable(map(dict.values, rows))
        self.keys += path
        self.keys += names
        self.keys += chain.from_iterable(rows)
        self.sizes += (len(path), len(names), len(rows))
        self.sizes += map(len, rows)
        return self._part(path, names, rows)

    def _part(
        self, path: Path, names: Collection[object], rows: Collection[dict[object, object]]
    ) -> _Part:
        """Return the next known tree. If it belongs to another sequence of leaves, the traces
        differ too."""
        part = next(self._parts, None)
        if part is None:
            raise _Different
        return part


class FirstWalk(_Walk):
    """The walk through a new state: names the leaves, and makes the parts that later walks
    reuse."""

    tree: object

    def __init__(self, takes: Callable[[type], bool], volatile: frozenset[Path]) -> None:
        super().__init__(iter(()))
        self._takes = takes
        self._taken: set[type] = set()
        self._volatile = volatile
        self.names: list[str] = []
        """One name for each leaf."""
        self.volatile_names: set[str] = set()
        self.parts: list[_Part] = []

    def _part(
        self, path: Path, names: Collection[object], rows: Collection[dict[object, object]]
    ) -> _Part:
        paths = [(*path, name) for name in names] if names else [path]
        made: list[_Part] = [self._row(*row) for row in zip(paths, rows, strict=True)]
        self.parts.append(dict(zip(names, made, strict=True)) if names else made[0])
        return self.parts[-1]

    def _row(self, path: Path, row: dict[object, object]) -> _Part:
        kinds = set(map(type, row.values()))
        if not kinds <= self._taken:
            if not all(map(self._takes, kinds)):
                raise _Different
            self._taken |= kinds
        names = names_in(path, row)
        self.names += names
        if self._volatile:
            own = [(*path, key) in self._volatile for key in row]
            self.volatile_names.update(compress(names, own))
        return dict(zip(row, map(TensorRef, names), strict=True))


class KnownState:
    """Remembers the structure of a state, to recognise another state with the same structure."""

    def __init__(self, walk: FirstWalk) -> None:
        self._parts = walk.parts
        self._keys = walk.keys
        self._kinds = list(map(type, walk.keys))  # equal keys, as 1 and True, differ in name
        self._sizes = walk.sizes
        self._inexact = [n for n, kind in enumerate(self._kinds) if kind not in _EXACT]
        self._names = self._names_in(walk.keys)

    def walk(self, value: object) -> tuple[object, list[object]] | None:
        """Return (tree, leaves) of a state with this structure and any plain values, else None."""
        walk = _Walk(iter(self._parts))
        tree = _walked(walk, value)
        same = (
            tree is not None
            and walk.sizes == self._sizes
            and list(map(type, walk.keys)) == self._kinds
            and walk.keys == self._keys
            and self._names_in(walk.keys) == self._names
        )
        return (tree, walk.leaves) if same else None

    def _names_in(self, keys: list[object]) -> list[str] | None:
        """Return the names of the keys that may be equal without being identical. Names differ if
        keys differ in any bit. None if a key has no name."""
        try:
            return [name_of((keys[number],)) for number in self._inexact]
        except UsageError:
            return None


def first_walk(
    value: object, takes: Callable[[type], bool], volatile: frozenset[Path]
) -> FirstWalk | None:
    """Walk through a new state. Return None if `takes` rejects the type of a leaf, or a key has no
    name."""
    walk = FirstWalk(takes, volatile)
    try:
        walk.tree = _walked(walk, value)
    except UsageError:
        return None
    return None if walk.tree is None else walk


def _walked(walk: _Walk, value: object) -> object | None:
    """Return the tree of a state, or None if the walk meets another structure."""
    if type(value) not in _CONTAINERS:
        return None
    try:
        return walk.container(value, ())
    except (_Different, RecursionError):
        return None
