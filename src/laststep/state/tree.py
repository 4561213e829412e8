"""The state of an item taken apart: a tree of plain values, pieces, and what is stored of them.

Knows nothing of torch: `collecting` takes a live state apart. Names of tensors are paths of keys as
strings, one to one, as docs/format.md defines them. Pieces are named tuples because a save of
100,000 tensors creates as many of them while training waits.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from laststep.codecs import objects
from laststep.codecs.objects import INT_MAX, INT_MIN, Tagged, TensorRef, is_utf8
from laststep.constants import DTYPES
from laststep.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from laststep.state.layouts import Layout


_RESERVED = "__metadata__"


def name_of(path: tuple[object, ...]) -> str:
    return "/".join(map(_escaped, path))


def names_in(path: tuple[object, ...], keys: Iterable[object]) -> list[str]:
    above = f"{name_of(path)}/" if path else ""
    return list(map(above.__add__, map(_escaped, keys)))


def path_of(name: str) -> tuple[object, ...]:
    """Return the path with this name. Raise `CorruptError` if there is none."""
    if name == "":
        return ()
    parts = name.split("/")
    is_escaped = "~" in name or "#" in name or "" in parts or _RESERVED in parts
    if not is_escaped and name.isascii():
        return tuple(parts)
    with contextlib.suppress(CorruptError, UsageError, ValueError):
        path = tuple(map(_key, parts))
        if name_of(path) == name:  # "#007", or "~3true" with a space in it, is no name
            return path
    raise CorruptError(
        "cannot read the name of a tensor",
        expected="keys joined by '/', escaped as docs/format.md says",
        found=repr(name)[:200],
    )


def _escaped(key: object) -> str:
    if type(key) is str:
        if key == "":
            return "~4"
        if key == _RESERVED:
            return "~5"
        if key.isascii() or is_utf8(key):
            text = key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key
            return "~2" + text[1:] if text[0] == "#" else text
    elif type(key) is int and INT_MIN <= key <= INT_MAX:
        return f"#{key}"
    try:
        return "~3" + objects.encode(key).decode().replace("~", "~0").replace("/", "~1")
    except UsageError as error:
        raise UsageError(
            "cannot name a tensor",
            expected="keys that are plain Python values",
            found=error.found,
            remedy="use keys of another type in the state",
        ) from None


def _key(part: str) -> object:
    if part == "~4":
        return ""
    if part == "~5":
        return _RESERVED
    if part.startswith("#"):
        return int(part[1:21])
    text = part.replace("~1", "/").replace("~0", "~")
    if part.startswith("~3"):
        return objects.decode(text[2:].encode(), where="")
    return "#" + text[2:] if part.startswith("~2") else text


Path = tuple[object, ...]

MAX_DEPTH = 200
PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, range})


@dataclass(frozen=True, slots=True)
class Owned:
    """A state and the class of the object that returned it, to refuse one of another class."""

    owner: str
    state: object


OWNED: Final = "owned"
"""The tag of an `Owned` in a stored tree: `[owner, state]`."""


def rebuild(
    tree: object, *, leaf: Callable[[str], object], revive: Callable[[Tagged], object]
) -> object:
    """Rebuild a state: replace TensorRefs by `leaf` of their names, Tagged by `revive` of them."""

    def build(node: object) -> object:
        kind = type(node)
        if kind is TensorRef:
            return leaf(node.name)  # type: ignore[attr-defined]
        if kind is dict or kind is OrderedDict:
            return kind(zip(node, map(build, node.values()), strict=True))  # type: ignore[attr-defined,call-overload]
        if kind is list or kind is tuple:
            return kind(map(build, node))  # type: ignore[call-overload]
        if kind is Tagged:
            return revive(Tagged(node.tag, build(node.value)))  # type: ignore[attr-defined]
        if kind is deque:
            return deque(map(build, node), node.maxlen)  # type: ignore[attr-defined,call-overload]
        if isinstance(node, tuple) and hasattr(node, "_make"):
            return node._make(map(build, node))
        return node

    return build(tree)


def tensor_names(tree: object) -> list[str]:
    names: list[str] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, TensorRef):
            names.append(node.name)
        elif isinstance(node, Tagged):
            stack.append(node.value)
        elif isinstance(node, dict):
            stack += reversed(node.values())
        elif isinstance(node, list | tuple | deque):
            stack += reversed(node)
    return names


def owned(tagged: Tagged) -> Owned:
    match tagged.value:
        case [str(owner), state]:
            return Owned(owner, state)
    raise CorruptError("the owner of a state is malformed", found=repr(tagged.value)[:80])


def owners(tree: object, path: Path = ()) -> dict[Path, str]:
    """Return the classes of the objects that returned a tree or its parts, by path."""
    if type(tree) is Tagged and tree.tag == OWNED:
        return {path: owned(tree).owner}
    classes: dict[Path, str] = {}
    if type(tree) is dict:
        for key, inner in tree.items():
            if type(inner) in (Tagged, dict):
                classes |= owners(inner, (*path, key))
    return classes


def show_path(path: Path) -> str:
    """Return a path in the form that a person would write: `groups[0]['fn']`."""
    if not path:
        return "the top of the state"
    text = str(path[0])
    for key in path[1:]:
        text += f"[{key!r}]"
    return text


Shape = tuple[int, ...]


class BoxPart(NamedTuple):
    """The position of a piece that is a box of a tensor instead of a whole tensor."""

    tensor: str
    shape: Shape
    start: Shape


class Piece(NamedTuple):
    """A tensor of an item, without its memory, because pieces are keys of cached plans."""

    name: str
    dtype: str
    shape: Shape
    size_bytes: int
    device: str
    contiguous: bool
    volatile: bool
    """True if a forward pass may change it, so that it is never captured lazily."""
    part: BoxPart | None = None
    trained: bool = False
    """True if an optimizer may change it. Frozen tensors are stored apart."""


class View(NamedTuple):
    """A tensor that shares bytes with others: a strided window into a stored base piece."""

    base: str
    dtype: str
    shape: Shape
    stride: Shape
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """An item's state taken apart: its tree, its pieces, and the names that share bytes."""

    tree: object
    pieces: tuple[Piece, ...]
    sources: tuple[torch.Tensor, ...]
    """The live tensor of each piece (possibly strided); opaque to this module."""
    ties: dict[str, str] = field(default_factory=dict)
    """Tied name → name of the piece that has the same memory."""
    views: dict[str, View] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every tensor by name, including those that share bytes; opaque like `sources`."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Layouts of the sharded tensors; `tensors` and `sources` contain this rank's part of them."""
    owners: dict[str, object] = field(default_factory=dict)
    """The live object of each tensor in `layouts`, to return after its part has been restored."""


def merge_trees(first: object, second: object) -> object:
    """Merge two ranks' parts of an item; the first wins, as with settings of pipeline stages."""
    if isinstance(first, dict) and isinstance(second, dict):
        merged = dict(first)
        for key, value in second.items():
            merged[key] = merge_trees(first[key], value) if key in first else value
        return type(first)(merged)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return list(map(merge_trees, first, second))
    match first, second:
        case Tagged(tag="owned"), Tagged(tag="owned"):
            ours, theirs = owned(first), owned(second)
            return Tagged(OWNED, [ours.owner, merge_trees(ours.state, theirs.state)])
    return first


_MAX_BYTES = (1 << 63) - 1
"""The largest size that torch can represent."""


class TensorSpec(NamedTuple):
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    name: str
    kind: str
    tree: object
    names: list[str]
    """All names in the tree, of tensors with and without bytes of their own."""
    ties: dict[str, str]
    views: dict[str, View]
    tensors: dict[str, TensorSpec]
    """The tensors with bytes of their own, by name."""

    def view_of(self, name: str) -> View | None:
        return self.views.get(self.ties.get(name, name))

    def source_of(self, name: str) -> str:
        """Return the name of the stored tensor that contains the bytes of a name."""
        view = self.view_of(name)
        return view.base if view is not None else self.ties.get(name, name)

    def window_of(self, name: str) -> tuple[str, View | None]:
        """Return (source, view) of a name; names for which both are equal are the same tensor."""
        return self.source_of(name), self.view_of(name)

    def spec_of(self, name: str) -> TensorSpec:
        view = self.view_of(name)
        if view is not None:
            return TensorSpec(view.dtype, view.shape)
        return self.tensors[self.ties.get(name, name)]


def encode_item(collected: Collected, kept: objects.EncodedDicts | None = None) -> bytes:
    """Encode an item's tree, ties and views. `kept` spares parts shared with an earlier save."""
    views = dict(zip(collected.views, map(tuple, collected.views.values()), strict=True))
    return objects.encode({"tree": collected.tree, "ties": collected.ties, "views": views}, kept)


def decode_item(
    trees: list[tuple[bytes, str]], *, name: str, kind: str, tensors: dict[str, TensorSpec]
) -> StoredItem:
    """Decode an item from (tree, location) pairs: several if ranks had different parts of it. Raise
    `CorruptError` if a tree is malformed or refers to tensors that are not stored."""
    tree: object = None
    ties: dict[str, str] = {}
    views: dict[str, View] = {}
    for number, (data, where) in enumerate(trees):
        match objects.decode(data, where=where):
            case {"tree": part, "ties": dict(tied), "views": dict(viewed), **rest} if not rest:
                names: list[object] = [*tied, *tied.values(), *viewed]
            case _:
                names = [None]
        if not {str}.issuperset(map(type, names)):
            raise CorruptError(
                "the tree of an item is malformed", where=where, expected="tree, ties and views"
            )
        tree = part if number == 0 else merge_trees(tree, part)
        ties.update(tied)
        for key, entry in viewed.items():
            views[key] = _view(entry, where)
    where = trees[0][1]
    try:
        owners(tree)
    except CorruptError as error:
        raise error.amended(where=where) from None
    item = StoredItem(
        name=name,
        kind=kind,
        tree=tree,
        names=tensor_names(tree),
        ties=ties,
        views=views,
        tensors=tensors,
    )
    for leaf in item.names:
        source = item.source_of(leaf)
        if source not in tensors:
            raise CorruptError(
                "a tensor named in the tree is not stored", where=where, found=repr(source)
            )
        view = item.view_of(leaf)
        if view is not None and not _lies_in(view, tensors[source]):
            raise CorruptError(
                "a view lies outside its base tensor", where=where, found=repr(view)[:200]
            )
    return item


def _lies_in(view: View, base: TensorSpec) -> bool:
    if view.dtype not in DTYPES or base.dtype != "uint8" or len(base.shape) != 1:
        return False
    size = DTYPES[view.dtype].size_bytes
    # A stride of 0 repeats one element any number of times; torch still counts all the bytes.
    if math.prod(max(n, 1) for n in view.shape) * size > _MAX_BYTES:
        return False
    reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    stop = view.offset_bytes + (0 if 0 in view.shape else (reach + 1) * size)
    fits = all(step * size <= _MAX_BYTES for step in view.stride)
    return fits and view.offset_bytes % size == 0 and stop <= base.shape[0]


def _view(entry: object, where: str) -> View:
    match entry:
        case (str(base), str(dtype), tuple(shape), tuple(stride), int(offset)):
            numbers = (*shape, *stride, offset)
            if len(shape) == len(stride) and all(type(n) is int and n >= 0 for n in numbers):
                return View(base, dtype, shape, stride, offset)
    raise CorruptError("a view of an item is malformed", where=where, found=repr(entry)[:80])
