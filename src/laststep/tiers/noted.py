"""The note in a run of the tiers that it is drained to, for whoever looks at it later.

Nothing depends on it: who restores names the tiers. It is written when a drain has first brought
something, and anew where other tiers are named.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import Corrupt, LaststepError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_NAME = "tiers.json"
_LIMIT_BYTES = 1 << 20


class TiersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run knows of the tiers that it is drained to."""

    tiers: tuple[str, ...]
    """Their URLs, nearest first."""


def noted_tiers(store: Store) -> tuple[str, ...]:
    """The tiers that a run says it is drained to."""
    try:
        data = store.read(_NAME, limit_bytes=_LIMIT_BYTES)
        return msgspec.json.decode(data, type=TiersRecord).tiers
    except NotFound:
        pass
    except (Corrupt, msgspec.MsgspecError) as error:
        log.warning("the tiers of %s are not known: %s: %s", store.url, _NAME, error)
    return ()


def note_tiers(store: Store, tiers: Sequence[str]) -> None:
    """Note them, unless that is what the run says already; failing costs nothing but the note."""
    try:
        if noted_tiers(store) != tuple(tiers):
            store.delete(_NAME)
            store.create(_NAME, msgspec.json.encode(TiersRecord(tiers=tuple(tiers))))
    except LaststepError as error:
        log.warning("the tiers of %s cannot be noted there: %s", store.url, error)
