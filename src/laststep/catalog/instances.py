"""A job instance: the lock that shows its pending saves, and the failures of earlier ones.

Every job instance that saves has one lock file, its liveness lock, and sets a pending marker for
each save in it before it hands anything to the flusher. The lock's descriptor is sent to the
flusher with a message, so the lock is held as long as the trainer, the flusher or the message
itself exists. A restore that finds no pending marker therefore misses no announced save, and one
that finds markers waits for them. A liveness lock need not survive a crash of the machine, so it is
never synced.

A job instance that did not record a clean end counts as failed. Its uptime lasts from its first
save to its last commit or, if retention has deleted all its commits, until the next job instance
began, but no longer than the median time between two of them.
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
from laststep.catalog.attempt import AttemptName, by_point, read_decision
from laststep.catalog.listing import Scanner
from laststep.catalog.run import newest_point
from laststep.catalog.terms import TERMS_FOLDER
from laststep.errors import LaststepError, NotFoundError
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.storage.store import Lock, Store

_log = logging.getLogger(__name__)

_ENDING = re.compile(r"start-([0-9a-f]{16})\.ended")
_LATEST = 64
"""The number of latest terms that count. Older ones predict little about the present job."""
UNPROVEN_S = 7 * 24 * 3600.0
"""The longest uptime that is believed from timestamps alone, because a clock may be set: a common
time limit of jobs."""


class AnnouncedSaves(msgspec.Struct, frozen=True, kw_only=True):
    """The pending saves of one job instance."""

    liveness: str
    pid: int
    """The process id of the trainer, on whichever machine it runs."""
    places: frozenset[int]


class Start:
    """The job instance of this trainer. Thread-safe. Nothing is written before the first save."""

    def __init__(self, store: Store) -> None:
        self.writer = terms.new_start()
        self.liveness_lock_name = terms.liveness_lock_name(self.writer.start, self.writer.pid)
        self.url = store.url
        """The URL of the run."""
        self._store = store
        self._began_s = time.monotonic()
        self._mutex = threading.Lock()
        self._liveness: Lock | None = None
        self._told = False
        """True once a failed marker was logged: without such locks every one fails."""

    def newest_point(self) -> terms.Seen:
        """Return the state of the run, for a job instance that has not restored."""
        return newest_point(self._store)

    def announce(self, save: int) -> int | None:
        """Set the pending marker of a save and return the lock's descriptor, to be sent along with
        the save.

        Return None if the marker cannot be set; a restore may then miss the save if the trainer
        dies.
        """
        if not self._store.has_marks:
            return None
        with self._mutex:
            try:
                if self._liveness is None:
                    terms.make_folder(self._store)
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
                # The kernel clears it when the process ends.
                with contextlib.suppress(LaststepError):
                    self._liveness.clear(save)

    def has_committed(self, folder: str) -> bool:
        """Return True if this attempt is committed, and make the commit durable. No process may
        still be deciding about the attempt."""
        if not isinstance(read_decision(self._store, folder), Commit):
            return False
        self._store.sync_folder(folder)
        return True

    def past(self) -> Past:
        return past_of(self._store, self.writer.start)

    def ended_well(self) -> None:
        """Record for later job instances that this one did not fail. Does nothing if it never saved
        to the run."""
        ran_s = time.monotonic() - self._began_s
        note = msgspec.json.encode(Ending(ended_s=time.time(), ran_s=ran_s))
        try:
            self._store.create(ending_name(self.writer.start), note)
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
    """Return the name of the file that holds the `Ending` of a job instance."""
    return f"{TERMS_FOLDER}/start-{start}.ended"


def past_of(store: Store, start: str) -> Past:
    """Return the failures and uptime of all job instances of a run except `start`. Damaged records
    are skipped: this is an estimate, and the next save reports them."""
    try:
        records = _records_of_others(store, start)
        endings = _endings(store)
        attempts = sorted(Scanner(store).names(), key=by_point, reverse=True)
        began = [min(record.created_s for record in its) for its in records.values()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(began))]
        usual_s = statistics.median(gaps) if gaps else 0.0
        uptime_s = 0.0
        for began_s, (its_start, its) in zip(began, records.items(), strict=True):
            ending = endings.get(its_start)
            if ending is not None and ending.ran_s is not None:
                uptime_s += ending.ran_s
                continue
            seen_s = ending.ended_s if ending is not None else _last_commit_s(store, its, attempts)
            if seen_s is None:
                until_s = min([other for other in began if other > began_s], default=began_s)
                seen_s = min(until_s, began_s + usual_s)
            uptime_s += min(max(seen_s - began_s, 0.0), UNPROVEN_S)
        return Past(failures=len(records.keys() - endings.keys()), uptime_s=uptime_s)
    except LaststepError as error:
        _log.warning("the number of failures of %s is unknown: %s", store.url, error)
        return Past()


def _records_of_others(store: Store, own: str) -> dict[str, list[terms.TermRecord]]:
    """Return the latest records of terms by job instance, except those of `own`."""
    known = terms.Terms(store)
    records: dict[str, list[terms.TermRecord]] = {}
    for number in known.numbers()[-_LATEST:]:
        with contextlib.suppress(LaststepError):
            record = known.read(number)
            if record is not None and (record.start != own or not own):
                records.setdefault(record.start or f"term {number}", []).append(record)
    return records


def _last_commit_s(
    store: Store, records: Iterable[terms.TermRecord], newest_first: Iterable[AttemptName]
) -> float | None:
    """Return the time of the last commit of these terms; None if they have none left."""
    numbers = {record.term for record in records}
    for name in newest_first:
        if name.term in numbers:
            with contextlib.suppress(LaststepError):
                decided = read_decision(store, name.folder)
                if isinstance(decided, Commit):
                    return decided.created_s
    return None


def _endings(store: Store) -> dict[str, Ending]:
    found = {}
    for name in store.file_names(TERMS_FOLDER):
        match = _ENDING.fullmatch(name)
        if match is not None:
            data = store.read(f"{TERMS_FOLDER}/{name}", limit_bytes=terms.RECORD_LIMIT_BYTES)
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found[match.group(1)] = msgspec.json.decode(data, type=Ending)
    return found
