"""A start of a job as its run knows it, and what shows that a save of it is coming.

Each start that saves has one lock file, its witness, in which it marks the number of every save
before it hands over anything of it. The descriptor goes to the flusher within a message: the lock
is then held by whoever of the two lives, or by the message alone, which outlives the trainer that
sent it. Whoever knows how a save ended clears its mark. So a restore that finds no mark misses
nothing that was promised, and one that finds some waits for them.

A witness need not outlive a crash of the machine, so nothing of it is synced. Knows nothing of what
is in a save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision, failures, lineage
from laststep.catalog.epochs import make_folder, new_start
from laststep.catalog.run import newest_point
from laststep.errors import LaststepError, NotFoundError

if TYPE_CHECKING:
    from laststep.catalog.failures import Past
    from laststep.catalog.lineage import Seen
    from laststep.storage.store import Lock, Store

_log = logging.getLogger(__name__)


class AnnouncedSaves(msgspec.Struct, frozen=True, kw_only=True):
    """Saves of one start that were announced and are not over."""

    witness: str
    pid: int
    """Of the trainer, on whatever machine."""
    places: frozenset[int]


class Start:
    """A start, in its trainer. Any thread may call; nothing is written before the first save."""

    def __init__(self, store: Store) -> None:
        self.writer = new_start()
        self._store = store
        self._began_s = time.monotonic()
        self._mutex = threading.Lock()
        self._witness: Lock | None = None
        self._told = False
        """Whether the log has said that a mark failed: without such locks every one does."""

    @property
    def url(self) -> str:
        """Of its run."""
        return self._store.url

    @property
    def witness_name(self) -> str:
        """The name of the witness within the run."""
        return lineage.witness_name(self.writer.start, self.writer.pid)

    def newest_point(self) -> Seen:
        """The newest epoch and the last commit of the run, for a start that has not restored."""
        return newest_point(self._store)

    def announce(self, save: int) -> int | None:
        """Mark a save that is coming; returns the descriptor to hand over with it. None where that
        cannot be done: then a restore may miss what a trainer announced just before it died."""
        if not self._store.has_marks:
            return None
        with self._mutex:
            try:
                if self._witness is None:
                    make_folder(self._store)
                    self._witness = self._store.lock(self.witness_name)
                self._witness.mark(save)
            except LaststepError as error:
                if not self._told:
                    _log.warning(
                        "a restore elsewhere will not wait for the saves of this job: %s", error
                    )
                self._told = True
                return None
            return self._witness.fileno()

    def over(self, save: int) -> None:
        """Clear the mark of a save: it is known how it ended."""
        with self._mutex:
            if self._witness is not None:
                with contextlib.suppress(LaststepError):  # it goes with this process at the latest
                    self._witness.clear(save)

    def has_committed(self, folder: str) -> bool:
        """Whether that attempt, which nobody decides about any more, is committed; if so, it is now
        durable too."""
        return decision.standing(self._store, folder) is not None

    def past(self) -> Past:
        """How often earlier starts of this run have failed."""
        return failures.past_of(self._store, self.writer.start)

    def ended_well(self) -> None:
        """Leave a note that this start has not failed, for those that come; where it has saved."""
        ran_s = time.monotonic() - self._began_s
        note = msgspec.json.encode(failures.Ending(ended_s=time.time(), ran_s=ran_s))
        try:
            self._store.create(lineage.ending_name(self.writer.start), note)
        except NotFoundError:
            pass  # nobody has saved to the run
        except LaststepError as error:
            _log.warning("this start may be taken for one that has failed: %s", error)

    def close(self) -> None:
        """Remove the witness: there will be no more saves."""
        with self._mutex:
            if self._witness is not None:
                forget(self._store, self.witness_name, self._witness)


def forget(store: Store, witness: str, lock: Lock) -> None:
    """Remove a witness that nobody will mark any more; where that fails, the next writer does."""
    with contextlib.suppress(LaststepError):
        store.delete(witness)
    lock.close()


def coming(store: Store) -> tuple[AnnouncedSaves, ...]:
    """The saves that are announced now."""
    announced = []
    for name in store.file_names(lineage.EPOCHS_FOLDER):
        pid = lineage.parse_witness(name)
        if pid is None:
            continue
        path = f"{lineage.EPOCHS_FOLDER}/{name}"
        places = frozenset(
            place for first, last in store.marked(path) for place in range(first, last + 1)
        )
        if places:
            announced.append(AnnouncedSaves(witness=path, pid=pid, places=places))
    return tuple(announced)


def still_coming(store: Store, before: AnnouncedSaves) -> bool:
    """Whether any of these saves is not over yet."""
    return any(
        first <= place <= last
        for first, last in store.marked(before.witness)
        for place in before.places
    )
