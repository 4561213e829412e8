"""The run as one flusher writes to it: its epoch, which it claims when it has to, its attempts, and
what it cleans and retains.

Knows nothing of messages but `Continue`, nor of files. The receiving thread begins attempts, the
finisher commits them.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import epochs
from laststep.catalog.lineage import RUN_NAME, AttemptName, Seen, epoch_record_name
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.errors import AbortedError, LaststepError, NotFoundError, StorageError
from laststep.flush.protocol import Continue, NoMetric, Removed
from laststep.format.manifest import Abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.epochs import Trainer
    from laststep.format.manifest import Commit
    from laststep.storage.store import Lock, Store

log = logging.getLogger(__name__)


class WriterEpoch:
    """A writer's side of a run."""

    def __init__(
        self, store: Store, trainer: Trainer, keep: Keep | None, trainer_is_dead: Callable[[], bool]
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._keep = keep
        self._trainer_is_dead = trainer_is_dead
        self._run: Run | None = None
        self._continues = Continue(seen=Seen())
        self._epoch: int | None = None
        self._lock: Lock | None = None
        self._attempts = 0
        self._to_clean = False
        self.last_folder: str | None = None
        """What the next commit continues."""

    @property
    def run(self) -> Run:
        """The run, which is there."""
        if self._run is None:
            self._run = Run.open(self._store)
        return self._run

    @property
    def before(self) -> str | None:
        """The folder of the checkpoint that the next save goes on from, as far as is known; the
        first rank alone claims epochs and commits, but all are told where they go on from."""
        after = self._continues.after
        return self.last_folder or (None if after is None else after.folder)

    def records(self) -> tuple[tuple[str, bytes], ...]:
        """The names and bytes of what says which run this is, and whose epoch; nothing where this
        writer has claimed none."""
        record = None if self._epoch is None else self.run.epoch(self._epoch)
        if record is None or self.run.record is None:
            return ()
        name = epoch_record_name(record.epoch)
        return (RUN_NAME, msgspec.json.encode(self.run.record)), (name, epochs.encode(record))

    def continue_from(self, message: Continue) -> None:
        """The next save goes on from there, in an epoch of its own. That is claimed with it, so
        that restoring alone disturbs no writer."""
        self._continues = message
        self._epoch = None

    def begin(self, step: int, *, alone: bool) -> AttemptName:
        """Make the folder of the next attempt; where it has to, claim an epoch first."""
        run = self._claimed(alone=alone)
        assert self._epoch is not None  # noqa: S101 (claimed)
        self._attempts += 1
        at = AttemptName(step=step, epoch=self._epoch, attempt=self._attempts)
        run.begin(step=at.step, epoch=at.epoch, attempt=at.attempt)
        return at

    def commit(self, at: AttemptName, commit: Commit) -> None:
        """Commit an attempt of this epoch's, unless a later start goes on from another one by now:
        this process may have slept for long."""
        self.run.check_newest(at.epoch)
        self.run.commit(at.folder, commit)
        self.last_folder = at.folder

    def cause(self, at: AttemptName | None, error: LaststepError) -> LaststepError:
        """Return why a save failed: by a takeover, if there is a newer writer. That one has removed
        files or uploads of this save, which fails where it misses them first. A store that cannot
        be reached is not asked once more: that would only delay the report."""
        is_unreachable = isinstance(error, StorageError) and error.transient
        if (
            at is not None
            and isinstance(error, (NotFoundError, StorageError))
            and not is_unreachable
        ):
            try:
                self.run.check_newest(at.epoch)
            except AbortedError as takeover:
                takeover.__cause__ = error
                return takeover
            except (LaststepError, OSError) as second:
                log.warning("cannot look whether the run was taken over: %s", second)
        return error

    def was_given_up(self, folder: str) -> bool:
        """Whether the first rank has decided against a member's save, or removed its folder."""
        with contextlib.suppress(LaststepError, OSError):
            if isinstance(self.run.decision(folder), Abort):
                return True
            return not self._store.list(folder)
        return False

    def abort_as_member(self, folder: str, reason: str) -> bool:
        """Decide against an attempt of all ranks; True if it has been committed. Its folder stays
        for the first rank, or whoever comes after it: others may still be writing, and whoever
        finds the decision finds the reason in it."""
        return not isinstance(self.run.abort(folder, reason), Abort)

    def abort(self, folder: str, reason: str) -> bool:
        """Decide against an attempt of our own and remove it; True if it has been committed."""
        run = self.run
        try:
            if not isinstance(run.abort(folder, reason), Abort):
                return True
            if run.decision(folder) is not None:  # else a later start has removed it already
                run.discard(folder)
        except StorageError:
            # A full disk has no room for a decision either; without its folder nobody can commit.
            if run.decision(folder) is not None:
                raise
            self._store.delete_folder(folder)
        return False

    def retain(
        self,
        at: AttemptName,
        *,
        overwritten: bool,
        needed: frozenset[str],
        tell: Callable[[NoMetric | Removed], None],
    ) -> None:
        """Apply the rules, after the commit of `at`; folders that are `needed` stay. Retention
        failing costs disk space, never the checkpoint that was just committed."""
        if self._keep is None and not overwritten:
            return
        run, asked = self.run, self._continues

        def check() -> None:
            run.check_newest(at.epoch)  # what a successor continues from is not ours to judge
            if self._continues is not asked:
                raise AbortedError("the run goes on from another checkpoint by now")

        try:
            # Without any rule everything stays, except what was overwritten.
            plan = plan_prune(
                run, self._keep or Keep(), resumed_from=asked.resumed_from, in_use=needed
            )
            if plan.lacking is not None:
                tell(NoMetric(reason=plan.lacking))
            steps = {verdict.folder: verdict.step for verdict in plan.verdicts}
            plan.execute(
                before=check, each=lambda gone: tell(Removed(step=steps[gone], folder=gone))
            )
        except (LaststepError, OSError) as error:
            log.warning("retention failed: %s", error)

    def clean(self) -> None:
        """Remove what others left behind, once in an epoch. Not before the first commit, which need
        not wait for it; but also after a save that failed: it may be what filled the disk."""
        if self._to_clean and self._run is not None:
            self._to_clean = False
            self._run.clean()

    def close(self) -> None:
        """Show that this writer is gone."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _claimed(self, *, alone: bool) -> Run:
        """The run, with an epoch of this writer's own."""
        if self._run is None:
            self._run = Run.open_or_create(self._store)
        if self._epoch is not None:
            return self._run
        asked, orphan = self._continues, self._trainer_is_dead()
        if orphan and not alone:
            raise AbortedError("the trainer died before the save began, which needs all ranks")
        point = None if asked.after is None else asked.after.point
        self.close()
        epoch = self._run.claim_epoch(point, seen=asked.seen, writer=self._trainer, orphan=orphan)
        self._lock = self._run.lock_epoch(epoch)
        self._epoch = epoch  # only with its lock: without it the attempts would look dead
        self._attempts = 0
        self.last_folder = None if asked.after is None else asked.after.folder
        self._to_clean = True
        return self._run
