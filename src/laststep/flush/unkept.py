"""A flusher without shared memory that outlives it; `keeping` is for those that have some."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.catalog.lineage import AttemptName
    from laststep.flush.protocol import Unchanged
    from laststep.flush.server import Save
    from laststep.memory.filled import Filled
    from laststep.storage.store import Store


class NothingKept:
    """What a flusher has without shared memory that outlives it: every slot goes back at once."""

    def start(self, count: int) -> None: ...

    def close(self, *, for_good: bool) -> None: ...

    def nothing_more_comes(self) -> None: ...

    def rescue(self, store: Store) -> None: ...

    def continue_from(self, store: Store, after: AttemptName | None) -> None: ...

    def limit(self, slots: int) -> None: ...

    def begin(self, save: Save) -> None: ...

    def take(self, save: Save, chunk: Filled) -> bool:
        return False

    def inheritable(self, save: Save, said: Unchanged) -> tuple[tuple[int, int, int], ...]:
        return said.chunks

    def inherit(self, save: Save, places: Iterable[tuple[int, int]]) -> None: ...

    def release(self, slot: int) -> bool:
        return True

    def try_to_seal(self, save: Save) -> None: ...

    def settle(self, save: Save) -> None: ...

    def stored(self, save: Save, *, committed: bool) -> None: ...

    def forget_predecessors(self, save: Save) -> None: ...
