"""Replicate checkpoints to other tiers: in the background, newest first, one at a time.

A replica is a run of its own, with the same checkpoints under the same names. Checkpoints are
copied there after their commit at the primary. If several are committed during a copy, only the
newest is copied next and the others are skipped. Failed copies are retried with growing pauses; no
failure here affects the primary. After a restart, the newest checkpoint that the replica lacks is
copied first.

In a job of several ranks each rank copies its own files. Rank 0 announces the checkpoint by
creating its folder at the replica, and commits when all files are there. Checkpoints that an
earlier job instance left incomplete, perhaps with other ranks, are copied by rank 0 alone. This
module knows nothing of torch or of saves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from laststep.catalog import attempt as attempts
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.errors import AbortedError, CorruptError, LaststepError, NotFoundError, StorageError
from laststep.process import threads
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from laststep.storage.store import Store
    from laststep.tiers.copying import Copier, Progress

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0
"""The first and the longest pause before a failed copy is retried; the pause doubles each time."""
_LOOK_S = 1.0
"""The interval at which ranks poll the progress of others."""
_PATIENCE_S, _LAST_PATIENCE_S = 900.0, 30.0
"""The time that rank 0 waits for files of other ranks while none is being copied, and the time that
each rank waits for others when the job ends, since they may have ended earlier."""
_REMEMBERED = 8

_State = Literal["copying", "held", "failed"]
"""The state of a copy; a failed one is retried."""


class ReplicaOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a replica, as sent to the flusher."""

    url: str
    opener: str | None = None
    """The function that opens the store, if it is not a built-in one."""
    every: int = 1
    keep: Keep | None = None
    bytes_per_s: float | None = None
    items: tuple[str, ...] | None = None
    """The items to copy; None: all."""

    def is_due(self, at: attempts.AttemptName) -> bool:
        """Return True, the same on all ranks, if this checkpoint is copied to the replica."""
        return (at.attempt - 1) % self.every == 0


class TierStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The progress of a checkpoint on its way to a tier, as the flusher sends it to the trainer."""

    at: attempts.AttemptName
    tier: str
    state: _State
    reason: str = ""
    """The reason for a failure."""
    save: int = 0
    """The number of the save, if it is still in progress."""


Tell = Callable[[TierStatus], None]


class Replicator:
    """Copies checkpoints from the primary to one replica, on a thread of its own."""

    # No dataclass: every start of a flusher would wait for its imports.
    def __init__(
        self, primary: Store, order: ReplicaOrder, tell: Tell, rank: int, ranks: int
    ) -> None:
        self.primary, self.order, self.tell = primary, order, tell
        self.rank, self.ranks = rank, ranks
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._due: deque[attempts.AttemptName] = deque(maxlen=1 if self.rank == 0 else _REMEMBERED)
        """Committed checkpoints that are not copied yet. Rank 0 copies only the newest; the others
        remember several, because rank 0 may have started with an older one."""
        self._current: attempts.AttemptName | None = None
        self._left: attempts.AttemptName | None = None
        """The checkpoint that an earlier job instance did not finish copying."""
        self._ends = False
        self._is_clean = False
        """True if the replica cannot contain remains of an interrupted copy."""
        self._thread = threads.Worker("replicate", self._run)

    def start(self) -> None:
        self._thread.start()

    def committed(self, at: attempts.AttemptName, *, is_last: bool = False) -> None:
        """Schedule a committed checkpoint. The last one of a job is copied in any case."""
        if is_last or self.order.is_due(at):
            with self._changed:
                if at not in self._due:
                    self._due.append(at)
                self._changed.notify_all()

    def needed(self) -> frozenset[str]:
        """Return the folders at the primary that are still to be copied; retention keeps them."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            return frozenset(at.folder for at in (*self._due, *current))

    def ask_to_end(self, *, at_once: bool) -> None:
        """End once everything due is copied or has failed once; with `at_once`, immediately."""
        with self._changed:
            self._ends = True
            if at_once:
                self._stop.set()
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    # On the replication thread

    def _run(self) -> None:
        with threads.outlasting(log, "replication to %s ended", self.order.url):
            pause_s = 0.0
            if self.rank == 0:
                self._take_up()
            while (at := self._next(pause_s)) is not None:
                if self._tries(at):
                    pause_s = 0.0
                elif self._ends:
                    return
                else:
                    pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            log.debug("nothing is left for %s", self.order.url)

    def _take_up(self) -> None:
        """Schedule the newest checkpoint if an earlier job instance did not copy it."""
        with contextlib.suppress(LaststepError, OSError):  # no run yet, or no replica to reach
            newest = Run.open(self.primary).newest()
            if newest is None:
                return
            with contextlib.suppress(NotFoundError):
                copied = Run.open(self._replica()).checkpoints()
                if any(item.folder == newest.folder for item in copied):
                    return
            with self._changed:
                if not self._due and (name := attempts.parse_folder(newest.folder)) is not None:
                    self._left = name
                    self._due.append(name)

    def _next(self, pause_s: float) -> attempts.AttemptName | None:
        """Wait until a checkpoint is due and return it; None if there will be no more."""
        with self._changed:
            self._current = None
            until_s = time.monotonic() + pause_s
            while not self._stop.is_set():
                left_s = until_s - time.monotonic()
                if self._due and (left_s <= 0 or self._ends):
                    self._current = self._due[-1]
                    return self._current
                if self._ends and not self._due:
                    return None
                self._changed.wait(left_s if self._due else None)
            return None

    def _tries(self, at: attempts.AttemptName) -> bool:
        """Copy one checkpoint. Return False if the copy has to be retried."""
        try:
            if self.rank == 0:
                self._lead(at)
            else:
                at = self._follow(at)
        except AbortedError:
            return True  # it was stopped
        except (LaststepError, OSError) as error:
            if not self._is_lost(at, error):
                log.warning("%s is not at %s yet: %s", at.folder, self.order.url, error)
                self._is_clean = False
                self._report(at, "failed", str(error))
                return False
            log.warning("%s is not copied to %s: %s", at.folder, self.order.url, error)
        with self._changed:
            while self._due and self._due[0].point <= at.point:
                self._due.popleft()
        return True

    def _is_lost(self, at: attempts.AttemptName, error: Exception) -> bool:
        """Return True if the primary has lost the checkpoint or has it damaged, so that a retry is
        useless. Damage elsewhere, such as in the replica's run.json, can be repaired."""
        if isinstance(error, CorruptError):
            return (error.where or "").startswith(f"{self.primary.url}/{at.folder}")
        if not isinstance(error, NotFoundError):
            return False
        with contextlib.suppress(StorageError):
            return attempts.deleted(self.primary, at.folder) is not None
        return False

    def _lead(self, at: attempts.AttemptName) -> None:
        """On rank 0: copy one checkpoint, together with other ranks, and commit it."""
        copier = self._copier()
        if not copier.is_there(at.folder):
            if self.ranks == 1 or at == self._left:
                copier.copy(at.folder, self._progress_of(at))
            else:
                copier.bring(at.folder, [0], self._progress_of(at))
                self._commit_when_whole(copier, at)
        self._report(at, "held")
        self._retain()

    def _commit_when_whole(self, copier: Copier, at: attempts.AttemptName) -> None:
        waited_s = 0.0
        while True:
            try:
                return copier.commit(at.folder)
            except StorageError as error:
                if copier.is_under_way(at.folder):
                    waited_s = 0.0
                elif waited_s > (_LAST_PATIENCE_S if self._ends else _PATIENCE_S):
                    if copier.abort(at.folder, error.what):
                        return None  # only a step after the commit failed
                    raise
            self._rest()
            waited_s += _LOOK_S

    def _follow(self, newest: attempts.AttemptName) -> attempts.AttemptName:
        """On other ranks: wait until rank 0 has begun one of the due checkpoints and copy this
        rank's files of it, or find that rank 0 has finished it. Return that checkpoint; all before
        it are done too."""
        waited_s = 0.0
        while True:
            with self._changed:
                due = list(self._due)
            for at in reversed(due):
                if attempts.exists(self._replica(), f"{at.folder}/{attempts.copying_name(0)}"):
                    self._copier().bring(at.folder, [self.rank], self._progress_of(at))
                    return at
                if attempts.read_decision(self._replica(), at.folder) is not None:
                    return at
            if self._ends and waited_s > _LAST_PATIENCE_S:
                return newest  # the next job instance copies it
            self._rest()
            waited_s += _LOOK_S if self._ends else 0.0

    def _rest(self) -> None:
        """Wait for one polling interval. Raise `AbortedError` if replication was stopped."""
        if self._stop.wait(_LOOK_S):
            raise AbortedError("the replication was stopped")

    def _retain(self) -> None:
        """Delete at the replica what its rules do not keep, and remains of interrupted copies."""
        try:
            run = Run.open(self._replica())
            if self.order.keep is not None:
                plan_prune(run, self.order.keep).execute()
            if not self._is_clean:
                run.clean()
                self._is_clean = True
        except (LaststepError, OSError) as error:
            log.warning("retention at %s failed: %s", self.order.url, error)

    def _report(self, at: attempts.AttemptName, state: _State, reason: str = "") -> None:
        self.tell(TierStatus(at=at, tier=self.order.url, state=state, reason=reason))

    def _replica(self) -> Store:
        return open_store(self.order.url)

    def _copier(self) -> Copier:
        # Imported late: the start of a job waits for the imports of its flusher.
        from laststep.tiers.copying import Copier, Pacing

        pacing = Pacing(bytes_per_s=self.order.bytes_per_s, stop=self._stop)
        return Copier(self.primary, self._replica(), self.order.items, pacing=pacing)

    def _progress_of(self, at: attempts.AttemptName) -> Progress:
        """Return a function that reports the progress of a copy, once a second."""
        reported_s = 0.0

        def report(_done_bytes: int, _size_bytes: int) -> None:
            nonlocal reported_s
            if time.monotonic() - reported_s > _LOOK_S:
                reported_s = time.monotonic()
                self._report(at, "copying")

        return report
