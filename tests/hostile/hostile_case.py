"""One hostile file."""

from __future__ import annotations

from dataclasses import dataclass

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Its name, the error that it MUST be refused with, what it is, and its bytes."""

    name: str
    raises: str
    why: str
    data: bytes
