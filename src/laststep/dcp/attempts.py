"""The saves of this process to a run on behalf of one trainer.

DCP creates a writer for each save and never closes it, so the term belongs to the process: all its
saves to a run share one term, which the first save claims. The lock of the term is held while a
save is in progress. A newer term of another trainer ends this one. A newer term of the same
trainer, which may save alternately from itself and from torch's background process, is continued.
Thread-safe.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.catalog.attempt import RUN_NAME, read_decision
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run, RunWriter
from laststep.catalog.terms import Terms, Trainer
from laststep.constants import listed
from laststep.dcp.address import is_own_path, own_paths_there, remove_stock, stock_saved_s
from laststep.errors import AbortedError, AlreadyExistsError, LaststepError, UsageError
from laststep.format.manifest import Abort
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.catalog.attempt import Attempt
    from laststep.format.manifest import Commit
    from laststep.storage.store import Store

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DcpSave:
    """A save in progress. The first `commit` or `abort` ends it; later calls do nothing."""

    writer: DcpWriter
    attempt: Attempt
    continues: str | None
    overwrite: bool
    sole: bool
    _pid: int = field(default_factory=os.getpid)

    def commit(self, commit: Commit) -> None:
        """Commit the checkpoint. Raise `AbortedError` if another writer has taken over the run."""
        self.writer.commit(self.attempt, commit)
        self.writer.ended(self)
        if self.overwrite:
            # Without any rule only overwritten checkpoints are deleted.
            with only_logged("delete what was overwritten"):
                plan_prune(self.writer.run, Keep()).execute()
                if self.sole:
                    remove_stock(self.attempt.store.url)
        self.writer.clean()

    def abort(self, reason: str) -> None:
        """Abort the attempt and delete its files. Errors of the store are only logged."""
        if self in self.writer.under_way and os.getpid() == self._pid:  # not a forked child
            try:
                with only_logged("clean up after a failed save"):
                    self.attempt.abort(reason)
            finally:
                self.writer.ended(self)


@contextlib.contextmanager
def only_logged(what: str) -> Iterator[None]:
    try:
        yield
    except (LaststepError, OSError) as error:
        _log.warning("cannot %s: %s", what, error)


class DcpWriter(RunWriter):
    """This process as the writer of one run."""

    def __init__(self, path: str, trainer: Trainer) -> None:
        super().__init__(open_store(path), trainer)
        self._mutex = threading.RLock()  # the finalizer of a Writer may abort during any call
        self.under_way: list[DcpSave] = []

    def begin_save(self, step: int, *, overwrite: bool, sole: bool) -> DcpSave:
        """Begin an attempt. Raise `AbortedError` if another trainer has taken over the run, and
        `UsageError` if a `sole` checkpoint would not be alone in it."""
        with self._mutex:
            if self.term is not None:
                self._look_round(self.term)
            if self.term is None:
                _check_one_way(self.store)
            self._run = run = self._run or Run.open_or_create(self.store)
            if sole:
                _check_sole(run, step)
            if self.term is not None:
                run.check_newest(self.term)
                for save in tuple(self.under_way):
                    if isinstance(read_decision(self.store, save.attempt.folder), Abort):
                        save.abort("another rank aborted it")
            if not overwrite:
                _check_step_free(run, step, sole=sole)
            if self.term is None:
                seen = run.newest_point()
                self.continue_from(run.newest(), seen)
            try:
                attempt = self.begin(step)
            except BaseException:
                self._close_if_idle()
                raise
            save = DcpSave(self, attempt, self.last_folder, overwrite=overwrite, sole=sole)
            self.under_way.append(save)
            return save

    def ended(self, save: DcpSave) -> None:
        """Remove a finished save; after the last one, release the lock of the term."""
        with self._mutex:
            if save in self.under_way:
                self.under_way.remove(save)
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.under_way:
            self.close()

    def _look_round(self, term: int) -> None:
        """Drop the term, to claim a new one, if the run is gone or this trainer has a newer one."""
        known = Terms(self.store)
        newest = max(known.numbers(), default=0)
        is_deleted = newest < term
        record = known.read(newest) if newest > term else None
        if not is_deleted and (record is None or _PROCESS(record) != _PROCESS(self._trainer)):
            return
        if self.under_way:
            raise AbortedError(
                "cannot save while a save of an older term is in progress",
                where=self.store.url,
                found=f"term {newest} after term {term}",
                remedy="wait for the saves of one process before starting those of another",
            )
        self.term = None
        if is_deleted:
            self.store, self._run = open_store(self.store.url), None


def _check_one_way(store: Store) -> None:
    """Raise `UsageError` if ranks have saved separately here and would now save together, or the
    other way round: a load could not know which is newer."""
    above, _, name = store.url.rpartition("/")
    mixed = own_paths_there(store.url)
    if is_own_path(name) and RUN_NAME in open_store(above).file_names(""):
        mixed = ["a run that ranks have saved to together"]
    if mixed:
        raise UsageError(
            "cannot save to one path both with collectives and without",
            where=store.url,
            found=listed(mixed),
            remedy="save to another path, or delete this one",
        )


def _check_sole(run: Run, step: int) -> None:
    steps = sorted({item.step for item in run.lineage()} - {step})
    if steps:
        raise UsageError(
            "cannot save without a step: the run has numbered steps",
            where=run.store.url,
            found=listed(f"step {number}" for number in steps),
            remedy="pass step= to the Writer, or checkpoint_id= to dcp.save; or save elsewhere",
        )


def _check_step_free(run: Run, step: int, *, sole: bool) -> None:
    """Raise `AlreadyExistsError`, with DCP's wording, if the step exists."""
    what, where = "torch's own storage has saved here", run.store.url
    if not sole or stock_saved_s(where) is None:
        try:
            run.check_step_free(step)
            return
        except AlreadyExistsError as error:
            what, where = error.what, error.where or where
    raise AlreadyExistsError(
        f"Checkpoint already exists: {what}",
        where=where,
        remedy="pass overwrite=True to the Writer to replace it, or save elsewhere",
    )


_PROCESS = operator.attrgetter("host", "pid", "boot", "process_started")

_MOST_WRITERS = 64
_writers: dict[tuple[int, str, Trainer], DcpWriter] = {}
"""The writers by process, run and trainer: a forked child starts with none."""


def writer_of(path: str, trainer: Trainer) -> DcpWriter:
    """Return the writer of this process for the run at a path or URL."""
    key = os.getpid(), path, trainer
    writer = _writers.setdefault(key, DcpWriter(path, trainer))
    # Drop the oldest idle ones; their next saves claim new terms.
    for old, known in tuple(_writers.items())[:-_MOST_WRITERS]:
        if old != key and not known.under_way:
            _writers.pop(old, None)
    return writer
