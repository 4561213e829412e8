"""Read a pickle without calling anything: classes stay names, objects become records of their
parts.

Knows nothing of the classes. Only classes that the caller admits, by module and name, may occur;
any other raises a `UsageError` that names it. Whatever the bytes are, the only other error is
`CorruptError`. There is no recursion, and nested values are never compared or hashed, so neither
deep nesting nor shared structure costs more than the length of the pickle.

This is written by hand because `pickle.Unpickler` with a refusing `find_class` is not as safe: 9
bytes made it allocate 2 GB (a large memo index), 157 bytes took 35 s (a key of tuples that share
parts), and 2 MB killed the process (a key of nested tuples).

Supports the output of Python's own pickler for such objects with protocols 2 to 5.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_LITERALS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    )
)
_ORDERED = ("collections", "OrderedDict")


class Global(NamedTuple):
    """A class or function, by name only."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object as it was pickled: its class or factory, the arguments, and its state."""

    kind: Global
    args: tuple[object, ...]
    state: object = None


def read(data: bytes, *, admitted: Collection[tuple[str, str]], where: str, remedy: str) -> object:
    """Return the content of a pickle: plain values, containers, `Global`, `PickledObject`. Keys are
    strings, ints or `PickledObject`s; the latter are compared by identity."""
    machine = _Machine(admitted=admitted, where=where, remedy=remedy)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _LITERALS:
                machine.stack.append(argument)
            elif opcode.name == "STOP":
                return machine.stack.pop()
            else:
                _OPERATIONS[opcode.name](machine, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CorruptError(
            "cannot read a pickle", where=where, found=f"damage: {str(error)[:200]}"
        ) from error
    raise CorruptError("cannot read a pickle", where=where, found="no end")


@dataclass(slots=True, kw_only=True)
class _Machine:
    """The stack and the memo, with a method for each operation that is not a literal."""

    admitted: Collection[tuple[str, str]]
    where: str
    remedy: str
    stack: list[object] = field(default_factory=list)
    _outer: list[list[object]] = field(default_factory=list)
    _memo: dict[object, object] = field(default_factory=dict)

    def mark(self, _: object) -> None:
        self._outer.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[object]:
        items, self.stack = self.stack, self._outer.pop()
        return items

    def push_marked(self, _: object) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def push_tuple(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError("too few values for a tuple")
        at = len(self.stack) - count
        self.stack[at:] = [tuple(self.stack[at:])]

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("values for an object that is not a list")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("keys and values for an object that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | PickledObject):
                raise TypeError(f"a {type(key).__name__} as a key")
            target[key] = value

    def find(self, module: object, name: object) -> None:
        if (module, name) not in self.admitted:
            raise UsageError(
                "cannot import",
                where=self.where,
                found=f"{str(module)[:100]}.{str(name)[:100]}, which is code and not allowed",
                remedy=self.remedy,
            )
        self.stack.append(Global(str(module), str(name)))

    def find_popped(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a class without a name")
        self.find(module, name)

    def make(self, _: object) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Global) or type(args) is not tuple:
            raise TypeError("an object of no class")
        self.stack.append({} if kind == _ORDERED and not args else PickledObject(kind, args))

    def build(self, _: object) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, PickledObject) or target.state is not None:
            raise TypeError("state for an object that takes none")
        target.state = state

    def remember(self, at: object) -> None:
        self._memo[len(self._memo) if at is None else at] = self.stack[-1]

    def recall(self, at: object) -> None:
        self.stack.append(self._memo[at])


def _global(machine: _Machine, argument: object) -> None:
    module, _, name = str(argument).partition(" ")
    machine.find(module, name)


_OPERATIONS: dict[str, Callable[[_Machine, object], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "MARK": _Machine.mark,
    "TUPLE": _Machine.push_marked,
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(
        [machine.stack.pop(), machine.stack.pop()][::-1]
    ),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _Machine.find_popped,
    "NEWOBJ": _Machine.make,
    "REDUCE": _Machine.make,
    "BUILD": _Machine.build,
    "MEMOIZE": _Machine.remember,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
}
