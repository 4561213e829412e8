"""Rebuild nested state from values and their paths: a string indexes a dict, an int a list.

Pure. DCP does not store some values, such as an empty dict in a list; such holes become None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable

Path = tuple[str | int, ...]

MAX_HOLES = 1_000_000
"""The limit for the holes of all lists together: a large index in a path must not cost memory."""


class _Branch(dict[str | int, object]):
    """A dict or list under construction. A class of its own, since a value may itself be a dict."""


def nest(values: Iterable[tuple[Path, object]], *, where: str) -> dict[str, object]:
    """Build one nested dict of all values. Raise CorruptError if two paths contradict."""
    root = _Branch()
    for path, value in values:
        branch = root
        for part in path[:-1]:
            inner = branch.setdefault(part, _Branch())
            if not isinstance(inner, _Branch):
                raise _corrupt(path, "there twice or inside a value", where)
            branch = inner
        if path[-1] in branch:
            raise _corrupt(path, "there twice or inside a value", where)
        branch[path[-1]] = value
    if any(isinstance(key, int) for key in root):
        raise _corrupt((), "a list", where)
    holes = 0

    def close(node: object, path: Path) -> object:
        nonlocal holes
        if not isinstance(node, _Branch):
            return node
        numbers = [key for key in node if isinstance(key, int)]
        if not numbers:
            return {key: close(inner, (*path, key)) for key, inner in node.items()}
        if len(numbers) < len(node) or min(numbers) < 0:
            raise _corrupt(path, "a list and a dict", where)
        size = max(numbers) + 1
        holes += size - len(numbers)
        if holes > MAX_HOLES:
            raise _corrupt(path, f"a list after {holes} holes", where)
        return [close(node.get(index), (*path, index)) for index in range(size)]

    return {str(key): close(value, (key,)) for key, value in root.items()}


def _corrupt(path: Path, found: str, where: str) -> CorruptError:
    shown = ".".join(map(str, path))[:100]
    return CorruptError("cannot import", where=where, found=f"{shown!r}, which is {found}")
