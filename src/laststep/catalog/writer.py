"""A job instance as the writer of a run: its term, and the attempts that it begins.

A restore does not disturb another writer: the term is claimed only with the first attempt after the
restore. The lock of the term shows that the writer is alive. This module knows nothing of messages,
files or retention. Only one thread at a time may begin attempts; another may commit them.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog import terms
from laststep.catalog.lineage import RUN_NAME, Seen, term_record_name
from laststep.catalog.run import Run
from laststep.errors import AbortedError, LaststepError, NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.attempt import Attempt
    from laststep.catalog.lineage import AttemptName
    from laststep.catalog.terms import Trainer
    from laststep.format.manifest import Commit
    from laststep.storage.store import Lock, Store

_log = logging.getLogger(__name__)


class RunWriter:
    """The writer of one run, on behalf of a job instance's trainer."""

    def __init__(
        self, store: Store, trainer: Trainer, trainer_is_dead: Callable[[], bool] = lambda: False
    ) -> None:
        self.store = store
        self._trainer = trainer
        self._trainer_is_dead = trainer_is_dead
        self._run: Run | None = None
        self._after: AttemptName | None = None
        self._seen = Seen()
        self.term: int | None = None
        """None before the first attempt, and after a restore."""
        self._lock: Lock | None = None
        self._attempts = 0
        self._to_clean = False
        self.last_folder: str | None = None
        """The checkpoint that the next commit follows."""

    @property
    def run(self) -> Run:
        """The run. Raise `NotFoundError` if it does not exist."""
        if self._run is None:
            self._run = Run.open(self.store)
        return self._run

    @property
    def before(self) -> str | None:
        """The folder of the checkpoint that the next save follows, if known. Only rank 0 claims
        terms and commits, but every rank knows the checkpoint that it restored."""
        return self.last_folder or (None if self._after is None else self._after.folder)

    def records(self) -> tuple[tuple[str, bytes], ...]:
        """Return the names and contents of the run's record and of this writer's term record; empty
        if it has claimed no term."""
        record = None if self.term is None else self.run.term(self.term)
        if record is None or self.run.record is None:
            return ()
        name = term_record_name(record.term)
        return (RUN_NAME, msgspec.json.encode(self.run.record)), (name, terms.encode(record))

    def continue_from(self, after: AttemptName | None, seen: Seen) -> None:
        """Claim a new term with the next attempt and continue from `after`. `seen` is the state of
        the run when this was decided."""
        self._after, self._seen = after, seen
        self.term = None

    def open_run(self) -> Run:
        """Return the run; create it if there is none."""
        if self._run is None:
            self._run = Run.open_or_create(self.store)
        return self._run

    def begin(self, step: int, *, needs_trainer: bool = False) -> Attempt:
        """Begin the next attempt, after claiming a term if there is none. Raise `AbortedError` if
        another writer has taken over the run."""
        run = self.open_run()
        if self.term is None:
            self._claim(run, needs_trainer=needs_trainer)
        assert self.term is not None  # noqa: S101 (claimed)
        if self._lock is None:
            self._lock = run.lock_term(self.term)
        self._attempts += 1
        return run.begin(step=step, term=self.term, attempt=self._attempts)

    def commit(self, attempt: Attempt, commit: Commit) -> None:
        """Commit an attempt of this writer."""
        attempt.commit(commit)
        self.last_folder = attempt.folder

    def cause(self, at: AttemptName | None, error: LaststepError) -> LaststepError:
        """Return the reason why a save failed: a takeover if there is a newer writer, else `error`.

        A newer writer removes files or uploads of this save, which then fails because they are
        missing. An unreachable store is not queried again, which would only delay the report.
        """
        is_unreachable = isinstance(error, StorageError) and error.transient
        if (
            at is not None
            and isinstance(error, (NotFoundError, StorageError))
            and not is_unreachable
        ):
            try:
                self.run.check_newest(at.term)
            except AbortedError as takeover:
                takeover.__cause__ = error
                return takeover
            except (LaststepError, OSError) as second:
                _log.warning(
                    "cannot check whether another writer has taken over the run: %s", second
                )
        return error

    def clean(self) -> None:
        """Remove orphans, once per term. Called after the first commit, which need not wait for it,
        and also after a failed save, because orphans may have filled the disk."""
        if self._to_clean and self._run is not None:
            self._to_clean = False
            self._run.clean()

    def close(self) -> None:
        """Release the lock of the term: nothing is being written. The next attempt takes it
        again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _claim(self, run: Run, *, needs_trainer: bool) -> None:
        orphan = self._trainer_is_dead()
        if orphan and needs_trainer:
            raise AbortedError("the trainer died before the save began on all ranks")
        after = self._after
        self.close()
        if after is not None:
            with contextlib.suppress(NotFoundError):  # it was read at another tier
                # Its writer may have died before its name was durable, and nothing synced it since.
                self.store.sync_folder(after.folder)
        term = run.claim_term(
            None if after is None else after.point,
            seen=self._seen,
            writer=self._trainer,
            orphan=orphan,
        )
        self._lock = run.lock_term(term)
        self.term = term  # only after locking: without the lock its attempts would look dead
        self._attempts = 0
        self.last_folder = None if after is None else after.folder
        self._to_clean = True
