"""Attempts of this process to save to a run for one trainer: begun, then committed or given up.

DCP makes a writer for each save and never closes it, so the epoch belongs to the process: all its
saves to a run share one, which is taken by the first. Its lock is held while a save is under way.
A newer epoch of another trainer ends this one; one of the same trainer, which may save from itself
and from torch's background process in turn, is continued. Any thread may call any of this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.adapters.dcp import stock_folder
from laststep.adapters.dcp.address import is_own_path, own_paths_there
from laststep.catalog.epochs import Epochs
from laststep.catalog.lineage import RUN_NAME
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    LaststepError,
    StorageError,
    UsageError,
)
from laststep.format.manifest import Abort
from laststep.storage.registry import open_store
from laststep.terms import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.catalog.epochs import EpochRecord, Trainer
    from laststep.format.manifest import Commit
    from laststep.storage.store import Lock, Store

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class DcpSave:
    """One save under way, which the first `commit` or `give_up` ends; later calls do nothing."""

    tenure: DcpWriter
    run: Run
    step: int
    epoch: int
    number: int
    folder: str
    continues: str | None
    overwrite: bool
    sole: bool
    _pid: int = field(default_factory=os.getpid)
    _ended: bool = False

    def commit(self, commit: Commit) -> None:
        """Make it a checkpoint; `AbortedError` if another writer has taken the run over
        meanwhile."""
        self.run.check_newest(self.epoch)
        self.run.commit(self.folder, commit)
        self.tenure.last_folder = self.folder
        self._end()
        if self.overwrite:
            # Without any rule everything stays, except what was overwritten.
            with _only_logged("delete what was overwritten"):
                plan_prune(self.run, Keep()).execute()
                if self.sole:
                    stock_folder.remove(self.run.store.url)

    def give_up(self, reason: str) -> None:
        """Abort the attempt and delete its files; a store that cannot do so raises nothing here."""
        if self._ended or os.getpid() != self._pid:  # a forked child has no say
            return
        try:
            with _only_logged("clean up after a failed save"):
                self._abandon(reason)
        finally:
            self._end()

    def _abandon(self, reason: str) -> None:
        try:
            if isinstance(self.run.abort(self.folder, reason), Abort):
                self.run.discard(self.folder)
        except StorageError:
            # A full disk has no room for a decision either; without its folder nobody can commit.
            if self.run.decision(self.folder) is None:
                self.run.store.delete_folder(self.folder)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.tenure.ended(self.number)


@contextlib.contextmanager
def _only_logged(what: str) -> Iterator[None]:
    try:
        yield
    except (LaststepError, OSError) as error:
        _log.warning("cannot %s: %s", what, error)


class DcpWriter:
    """This process as a writer of one run."""

    def __init__(self, path: str, trainer: Trainer) -> None:
        self._store = open_store(path)
        self._trainer = trainer
        self._mutex = threading.RLock()  # a collected Writer may give up within any call
        self._run: Run | None = None
        self._epoch: int | None = None
        self._lock: Lock | None = None
        self._attempts = 0
        self._under_way: dict[int, DcpSave | None] = {}
        """The saves under way by their numbers; None for one that is just about to begin."""
        self.last_folder: str | None = None

    def begin(self, step: int, *, overwrite: bool, sole: bool = False) -> DcpSave:
        """A new attempt and its folder; `AlreadyExistsError` where the step is taken,
        `AbortedError` where the run is another trainer's. A `sole` checkpoint has the run to
        itself, else that is `UsageError`."""
        with self._mutex:
            if self._epoch is not None:
                self._look_round(self._epoch)
            if self._epoch is None:
                _check_one_way(self._store)
            run = self._run = self._run or Run.open_or_create(self._store)
            if sole:
                _check_sole(run, step)
            if self._epoch is not None:
                run.check_newest(self._epoch)
                self._end_given_up(run)
            if not overwrite:
                _check_step_free(run, step, sole=sole)
            epoch = self._enter(run) if self._epoch is None else self._epoch
            if self._lock is None:
                self._lock = run.lock_epoch(epoch)
            self._attempts += 1
            number = self._attempts
            self._under_way[number] = None
            try:
                folder = run.begin(step=step, epoch=epoch, attempt=number)
            except BaseException:
                self.ended(number)
                raise
            attempt = self._under_way[number] = DcpSave(
                tenure=self,
                run=run,
                step=step,
                epoch=epoch,
                number=number,
                folder=folder,
                continues=self.last_folder,
                overwrite=overwrite,
                sole=sole,
            )
            return attempt

    def _end_given_up(self, run: Run) -> None:
        """End the saves under way that some rank has given up; called when a new save begins."""
        for attempt in list(self._under_way.values()):
            if attempt is not None and isinstance(run.decision(attempt.folder), Abort):
                attempt.give_up("a rank has given it up")

    def ended(self, number: int) -> None:
        """Forget an attempt that is over, and with the last one let go of the lock of the epoch."""
        with self._mutex:
            self._under_way.pop(number, None)
            if not self._under_way and self._lock is not None:
                self._lock.close()
                self._lock = None

    def is_idle(self) -> bool:
        return not self._under_way

    def _enter(self, run: Run) -> int:
        """Take the next epoch, which continues the newest checkpoint."""
        seen = run.newest_point()
        newest = run.newest()
        point = None if newest is None else newest.point
        epoch = run.claim_epoch(point, seen=seen, writer=self._trainer)
        self._lock = run.lock_epoch(epoch)
        self._epoch, self._attempts = epoch, 0
        self.last_folder = None if newest is None else newest.folder
        run.clean()
        return epoch

    def _look_round(self, epoch: int) -> None:
        """Let go of an epoch that is not the newest, unless another trainer has taken over."""
        epochs = Epochs(self._store)
        newest = max(epochs.numbers(), default=0)
        if newest < epoch:  # somebody has deleted the run
            self._store = open_store(self._store.url)
            self._run = self._epoch = None
        elif newest > epoch:
            record = epochs.read(newest)
            if record is not None and _same(record, self._trainer):
                self._epoch = None
        if self._epoch is None and self._under_way:
            self._epoch = epoch
            raise AbortedError(
                "cannot save while a save of an older epoch is under way",
                where=self._store.url,
                found=f"epoch {newest} after epoch {epoch}",
                remedy="wait for the saves of one process before those of another begin",
            )


def _check_one_way(store: Store) -> None:
    """`UsageError` where ranks have saved for themselves and are now to save together, or the other
    way round: a load would not know which of the two is newer."""
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
    others = sorted({there.step for there in run.lineage()} - {step})
    if others:
        raise UsageError(
            "cannot save without a step: this is a run with steps of its own",
            where=run.store.url,
            found=listed(f"step {other}" for other in others),
            remedy="pass step= to the Writer, or checkpoint_id= to dcp.save; or save elsewhere",
        )


def _check_step_free(run: Run, step: int, *, sole: bool) -> None:
    """`AlreadyExistsError`, in the words that DCP has for it, where that step is taken."""
    if sole and stock_folder.is_stock_folder(run.store.url):
        raise AlreadyExistsError(
            "Checkpoint already exists: torch's own storage has saved here",
            where=run.store.url,
            remedy="leave overwrite=False out to replace it, or save elsewhere",
        )
    try:
        run.check_step_free(step)
    except AlreadyExistsError as error:
        raise AlreadyExistsError(
            f"Checkpoint already exists: {error.what}",
            where=error.where,
            remedy="pass overwrite=True to the Writer to replace it, or save another step",
        ) from error


def _same(record: EpochRecord, trainer: Trainer) -> bool:
    return (record.host, record.pid, record.boot, record.process_started) == (
        trainer.host,
        trainer.pid,
        trainer.boot,
        trainer.process_started,
    )


class _Tenures:
    """The writers of this process, by run and trainer; a forked child starts with none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.mutex = threading.Lock()
        self.known: dict[tuple[str, Trainer], DcpWriter] = {}


_MOST_TENURES = 64
_tenures = _Tenures()
os.register_at_fork(after_in_child=_tenures.reset)


def tenure_of(path: str, trainer: Trainer) -> DcpWriter:
    """This process as a writer of the run at that path or URL."""
    with _tenures.mutex:
        known = _tenures.known.pop((path, trainer), None) or DcpWriter(path, trainer)
        if len(_tenures.known) >= _MOST_TENURES:
            # The one that was longest unused; its next save takes a new epoch.
            for key in [key for key, tenure in _tenures.known.items() if tenure.is_idle()][:1]:
                del _tenures.known[key]
        _tenures.known[path, trainer] = known
        return known
