"""Check values that a user passes against their declared type; messages are derived from the type.

Knows nothing of the meaning of the values.
"""

from __future__ import annotations

import difflib
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta, inspect

from laststep.constants import with_article
from laststep.errors import UsageError
from laststep.process.threads import ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_INT: Final = 1 << 62
_ADVICE = "pass such a value, or leave it out for the default"


class _NamesFields(msgspec.StructMeta):
    """Refuses unknown keywords with a suggestion."""

    def __call__(cls, *unnamed: object, **fields: object) -> Any:  # noqa: N805 (of a class)
        known = cls.__struct_fields__
        unknown = [name for name in fields if name not in known]
        too_many = unnamed[len(cls.__match_args__) :]
        if too_many or unknown:
            found = unknown[0] if unknown else shown(too_many[0])
            near = difflib.get_close_matches(found, known, n=1)
            remedy = f"did you mean {near[0]}=…?" if near else f"it has {', '.join(known)}"
            raise UsageError(f"{cls.__name__} has no setting {found}", remedy=remedy)
        return super().__call__(*unnamed, **fields)


class Checked(msgspec.Struct, frozen=True, kw_only=True, metaclass=_NamesFields):
    """A struct whose fields are checked against their declared types, however it is created."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            msgspec.structs.force_setattr(self, name, checked(name, getattr(self, name), kind))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else "leave it out"


def plain(value: object) -> object:
    """Convert a number or text to Python's own type: subclasses and NumPy's cannot be stored."""
    numpy = sys.modules.get("numpy")  # without the import there are no NumPy values
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
"""These methods instead of str(), int() and float(), which a class may override: str() of an enum
member returns its name."""


def shown(value: object) -> str:
    """Return the repr of a user's value for a message; its `__repr__` may raise."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 (any error: the message is about something else)
        return f"{with_article(type(value))} that cannot be shown"


def checked(name: str, value: object, kind: Any, *, remedy: str = _ADVICE) -> Any:
    """Convert a value to a type, or raise `UsageError` with the values that the type allows. Empty
    text and integers above `MAX_INT`, which could not be sent and stored, are rejected as well."""
    value, more = plain(value), ""
    try:
        made = msgspec.convert(value, ready(kind))
        if type(made) is int and made > MAX_INT:
            more = f", at most {MAX_INT}"
        elif made == "":
            more = " that is not empty"
        else:
            return made
    except msgspec.ValidationError:
        pass
    raise UsageError(
        f"invalid value of {name}",
        expected=allowed(kind) + more,
        found=f"{shown(value)}, {with_article(type(value))}",
        remedy=remedy,
    )


def seconds(timeout_s: object) -> float | None:
    """Return a timeout of at most the system's maximum; None waits for ever. Nan is rejected."""
    if timeout_s is None:
        return None
    timeout: float | None = checked(
        "timeout_s", timeout_s, Annotated[float, Meta(ge=-sys.float_info.max)] | None
    )
    return None if timeout is None else min(timeout, threading.TIMEOUT_MAX)


def allowed(kind: Any) -> str:
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
