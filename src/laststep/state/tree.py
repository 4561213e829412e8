"""Take a nested state apart into a tree of plain values and its leaves, and put it together again.

Knows nothing of torch: what a leaf is, is said by a `Leaves` object. `copy_tree` copies every
container, so a tree that was taken at `save()` does not change when training changes the original.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import Corrupt, Usage
from laststep.terms import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        raise Usage(
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
    raise Usage(
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
        raise Usage(
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
    """What a tag of an `Owned` stands for; `Corrupt` where it is none."""
    match tagged.value:
        case [str(owner), state]:
            return Owned(owner, state)
    raise Corrupt("the owner of a state is malformed", found=repr(tagged.value)[:80])


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
