"""Hold what a user passes against the type that is declared for it; messages follow from the type.

Knows nothing of what the values mean.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, inspect

from laststep.errors import Usage
from laststep.terms import with_article

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


def checked(name: str, value: object, kind: Any, *, remedy: str = _ADVICE) -> Any:
    """The value as that type; NumPy's numbers are welcome as what they are. `Usage` names what was
    expected, as the type has it."""
    numpy = sys.modules.get("numpy")  # nobody has a number of NumPy's who has not imported it
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise Usage(
            f"{name} has no such value",
            expected=allowed(kind),
            found=f"{value!r}, {with_article(type(value))}",
            remedy=remedy,
        ) from None


def seconds(timeout_s: object) -> float | None:
    """How long to wait at most; None: for ever. Any number will do, but nan is none."""
    timeout: float | None = checked(
        "timeout_s", timeout_s, Annotated[float, Meta(ge=-sys.float_info.max)] | None
    )
    return timeout


def allowed(kind: Any) -> str:
    """What a value of a type may be, in words."""
    return _words(inspect.type_info(kind))


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types):
            return " or ".join(map(_words, types))
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
