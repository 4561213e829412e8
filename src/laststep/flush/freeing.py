"""Slots that are written go back to the trainer, a few at a time. Any thread may add one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from laststep.flush.protocol import Freed

if TYPE_CHECKING:
    from collections.abc import Callable

_TOGETHER = 8


class FreedSlots:
    """Those that the trainer has not been told of."""

    def __init__(self, send: Callable[[Freed], None]) -> None:
        self._send = send
        self._slots: list[int] = []
        self._lock = threading.Lock()

    def add(self, slot: int, *, more_comes: bool) -> None:
        """Tell of several together, since each message takes the trainer's GIL; but keep none when
        nothing is left to write, for then the trainer may be waiting for them."""
        with self._lock:
            self._slots.append(slot)
            if len(self._slots) < _TOGETHER and more_comes:
                return
            freed, self._slots = self._slots, []
        self._send(Freed(slots=freed))
