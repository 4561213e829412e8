"""The names of tensors: paths of keys as strings, one to one, as docs/format.md defines them.

Knows nothing of trees or files. Invariants: different paths have different names, where keys of
different type are different (1, True, 1.0); a name is valid UTF-8, and never `__metadata__`, which
safetensors keeps for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.codecs import objects
from laststep.codecs.typed_values import INT_MAX, INT_MIN, is_utf8
from laststep.errors import Corrupt, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

_RESERVED = "__metadata__"


def name_of(path: tuple[object, ...]) -> str:
    """The name of the leaf at `path`; `Usage` if a key is of a kind that has no name."""
    return "/".join([_escaped(key) for key in path])


def names_in(path: tuple[object, ...], keys: Iterable[object]) -> list[str]:
    """The names of the leaves that lie under these keys in the container at `path`."""
    above = "".join([f"{_escaped(key)}/" for key in path])
    return [above + _escaped(key) for key in keys]


def path_of(name: str) -> tuple[object, ...]:
    """The path that has this name; `Corrupt` if none has."""
    if name == "":
        return ()
    parts = name.split("/")
    if "~" not in name and "#" not in name and "" not in parts and name.isascii():
        if _RESERVED in parts:
            raise _malformed(name)
        return tuple(parts)
    path = tuple([_key(part, name) for part in parts])
    # Only what `name_of` gives is a name: "#007" or "~3true" with a space in it is none.
    try:
        same = name_of(path) == name
    except Usage:
        same = False
    if not same:
        raise _malformed(name)
    return path


def _escaped(key: object) -> str:
    if type(key) is str:
        if key == "":
            return "~4"
        if key == _RESERVED:
            return "~5"
        if key.isascii() or is_utf8(key):
            text = key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key
            return "~2" + text[1:] if text[0] == "#" else text
    elif type(key) is int and INT_MIN <= key <= INT_MAX:
        return f"#{key}"
    return "~3" + _typed(key).replace("~", "~0").replace("/", "~1")


def _typed(key: object) -> str:
    try:
        return objects.encode(key).decode()
    except Usage as error:
        raise Usage(
            "cannot name a tensor",
            expected="keys that are plain Python values",
            found=error.found,
            remedy="use keys of another type in the state",
        ) from None


def _key(part: str, name: str) -> object:
    """The key that `part` of `name` stands for; need not notice what `_escaped` never writes."""
    if part == "~4":
        return ""
    if part == "~5":
        return _RESERVED
    if part.startswith("#"):
        return _int(part[1:], name)
    if part.startswith("~3"):
        try:
            return objects.decode(_plain(part[2:]).encode(), where=repr(name))
        except UnicodeEncodeError:
            raise _malformed(name) from None
    if part.startswith("~2"):
        return "#" + _plain(part[2:])
    return _plain(part)


def _plain(text: str) -> str:
    return text.replace("~1", "/").replace("~0", "~")


def _int(digits: str, name: str) -> int:
    if len(digits) > 20 or not digits.isascii() or not digits.removeprefix("-").isdigit():
        raise _malformed(name)
    return int(digits)


def _malformed(name: str) -> Corrupt:
    return Corrupt(
        "cannot read the name of a tensor",
        expected="keys joined by '/', escaped as docs/format.md says",
        found=repr(name)[:200],
    )
