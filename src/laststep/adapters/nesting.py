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
    """Build one nested dict of all values; raise CorruptError if two paths contradict each
    other."""
    root = _Branch()
    for path, value in values:
        branch = root
        for part in path[:-1]:
            inner = branch.setdefault(part, _Branch())
            if not isinstance(inner, _Branch):
                raise _both(path, where)
            branch = inner
        if path[-1] in branch:
            raise _both(path, where)
        branch[path[-1]] = value
    holes = _count_holes(root, where)
    if holes > MAX_HOLES:
        raise CorruptError("cannot import", where=where, found=f"lists with {holes} holes")
    return {str(key): _close(value) for key, value in root.items()}


def _count_holes(root: _Branch, where: str) -> int:
    holes = 0
    todo: list[tuple[str, _Branch]] = [("", root)]
    while todo:
        at, branch = todo.pop()
        numbers = [key for key in branch if isinstance(key, int)]
        if numbers and (len(numbers) < len(branch) or min(numbers) < 0 or branch is root):
            raise CorruptError(
                "cannot import", where=where, found=f"{at[:100]!r}, which is a list and a dict"
            )
        if numbers:
            holes += max(numbers) + 1 - len(numbers)
        todo += [
            (f"{at}.{key}".lstrip("."), inner)
            for key, inner in branch.items()
            if isinstance(inner, _Branch)
        ]
    return holes


def _close(value: object) -> object:
    if not isinstance(value, _Branch):
        return value
    numbers = [key for key in value if isinstance(key, int)]
    if numbers:
        return [_close(value.get(index)) for index in range(max(numbers) + 1)]
    return {key: _close(inner) for key, inner in value.items()}


def _both(path: Path, where: str) -> CorruptError:
    shown = ".".join(map(str, path))[:100]
    return CorruptError(
        "cannot import", where=where, found=f"{shown!r}, which is there twice or inside a value"
    )
