"""What a slot of the pool holds, in the words of both who fills it and who writes it."""

from __future__ import annotations

from typing import NamedTuple


class Filled(NamedTuple):
    """A slot holds these bytes of a file's tensor area."""

    file: int
    start: int
    size_bytes: int
    slot: int
