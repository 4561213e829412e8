"""Walk a state: one that is new, or probably built like that of the last save, unless it is not.

Between two saves a training run keeps its tensors and changes its numbers. A walk copies the plain
values and notes, for all else, what it meets and where: its trace. A state that leaves the same
trace as the last one has the same names in the same order, so it only remains to look at the
memory of its leaves (`state.tensors.tensor_places`). Notes are lists that are filled and compared
whole, as this runs while training waits. Holds no leaf between saves; imports no torch.
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
"""The tree of a container of leaves, or of one of such containers. Trees are never changed, so they
share theirs with those of other saves."""

_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple, Owned})
_NO_LEAVES: Final = PLAIN | _CONTAINERS
_DICT: Final = frozenset({dict})
_EXACT: Final = frozenset({str, int, bool, bytes, type(None)})
"""Keys of these types are the same key if they are equal; others may be equal and yet differ, as
0.0 and -0.0 do, or (1,) and (True,)."""


class _Different(Exception):
    """The state is not the known one; it never leaves this module."""


class _Walk:
    """Walks through a state once; `keys` and `sizes` are the trace that it leaves."""

    def __init__(self, parts: Iterator[_Part]) -> None:
        self._parts = parts
        self.leaves: list[object] = []
        self.keys: list[object] = []
        """Of every stretch of leaves: its path, the names of its rows, and the keys in these."""
        self.sizes: list[int] = []
        """How many each of those are."""

    def container(self, node: object, path: Path) -> object:
        if len(path) >= MAX_DEPTH:  # `copy_tree` says where
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
        if kinds == _DICT:  # as an optimizer has its state: thousands of dicts, so all at once
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
        """Leaves that follow each other: a container of them, or several in one above them."""
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
        """The known tree; if it is of another stretch than this, the traces differ as well."""
        part = next(self._parts, None)
        if part is None:
            raise _Different
        return part


class FirstWalk(_Walk):
    """The walk through a new state: it names the leaves, and makes the parts that later walks take
    over."""

    tree: object

    def __init__(self, takes: Callable[[type], bool], volatile: frozenset[Path]) -> None:
        super().__init__(iter(()))
        self._takes = takes
        self._taken: set[type] = set()
        self._volatile = volatile
        self.names: list[str] = []
        """One for each leaf."""
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
    """Remembers how a state is built, to recognise one that is built the same."""

    def __init__(self, walk: FirstWalk) -> None:
        self._parts = walk.parts
        self._keys = walk.keys
        self._kinds = list(map(type, walk.keys))  # 1, True and 1.0 are equal keys of different name
        self._sizes = walk.sizes
        self._inexact = [n for n, kind in enumerate(self._kinds) if kind not in _EXACT]
        self._names = self._names_in(walk.keys)

    def walk(self, value: object) -> tuple[object, list[object]] | None:
        """(tree, leaves) of a state that is built just so, whatever its plain values are."""
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
        """The names of the keys of which equality does not tell that they are the same: different
        keys have different names, to the last bit. None where one has no name."""
        try:
            return [name_of((keys[number],)) for number in self._inexact]
        except UsageError:
            return None


def first_walk(
    value: object, takes: Callable[[type], bool], volatile: frozenset[Path]
) -> FirstWalk | None:
    """Walk through a new state. None where `takes` refuses the type of a leaf, or a key has no
    name."""
    walk = FirstWalk(takes, volatile)
    try:
        walk.tree = _walked(walk, value)
    except UsageError:
        return None
    return None if walk.tree is None else walk


def _walked(walk: _Walk, value: object) -> object | None:
    """The tree of a state, or None where it is another."""
    if type(value) not in _CONTAINERS:
        return None
    try:
        return walk.container(value, ())
    except (_Different, RecursionError):
        return None
