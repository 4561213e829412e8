"""What typed JSON has besides Python's own types, and the limits that both directions share.

Knows nothing of JSON.
"""

from __future__ import annotations

import collections
import functools
import keyword
from typing import TYPE_CHECKING, Any, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DEPTH = 200
"""How many containers may lie within each other."""

MAX_NAMEDTUPLES = 256
"""How many different namedtuple classes one document may have: making one takes about 0.3 ms."""

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""The ints that are plain JSON numbers; others are written in hex."""


class TensorRef(msgspec.Struct, frozen=True):
    """Stands for the tensor of that name."""

    name: str


class Tagged(msgspec.Struct, frozen=True):
    """A value of a type that a higher layer knows: `tag` says which, `value` what it is made of."""

    tag: str
    value: object


_make_namedtuple: Callable[..., Any] = collections.namedtuple  # noqa: PYI024
"""Under a name of our own, since here the class's name and fields are data."""


@functools.lru_cache(maxsize=1024)
def namedtuple_class(name: str, fields: tuple[str, ...]) -> type[tuple[object, ...]] | None:
    """The class of that name and these fields, or None where there can be none."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return None
    try:
        # `rename` admits the positional names that a class made with it has, and changes others.
        made = _make_namedtuple(name, fields, rename=True)
    except (ValueError, SyntaxError, TypeError):
        return None
    return cast("type[tuple[object, ...]]", made) if made._fields == fields else None


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold `text`: it has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
