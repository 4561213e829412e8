"""A run: its checkpoints, the writer that adds to it, and its cleanup.

Connects `terms`, `listing`, `attempt` and `retention` to one store and defines only the order of
their operations. It caches only what never changes on disk, so all methods of `Run` are
thread-safe. A run is identified by the id in `run.json` or, without that file, in its manifests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import re
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from laststep.catalog import attempt as attempts
from laststep.catalog import listing, retention, terms
from laststep.catalog.attempt import Attempt, AttemptName
from laststep.constants import FORMAT_VERSION
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format.manifest import Abort, Commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from laststep.catalog.listing import Listed, ScannedAttempt
    from laststep.storage.store import Lock, Store, StoreEntry

_log = logging.getLogger(__name__)

_ID = re.compile("[0-9a-f]{32}")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `run.json`, which identifies a run."""

    format: terms.Format
    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    created_s: float


def run_id(store: Store) -> str:
    """Return the id of the run in a store; "" if neither `run.json` nor a manifest has one."""
    return Run(store, read_record(store)).id


def read_record(store: Store) -> RunRecord | None:
    """Return the content of `run.json`, if it exists. Raise `CorruptError` if it is damaged."""
    where = f"{store.url}/{attempts.RUN_NAME}"
    try:
        data = store.read(attempts.RUN_NAME, limit_bytes=terms.RECORD_LIMIT_BYTES)
    except NotFoundError:
        return None
    try:
        return terms.decode_record(data, RunRecord, what="run", where=where)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(
            "the record of the run is damaged",
            where=where,
            remedy="move the file away: the checkpoints open without it",
        ) from error


class LiveWriter(msgspec.Struct, frozen=True, kw_only=True):
    """A term with a live writer, maybe just a flusher, and its undecided attempts."""

    term: int
    record: terms.TermRecord | None
    attempts: tuple[str, ...]

    @property
    def who(self) -> str:
        record = self.record
        return "another process" if record is None else f"process {record.pid} on {record.host}"


class Run:
    """A run in a store. Create it with `open` or `open_or_create`."""

    def __init__(self, store: Store, record: RunRecord | None) -> None:
        self.store = store
        self.record = record
        self._terms = terms.Terms(store)
        self._scanner = listing.Scanner(store)

    @classmethod
    def open(cls, store: Store) -> Run:
        """Open a run. Raise `NotFoundError` if there is neither a record nor any checkpoint."""
        record = read_record(store)
        run = cls(store, record)
        if record is None and not run._scanner.names():
            raise NotFoundError(
                "there is no run",
                where=store.url,
                expected=f"{attempts.RUN_NAME} or a folder named step-…",
                remedy=listing.remedy_for_no_run(store) or "check the path",
            )
        return run

    @classmethod
    def open_or_create(cls, store: Store) -> Run:
        record = read_record(store)
        if record is None:
            # Replicas refuse checkpoints of a run with another id, so a lost run.json must not
            # give the run a new one.
            known = cls(store, None).id or os.urandom(16).hex()
            fresh = RunRecord(format=FORMAT_VERSION, run=known, created_s=time.time())
            try:
                store.create(attempts.RUN_NAME, msgspec.json.encode(fresh))
                record = fresh
            except AlreadyExistsError:
                record = read_record(store)
        return cls(store, record)

    @property
    def id(self) -> str:
        """The random id of the run; "" if neither `run.json` nor a readable manifest has one."""
        if self.record is not None:
            return self.record.run
        for name in sorted(self._scanner.names(), key=attempts.by_point, reverse=True):
            try:
                decided = attempts.read_decision(self.store, name.folder)
            except StorageError:
                raise
            except LaststepError:
                continue  # damaged or of a later format; older manifests have the same id
            if isinstance(decided, Commit) and _ID.fullmatch(decided.run):
                return decided.run
        return ""

    # Reading

    def checkpoints(self) -> tuple[Listed, ...]:
        """Return all committed checkpoints in the order of commits, on the lineage or not."""
        return self._listed(self._scanner.scan())

    def _listed(
        self, scanned: tuple[ScannedAttempt, ...], term: int | None = None
    ) -> tuple[Listed, ...]:
        """Return the scanned checkpoints; the lineage is that of the run, or of `term`."""
        if term is not None:
            return listing.checkpoints(scanned, self._terms.chain(term))
        found = filter(operator.attrgetter("is_committed"), scanned)
        committed = set(map(operator.attrgetter("name"), found))
        return listing.checkpoints(scanned, self._chain(committed, committed.__contains__))

    def _chain(
        self, names: Iterable[AttemptName], is_committed: Callable[[AttemptName], bool]
    ) -> terms.Chain:
        """Return the terms that the newest term with a commit descends from, of all attempts that
        exist. A term without a commit does not count: its writer may have died before it knew which
        checkpoints it would abandon. `is_committed` is called for as few as possible."""
        numbers = self._terms.numbers()
        recorded, is_told = frozenset(numbers), not numbers
        for name in sorted(names, key=attempts.by_point, reverse=True):
            if name.term in recorded:
                if is_committed(name):
                    return self._terms.chain(name.term)
            elif not is_told and name.term > numbers[-1] and is_committed(name):
                self._tell_unrecorded(name)
                is_told = True
        return self._terms.chain(None)

    def _tell_unrecorded(self, name: AttemptName) -> None:
        """Warn about a checkpoint that is newer than every recorded term. Raise `StorageError` if
        its record exists and was only missing from the listing."""
        record = terms.term_record_name(name.term)
        if attempts.exists(self.store, record):
            error = StorageError("a listing omits a file", where=self.store.url, expected=record)
            error.transient = True
            raise error
        why = "is ignored because the record of its term is missing; restore(%d) restores it"
        _log.warning(f"%s of %s {why}", name.folder, self.store.url, name.step)

    def look(self) -> tuple[tuple[Listed, ...], tuple[listing.OpenAttempt, ...]]:
        """Scan all folders once; return the committed checkpoints and the undecided attempts."""
        scanned = self._scanner.scan(deep=True)
        return self._listed(scanned), listing.open_attempts(scanned, self._terms)

    def lineage(self) -> tuple[Listed, ...]:
        """Return the present state's lineage, oldest first, with unreadable and incomplete ones."""
        return tuple(item for item in self.checkpoints() if item.on_lineage)

    def would_descend(self, names: Iterable[AttemptName]) -> tuple[AttemptName, ...]:
        """Return the lineage as it would be if the run had exactly these commits."""
        known = list(names)
        return terms.order(known, self._chain(known, lambda _: True))

    def newest(self) -> Listed | None:
        """Return the lineage's last checkpoint whose files have full size, or None."""
        newest = None
        for _ in attempts.looks():
            folders = self._scanner.folders()
            looked: dict[AttemptName, ScannedAttempt] = {}
            newest = self._newest_of(folders, looked)
            if not self._scanner.missed_commit(looked.values(), folders.keys()):
                break
        return newest

    def _newest_of(
        self, folders: dict[AttemptName, StoreEntry], looked: dict[AttemptName, ScannedAttempt]
    ) -> Listed | None:
        """Return the last complete checkpoint among these folders, or None. Scanned folders are
        added to `looked`."""

        def look(name: AttemptName) -> ScannedAttempt:
            if name not in looked:
                looked[name] = self._scanner.look(name, folders[name])
            return looked[name]

        chain = self._chain(folders, lambda name: look(name).is_committed)
        for name in reversed(terms.order(folders, chain)):
            for listed in listing.checkpoints((look(name),), chain):
                if listed.is_whole:
                    return listed
        return None

    def attempts(self) -> tuple[listing.OpenAttempt, ...]:
        return listing.open_attempts(self._scanner.scan_undecided(), self._terms)

    def term(self, number: int) -> terms.TermRecord | None:
        return self._terms.read(number)

    def live_writer(self, *, below: int | None = None) -> LiveWriter | None:
        """Return the newest term (below `below`) whose writer is alive, or None. Before a restore,
        it still finishes the last save of an earlier job instance."""
        for number in reversed(self._terms.numbers("lock")):
            if (below is None or number < below) and self._terms.is_alive(number):
                record = self._terms.read(number)
                pending = tuple(item.folder for item in self.attempts() if item.term == number)
                return LiveWriter(term=number, record=record, attempts=pending)
        return None

    # Writing

    def newest_point(self) -> terms.Seen:
        """Return the newest term and the last commit. A listing made after this call contains that
        commit or a newer one."""
        return newest_point(self.store)

    def claim_term(
        self,
        continues: terms.Point | None,
        *,
        seen: terms.Seen | None = None,
        writer: terms.Trainer | None = None,
        orphan: bool = False,
    ) -> int:
        """Become the writer: claim the next term, then abort the undecided attempts of older
        writers, so that none of them can be committed any more. Attempts of dead writers are
        removed, because they may be what fills the disk.

        Raise `AbortedError` unless the newest term and the last commit are still those in `seen`,
        the state in which the caller chose to continue from `continues` (None: the present state);
        see `terms`. `writer` is the trainer on whose behalf the term is claimed; by default this
        process. The lock of the term MUST be taken (`lock_term`) before the first attempt begins.
        """
        seen, writer = seen or self.newest_point(), writer or terms.this_writer()
        if continues is not None:
            # A writer has seen the commit that it continues from, even if it came after `seen`.
            seen = terms.Seen(term=max(seen.term, continues[0]), commit=max(seen.commit, continues))
        self._check_missed_nothing(seen.commit, writer)
        claim = functools.partial(
            self._terms.claim, continues, seen=seen.term, writer=writer, orphan=orphan
        )
        try:
            number = claim()
        except StorageError:
            # The attempts of dead writers may leave no room for a record.
            scanned = self._scanner.scan_undecided(deep=True)
            dead = retention.attempts_of_the_dead(self._terms, scanned, now_s=time.time())
            if not self._remove(dead):
                raise
            number = claim()
        self._end_older(number)
        # An older writer may have committed before it could see this term. If this process fails
        # or dies before the second check, it has committed nothing, so that commit is still last.
        self._check_missed_nothing(seen.commit, writer)
        _log.info("term %d of %s continues from %s", number, self.store.url, continues)
        return number

    def _end_older(self, successor: int) -> None:
        """Remove the attempts of dead writers and abort those of other older writers. A live writer
        that checked for newer terms before this one existed finds the abort when it commits."""
        scanned = self._scanner.scan_undecided(deep=True)
        if not scanned:
            return
        dead = retention.attempts_of_the_dead(self._terms, scanned, now_s=time.time())
        self._remove(dead)
        ended = {orphan.name for orphan in dead}
        for item in scanned:
            # A copy belongs to no writer of this run, and committing it cannot move the lineage
            # forward: it has the point of its original.
            is_own = not (item.is_copy or item.folder.is_link)
            if is_own and item.name.term < successor and item.folder.name not in ended:
                self._give_up_for(successor, item.folder.name)

    def _give_up_for(self, successor: int, folder: str) -> None:
        """Abort an attempt of an older term, unless it has been committed."""
        reason = f"the run was taken over by {self._terms.described(successor)}"
        try:
            decided = attempts.abort(self.store, folder, reason)
        except LaststepError as error:
            if attempts.read_decision(self.store, folder) is not None:
                return
            raise StorageError(
                "cannot take over the run: cannot abort a save of another job, which may still be "
                "alive",
                where=f"{self.store.url}/{folder}",
                found=error.without_remedy(),
                remedy="stop that job and delete this folder, or give this job write access; the "
                "next save tries again",
            ) from error
        if isinstance(decided, Abort):
            _log.warning("aborted %s, which was in progress in an older term", folder)

    def _check_missed_nothing(self, seen: terms.Point, writer: terms.Trainer) -> None:
        """Raise `AbortedError` if another job instance has committed after `seen`: continuing would
        abandon that commit, and `seen` itself may have been pruned by now."""
        for name in sorted(self._scanner.names(), key=attempts.by_point, reverse=True):
            if name.point <= seen:
                return
            if not self._terms.is_of(name.term, writer) and _is_committed(self.store, name):
                raise self._terms.superseded_error(
                    name.term,
                    "no checkpoint that this job has not seen",
                    found=f"{name.folder}, saved by {self._terms.described(name.term)}",
                )

    def check_newest(self, term: int) -> None:
        """Raise `AbortedError` if another writer has claimed a newer term."""
        newest = max(self._terms.numbers(), default=0)
        if newest > term:
            raise self._terms.superseded_error(newest, f"term {term} to be the newest")

    def lock_term(self, number: int) -> Lock:
        """Lock a term, to show that its writer is alive."""
        return self.store.lock(terms.term_lock_name(number))

    def check_step_free(self, step: int, *, own: AttemptName | None = None) -> None:
        """Raise `AlreadyExistsError` if the step is complete on the lineage: with `own`, which does
        not count, on that of its term, which may have no commit yet."""
        # The full scan runs only if there is a commit, because every save calls this and a run may
        # have thousands.
        for name in self._scanner.names():
            if name.step == step and name != own and _is_committed(self.store, name):
                break
        else:
            return
        scanned = self._scanner.scan(deep=True)
        for item in self._listed(scanned, None if own is None else own.term):
            if item.on_lineage and item.step == step and item.is_whole:
                raise AlreadyExistsError(
                    f"step {step} has already been saved",
                    where=f"{self.store.url}/{item.folder}",
                    remedy="save with overwrite=True to replace it, or restore an earlier step",
                )

    def begin(self, *, step: int, term: int, attempt: int) -> Attempt:
        """Begin an attempt. Raise `NotFoundError` if the run was deleted or replaced."""
        if term not in self._terms.numbers():
            raise NotFoundError(
                f"cannot save step {step}: the run is missing or was replaced",
                where=self.store.url,
                expected=f"its record of term {term}",
                found="nothing: the run was deleted, renamed or relinked",
                remedy="move it back to this path, or create a new Checkpointer",
            )
        name = AttemptName(step=step, term=term, attempt=attempt)
        if attempts.parse_folder(name.folder) != name:
            raise UsageError("cannot name a checkpoint", found=name.folder)
        begun = Attempt(self.store, name, functools.partial(self.check_newest, term))
        begun.begin()
        return begun

    # Removing

    def orphans(self, *, now_s: float | None = None) -> tuple[retention.Orphan, ...]:
        """Return the files and folders that crashes left behind and that no live writer needs."""
        now = time.time() if now_s is None else now_s
        scanned = self._scanner.scan(deep=True)
        return retention.orphans(self.store, self._terms, scanned, now_s=now)

    def clean(self, *, now_s: float | None = None) -> tuple[retention.Orphan, ...]:
        """Remove orphans and return them. A failure is only logged: the next writer tries again."""
        try:
            return self._remove(self.orphans(now_s=now_s))
        except LaststepError as error:
            _log.warning("cannot look for orphaned snapshots: %s", error)
            return ()

    def _remove(self, orphans: Iterable[retention.Orphan]) -> tuple[retention.Orphan, ...]:
        """Remove as many of these as possible, and return them."""
        gone = []
        for orphan in orphans:
            try:
                if retention.remove(self.store, orphan):
                    gone.append(orphan)
            except LaststepError as error:
                _log.warning("cannot remove %s: %s", orphan.name, error)
        return tuple(gone)

    def pin(self, folder: str) -> None:
        """Protect a checkpoint from retention. Raise `NotFoundError` if it does not exist."""
        if not isinstance(attempts.read_decision(self.store, folder), Commit):
            raise NotFoundError(
                "cannot pin: the checkpoint does not exist", where=f"{self.store.url}/{folder}"
            )
        try:
            self.store.create(f"{folder}/{attempts.PIN_NAME}", b"")
        except AlreadyExistsError:
            self.store.sync_folder(folder)  # its creator may have failed to sync it

    def unpin(self, folder: str) -> None:
        self.store.delete(f"{folder}/{attempts.PIN_NAME}")


def newest_point(store: Store) -> terms.Seen:
    names = sorted(listing.Scanner(store).names(), key=attempts.by_point, reverse=True)
    newest = max((names[0].term if names else 0, *terms.Terms(store).numbers()))
    for name in names:
        if _is_committed(store, name):
            return terms.Seen(term=newest, commit=name.point)
    return terms.Seen(term=newest)


def _is_committed(store: Store, name: AttemptName) -> bool:
    """Return True if an attempt counts as committed, as it does with an unreadable manifest."""
    try:
        return isinstance(attempts.read_decision(store, name.folder), Commit)
    except StorageError:
        raise
    except LaststepError:
        return True


class RunWriter:
    """A job instance as the writer of a run, on behalf of its trainer. A restore does not disturb
    another writer: the term is claimed only with the first attempt after it. The lock of the term
    shows that the writer is alive. One thread may begin attempts, another may commit them."""

    def __init__(
        self,
        store: Store,
        trainer: terms.Trainer,
        trainer_is_dead: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store = store
        self._trainer = trainer
        self._trainer_is_dead = trainer_is_dead
        self._run: Run | None = None
        self._after: AttemptName | None = None
        self._seen = terms.Seen()
        self.term: int | None = None
        """None before the first attempt, and after a restore."""
        self._lock: Lock | None = None
        self._attempts = 0
        self._to_clean = False
        self.last_folder: str | None = None
        """The checkpoint that the next commit follows, also on ranks that only restored it."""
        self.resumed_from: str | None = None
        """The checkpoint that the trainer restored, which retention keeps."""

    @property
    def run(self) -> Run:
        """The run. Raise `NotFoundError` if it does not exist."""
        if self._run is None:
            self._run = Run.open(self.store)
        return self._run

    def records(self) -> tuple[tuple[str, bytes], ...]:
        """Return the records of the run and this term by name; empty before the first attempt."""
        record = None if self.term is None else self.run.term(self.term)
        if record is None or self.run.record is None:
            return ()
        name = terms.term_record_name(record.term)
        run = msgspec.json.encode(self.run.record)
        return (attempts.RUN_NAME, run), (name, terms.encode(record))

    def continue_from(
        self, after: AttemptName | None, seen: terms.Seen, resumed_from: str | None = None
    ) -> None:
        """Claim a new term with the next attempt and go on from `after`, chosen in state `seen`."""
        self.term = None  # first: whoever reads the others for the old term then sees its end
        self._after, self._seen, self.resumed_from = after, seen, resumed_from
        self.last_folder = None if after is None else after.folder

    def begin(self, step: int, *, needs_trainer: bool = False) -> Attempt:
        """Begin the next attempt, claiming a term if needed; `AbortedError` after a takeover."""
        self._run = run = self._run or Run.open_or_create(self.store)
        if self.term is None:
            orphan = self._trainer_is_dead()
            if orphan and needs_trainer:
                raise AbortedError("the trainer died before the save began on all ranks")
            self.close()
            after, continues, folder = self._after, None, None
            if after is not None:
                continues, folder = after.point, after.folder
                with contextlib.suppress(NotFoundError):  # it was read at another tier
                    # Its writer may have died before its name was durable; nothing synced it since.
                    self.store.sync_folder(folder)
            self.last_folder = folder  # not what was committed since
            self.term = run.claim_term(
                continues, seen=self._seen, writer=self._trainer, orphan=orphan
            )
            self._attempts = 0
            self._to_clean = self.term > 1  # before the first term nobody left anything behind
        if self._lock is None:  # else its attempts would look dead
            self._lock = run.lock_term(self.term)
        self._attempts += 1
        return run.begin(step=step, term=self.term, attempt=self._attempts)

    def commit(self, attempt: Attempt, commit: Commit) -> None:
        attempt.commit(commit)
        self.last_folder = attempt.folder

    def cause(self, at: AttemptName | None, error: LaststepError) -> LaststepError:
        """Return the reason why a save failed: a takeover if there is a newer writer, else `error`.

        A newer writer removes files or uploads of this save, which then fails because they are
        missing. An unreachable store is not queried again, which would only delay the report.
        """
        is_unreachable = isinstance(error, StorageError) and error.transient
        if at is None or is_unreachable or not isinstance(error, (NotFoundError, StorageError)):
            return error
        try:
            self.run.check_newest(at.term)
        except AbortedError as takeover:
            takeover.__cause__ = error
            return takeover
        except (LaststepError, OSError) as second:
            _log.warning("cannot check whether another writer has taken over the run: %s", second)
        return error

    def clean(self) -> None:
        """Remove orphans, once per term. Called after the first commit, which need not wait for it,
        and also after a failed save, because orphans may have filled the disk."""
        if self._to_clean and self._run is not None:
            self._to_clean = False
            self._run.clean()

    def close(self) -> None:
        """Release the lock of the term until the next attempt: nothing is being written."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
