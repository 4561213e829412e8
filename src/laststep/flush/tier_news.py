"""What the trainer hears of further tiers: which has what, what fails, and so what is at risk.

Thread-safe. A drain may end long after its save: handles of the last few are remembered, so that
their reports say which tiers hold them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from laststep.events import Bus, TierHolds, TierLags, WorkAtRisk
from laststep.tiers.drains import Drained, DrainFailed, Draining

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.names import AttemptName
    from laststep.flush.handle import SaveHandle
    from laststep.tiers.drains import DrainOrder

_REMEMBERED = 64


class TierNews:
    """The further tiers of a run."""

    def __init__(self, bus: Bus, orders: Sequence[DrainOrder]) -> None:
        self._bus = bus
        self._orders = orders
        self._items = {order.url: order.items for order in orders}
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._newest: dict[str, tuple[int, float] | None] = {order.url: None for order in orders}
        """Of each tier the newest step that it has got since the start, and of when that is."""
        self._handles: deque[tuple[AttemptName, SaveHandle, float]] = deque(maxlen=_REMEMBERED)
        self._heard_s = 0.0
        self._last: AttemptName | None = None
        self._owing: set[str] = set()
        """Which tiers are still to get the last checkpoint that was committed."""
        self.settled = threading.Event()
        """Set while each of them has it, or has failed to get it once, or nobody would tell."""
        self.settled.set()

    def committed(self, at: AttemptName, handle: SaveHandle) -> None:
        """A checkpoint is committed at home; what the further tiers lack of it is at risk."""
        now_s = time.monotonic()
        with self._lock:
            self._handles.append((at, handle, now_s - handle.since_began_s()))
            newest = dict(self._newest)
            self._owe(at, [order.url for order in self._orders if order.is_due(at)])
        for tier, has in newest.items():
            step, since_s = (None, self._began_s) if has is None else has
            risk = WorkAtRisk(
                tier=tier, step=step, seconds=now_s - since_s, items=self._items[tier]
            )
            self._bus.emit(risk)

    def owe_all(self, handle: SaveHandle) -> AttemptName | None:
        """That checkpoint is to go to all tiers; returns its name, where it is remembered."""
        with self._lock:
            found = [at for at, known, _ in self._handles if known is handle]
            for at in found:
                held = handle.report.tiers
                self._owe(at, [order.url for order in self._orders if order.url not in held])
            return found[0] if found else None

    def _owe(self, at: AttemptName, tiers: Sequence[str]) -> None:
        self._last, self._owing = at, set(tiers)
        (self.settled.clear if tiers else self.settled.set)()

    def last_save(self, step: int) -> SaveHandle | None:
        """The last that was committed, if it is of that step."""
        last = self.newest_save()
        return last if last is not None and last.step == step else None

    def newest_save(self) -> SaveHandle | None:
        """The last that was committed."""
        with self._lock:
            return self._handles[-1][1] if self._handles else None

    def hear(self, message: Drained | Draining | DrainFailed) -> None:
        """What the flusher says of a drain."""
        self._heard_s = time.monotonic()
        if isinstance(message, Drained):
            self._drained(message)
        elif isinstance(message, DrainFailed):
            self._bus.emit(TierLags(step=message.at.step, tier=message.tier, reason=message.reason))
        if not isinstance(message, Draining):
            self._settle(message)

    def _settle(self, message: Drained | DrainFailed) -> None:
        with self._lock:
            if message.at == self._last:
                self._owing.discard(message.tier)
            if not self._owing:
                self.settled.set()

    def was_heard_within(self, seconds: float) -> bool:
        """Whether a drain is getting on."""
        return time.monotonic() - self._heard_s < seconds

    def _drained(self, message: Drained) -> None:
        with self._lock:
            known = [(handle, began) for at, handle, began in self._handles if at == message.at]
            began_s = known[0][1] if known else self._began_s
            self._newest[message.tier] = message.at.step, began_s
        seconds = time.monotonic() - began_s
        for handle, _ in known:
            handle.report.tiers[message.tier] = seconds
        items = self._items.get(message.tier)
        self._bus.emit(
            TierHolds(step=message.at.step, tier=message.tier, seconds=seconds, items=items)
        )
