"""The number of the format, as every document of a run says it, and the refusal of a later one.

Knows nothing of what documents mean. A document says its format before anything else in it is
believed, and MAY say which version of laststep wrote it: that one reads it.
"""

from __future__ import annotations

import re

import msgspec

from laststep.errors import Usage
from laststep.terms import FORMAT_VERSION
from laststep.version import VERSION

_RELEASE = re.compile(r"[0-9][0-9A-Za-z.+-]{0,39}")


class Versioned(msgspec.Struct, frozen=True):
    """What documents of every format have in common, as far as small records go."""

    format: int
    laststep: str = ""


def refuse_later(
    number: object,
    *,
    what: str,
    where: str,
    writer: object = None,
    latest: int = FORMAT_VERSION,
) -> None:
    """`Usage` for a later format than this version reads; `writer` is the version of laststep that
    the document names, or nothing."""
    if type(number) is not int or number <= latest:
        return
    found, reads = f"format {number}", f"a version that writes format {number}"
    if isinstance(writer, str) and _RELEASE.fullmatch(writer):
        found, reads = f"{found}, written by laststep {writer}", f"version {writer} or a later one"
    raise Usage(
        f"cannot read a {what} of a later format",
        where=where,
        expected=f"format {latest}, the latest that laststep {VERSION} reads",
        found=found,
        remedy=f"upgrade laststep (`pip install --upgrade laststep`) to {reads}",
    )
