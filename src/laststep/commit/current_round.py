"""What the first rank says of the save that it leads, and of those before it."""

from __future__ import annotations

import msgspec

from laststep.catalog.names import AttemptName


class EndedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A save that is over; without a reason, it is committed."""

    number: int
    step: int
    reason: str


class CurrentRound(msgspec.Struct, frozen=True, kw_only=True):
    """The save that the first rank leads: where, or why it does not; and the latest before it."""

    number: int
    step: int
    place: AttemptName | None
    problem: str
    past: tuple[EndedRound, ...]
    group_size: int
    """How the ranks are cut. The first rank says it: nodes, and what ranks know of them, differ."""
