"""Take a nested state apart into a tree of plain values and its leaves, and put it together again.

Knows nothing of torch: what a leaf is, is said by a `Leaves` object. `copy_tree` copies every
container, so a tree that was taken at `save()` does not change when training changes the original.

Names of tensors are paths of keys as strings, one to one, as docs/format.md defines them. A stored
item is its tree, the specs of its tensors and which of them share bytes.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from laststep.codecs import objects
from laststep.codecs.objects import INT_MAX, INT_MIN, Tagged, TensorRef, is_utf8
from laststep.errors import CorruptError, UsageError
from laststep.state.provider import Collected, Shape, View
from laststep.terms import DTYPES, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_RESERVED = "__metadata__"


def name_of(path: tuple[object, ...]) -> str:
    """The name of the leaf at `path`; `UsageError` if a key is of a kind that has no name."""
    return "/".join([_escaped(key) for key in path])


def names_in(path: tuple[object, ...], keys: Iterable[object]) -> list[str]:
    """The names of the leaves that lie under these keys in the container at `path`."""
    above = "".join([f"{_escaped(key)}/" for key in path])
    return [above + _escaped(key) for key in keys]


def path_of(name: str) -> tuple[object, ...]:
    """The path that has this name; `CorruptError` if none has."""
    if name == "":
        return ()
    parts = name.split("/")
    if "~" not in name and "#" not in name and "" not in parts and name.isascii():
        if _RESERVED in parts:
            raise _malformed(name)
        return tuple(parts)
    path = tuple([_key(part, name) for part in parts])
    # Only what `name_of` gives is a name: "#007" or "~3true" with a space in it is none.
    try:
        same = name_of(path) == name
    except UsageError:
        same = False
    if not same:
        raise _malformed(name)
    return path


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
    return "~3" + _typed(key).replace("~", "~0").replace("/", "~1")


def _typed(key: object) -> str:
    try:
        return objects.encode(key).decode()
    except UsageError as error:
        raise UsageError(
            "cannot name a tensor",
            expected="keys that are plain Python values",
            found=error.found,
            remedy="use keys of another type in the state",
        ) from None


def _key(part: str, name: str) -> object:
    """The key that `part` of `name` stands for; need not notice what `_escaped` never writes."""
    if part == "~4":
        return ""
    if part == "~5":
        return _RESERVED
    if part.startswith("#"):
        return _int(part[1:], name)
    if part.startswith("~3"):
        try:
            return objects.decode(_plain(part[2:]).encode(), where=repr(name))
        except UnicodeEncodeError:
            raise _malformed(name) from None
    if part.startswith("~2"):
        return "#" + _plain(part[2:])
    return _plain(part)


def _plain(text: str) -> str:
    return text.replace("~1", "/").replace("~0", "~")


def _int(digits: str, name: str) -> int:
    if len(digits) > 20 or not digits.isascii() or not digits.removeprefix("-").isdigit():
        raise _malformed(name)
    return int(digits)


def _malformed(name: str) -> CorruptError:
    return CorruptError(
        "cannot read the name of a tensor",
        expected="keys joined by '/', escaped as docs/format.md says",
        found=repr(name)[:200],
    )


Path = tuple[object, ...]

MAX_DEPTH = 200
PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, range})
_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Owned:
    """A state and the class of the object that gave it. Only the state is handed out again; the
    class is there to notice that it would go to an object of another class."""

    owner: str
    state: object


OWNED: Final = "owned"
"""The tag of an `Owned` in a stored tree: `[owner, state]`."""


class NotMine:
    """What `Leaves.take` answers for a value that it does not know."""


NOT_MINE: Final = NotMine()


class Leaves(Protocol):
    """Decides what is a leaf and remembers it."""

    def take(self, path: Path, value: object) -> object:
        """The marker that stands for `value` in the tree (a TensorRef or Tagged), or NOT_MINE."""


def copy_tree(value: object, leaves: Leaves, path: Path, *, allow_pickle: bool) -> object:
    """A copy of `value` made of plain values, with every leaf replaced by what `leaves` answers."""
    kind = type(value)
    if kind in PLAIN or (kind is bytes and len(value) <= _SMALL_BYTES):  # type: ignore[arg-type]
        return value
    if kind is dict or kind is OrderedDict:
        _check_depth(path)
        # Spelled out rather than shared with the other containers: this loop runs once per tensor.
        copied = {} if kind is dict else OrderedDict()
        for key, inner in value.items():  # type: ignore[attr-defined]
            if type(inner) in PLAIN:
                copied[key] = inner
            else:
                copied[key] = copy_tree(inner, leaves, (*path, key), allow_pickle=allow_pickle)
        return copied
    if kind is list or kind is tuple:
        _check_depth(path)
        inners: Iterable[object] = value  # type: ignore[assignment]
        if PLAIN.issuperset(map(type, inners)):  # the state of a generator has hundreds
            return kind(inners)
        entries = [
            copy_tree(inner, leaves, (*path, i), allow_pickle=allow_pickle)
            for i, inner in enumerate(inners)
        ]
        return entries if kind is list else tuple(entries)
    taken = leaves.take(path, value)
    if taken is not NOT_MINE:
        return taken
    _check_depth(path)

    def down(key: object, inner: object) -> object:
        return copy_tree(inner, leaves, (*path, key), allow_pickle=allow_pickle)

    return _uncommon(value, down, path, allow_pickle=allow_pickle)


def _check_depth(path: Path) -> None:
    if len(path) > MAX_DEPTH:
        raise UsageError(
            "cannot save a state nested this deeply, or that contains itself",
            where=show_path(path[:8]) + "…",
            expected=f"at most {MAX_DEPTH} levels",
        )


def _uncommon(
    value: object, down: Callable[[object, object], object], path: Path, *, allow_pickle: bool
) -> object:
    if isinstance(value, deque) and type(value) is deque:
        return deque((down(i, inner) for i, inner in enumerate(value)), value.maxlen)
    if type(value) in (set, frozenset):
        return type(value)(value)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make"):
        return value._make(
            down(name, inner) for name, inner in zip(value._fields, value, strict=True)
        )
    if type(value) is bytearray:
        return bytearray(value)
    if type(value) is slice:
        return slice(down(0, value.start), down(1, value.stop), down(2, value.step))
    if allow_pickle:
        return Tagged("pickle", _pickled(value, path))
    raise UsageError(
        f"cannot save {_class_of(value)}",
        where=show_path(path),
        expected="tensors, arrays, containers and plain values",
        remedy="leave it out, give it state_dict() and load_state_dict(), "
        "or pass allow_pickle=True",
    )


def _class_of(value: object) -> str:
    return with_article(f"{type(value).__module__}.{type(value).__qualname__}")


def _pickled(value: object, path: Path) -> bytes:
    try:
        return pickle.dumps(value, protocol=4)
    except Exception as error:  # whatever a user's class raises
        raise UsageError(
            f"cannot pickle {_class_of(value)}",
            where=show_path(path),
            found=str(error),
            remedy="leave it out, or give it state_dict() and load_state_dict()",
        ) from error


def rebuild(
    tree: object, *, leaf: Callable[[TensorRef], object], revive: Callable[[Tagged], object]
) -> object:
    """The nested state again: every TensorRef through `leaf`, every Tagged through `revive`."""

    def build(node: object) -> object:
        kind = type(node)
        if kind is TensorRef:
            return leaf(node)  # type: ignore[arg-type]
        if kind is dict or kind is OrderedDict:
            return kind((key, build(inner)) for key, inner in node.items())  # type: ignore[attr-defined]
        if kind is list:
            return [build(inner) for inner in node]  # type: ignore[attr-defined]
        if kind is tuple:
            return tuple(build(inner) for inner in node)  # type: ignore[attr-defined]
        if kind is Tagged:
            return revive(Tagged(node.tag, build(node.value)))  # type: ignore[attr-defined]
        if kind is deque:
            return deque((build(inner) for inner in node), node.maxlen)  # type: ignore[attr-defined]
        if isinstance(node, tuple) and hasattr(node, "_make"):
            return node._make(build(inner) for inner in node)
        return node

    return build(tree)


def tensor_names(tree: object) -> list[str]:
    """The names of all tensors that a tree refers to, in order."""
    names: list[str] = []

    def see(ref: TensorRef) -> object:
        names.append(ref.name)
        return None

    rebuild(tree, leaf=see, revive=lambda tagged: None)
    return names


def owned(tagged: Tagged) -> Owned:
    """What a tag of an `Owned` stands for; `CorruptError` where it is none."""
    match tagged.value:
        case [str(owner), state]:
            return Owned(owner, state)
    raise CorruptError("the owner of a state is malformed", found=repr(tagged.value)[:80])


def owners(tree: object, path: Path = ()) -> dict[Path, str]:
    """The classes of the objects that gave a tree or its parts, by path."""
    if type(tree) is Tagged and tree.tag == OWNED:
        return {path: owned(tree).owner}
    classes: dict[Path, str] = {}
    if type(tree) is dict:
        for key, inner in tree.items():
            if type(inner) in (Tagged, dict):
                classes |= owners(inner, (*path, key))
    return classes


def show_path(path: Path) -> str:
    """A path as a person would write it: `groups[0]['fn']`."""
    if not path:
        return "the top of the state"
    text = str(path[0])
    for key in path[1:]:
        text += f"[{key!r}]"
    return text


def merge_trees(first: object, second: object) -> object:
    """What two ranks hold of one item: the entries of both. Where they contradict each other, as
    the settings of two stages may, the first holds."""
    if isinstance(first, dict) and isinstance(second, dict):
        merged = dict(first)
        for key, value in second.items():
            merged[key] = merge_trees(first[key], value) if key in first else value
        return type(first)(merged)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return list(map(merge_trees, first, second))
    if (
        isinstance(first, Tagged)
        and isinstance(second, Tagged)
        and first.tag == second.tag == OWNED
    ):
        ours, theirs = owned(first), owned(second)
        return Tagged(OWNED, [ours.owner, merge_trees(ours.state, theirs.state)])
    return first


MAX_BYTES = (1 << 63) - 1
"""The most that torch counts."""


class TensorSpec(NamedTuple):
    """What a stored tensor is."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """An item of a checkpoint."""

    name: str
    kind: str
    tree: object
    ties: dict[str, str]
    views: dict[str, View]
    tensors: dict[str, TensorSpec]
    """The tensors that have bytes of their own, by name."""

    def view_of(self, name: str) -> View | None:
        """The window that a name is, if it is one; a name may be tied to one that is."""
        return self.views.get(self.ties.get(name, name))

    def source_of(self, name: str) -> str:
        """The stored tensor whose bytes a name's bytes are."""
        view = self.view_of(name)
        return view.base if view is not None else self.ties.get(name, name)

    def window_of(self, name: str) -> tuple[str, View | None]:
        """Whose bytes they are, and which of them: names with the same are of one tensor."""
        return self.source_of(name), self.view_of(name)

    def spec_of(self, name: str) -> TensorSpec:
        view = self.view_of(name)
        if view is not None:
            return TensorSpec(view.dtype, view.shape)
        return self.tensors[self.ties.get(name, name)]

    def names(self) -> list[str]:
        """Every tensor of the tree."""
        return tensor_names(self.tree)


def encode_item(collected: Collected, kept: objects.EncodedDicts | None = None) -> bytes:
    """The tree and the sharing of an item as one object; `kept` from one save to the next spares
    the parts of a tree that these share."""
    views = {
        name: (view.base, view.dtype, view.shape, view.stride, view.offset_bytes)
        for name, view in collected.views.items()
    }
    return objects.encode({"tree": collected.tree, "ties": collected.ties, "views": views}, kept)


def decode_item(
    trees: list[tuple[bytes, str]], *, name: str, kind: str, tensors: dict[str, TensorSpec]
) -> StoredItem:
    """The item again, from its trees and where they lie: one, or several where ranks had different
    parts of it. `CorruptError` where they refer to tensors that are not there."""
    tree: object = None
    ties: dict[str, str] = {}
    views: dict[str, View] = {}
    for number, (data, where) in enumerate(trees):
        plain = objects.decode(data, where=where)
        if not isinstance(plain, dict) or set(plain) != {"tree", "ties", "views"}:
            raise CorruptError(
                "the tree of an item is malformed", where=where, expected="tree, ties and views"
            )
        tree = plain["tree"] if number == 0 else merge_trees(tree, plain["tree"])
        ties.update(_ties(plain["ties"], where))
        entries = _dict(plain["views"], where).items()
        views.update({key: _view(entry, where) for key, entry in entries})
    where = trees[0][1]
    try:
        owners(tree)
    except CorruptError as error:
        raise CorruptError(error.what, where=where, found=error.found) from None
    item = StoredItem(name=name, kind=kind, tree=tree, ties=ties, views=views, tensors=tensors)
    for leaf in item.names():
        source = item.source_of(leaf)
        if source not in tensors:
            raise CorruptError(
                "a tensor that the tree names is not stored", where=where, found=repr(source)
            )
        view = item.view_of(leaf)
        if view is not None and not _lies_in(view, tensors[source]):
            raise CorruptError(
                "a view lies outside of its base", where=where, found=repr(view)[:200]
            )
    return item


def _lies_in(view: View, base: TensorSpec) -> bool:
    if view.dtype not in DTYPES or base.dtype != "uint8" or len(base.shape) != 1:
        return False
    size = DTYPES[view.dtype].size_bytes
    # A step of 0 makes any number of elements of one; torch counts their bytes all the same.
    if math.prod(max(n, 1) for n in view.shape) * size > MAX_BYTES:
        return False
    reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    stop = view.offset_bytes + (0 if 0 in view.shape else (reach + 1) * size)
    fits = all(step * size <= MAX_BYTES for step in view.stride)
    return fits and view.offset_bytes % size == 0 and stop <= base.shape[0]


def _dict(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CorruptError("the tree of an item is malformed", where=where, expected="names")
    return value


def _ties(value: object, where: str) -> dict[str, str]:
    ties = _dict(value, where)
    if not all(isinstance(target, str) for target in ties.values()):
        raise CorruptError("the ties of an item are malformed", where=where)
    return ties  # type: ignore[return-value]


def _view(entry: object, where: str) -> View:
    match entry:
        case (str(base), str(dtype), tuple(shape), tuple(stride), int(offset)):
            if len(shape) == len(stride) and all(
                type(n) is int and n >= 0 for n in (*shape, *stride, offset)
            ):
                return View(base=base, dtype=dtype, shape=shape, stride=stride, offset_bytes=offset)
    raise CorruptError("a view of an item is malformed", where=where, found=repr(entry)[:80])
