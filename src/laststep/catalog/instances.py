"""A job instance: the lock that shows its pending saves, and the failures of earlier ones.

Every job instance that saves has one lock file, its liveness lock, and sets a pending marker for
each save in it before it hands anything to the flusher. The lock's descriptor is sent to the
flusher with a message, so the lock is held as long as the trainer, the flusher or the message
itself exists. A restore that finds no pending marker therefore misses no announced save, and one
that finds markers waits for them. A liveness lock need not survive a crash of the machine, so it is
never synced.

A job instance that did not record a clean end counts as failed. Its uptime lasts until the next one
began, but no longer than the median time between two of them: the estimate need not be exact.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import statistics
import threading
import time
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from laststep.catalog import terms
from laststep.catalog.attempt import read_decision
from laststep.catalog.terms import TERMS_FOLDER
from laststep.errors import LaststepError, NotFoundError
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from laststep.storage.store import Lock, Store

_log = logging.getLogger(__name__)

_ENDING = re.compile(r"start-([0-9a-f]{16})\.ended")
_LATEST = 64
"""The number of latest terms that count. Older ones predict little about the present job."""
UNPROVEN_S = 7 * 24 * 3600.0
"""The longest uptime that is believed, because a clock may be set: a common time limit of jobs."""


class AnnouncedSaves(msgspec.Struct, frozen=True, kw_only=True):
    liveness: str
    pid: int
    """The process id of the trainer, on whichever machine it runs."""
    places: frozenset[int]


class Start:
    """The job instance of this trainer. Thread-safe. Nothing is written before the first save."""

    def __init__(self, store: Store) -> None:
        self.writer = terms.new_start()
        self.liveness_lock_name = terms.liveness_lock_name(self.writer.start, self.writer.pid)
        self.store = store
        self.url = store.url
        self._began_s = time.monotonic()
        self._mutex = threading.Lock()
        self._liveness: Lock | None = None
        self._told = False
        """True once a failed marker was logged: without such locks every one fails."""

    def announce(self, save: int) -> int | None:
        """Set the pending marker of a save and return the lock's descriptor, to be sent along. None
        if it cannot be set: a restore may then miss the save if the trainer dies."""
        if not self.store.has_marks:
            return None
        with self._mutex:
            try:
                if self._liveness is None:
                    terms.make_folder(self.store)
                    self._liveness = self.store.lock(self.liveness_lock_name)
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
                # The kernel clears it when the process ends.
                with contextlib.suppress(LaststepError):
                    self._liveness.clear(save)

    def has_committed(self, folder: str) -> bool:
        """Return whether an attempt is durably committed; no process may still be deciding that."""
        if not isinstance(read_decision(self.store, folder), Commit):
            return False
        self.store.sync_folder(folder)
        return True

    def past(self) -> Past:
        return past_of(self.store, self.writer.start)

    def ended_well(self) -> None:
        """Record for later job instances that this one, if it ever saved, did not fail."""
        ran_s = time.monotonic() - self._began_s
        note = msgspec.json.encode(Ending(ended_s=time.time(), ran_s=ran_s))
        try:
            self.store.create(ending_name(self.writer.start), note)
        except NotFoundError:
            pass  # no job has saved to the run
        except LaststepError as error:
            _log.warning("this job instance may be counted as failed: %s", error)

    def close(self) -> None:
        """Remove the liveness lock. No save may follow."""
        with self._mutex:
            if self._liveness is not None:
                forget(self.store, self.liveness_lock_name, self._liveness)


def forget(store: Store, liveness: str, lock: Lock) -> None:
    """Remove a liveness lock that is no longer needed."""
    with contextlib.suppress(LaststepError):  # the next writer removes it
        store.delete(liveness)
    lock.close()


def coming(store: Store) -> tuple[AnnouncedSaves, ...]:
    """Return the saves that are pending now."""
    announced = []
    for name in store.file_names(TERMS_FOLDER):
        pid = terms.parse_liveness_lock(name)
        if pid is not None:
            path = f"{TERMS_FOLDER}/{name}"
            places = _marked(store, path)
            if places:
                announced.append(AnnouncedSaves(liveness=path, pid=pid, places=places))
    return tuple(announced)


def still_coming(store: Store, before: AnnouncedSaves) -> bool:
    return not before.places.isdisjoint(_marked(store, before.liveness))


def _marked(store: Store, path: str) -> frozenset[int]:
    ranges = store.marked(path)
    return frozenset(place for first, last in ranges for place in range(first, last + 1))


# Failures of earlier job instances


class Past(NamedTuple):
    failures: int = 0
    uptime_s: float = 0.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file that a job instance writes when it ends well."""

    ended_s: float
    ran_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """The time since the job instance began, by a monotonic clock."""


def ending_name(start: str) -> str:
    return f"{TERMS_FOLDER}/start-{start}.ended"


def past_of(store: Store, start: str) -> Past:
    """Return the failures and uptime of all job instances of a run except `start`. Damaged records
    are skipped: this is an estimate, and the next save reports them."""
    known, began = terms.Terms(store), dict[str, float]()
    try:
        for number in known.numbers()[-_LATEST:]:
            with contextlib.suppress(LaststepError):
                record = known.read(number)
                if record is not None and (record.start != start or not start):
                    began.setdefault(record.start or f"term {number}", record.created_s)
        matches = map(_ENDING.fullmatch, store.file_names(TERMS_FOLDER))
    except LaststepError as error:
        _log.warning("the number of failures of %s is unknown: %s", store.url, error)
        return Past()
    ended_well = {match.group(1) for match in matches if match is not None}
    times = itertools.pairwise([*sorted(began.values()), time.time()])
    gaps = [later - earlier for earlier, later in times]
    longest_s = min(statistics.median(gaps), UNPROVEN_S) if gaps else 0.0
    uptime_s = sum(max(min(gap, longest_s), 0.0) for gap in gaps)
    return Past(failures=len(began.keys() - ended_well), uptime_s=uptime_s)
