"""Convert values, which DCP passes as bytes of `torch.save`, to trees of plain values and back.

Values that a tree can express are stored like any other state: plain values, containers, arrays and
tensors. Datetimes, paths, enum members and dataclasses are described, each by a dict that names its
type under `~type`. The bytes of any other value are stored unchanged. A value that torch.load
accepts only with `weights_only=False` (io.BytesIO excepted) is stored and loaded only if
`allow_pickle` was passed to both Writer and Reader.

Pickle would import a class by its name. Here a user's class is used only if the reader was given it
or if it occurs in the state that is loaded into (DCP's planners may remove it from there). Neither
its `__init__` nor any other code of it is called, except for the lookup of an enum member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import io
import pathlib
import pickle
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from laststep.adapters.importing.tensor_files import load_plain, refused_by
from laststep.codecs import objects
from laststep.codecs.objects import TensorRef
from laststep.dcp.record import tensor_name
from laststep.errors import CorruptError, LaststepError, MismatchError, UsageError
from laststep.state.collecting import collect
from laststep.state.tree import rebuild

if TYPE_CHECKING:
    from laststep.adapters.nesting import Path

_ADMITTING = threading.Lock()
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
REMEDY = "leave it out of the state, or pass allow_pickle=True to both Writer and Reader"


class Value(NamedTuple):
    """A value as a tree (typed JSON) and the tensors that the tree names."""

    tree: bytes
    tensors: dict[str, torch.Tensor]
    kind: Literal["value", "typed", "raw"]
    """The content of the tree: the value, a description of it, or the planner's bytes."""


def take_apart(data: bytes, location: Path, *, fqn: str, allow_pickle: bool) -> Value:
    """Convert the planner's bytes; `location` is where the value will be stored. Raise `UsageError`
    if the value must be pickled, unless that is allowed."""
    with contextlib.suppress(LaststepError, _NotPlain):
        value, is_typed = _plain_value(data)
        return _collected(value, location, "typed" if is_typed else "value")
    if not allow_pickle:
        _loaded_safely(data, what=f"cannot save {fqn}")
    return _collected(data, location, "raw")


class _NotPlain(Exception):
    """Raised for a value that a tree could not reproduce exactly."""


class _PlainUnpickler(pickle.Unpickler):
    """Creates only objects that a tree can hold or that can be described. It creates no objects of
    user classes, although the bytes come from this process, because that could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _member
        instead = _unmade(module, name)
        if instead is not None:
            return instead
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain")
        plain = super().find_class(module, name)
        return functools.partial(_made_tensor, plain) if name == "_rebuild_tensor_v2" else plain


def _made_tensor(make: Callable[..., object], *parts: object) -> object:
    """Create a tensor from storage, offset, size, stride, requires_grad, and more."""
    if parts[4]:
        raise _NotPlain  # a tree would lose requires_grad
    return make(*parts)


_UNPICKLERS: Any = types.SimpleNamespace(__name__=__name__, Unpickler=_PlainUnpickler)
"""A stand-in for the module that torch.load expects as `pickle_module`."""
_BUILTINS = ("bytearray", "complex", "frozenset", "range", "set", "slice", "xrange")
_PLAIN: dict[str, Collection[str]] = {
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "collections": ("Counter", "OrderedDict", "deque"),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "pathlib": [kind.__name__ for kind in _PATHS],
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "_codecs": ("encode",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_sparse_tensor"),
    "torch.serialization": ("_get_layout",),
    "torch": ["Size", "device"]
    + [n for n, v in vars(torch).items() if isinstance(v, torch.dtype) or n.endswith("Storage")],
}
"""Classes and functions that only make plain values, by module."""


def _plain_value(data: bytes) -> tuple[object, bool]:
    """Return the value, and True if it is described. Raise `_NotPlain` if it cannot be a tree."""
    try:
        value = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_UNPICKLERS
        )
        return _describe(value)
    except MemoryError:
        raise
    except Exception as error:  # a planner may give any bytes
        raise _NotPlain from error


def _collected(value: object, location: Path, kind: Literal["value", "typed", "raw"]) -> Value:
    collected = collect(value)
    above = tensor_name(location)

    def name_in_item(name: str) -> str:
        return f"{above}/{name}" if above and name else above or name

    tree = rebuild(
        collected.tree, leaf=lambda ref: TensorRef(name_in_item(ref.name)), revive=lambda tag: tag
    )
    # Tensors that share memory within a value are each stored in full.
    tensors = {name_in_item(name): tensor for name, tensor in collected.tensors.items()}
    return Value(tree=objects.encode(tree), tensors=tensors, kind=kind)


def raw_bytes(data: bytes, *, fqn: str, allow_pickle: bool) -> io.BytesIO:
    """Return bytes for a planner, which may run code in them. Without `allow_pickle`, rewrite them
    from what loads without running code; raise `UsageError` if that is impossible."""
    if allow_pickle:
        return io.BytesIO(data)
    return put_together(_loaded_safely(data, what=f"cannot load {fqn}"))


def put_together(value: object) -> io.BytesIO:
    """Return a value as the bytes that a planner loads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _loaded_safely(data: bytes, *, what: str) -> object:
    try:
        # io.BytesIO holds bytes and runs no code. Torch can allow a class only for the whole
        # process, so only one thread at a time does this. What the user has allowed stays allowed.
        with _ADMITTING, contextlib.ExitStack() as admitted:
            if io.BytesIO not in torch.serialization.get_safe_globals():
                admitted.enter_context(torch.serialization.safe_globals([io.BytesIO]))
            return load_plain(io.BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # invalid bytes can make torch raise anything
        raise UsageError(
            f"{what}: it is a pickled object, which can run any code when loaded",
            expected="tensors, containers and plain values",
            found=refused_by(error) or "bytes that torch.load does not take",
            remedy=REMEDY,
        ) from error


# Descriptions

_TYPE = "~type"
_MADE_OF_TEXT: dict[str, tuple[type, Callable[[str], object]]] = {
    "datetime": (dt.datetime, dt.datetime.fromisoformat),
    "date": (dt.date, dt.date.fromisoformat),
    "time": (dt.time, dt.time.fromisoformat),
    **{kind.__name__: (kind, kind) for kind in _PATHS},
}


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


def _unmade(module: str, name: str) -> type[Unmade] | None:
    """Return a stand-in for a class that is loaded in this process and is an enum or a dataclass
    with default pickling; else None."""
    kind: object = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or not (issubclass(kind, enum.Enum) or _is_plain_dataclass(kind)):
        return None
    return type(name, (Unmade,), {"kind": kind})


def _member(kind: object, name: object) -> object:
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


def _describe(value: object) -> tuple[object, bool]:
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
        kind = node if isinstance(node, type) else type(node)
        if issubclass(kind, enum.Enum) or dataclasses.is_dataclass(kind):
            found[class_name(kind)] = kind
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            pending += [getattr(node, field.name, None) for field in dataclasses.fields(node)]
        elif isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, list | tuple | set | frozenset):
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
