"""A run: the way to its checkpoints, its writers, its commits and its cleaning.

Ties `epochs`, `listing`, `decision` and `cleaning` to one store and adds only the order in which
they act. Knows nothing of tensors, data files or processes. What it remembers never changes on
disk, so any thread may call any method.

The identity of a run is the id in `run.json` or, without that file, in its manifests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from laststep.catalog import cleaning, decision, lineage, listing
from laststep.catalog.decision import exists
from laststep.catalog.epochs import (
    RECORD_LIMIT_BYTES,
    EpochRecord,
    Epochs,
    shares_pids,
    this_writer,
    trainer_is_gone,
)
from laststep.catalog.lineage import (
    PIN_NAME,
    RUN_NAME,
    AttemptName,
    Seen,
    epoch_lock_name,
    epoch_record_name,
    format_folder,
    parse_folder,
)
from laststep.catalog.listing import (
    SCAN_PAUSES_S,
    Listed,
    OpenAttempt,
    ScanDepth,
    Scanner,
    remedy_for_no_run,
)
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format.manifest import Abort, Commit, Versioned, refuse_later
from laststep.terms import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from laststep.catalog.cleaning import Orphan
    from laststep.catalog.epochs import Trainer
    from laststep.catalog.lineage import Chain, Point
    from laststep.catalog.listing import ScannedAttempt
    from laststep.storage.store import Lock, Store, StoreEntry


_ID = re.compile("[0-9a-f]{32}")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `run.json`, by which a run is known."""

    format: int
    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    created_s: float


def run_id(store: Store) -> str:
    """Return the id of the run in a store; "" if neither `run.json` nor a manifest tells it."""
    record = read_record(store)
    return id_in_manifests(store) if record is None else record.run


def id_in_manifests(store: Store) -> str:
    """Return the run id in the newest readable manifest; "" if there is none."""
    attempts = [name for name in map(parse_folder, store.folder_names("")) if name is not None]
    for attempt in sorted(attempts, key=lambda name: name.point, reverse=True):
        try:
            decided = decision.read_manifest(store, attempt.folder)
        except StorageError:
            raise
        except LaststepError:
            continue  # damaged, or of a later format; an older manifest has the same id
        if isinstance(decided, Commit) and _ID.fullmatch(decided.run):
            return decided.run
    return ""


def read_record(store: Store) -> RunRecord | None:
    """Return the content of `run.json`; None if there is none, `CorruptError` if it is damaged."""
    where = f"{store.url}/{RUN_NAME}"
    try:
        data = store.read(RUN_NAME, limit_bytes=RECORD_LIMIT_BYTES)
    except NotFoundError:
        return None
    try:
        said = msgspec.json.decode(data, type=Versioned)
        refuse_later(
            said.format, what="run", where=where, writer=said.laststep, latest=FORMAT_VERSION
        )
        record = msgspec.json.decode(data, type=RunRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        found = "other content, which laststep did not write" if data else "an empty file"
        raise _bad_record(where, found) from error
    if record.format != FORMAT_VERSION:
        raise _bad_record(where, f"format {record.format}")
    return record


def _bad_record(where: str, found: str) -> LaststepError:
    return CorruptError(
        "the record of the run is damaged",
        where=where,
        expected="a format, a run id and a time",
        found=found,
        remedy="move the file away: the checkpoints open without it",
    )


_log = logging.getLogger(__name__)


class LiveWriter(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch whose writer is alive, and the attempts it has not decided yet."""

    epoch: int
    host: str
    pid: int
    """Of the trainer, which may be dead while its flusher finishes."""
    shares_pids: bool
    """Whether `pid` means the same process here."""
    trainer_is_gone: bool
    """Whether that process is known to be dead."""
    attempts: tuple[str, ...]


class Run:
    """One run in one store. Made by `open` or `open_or_create`."""

    def __init__(self, store: Store, record: RunRecord | None) -> None:
        self.store = store
        self.record = record
        self._epochs = Epochs(store)
        self._scanner = Scanner(store)

    @classmethod
    def open(cls, store: Store) -> Run:
        """An existing run; `NotFoundError` where there is neither a record nor any checkpoint."""
        record = read_record(store)
        run = cls(store, record)
        if record is None and not run._scanner.names():
            raise NotFoundError(
                "there is no run",
                where=store.url,
                expected=f"{RUN_NAME} or a folder named step-…",
                remedy=remedy_for_no_run(store) or "check the path",
            )
        return run

    @classmethod
    def open_or_create(cls, store: Store) -> Run:
        """The run, which is made where there is none."""
        record = read_record(store)
        if record is None:
            # Replicas refuse checkpoints of a run with another id, so a lost run.json must not
            # give the run a new one.
            known = id_in_manifests(store) or os.urandom(16).hex()
            fresh = RunRecord(format=FORMAT_VERSION, run=known, created_s=time.time())
            try:
                store.create(RUN_NAME, msgspec.json.encode(fresh))
                record = fresh
            except AlreadyExistsError:
                record = read_record(store)
        return cls(store, record)

    @property
    def id(self) -> str:
        """The random id of the run; "" if neither `run.json` nor a manifest tells it."""
        return id_in_manifests(self.store) if self.record is None else self.record.run

    # What there is

    def checkpoints(self) -> tuple[Listed, ...]:
        """All committed checkpoints in the order of commits, on the lineage or not."""
        return self._listed(self._scanner.scan())

    def _listed(
        self, scanned: tuple[ScannedAttempt, ...], epoch: int | None = None
    ) -> tuple[Listed, ...]:
        """The checkpoints among them, on the lineage of the run or on that of an `epoch`."""
        if epoch is not None:
            return listing.checkpoints(scanned, self._epochs.chain(epoch))
        committed = [item.name for item in scanned if item.is_committed]
        return listing.checkpoints(scanned, self._chain(committed, lambda _: True))

    def _chain(
        self, names: Iterable[AttemptName], is_committed: Callable[[AttemptName], bool]
    ) -> Chain:
        """The epochs of the lineage, given the attempts that there are: what the newest epoch that
        has a commit descends from. One that has none has decided nothing: its writer may have died
        before it knew what it would leave behind. Asks of as few attempts as possible whether they
        are committed, newest first."""
        numbers = self._epochs.numbers()
        recorded = frozenset(numbers)
        own = [name for name in names if name.epoch in recorded]
        newest_first = sorted(own, key=lambda name: name.point, reverse=True)
        last = next((name for name in newest_first if is_committed(name)), None)
        beyond = [name for name in names if numbers and name.epoch > numbers[-1]]
        self._tell_unrecorded(filter(is_committed, beyond))
        if last is None:
            return self._epochs.chain(None)
        if numbers[-1] > last.epoch:
            self._tell_undecided(numbers[-1], last)
        return self._epochs.chain(last.epoch)

    def _tell_unrecorded(self, committed: Iterable[AttemptName]) -> None:
        """Say so where a checkpoint is newer than every epoch that there is a record of."""
        for name in sorted(committed, key=lambda name: name.point)[-1:]:
            if exists(self.store, epoch_record_name(name.epoch)):
                error = StorageError(
                    "a listing lacks the record of an epoch",
                    where=self.store.url,
                    expected=epoch_record_name(name.epoch),
                    remedy="try again",
                )
                error.transient = True
                raise error
            why = "does not count, as there is no record of its epoch; restore(%d) takes it"
            _log.warning(f"%s of %s {why}", name.folder, self.store.url, name.step)

    def _tell_undecided(self, epoch: int, last: AttemptName) -> None:
        """Say so where the newest epoch, which has no commit, continues another than the last."""
        with contextlib.suppress(CorruptError):
            record = self._epochs.read(epoch)
            if record is not None and record.continues != last.point:
                _log.warning(
                    "epoch %d of %s continues from %s and has committed nothing: %s is still the "
                    "last checkpoint",
                    epoch,
                    self.store.url,
                    record.continues,
                    last.folder,
                )

    def look(self) -> tuple[tuple[Listed, ...], tuple[OpenAttempt, ...]]:
        """The committed checkpoints and the undecided attempts, as they were at one look, which
        goes through all folders: for a person, or before a deletion."""
        scanned = self._scanner.scan(ScanDepth.ALL)
        return self._listed(scanned), listing.attempts(scanned, self._epochs)

    def lineage(self) -> tuple[Listed, ...]:
        """The checkpoints that the present state descends from, oldest first; also those that are
        unreadable or incomplete."""
        return tuple(item for item in self.checkpoints() if item.on_lineage)

    def would_descend(self, names: Iterable[AttemptName]) -> tuple[AttemptName, ...]:
        """Of these commits, if all of them and no others were here, those of the lineage."""
        known = list(names)
        return lineage.order(known, self._chain(known, lambda _: True))

    def newest(self) -> Listed | None:
        """The last whole one of the lineage, by manifests and sizes; looks into few folders."""
        for pause_s in SCAN_PAUSES_S:
            time.sleep(pause_s)
            folders = dict(self._scanner.folders())
            looked: dict[AttemptName, ScannedAttempt] = {}
            newest = self._newest_of(folders, looked)
            if not self._scanner.missed_commit(looked.values(), folders.keys()):
                break
        return newest

    def _newest_of(
        self, folders: dict[AttemptName, StoreEntry], looked: dict[AttemptName, ScannedAttempt]
    ) -> Listed | None:
        """The same of these folders; adds those that it looks into to `looked`."""

        def look(name: AttemptName) -> ScannedAttempt:
            if name not in looked:
                looked[name] = self._scanner.look(name, folders[name])
            return looked[name]

        chain = self._chain(folders, lambda name: look(name).is_committed)
        for name in reversed(lineage.order(folders, chain)):
            attempt = look(name)
            if attempt.is_committed:
                (listed,) = listing.checkpoints((attempt,), chain)
                if listed.is_whole:
                    return listed
        return None

    def attempts(self) -> tuple[OpenAttempt, ...]:
        """The undecided attempts."""
        return listing.attempts(self._scanner.scan_undecided(), self._epochs)

    def epoch(self, number: int) -> EpochRecord | None:
        """The record of one epoch."""
        return self._epochs.read(number)

    def live_writer(self, *, below: int | None = None) -> LiveWriter | None:
        """The newest epoch (below that number) whose writer is alive, or None.

        Before a restore this is whoever still finishes the last save of an earlier start.
        """
        for number in self._epochs.locked():
            if below is None or number < below:
                record = self._epochs.read(number)
                pending = tuple(item.folder for item in self.attempts() if item.epoch == number)
                return LiveWriter(
                    epoch=number,
                    host="" if record is None else record.host,
                    pid=0 if record is None else record.pid,
                    shares_pids=record is not None and shares_pids(record),
                    trainer_is_gone=record is not None and trainer_is_gone(record),
                    attempts=pending,
                )
        return None

    # Writing

    def newest_point(self) -> Seen:
        """See `newest_point`. A listing made after this call holds that commit, or a newer one."""
        return newest_point(self.store)

    def claim_epoch(
        self,
        continues: Point | None,
        *,
        seen: Seen | None = None,
        writer: Trainer | None = None,
        orphan: bool = False,
    ) -> int:
        """Become the writer: take the next epoch, then give up what older writers left open, none
        of which can be committed after that. What the dead left is removed: it may be what fills
        the disk.

        `AbortedError` unless the newest epoch and the last commit are those that were `seen` when
        it was decided to continue from there (None: that was just now); see `epochs`. `writer` is
        the trainer that this is done for; this process where none is named. The lock of the epoch
        MUST be taken (`lock_epoch`) before the first attempt begins."""
        seen, writer = seen or self.newest_point(), writer or this_writer()
        if continues is not None:
            # Who continues from a commit has seen it, though it may have come after the first look.
            seen = Seen(epoch=max(seen.epoch, continues[0]), commit=max(seen.commit, continues))
        self._check_missed_nothing(seen.commit, writer)
        number = self._claim(continues, seen=seen.epoch, writer=writer, orphan=orphan)
        self._end_older(number)
        # Somebody may have been told of a commit before he could know of this epoch. Whoever fails
        # or dies before this second look has committed nothing, so that commit is still the last.
        self._check_missed_nothing(seen.commit, writer)
        _log.info("epoch %d of %s continues from %s", number, self.store.url, continues)
        return number

    def _claim(self, continues: Point | None, *, seen: int, writer: Trainer, orphan: bool) -> int:
        try:
            return self._epochs.claim(continues, seen=seen, writer=writer, orphan=orphan)
        except StorageError:
            # There may be no room for a record beside what the dead have left.
            scanned = self._scanner.scan_undecided(ScanDepth.ATTEMPTS)
            dead = cleaning.attempts_of_the_dead(self._epochs, scanned, now_s=time.time())
            if not self._remove(dead):
                raise
            return self._epochs.claim(continues, seen=seen, writer=writer, orphan=orphan)

    def _end_older(self, successor: int) -> None:
        """Remove the attempts of dead writers, and give up those of others. A live one that looked
        for newer epochs before this one was there finds that when it commits."""
        scanned = self._scanner.scan_undecided(ScanDepth.ATTEMPTS)
        dead = cleaning.attempts_of_the_dead(self._epochs, scanned, now_s=time.time())
        self._remove(dead)
        of_the_dead = {orphan.name for orphan in dead}
        for item in listing.attempts(scanned, self._epochs):
            # A copy is no writer's, and settles nothing: it is as old as its original.
            if item.epoch < successor and item.folder not in of_the_dead and not item.is_copy:
                self._give_up_for(successor, item.folder)

    def _give_up_for(self, successor: int, folder: str) -> None:
        """Give up an attempt of an older epoch; a commit that came first stands."""
        reason = f"the run was taken over by {self._epochs.described(successor)}"
        try:
            decided = decision.abort(self.store, folder, reason)
        except LaststepError as error:
            if self.decision(folder) is not None:
                return
            raise StorageError(
                "cannot take the run over: a save of another job, which may live, cannot be given "
                "up",
                where=f"{self.store.url}/{folder}",
                found=error.without_remedy(),
                remedy="end that job and delete this folder, or let this job write to it; the next "
                "save tries again",
            ) from error
        if isinstance(decided, Abort):
            _log.warning("gave up %s, which was under way in an older epoch", folder)

    def _check_missed_nothing(self, seen: Point, writer: Trainer) -> None:
        """`AbortedError` if another start has committed anything after `seen`: who goes on from
        there would abandon it, and what he continues may be pruned by now."""
        later = sorted((n for n in self._scanner.names() if n.point > seen), key=lambda n: n.point)
        for name in reversed(later):
            if not self._epochs.is_of(name.epoch, writer) and _is_committed(self.store, name):
                raise self._epochs.superseded(
                    name.epoch,
                    expected="nothing to be saved since this job looked at the run",
                    before=True,
                    saved=name.folder,
                )

    def check_newest(self, epoch: int) -> None:
        """`AbortedError` if another writer has taken a newer epoch."""
        newest = max(self._epochs.numbers(), default=0)
        if newest > epoch:
            raise self._epochs.superseded(newest, expected=f"epoch {epoch} to be the newest")

    def lock_epoch(self, number: int) -> Lock:
        """Show that the writer of that epoch is alive, until this is closed or the process ends."""
        return self.store.lock(epoch_lock_name(number))

    def check_step_free(self, step: int, *, epoch: int | None = None) -> None:
        """`AlreadyExistsError` where that step is committed on the lineage and whole; on that of a
        writer's
        `epoch`, which may have no commit yet."""
        # One that is not committed may be that of the very save which asks. All are looked at only
        # where there is one: every save asks, and a run may have thousands.
        there = [name for name in self._scanner.names() if name.step == step]
        if not any(_is_committed(self.store, name) for name in there):
            return
        scanned = self._scanner.scan(ScanDepth.ALL)
        for item in self._listed(scanned, epoch):
            if item.on_lineage and item.step == step and item.is_whole:
                raise AlreadyExistsError(
                    f"step {step} has been saved already",
                    where=f"{self.store.url}/{item.folder}",
                    remedy="save with overwrite=True to replace it, or restore an earlier step",
                )

    def begin(self, *, step: int, epoch: int, attempt: int) -> str:
        """Make the folder of an attempt, then see whether this writer is still the newest.

        In that order: a newer writer either shows up here, or finds the folder and gives it up.
        """
        if epoch not in self._epochs.numbers():
            raise NotFoundError(
                f"cannot save step {step}: the run is not there, or not the one that was saved to",
                where=self.store.url,
                expected=f"its record of epoch {epoch}",
                found="none: the run was deleted or renamed, or a link to it points elsewhere",
                remedy="bring it back to this path, or make a new Checkpointer",
            )
        folder = format_folder(step=step, epoch=epoch, attempt=attempt)
        self.store.make_folder(folder)
        try:
            self.check_newest(epoch)
        except AbortedError as error:
            decision.abort(self.store, folder, f"the run was taken over by {error.found}")
            raise
        return folder

    def commit(self, folder: str, commit: Commit) -> None:
        """Make a checkpoint visible; see `decision.commit`."""
        decision.commit(self.store, folder, commit)

    def abort(self, folder: str, reason: str) -> Commit | Abort:
        """Give an attempt up; returns the decision that stands, a `Commit` if it came too late."""
        _check_folder(folder)
        return decision.abort(self.store, folder, reason)

    def decision(self, folder: str) -> Commit | Abort | None:
        """What was decided about an attempt."""
        _check_folder(folder)
        return decision.read(self.store, folder)

    # Removing

    def discard(self, folder: str) -> None:
        """Delete an attempt that was given up; for its own writer, once it writes no more. One that
        somebody else has deleted is fine."""
        decided = self.decision(folder)
        if decided is None and parse_folder(folder) not in self._scanner.names():
            return
        if not isinstance(decided, Abort):
            raise UsageError(
                "refused to delete an attempt that was not given up",
                where=f"{self.store.url}/{folder}",
                remedy="abort it first, or prune if it is committed",
            )
        self.store.delete_folder(folder)

    def orphans(self, *, now_s: float | None = None) -> tuple[Orphan, ...]:
        """What crashes left behind and no live writer can want."""
        now = time.time() if now_s is None else now_s
        scanned = self._scanner.scan(ScanDepth.ATTEMPTS)
        return cleaning.orphans(self.store, self._epochs, scanned, now_s=now)

    def clean(self, *, now_s: float | None = None) -> tuple[Orphan, ...]:
        """Remove the orphans; returns those that are gone. Failing costs disk space and is logged:
        whoever cleans has something better to do, and the next writer tries again."""
        try:
            return self._remove(self.orphans(now_s=now_s))
        except LaststepError as error:
            _log.warning("cannot look for what crashes left behind: %s", error)
            return ()

    def _remove(self, orphans: Iterable[Orphan]) -> tuple[Orphan, ...]:
        """Remove what can be removed; returns that."""
        gone = []
        for orphan in orphans:
            try:
                if cleaning.remove(self.store, orphan):
                    gone.append(orphan)
            except LaststepError as error:
                _log.warning("cannot remove %s: %s", orphan.name, error)
        return tuple(gone)

    def pin(self, folder: str) -> None:
        """Keep that checkpoint whatever the rules say."""
        if not isinstance(self.decision(folder), Commit):
            raise NotFoundError(
                "cannot pin, there is no such checkpoint", where=f"{self.store.url}/{folder}"
            )
        try:
            self.store.create(f"{folder}/{PIN_NAME}", b"")
        except AlreadyExistsError:
            self.store.sync_folder(folder)  # who made it may have failed to

    def unpin(self, folder: str) -> None:
        """Leave that checkpoint to the rules again."""
        _check_folder(folder)
        self.store.delete(f"{folder}/{PIN_NAME}")


def newest_point(store: Store) -> Seen:
    """The newest epoch of the run in a store, and its last commit."""
    names = sorted(Scanner(store).names(), key=lambda name: name.point, reverse=True)
    newest = max((*Epochs(store).numbers(), *(name.epoch for name in names)), default=0)
    last = next((name.point for name in names if _is_committed(store, name)), (0, 0))
    return Seen(epoch=newest, commit=last)


def _is_committed(store: Store, name: AttemptName) -> bool:
    """Whether an attempt counts as a checkpoint; as in a listing, an unreadable manifest does."""
    try:
        return isinstance(decision.read(store, name.folder), Commit)
    except StorageError:
        raise
    except LaststepError:
        return True


def _check_folder(folder: str) -> None:
    if parse_folder(folder) is None:
        raise UsageError(
            "this is not the name of a checkpoint", expected="step-S.E-A", found=repr(folder)
        )
