"""Compare stored and live trees by their keys, and mark in a loaded one what was not restored.

Pure; knows nothing of tensors but their names.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from laststep.codecs.objects import Tagged, TensorRef
from laststep.state.provider import ABSENT
from laststep.state.tree import OWNED, Path, owned, tensor_names


def newer_entries(stored: object, live: object, path: Path) -> list[Path]:
    """The entries of dicts in the live tree that the stored one does not have."""
    stored, live = _state(stored), _state(live)
    theirs, newer = _entries(stored), []
    for key, inner in _entries(live).items():
        if key in theirs:
            newer += newer_entries(theirs[key], inner, (*path, key))
        elif isinstance(live, dict) and isinstance(stored, dict):
            newer.append((*path, key))
    return newer


def _entries(node: object) -> dict[object, object]:
    """The parts of a container by their keys, as paths have them; of anything else, none."""
    node = _state(node)
    if isinstance(node, dict):
        return node
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    return dict(enumerate(node)) if isinstance(node, list | tuple | deque) else {}


def _state(node: object) -> object:
    """A part without the class of the object that gave it, which is in no path."""
    return owned(node).state if isinstance(node, Tagged) and node.tag == OWNED else node


def part_at(tree: object, path: Path) -> object:
    """What stands there in a tree, or ABSENT."""
    for key in path:
        tree = _entries(tree).get(key, ABSENT)
    return tree


def mark_absent(tree: object, path: Path) -> None:
    """Note in a loaded tree that an entry of a dict was not restored."""
    for key in path[:-1]:
        tree = _entries(tree).get(key)
    if isinstance(tree, dict):
        tree[path[-1]] = ABSENT


def without(node: object, gone: tuple[Path, ...], path: Path = ()) -> object:
    """The tree with ABSENT at these paths."""
    if path in gone:
        return ABSENT
    if gone and type(node) is dict:
        return {key: without(inner, gone, (*path, key)) for key, inner in node.items()}
    if gone and isinstance(node, Tagged) and node.tag == OWNED:
        inside = owned(node)
        return Tagged(OWNED, [inside.owner, without(inside.state, gone, path)])
    return node


def without_plain(node: object, whole: tuple[Path, ...], path: Path = ()) -> object:
    """The tree with every plain value ABSENT, so that a partial restore changes none: an empty
    container is one too. What can only be taken `whole` is ABSENT altogether."""
    if path in whole:
        return ABSENT

    def down(key: object, inner: object) -> object:
        return without_plain(inner, whole, (*path, key))

    if isinstance(node, TensorRef):
        return node
    if isinstance(node, Tagged) and node.tag == OWNED:
        inner = owned(node)
        return Tagged(OWNED, [inner.owner, without_plain(inner.state, whole, path)])
    if isinstance(node, Tagged):
        return node if tensor_names(node.value) else ABSENT
    if not _entries(node):
        return ABSENT
    if type(node) in (dict, OrderedDict):
        return {key: down(key, inner) for key, inner in node.items()}  # type: ignore[attr-defined]
    if isinstance(node, deque):
        return deque((down(i, inner) for i, inner in enumerate(node)), node.maxlen)
    parts = [down(key, inner) for key, inner in _entries(node).items()]
    return node._make(parts) if hasattr(node, "_make") else type(node)(parts)  # type: ignore[call-arg]
