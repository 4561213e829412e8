"""Convert datetimes, paths, enum members and dataclasses to plain values and back.

Each becomes a dict that names its type under `~type`. Pickle would import the class by its name.
Here a user's class is used only if the reader was given it or if it occurs in the state that is
loaded into (DCP's planners may remove it from there). Neither its `__init__` nor any other code of
it is called, except for the lookup of an enum member.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from laststep.errors import CorruptError, MismatchError, UsageError

_TYPE = "~type"
_MADE_OF_TEXT: dict[str, tuple[type, Callable[[str], object]]] = {
    "datetime": (dt.datetime, dt.datetime.fromisoformat),
    "date": (dt.date, dt.date.fromisoformat),
    "time": (dt.time, dt.time.fromisoformat),
    **{
        kind.__name__: (kind, kind)
        for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
    },
}
OF_DATETIME = ("datetime", "date", "time", "timedelta", "timezone")
OF_PATHLIB = ("PurePosixPath", "PureWindowsPath", type(pathlib.Path()).__name__)


class Unmade:
    """A stand-in for an object of a user's class, filled from its pickle."""

    kind: type

    def __new__(cls, *arguments: object) -> Self:
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    arguments: tuple[object, ...]
    state: object

    def __setstate__(self, state: object) -> None:
        self.state = state


def unmade(module: str, name: str) -> type[Unmade] | None:
    """Return a stand-in for a class that is loaded in this process and is an enum or a dataclass
    with default pickling; else None."""
    kind: object = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or not (issubclass(kind, enum.Enum) or _is_plain_dataclass(kind)):
        return None
    return type(name, (Unmade,), {"kind": kind})


def member(kind: object, name: object) -> object:
    """Return a member of an enum, which some versions of Python pickle as `getattr(kind, name)`."""
    if isinstance(kind, type) and issubclass(kind, Unmade) and issubclass(kind.kind, enum.Enum):
        return kind(kind.kind[str(name)].value)
    raise ValueError("no member of an enum")


def _is_plain_dataclass(kind: type) -> bool:
    own = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in own)
    # `dataclasses` generates these two for frozen classes with slots.
    states = (getattr(kind, name, None) for name in ("__getstate__", "__setstate__"))
    made = (None, getattr(object, "__getstate__", None))
    plain = plain and all(s in made or s.__module__ == "dataclasses" for s in states)
    return plain and all(map(dataclasses.is_dataclass, kind.__mro__[:-1]))


def describe(value: object) -> tuple[object, bool]:
    """Return the value made of plain values, and True if anything in it had to be described. Raise
    `ValueError` if it could not be rebuilt exactly."""
    found = False

    def down(node: object) -> object:
        nonlocal found
        match node:
            case dict() if type(node) in (dict, OrderedDict):
                if _TYPE in node:
                    raise ValueError("a dict that looks like a described value")
                return type(node)((key, down(inner)) for key, inner in node.items())
            case list() | tuple() if type(node) in (list, tuple):
                return type(node)(map(down, node))
        described = _described(node, down)
        found = found or described is not node
        return described

    tree = down(value)
    return tree, found


def _described(node: object, down: Callable[[object], object]) -> object:
    kind = type(node)
    if isinstance(node, Unmade):
        if issubclass(node.kind, enum.Enum):
            [value] = node.arguments
            return {_TYPE: "enum", "class": class_name(node.kind), "value": down(value)}
        fields = {name: down(inner) for name, inner in _state_of(node).items()}
        return {_TYPE: "dataclass", "class": class_name(node.kind), "fields": fields}
    if kind is dt.timedelta:
        return {_TYPE: "timedelta", "value": [node.days, node.seconds, node.microseconds]}  # type: ignore[attr-defined]
    if kind is dt.timezone:
        return {_TYPE: "timezone", "value": down(node.utcoffset(None)), "name": str(node)}  # type: ignore[attr-defined]
    if kind.__name__ in _MADE_OF_TEXT and kind is _MADE_OF_TEXT[kind.__name__][0]:
        text = node.isoformat() if kind.__module__ == "datetime" else str(node)  # type: ignore[attr-defined]
        if repr(_MADE_OF_TEXT[kind.__name__][1](text)) != repr(node):
            raise ValueError(f"{node!r} is more than its text")
        return {_TYPE: kind.__name__, "value": text}
    return node


def _state_of(node: Unmade) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(node.kind)]
    state = node.state
    if isinstance(state, tuple) and len(state) == 2:  # with slots
        state = {**(state[0] or {}), **(state[1] or {})}
    if isinstance(state, list):  # with slots and frozen
        state = dict(zip(names, state, strict=True))
    if node.arguments or not isinstance(state, dict) or state.keys() != set(names):
        raise ValueError("a dataclass with more than its fields")
    return state


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def classes_in(value: object) -> dict[str, type]:
    """Return the enums and dataclasses that occur in a value, by name."""
    found: dict[str, type] = {}
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, type) and (
            issubclass(node, enum.Enum) or dataclasses.is_dataclass(node)
        ):
            found[class_name(node)] = node
        elif isinstance(node, enum.Enum):
            found[class_name(type(node))] = type(node)
        elif dataclasses.is_dataclass(node):
            found[class_name(type(node))] = type(node)
            pending += [getattr(node, f.name, None) for f in dataclasses.fields(node)]
        elif isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, Iterable) and isinstance(node, list | tuple | set | frozenset):
            pending += node
    return found


def rebuilt(tree: object, classes: Mapping[str, type], *, fqn: str) -> object:
    """Return the value that was described. Raise `UsageError` if a class is not in `classes`."""
    match tree:
        case {"~type": "enum", "class": str(name), "value": value, **rest} if not rest:
            kind = _known(name, classes, fqn)
            try:
                return kind(rebuilt(value, classes, fqn=fqn))
            except ValueError as error:
                raise MismatchError(f"cannot load {fqn}: {error}") from error
        case {"~type": "dataclass", "class": str(name), "fields": dict(fields), **rest} if not rest:
            kind = _known(name, classes, fqn)
            return _filled(kind, {k: rebuilt(v, classes, fqn=fqn) for k, v in fields.items()}, fqn)
        case {"~type": str(name), **parts}:
            return _of_python(name, parts, fqn)
        case dict():
            return type(tree)((k, rebuilt(v, classes, fqn=fqn)) for k, v in tree.items())
        case list() | tuple() if type(tree) in (list, tuple):
            return type(tree)(rebuilt(inner, classes, fqn=fqn) for inner in tree)
    return tree


def _of_python(name: str, parts: dict[Any, Any], fqn: str) -> object:
    try:
        if name == "timedelta":
            return dt.timedelta(*parts["value"])
        if name == "timezone":
            offset = _of_python("timedelta", parts["value"], fqn)
            plain = dt.timezone(offset)  # type: ignore[arg-type]
            named = str(plain) != parts["name"]
            return dt.timezone(offset, parts["name"]) if named else plain  # type: ignore[arg-type]
        if name == "WindowsPath" or (name == "PosixPath" and name not in _MADE_OF_TEXT):
            name = f"Pure{name}"  # a path of another operating system
        return _MADE_OF_TEXT[name][1](parts["value"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptError(f"cannot load {fqn}: no such {name}", found=repr(parts)[:200]) from error


def _known(name: str, classes: Mapping[str, type], fqn: str) -> type:
    if name in classes:
        return classes[name]
    raise UsageError(
        f"cannot load {fqn}: it has a {name}",
        expected="a class that the Reader knows",
        remedy="pass it to the Reader, as types=[…]",
    )


def _filled(kind: type, fields: dict[str, object], fqn: str) -> object:
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if fields.keys() != names:
        raise MismatchError(
            f"cannot load {fqn}: the fields of {class_name(kind)} have changed",
            expected=", ".join(fields),
            found=", ".join(sorted(names)),
        )
    made: object = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
