"""JSON as it should be read: one document, valid UTF-8, no key twice, nothing after the end.

Knows nothing of what documents mean. Whatever the input is, the only error is `Corrupt`.
"""

from __future__ import annotations

import json

import msgspec

from laststep.errors import Corrupt

_encoder = msgspec.json.Encoder()


class _Twice(ValueError):
    """A key that stands twice in one JSON object."""


def parse(data: bytes, *, where: str) -> object:
    """The plain values that the JSON document `data` stands for; `Corrupt` if it is not one."""
    try:
        value: object = msgspec.json.decode(data)
        # A document that comes out again byte for byte has no key twice, since the parser keeps
        # one of each. This is far cheaper than looking, and whatever we wrote passes it.
        if _encoder.encode(value) != data.strip(b" "):
            json.loads(data, object_pairs_hook=_refuse_twice)
    except RecursionError:
        raise Corrupt("cannot read JSON", where=where, found="nesting beyond all limits") from None
    except ValueError as error:  # msgspec's errors, Unicode errors and _Twice are all ValueErrors
        raise Corrupt("cannot read JSON", where=where, found=str(error)) from None
    return value


def _refuse_twice(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _Twice(f"the key {key[:100]!r} twice in one object")
        seen.add(key)
