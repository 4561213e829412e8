"""The envelope of a manifest: its content, and in front of it the digest of exactly these bytes.

Knows nothing of what the content means. Anything that is not byte for byte what `seal` makes is
`Corrupt`, so any changed bit is noticed before anything in the content is believed.
"""

from __future__ import annotations

import re

from laststep.codecs.digests import DIGEST_NAME, digest_text
from laststep.errors import Corrupt

DAMAGE_REMEDY = (
    "`laststep verify` lists all damage; restore() without a step takes the newest good checkpoint"
)
"""What to do about stored bytes that are not what was written."""

_DIGEST = re.compile(re.escape(DIGEST_NAME) + r":[0-9a-f]{32}")
_DIGEST_TEXT_BYTES = len(DIGEST_NAME) + 1 + 32
_OPEN, _CLOSE = b'{"digest": "', b"}"


def seal(content: bytes, *, member: str) -> bytes:
    """The document whose second member, of that name, is `content`."""
    return _OPEN + digest_text(content).encode() + _between(member) + content + _CLOSE


def unseal(data: bytes, *, member: str, where: str, what: str) -> bytes:
    """The content of a document that `seal` made; `what` it is, in words, for the error."""
    content = data[len(_OPEN) + _DIGEST_TEXT_BYTES + len(_between(member)) : -len(_CLOSE)]
    if data != seal(content, member=member):
        raise _changed(data, content, where, what)
    return content


def is_digest(text: str) -> bool:
    """Whether this is the digest of something, as manifests write it."""
    return _DIGEST.fullmatch(text) is not None


def corrupt(where: str, expected: str, found: str, *, what: str, why: str = "") -> Corrupt:
    """The error for a manifest that is not as it was written."""
    return Corrupt(
        f"cannot read a {what}" + (f": {why}" if why else ""),
        where=where,
        expected=expected,
        found=found,
        remedy=DAMAGE_REMEDY,
    )


def _between(member: str) -> bytes:
    return f'", "{member}": '.encode()


def _changed(data: bytes, content: bytes, where: str, what: str) -> Corrupt:
    """What is wrong with an envelope, in words; bytes that are no digest are not shown."""
    if not data:
        expected = "the record of a checkpoint"
        return corrupt(where, expected, "an empty file", what=what, why="it is empty")
    claimed = data[len(_OPEN) : len(_OPEN) + _DIGEST_TEXT_BYTES].decode("ascii", "replace")
    actual = digest_text(content)
    if not is_digest(claimed) or claimed == actual:
        claimed, actual = "what was written", "other bytes"
    return corrupt(where, claimed, actual, what=what, why=f"the {what} has been changed")
