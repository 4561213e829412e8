"""All further tiers of a run: what a flusher is told of them, and what it tells.

What brings checkpoints there (`draining`) is imported where there are any: every start of a job
waits for its flusher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.lineage import AttemptName
from laststep.catalog.retention import Keep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.storage.store import Store
    from laststep.tiers.draining import Drain


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a flusher is told of a further tier."""

    url: str
    opener: str | None = None
    """What opens it, where that is no store of ours."""
    every: int = 1
    keep: Keep | None = None
    bytes_per_s: float | None = None
    items: tuple[str, ...] | None = None
    """Which of them go there; None: all."""

    def is_due(self, at: AttemptName) -> bool:
        """Whether that checkpoint goes there; all ranks come to the same answer."""
        return (at.attempt - 1) % self.every == 0


class _News(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What is told of a checkpoint on its way to a tier; the flusher passes it on as it is."""

    at: AttemptName
    tier: str


class Drained(_News, frozen=True, kw_only=True):
    """A further tier holds a checkpoint."""


class Draining(_News, frozen=True, kw_only=True):
    """So much of a checkpoint is at a further tier."""

    done_bytes: int
    size_bytes: int


class DrainFailed(_News, frozen=True, kw_only=True):
    """A checkpoint is not at a further tier yet; it will be tried again."""

    reason: str


Tell = Callable[[Drained | Draining | DrainFailed], None]


class Drains:
    """All further tiers of a run."""

    def __init__(
        self, home: Store, orders: Sequence[DrainOrder], tell: Tell, *, rank: int, ranks: int
    ) -> None:
        self._home = home
        self._tell = tell
        self._urls = [order.url for order in orders]
        self._is_noted = rank != 0
        self._drains: list[Drain] = []
        if orders:
            from laststep.tiers.draining import Drain

            self._drains = [Drain(home, one, self._hear, rank=rank, ranks=ranks) for one in orders]

    def start(self) -> None:
        for drain in self._drains:
            drain.start()

    def _hear(self, news: Drained | Draining | DrainFailed) -> None:
        self._tell(news)
        if isinstance(news, Drained) and not self._is_noted:
            from laststep.tiers.draining import note_tiers

            self._is_noted = True
            note_tiers(self._home, self._urls)

    def committed(self, at: AttemptName, *, is_last: bool = False) -> None:
        """A checkpoint is committed at home; the last of a job goes to all tiers."""
        for drain in self._drains:
            drain.committed(at, is_last=is_last)

    def needed(self) -> frozenset[str]:
        """The folders at home that are to be brought somewhere: retention spares them."""
        return frozenset(folder for drain in self._drains for folder in drain.needed())

    def close(self, *, at_once: bool) -> None:
        """End: when what is due has been brought, or has failed once; or at once."""
        for drain in self._drains:
            drain.ask_to_end(at_once=at_once)
        for drain in self._drains:
            drain.join()
