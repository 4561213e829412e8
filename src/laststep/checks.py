"""Hold what a user passes against the type that is declared for it; messages follow from the type.

Knows nothing of what the values mean.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta, inspect

from laststep.errors import UsageError
from laststep.terms import with_article

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_INT: Final = 1 << 62
_ADVICE = "pass such a value, or leave it out for the default"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A struct whose fields are of their declared types, whoever made it."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            given = getattr(self, name)
            value = checked(self.shown(name), given, kind, remedy=self.advice(name, given))
            msgspec.structs.force_setattr(self, name, value)

    @staticmethod
    def shown(name: str) -> str:
        """A field as messages name it."""
        return name

    @staticmethod
    def advice(name: str, value: object) -> str:  # noqa: ARG004 (of those that override it)
        """What to do about a value of a field that cannot be."""
        return _ADVICE


def plain(value: object) -> object:
    """A number or text as Python's own type: those of NumPy's, and of classes that derive from
    Python's, are welcome as what they are, and could not be stored."""
    numpy = sys.modules.get("numpy")  # nobody has a number of NumPy's who has not imported it
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    for kind, as_it_is in _AS_THEY_ARE.items():
        if isinstance(value, kind) and not isinstance(value, bool):
            return as_it_is(value)
    return value


_AS_THEY_ARE: Final[dict[type, Callable[[Any], object]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
"""Not str() and the like, which ask the class: of a member of an enum they give its name."""


def shown(value: object) -> str:
    """A value of a user's in a message; its own way to show itself may fail."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 (whatever it is: the message is about something else)
        return f"{with_article(type(value))} that cannot be shown"


def checked(name: str, value: object, kind: Any, *, remedy: str = _ADVICE) -> Any:
    """The value as that type, in Python's own. `UsageError` names what was expected, as the type
    has it. Whole numbers must also fit where they are sent and stored, and text must not be
    empty."""
    value, more = plain(value), ""
    try:
        made = msgspec.convert(value, kind)
        if type(made) is int and made > MAX_INT:
            more = f", at most {MAX_INT}"
        elif made == "":
            more = " that is not empty"
        else:
            return made
    except msgspec.ValidationError:
        pass
    raise UsageError(
        f"{name} has no such value",
        expected=allowed(kind) + more,
        found=f"{shown(value)}, {with_article(type(value))}",
        remedy=remedy,
    )


def seconds(timeout_s: object) -> float | None:
    """How long to wait at most; None: for ever. Any number will do, but nan is none; what is more
    than the system can wait for is as long as that."""
    timeout: float | None = checked(
        "timeout_s", timeout_s, Annotated[float, Meta(ge=-sys.float_info.max)] | None
    )
    return None if timeout is None else min(timeout, threading.TIMEOUT_MAX)


def allowed(kind: Any) -> str:
    """What a value of a type may be, in words."""
    return _words(inspect.type_info(kind))


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types):
            return " or ".join(map(_words, types))
        case inspect.Metadata(extra_json_schema={"description": words}):
            return str(words)
        case inspect.EnumType(choices):
            return f"one of {', '.join(repr(choice.value) for choice in choices)}"
        case inspect.LiteralType(values):
            return f"one of {', '.join(map(repr, values))}"
        case inspect.BoolType():
            return "True or False"
        case inspect.IntType(ge=None):
            return "an int"
        case inspect.IntType(ge=least, le=None):
            return f"an int of {least} or more"
        case inspect.IntType(ge=least, le=most):
            return f"an int from {least} to {most}"
        case inspect.FloatType(gt=None):
            return "a number"
        case inspect.FloatType(gt=least, lt=most):
            return f"a number above {least:.0f} and below {most:.0f}"
        case inspect.StrType():
            return "a str"
        case _:
            return "None"
