"""Bring checkpoints to a further tier: in the background, the newest first, one at a time.

A tier is a run of its own, with the same checkpoints under the same names; what is committed at
home is copied there. While one is on its way others may be committed at home: of these only the
newest waits, the others are left out. What fails is tried again, later and later; nothing that goes
wrong here reaches home. After a restart the newest that the tier lacks is the first.

In a job of several ranks each brings its own files. The first rank says which checkpoint it is, by
the folder that it makes at the tier, and commits when all files are there. What an earlier start
has left undone, whose ranks may have been others, it brings alone. Knows nothing of torch, nor of
who saves.

A note in the run says to which tiers it is drained, for whoever looks later; nothing depends on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import decision
from laststep.catalog.lineage import AttemptName, copying_name, parse_folder
from laststep.catalog.retention import plan_prune
from laststep.catalog.run import Run
from laststep.errors import AbortedError, CorruptError, LaststepError, NotFoundError, StorageError
from laststep.process import threads
from laststep.storage.registry import open_store
from laststep.tiers.bringing import CopyRoute, Pacing
from laststep.tiers.copying import Copier
from laststep.tiers.drains import Drained, DrainFailed, Draining

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.storage.store import Store
    from laststep.tiers.drains import DrainOrder, Tell


log = logging.getLogger(__name__)

_NAME = "tiers.json"
_LIMIT_BYTES = 1 << 20


class TiersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run knows of the tiers that it is drained to."""

    tiers: tuple[str, ...]
    """Their URLs, nearest first."""


def noted_tiers(store: Store) -> tuple[str, ...]:
    """The tiers that a run says it is drained to."""
    try:
        data = store.read(_NAME, limit_bytes=_LIMIT_BYTES)
        return msgspec.json.decode(data, type=TiersRecord).tiers
    except NotFoundError:
        pass
    except (CorruptError, msgspec.MsgspecError) as error:
        log.warning("the tiers of %s are not known: %s: %s", store.url, _NAME, error)
    return ()


def note_tiers(store: Store, tiers: Sequence[str]) -> None:
    """Note them, unless that is what the run says already; failing costs nothing but the note."""
    try:
        if noted_tiers(store) != tuple(tiers):
            store.delete(_NAME)
            store.create(_NAME, msgspec.json.encode(TiersRecord(tiers=tuple(tiers))))
    except LaststepError as error:
        log.warning("the tiers of %s cannot be noted there: %s", store.url, error)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0
"""Before a drain that has failed is tried again: twice as long each time."""
_LOOK_S = 1.0
"""How often ranks look what others have done."""
_PATIENCE_S, _LAST_PATIENCE_S = 900.0, 30.0
"""So long the first rank waits for the files of others while nobody brings any; and so long each
rank waits for others where the job ends: they may have ended before."""
_REMEMBERED = 8
_PROBE_LIMIT_BYTES = 1 << 16


class Drain:
    """Brings checkpoints from home to one further tier, on a thread of its own."""

    def __init__(
        self, home: Store, order: DrainOrder, tell: Tell, *, rank: int, ranks: int
    ) -> None:
        self._home = home
        self._order = order
        self._tell = tell
        self._rank, self._ranks = rank, ranks
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._due: deque[AttemptName] = deque(maxlen=1 if rank == 0 else _REMEMBERED)
        """Committed, and not brought yet. The first rank brings the newest only; the others follow
        it, which may have begun with one of several."""
        self._current: AttemptName | None = None
        self._left: AttemptName | None = None
        """What an earlier start has left undone."""
        self._ends = False
        self._is_clean = False
        """Whether no drain that was cut off can have left something at the tier."""
        self._thread = threading.Thread(target=self._run, name="laststep-drain", daemon=True)

    def start(self) -> None:
        threads.start(self._thread)

    def committed(self, at: AttemptName, *, is_last: bool) -> None:
        """See `Drains.committed`."""
        if is_last or self._order.is_due(at):
            with self._changed:
                if at not in self._due:
                    self._due.append(at)
                self._changed.notify_all()

    def needed(self) -> frozenset[str]:
        """The folders at home that it needs: retention spares them."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            return frozenset(at.folder for at in (*self._due, *current))

    def ask_to_end(self, *, at_once: bool) -> None:
        """See `Drains.close`."""
        with self._changed:
            self._ends = True
            if at_once:
                self._stop.set()
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    # On its thread

    def _run(self) -> None:
        with threads.outlasting(log, "draining to %s ended", self._order.url):
            pause_s = 0.0
            self._take_up()
            while (at := self._next(pause_s)) is not None:
                pause_s = self._longer(pause_s) if not self._tries(at) else 0.0
                if pause_s and self._ends:
                    return
            log.debug("nothing is left for %s", self._order.url)

    def _take_up(self) -> None:
        """What an earlier start has left undone: the newest at home, if the tier lacks it."""
        if self._rank != 0:
            return
        with contextlib.suppress(LaststepError, OSError):  # there is no run yet, or no tier
            newest = Run.open(self._home).newest()
            if newest is None or newest.folder in _steps_of(self._target()):
                return
            with self._changed:
                if not self._due:
                    self._left = _name(newest.folder)
                    self._due.append(self._left)

    def _next(self, pause_s: float) -> AttemptName | None:
        """Wait for what is due; None where nothing more will be."""
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

    def _longer(self, pause_s: float) -> float:
        return min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def _tries(self, at: AttemptName) -> bool:
        """Bring one; False where that is to be tried again."""
        try:
            if self._rank == 0:
                self._lead(at)
            else:
                at = self._follow(at)
        except AbortedError:
            return True  # it was stopped
        except (LaststepError, OSError) as error:
            if self._is_lost(at, error):
                log.warning("%s is not brought to %s: %s", at.folder, self._order.url, error)
                return self._done(at)
            log.warning("%s is not at %s yet: %s", at.folder, self._order.url, error)
            self._is_clean = False
            self._tell(DrainFailed(at=at, tier=self._order.url, reason=str(error)))
            return False
        return self._done(at)

    def _done(self, at: AttemptName) -> bool:
        with self._changed:
            while self._due and self._due[0].point <= at.point:
                self._due.popleft()
        return True

    def _is_lost(self, at: AttemptName, error: Exception) -> bool:
        """Return whether home has the checkpoint no more, or has it damaged: then trying again is
        of no use. Damage elsewhere, such as in the target's run.json, can be mended."""
        if isinstance(error, CorruptError):
            return (error.where or "").startswith(f"{self._home.url}/{at.folder}")
        if not isinstance(error, NotFoundError):
            return False
        with contextlib.suppress(StorageError):
            return decision.deleted(self._home, at.folder) is not None
        return False

    def _lead(self, at: AttemptName) -> None:
        """On the first rank: bring one, with the others if there are any, and commit it."""
        copier = self._copier(at)
        if not copier.is_there(at.folder):
            if self._ranks == 1 or at == self._left:
                copier.copy(at.folder)
            else:
                copier.bring(at.folder, [0])
                self._commit_when_whole(copier, at)
        self._tell(Drained(at=at, tier=self._order.url))
        self._retain()

    def _commit_when_whole(self, copier: Copier, at: AttemptName) -> None:
        waited_s = 0.0
        while True:
            try:
                copier.commit(at.folder)
            except StorageError:
                if copier.is_under_way(at.folder):
                    waited_s = 0.0
                elif waited_s > (_LAST_PATIENCE_S if self._ends else _PATIENCE_S):
                    self._target().delete_folder(at.folder)
                    raise
            else:
                return
            self._rest()
            waited_s += _LOOK_S

    def _follow(self, newest: AttemptName) -> AttemptName:
        """On another rank: bring one's own files of what the first rank has begun with, of what is
        due, or learn that it has gone past it. Which is done with by then, and all before it."""
        waited_s = 0.0
        while True:
            with self._changed:
                due = list(self._due)
            for at in reversed(due):
                if self._is_begun(at):
                    self._copier(at).bring(at.folder, [self._rank])
                    return at
                if decision.read_manifest(self._target(), at.folder) is not None:
                    return at
            if self._ends and waited_s > _LAST_PATIENCE_S:
                return newest  # the next start brings it
            self._rest()
            waited_s += _LOOK_S if self._ends else 0.0

    def _rest(self) -> None:
        """Give others time; `AbortedError` where there is none left."""
        if self._stop.wait(_LOOK_S):
            raise AbortedError("the drain was stopped")

    def _is_begun(self, at: AttemptName) -> bool:
        try:
            self._target().read(f"{at.folder}/{copying_name(0)}", limit_bytes=_PROBE_LIMIT_BYTES)
        except NotFoundError:
            return False
        return True

    def _retain(self) -> None:
        """Remove from the tier what its rules do not keep, and what was cut off."""
        try:
            run = Run.open(self._target())
            if self._order.keep is not None:
                plan_prune(run, self._order.keep).execute()
            if not self._is_clean:
                run.clean()
                self._is_clean = True
        except (LaststepError, OSError) as error:
            log.warning("retention at %s failed: %s", self._order.url, error)

    def _target(self) -> Store:
        return open_store(self._order.url)

    def _copier(self, at: AttemptName) -> Copier:
        told_s = 0.0

        def tell(done_bytes: int, size_bytes: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s > _LOOK_S:
                told_s = time.monotonic()
                self._tell(
                    Draining(
                        at=at, tier=self._order.url, done_bytes=done_bytes, size_bytes=size_bytes
                    )
                )

        pacing = Pacing(bytes_per_s=self._order.bytes_per_s, stop=self._stop)
        return Copier(
            CopyRoute(source=self._home, target=self._target(), pacing=pacing, progress=tell),
            self._order.items,
        )


def _steps_of(store: Store) -> frozenset[str]:
    """The folders of the checkpoints in a tier."""
    try:
        return frozenset(listed.folder for listed in Run.open(store).checkpoints())
    except NotFoundError:
        return frozenset()


def _name(folder: str) -> AttemptName:
    name = parse_folder(folder)
    assert name is not None  # noqa: S101 (it was listed as a checkpoint)
    return name
