"""What a slot of the pool holds: one record for those who fill it and those who write it."""

from __future__ import annotations

from typing import NamedTuple


class Filled(NamedTuple):
    """A slot holds these bytes of a file's tensor area."""

    file: int
    start: int
    size_bytes: int
    slot: int
