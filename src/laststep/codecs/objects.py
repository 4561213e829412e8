"""Typed JSON: plain Python values as JSON, such that decoding gives back equal values and types.

None, bool, 64-bit ints, finite floats, str, lists and dicts with str keys are themselves; all else
is an object `{"$": tag, ...}`, and a dict that could be taken for one is written as its pairs.
Tensors and extension types are markers here (`TensorRef`, `Tagged`): higher layers make and
interpret them. Knows nothing of torch or files.

Invariants: `encode` raises only `Usage`, `decode` only `Corrupt`, whatever the input; decoding
takes no memory or time out of proportion to it. Equal values give equal bytes, also for sets.
Values that are shared are written as often as they are met: identity of objects is not kept.
"""

from __future__ import annotations

from laststep.codecs import strict
from laststep.codecs.typed_decoder import Malformed, TypedDecoder
from laststep.codecs.typed_encoder import EncodedDicts, TypedEncoder, json_bytes
from laststep.codecs.typed_values import MAX_DEPTH, MAX_NAMEDTUPLES, Tagged, TensorRef
from laststep.errors import Corrupt

__all__ = [
    "MAX_DEPTH", "MAX_NAMEDTUPLES", "EncodedDicts", "Tagged", "TensorRef", "decode", "encode",
    "from_parsed",
]  # fmt: skip


def encode(value: object, kept: EncodedDicts | None = None) -> bytes:
    """`value` as typed JSON; `Usage` with the path of the first value that cannot be expressed.
    With `kept`, parts that were encoded with it the last time are not walked again."""
    if kept is not None:
        kept.begin()
    encoder = TypedEncoder(kept)
    try:
        return json_bytes(encoder.value(value))
    except RecursionError:
        raise encoder.refusal("nesting too deep for what is left of the call stack") from None


def decode(data: bytes, *, where: str) -> object:
    """The value that `encode` wrote; `Corrupt`, naming `where`, for anything else."""
    return from_parsed(strict.parse(data, where=where), where=where)


def from_parsed(plain: object, *, where: str) -> object:
    """The same from a part of a document that `strict.parse` has parsed; `plain` is used up."""
    try:
        return TypedDecoder().value(plain)
    except Malformed as error:
        raise Corrupt("cannot read typed JSON", where=where, found=str(error)) from None
