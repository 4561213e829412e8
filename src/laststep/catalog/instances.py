"""A job instance and the lock that shows its pending saves.

Every job instance that saves has one lock file, its liveness lock, and sets a pending marker for
each save in it before it hands anything to the flusher. The lock's descriptor is sent to the
flusher with a message, so the lock is held as long as the trainer, the flusher or the message
itself exists. The marker is cleared once the outcome of the save is known. A restore that finds no
pending marker therefore misses no announced save, and one that finds markers waits for them.

A liveness lock need not survive a crash of the machine, so it is never synced. This module knows
nothing of the content of a save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision, failures, lineage
from laststep.catalog.run import newest_point
from laststep.catalog.terms import make_folder, new_start
from laststep.errors import LaststepError, NotFoundError

if TYPE_CHECKING:
    from laststep.catalog.failures import Past
    from laststep.catalog.lineage import Seen
    from laststep.storage.store import Lock, Store

_log = logging.getLogger(__name__)


class AnnouncedSaves(msgspec.Struct, frozen=True, kw_only=True):
    """The pending saves of one job instance."""

    liveness: str
    pid: int
    """The process id of the trainer, on whichever machine it runs."""
    places: frozenset[int]


class Start:
    """The job instance of this trainer. Thread-safe. Nothing is written before the first save."""

    def __init__(self, store: Store) -> None:
        self.writer = new_start()
        self._store = store
        self._began_s = time.monotonic()
        self._mutex = threading.Lock()
        self._liveness: Lock | None = None
        self._told = False
        """True once a warning about a failed marker has been logged. On a filesystem without such
        locks every marker fails, so only the first failure is logged."""

    @property
    def url(self) -> str:
        """The URL of the run."""
        return self._store.url

    @property
    def liveness_lock_name(self) -> str:
        """The name of the liveness lock, relative to the run."""
        return lineage.liveness_lock_name(self.writer.start, self.writer.pid)

    def newest_point(self) -> Seen:
        """Return the newest term and the last commit of the run, for a job instance that has not
        restored."""
        return newest_point(self._store)

    def announce(self, save: int) -> int | None:
        """Set the pending marker of a save and return the lock's descriptor, to be sent along with
        the save.

        Return None if the marker cannot be set; a restore may then miss a save that was announced
        just before the trainer died.
        """
        if not self._store.has_marks:
            return None
        with self._mutex:
            try:
                if self._liveness is None:
                    make_folder(self._store)
                    self._liveness = self._store.lock(self.liveness_lock_name)
                self._liveness.mark(save)
            except LaststepError as error:
                if not self._told:
                    _log.warning(
                        "a restore on another machine will not wait for saves of this job: %s",
                        error,
                    )
                self._told = True
                return None
            return self._liveness.fileno()

    def over(self, save: int) -> None:
        """Clear the pending marker of a save whose outcome is known."""
        with self._mutex:
            if self._liveness is not None:
                with contextlib.suppress(
                    LaststepError
                ):  # the kernel clears it when the process ends
                    self._liveness.clear(save)

    def has_committed(self, folder: str) -> bool:
        """Return True if this attempt is committed, and make the commit durable. No process may
        still be deciding about the attempt."""
        return decision.standing(self._store, folder) is not None

    def past(self) -> Past:
        """Return the failures and uptime of earlier job instances of this run."""
        return failures.past_of(self._store, self.writer.start)

    def ended_well(self) -> None:
        """Record for later job instances that this one did not fail. Does nothing if it never saved
        to the run."""
        ran_s = time.monotonic() - self._began_s
        note = msgspec.json.encode(failures.Ending(ended_s=time.time(), ran_s=ran_s))
        try:
            self._store.create(lineage.ending_name(self.writer.start), note)
        except NotFoundError:
            pass  # no job has saved to the run
        except LaststepError as error:
            _log.warning("this job instance may be counted as failed: %s", error)

    def close(self) -> None:
        """Remove the liveness lock. No save may follow."""
        with self._mutex:
            if self._liveness is not None:
                forget(self._store, self.liveness_lock_name, self._liveness)


def forget(store: Store, liveness: str, lock: Lock) -> None:
    """Remove a liveness lock that is no longer needed; if that fails, the next writer removes
    it."""
    with contextlib.suppress(LaststepError):
        store.delete(liveness)
    lock.close()


def coming(store: Store) -> tuple[AnnouncedSaves, ...]:
    """Return the saves that are pending now."""
    announced = []
    for name in store.file_names(lineage.TERMS_FOLDER):
        pid = lineage.parse_liveness_lock(name)
        if pid is None:
            continue
        path = f"{lineage.TERMS_FOLDER}/{name}"
        places = frozenset(
            place for first, last in store.marked(path) for place in range(first, last + 1)
        )
        if places:
            announced.append(AnnouncedSaves(liveness=path, pid=pid, places=places))
    return tuple(announced)


def still_coming(store: Store, before: AnnouncedSaves) -> bool:
    """Return True if any of these saves is still pending."""
    return any(
        first <= place <= last
        for first, last in store.marked(before.liveness)
        for place in before.places
    )
