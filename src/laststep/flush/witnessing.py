"""The flusher's hold of its trainer's witness, by which others see which saves are coming."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from laststep.catalog import starts
from laststep.errors import LaststepError
from laststep.storage import locks

if TYPE_CHECKING:
    from laststep.flush.protocol import Connection, Witness
    from laststep.storage.store import Lock, Store


class WitnessHold:
    """Nothing before the trainer has handed it over."""

    def __init__(self, store: Store, connection: Connection) -> None:
        self._store = store
        self._connection = connection
        self._held: tuple[str, Lock] | None = None

    def take(self, message: Witness) -> None:
        """Hold it too; its descriptor has come with the message."""
        descriptor = self._connection.take_descriptor()
        if descriptor is not None:
            self._held = message.name, locks.adopt(descriptor, message.name)

    def clear(self, save: int) -> None:
        """Show that a save is over."""
        if self._held is not None:
            with contextlib.suppress(LaststepError):  # it goes with this process at the latest
                self._held[1].clear(save)

    def let_go(self) -> None:
        """No more saves will come; the trainer has it too, if it lives."""
        if self._held is None:
            return
        if self._connection.peer_is_dead():
            starts.forget(self._store, *self._held)
        else:
            self._held[1].close()
