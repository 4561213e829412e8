"""Choose the checkpoint that all ranks restore: rank 0 lists the run and broadcasts its choice.

The other ranks open the checkpoint that rank 0 names, with the manifest that rank 0 read: their own
view of the run may be stale (network filesystems cache directory contents for a while). If a rank
finds a file missing, rank 0 checks again. Everything here is collective.

Rank 0 first waits for saves that other processes are still writing, because they may be newer.
Checkpoints are then tried one after the other. Only `CorruptError`, which readers raise after a
second read, causes a fallback to an older checkpoint. Unreachable storage and state that does not
fit raise.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from laststep import constants
from laststep.catalog.attempt import AttemptName, deleted, exists
from laststep.catalog.instances import coming, still_coming
from laststep.catalog.listing import nearest_steps
from laststep.catalog.run import Run, newest_point
from laststep.catalog.terms import shares_pids, trainer_is_gone
from laststep.codecs.digests import without_digests
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError, UsageError
from laststep.events import Bus, PassedOver
from laststep.format import manifest
from laststep.format.manifest import Abort, Commit
from laststep.process import signals, system
from laststep.process.threads import ready
from laststep.ranks.group import collective
from laststep.read.content import Content
from laststep.settings import WAIT_FOR_OTHERS_S
from laststep.storage.registry import open_store
from laststep.tiers.nearest import NearestStore, ReplicaHas, look_at_replicas, only_there
from laststep.tiers.snapshots import NodePart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.listing import Listed
    from laststep.catalog.run import LiveWriter
    from laststep.catalog.terms import Seen
    from laststep.flush.saves import SaveHandle
    from laststep.ranks.group import Rank, Ranks
    from laststep.restoring.restore import RestoreRequest
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Time a rank is given to see what rank 0 sees: network filesystems cache folders for a minute."""
PAUSE_S = 0.5
_DELETED = "it was deleted in the meantime"
_LOOK_S = 0.05
_RECORDS_BYTES = 64 << 20
"""Limit on the snapshot records that nodes exchange; above it, a job on several nodes uses none."""

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was not restored, and the reason."""

    step: int
    folder: str
    reason: str


class Chosen(AttemptName, frozen=True, kw_only=True):
    manifest: bytes
    """The encoded manifest for the other ranks; empty if rank 0 cannot read it."""
    lineage_steps: tuple[int, ...]
    """Steps of the lineage up to and including this checkpoint."""


class _Finding(enum.StrEnum):
    """The findings of rank 0 about a checkpoint that failed to open or verify on some rank."""

    DAMAGED = "damaged"
    DELETED = "deleted"
    UNSEEN = "unseen"
    """Rank 0 sees the file that another rank is missing."""


# --- other writers -------------------------------------------------------------------------------

_Saves = Callable[[Any], "list[SaveHandle]"]
_entered: weakref.WeakKeyDictionary[object, tuple[Path, _Saves]] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_entered.clear)


def enter(who: object, run: str, under_way: _Saves) -> None:
    """Register `who` as a writer to that run; `under_way(who)` returns its unfinished saves."""
    _entered[who] = Path(run).resolve(), under_way


def wait_for_others(who: object, run: str) -> None:
    """Wait for the saves of this process's other Checkpointers of the run, failed or not."""
    for other, (place, ask) in list(_entered.items()):
        if other is not who and place == Path(run).resolve():
            for handle in ask(other):
                log.info("waiting for another Checkpointer, which is saving step %d", handle.step)
                handle.committed.over_within(None)


def _wait_for_writers(store: Store, rank: Rank) -> None:
    """On rank 0, wait until other processes have finished their saves; warn if one keeps saving."""
    if not rank.is_first:
        return
    deadline = time.monotonic() + WAIT_FOR_OTHERS_S
    # Saves with a pending marker first: nothing of them may be in the run yet.
    for announced in coming(store):
        works = functools.partial(still_coming, store, announced)
        _let_finish(f"process {announced.pid}", works, deadline)
    try:
        run = Run.open(store)
    except LaststepError:
        return  # the caller opens the run next and raises
    # A trainer that died may have left a flusher that is finishing its last save. It is not known
    # whether a trainer is dead, so flushers of live trainers are waited for too.
    for writer in _other_writers(run):
        if writer.attempts:
            works = functools.partial(_is_undecided, run, frozenset(writer.attempts))
            _let_finish(writer.who, works, deadline)
    for writer in _other_writers(run):
        if writer.record is None or not trainer_is_gone(writer.record):
            log.warning(
                "%s is saving to this run. Only one job may save at a time: if this one saves too, "
                "saves of one of them fail",
                writer.who,
            )
            return


def _is_undecided(run: Run, folders: frozenset[str]) -> bool:
    return any(attempt.alive and attempt.folder in folders for attempt in run.attempts())


def _let_finish(who: str, works: Callable[[], bool], deadline: float) -> None:
    log.info("waiting for the flusher of %s, which is finishing its saves", who)
    while works():
        if time.monotonic() >= deadline:
            log.warning(
                "the flusher of %s has not finished its saves after %.0f s: restoring the newest "
                "checkpoint that is committed",
                who,
                WAIT_FOR_OTHERS_S,
            )
            return
        signals.check_signals()
        time.sleep(_LOOK_S)  # poll: another process sends no event


def _other_writers(run: Run) -> list[LiveWriter]:
    """Return the live writers that do not belong to this process."""
    foreign: list[LiveWriter] = []
    try:
        writer = run.live_writer()
        while writer is not None:
            record = writer.record
            if record is None or record.pid != os.getpid() or not shares_pids(record):
                foreign.append(writer)
            writer = run.live_writer(below=writer.term)
    except LaststepError as error:
        log.warning("cannot determine whether another process is saving to this run: %s", error)
    return foreign


# --- what all ranks see -------------------------------------------------------------------------


def choosing_of(
    store: Store,
    bus: Bus,
    wanted: RestoreRequest,
    saw: Callable[[Seen], None],
    ranks: Ranks,
    call: str,
) -> Choosing | None:
    """Return the checkpoints to try, or None if there is no run. `saw` is as in `restore_into`."""
    near = store if isinstance(store, NearestStore) else None
    in_memory = near is not None and near.in_memory
    if ranks.size > 1:
        _check_same_call(ranks, call, wanted, in_memory=in_memory)
    is_first, replicas = ranks.rank.is_first, list[ReplicaHas]()
    primary = store if near is None else near.primary
    collective(ranks, functools.partial(_wait_for_writers, primary, ranks.rank))
    if near is not None:
        if wanted.tiers:
            replicas = _look_at_replicas(near, wanted, ranks)
        if in_memory:
            _look_into_memory(near, ranks)

    def open_run() -> Run:
        if not is_first:
            return Run(store, None)
        saw(newest_point(store if near is None else near.without_tiers()))
        return Run.open(store)

    try:
        run = collective(ranks, open_run)
    except NotFoundError:
        _refuse_hidden_run(store, ranks)
        if wanted.step is not None or wanted.peeked is not None:
            raise
        return None
    return Choosing(store, near, run, wanted, ranks, bus, saw, replicas)


def _check_same_call(ranks: Ranks, call: str, wanted: RestoreRequest, *, in_memory: bool) -> None:
    own_call = (
        f"{call} with step={wanted.step}, only={wanted.only and list(wanted.only)}, "
        f"strict={wanted.strict}, exact={wanted.exact}, peeked at {wanted.peeked}, "
        f"{len(wanted.tiers)} replicas, shared memory: {in_memory}"
    )
    calls = [note.decode() for note in ranks.all_gather(own_call.encode())]
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise UsageError(
                "the ranks of this job passed different arguments",
                where=call,
                found=f"{calls[0]} on rank 0, {other} on rank {rank}",
                remedy=f"call {call} with the same arguments on every rank",
            )


def _look_at_replicas(near: NearestStore, wanted: RestoreRequest, ranks: Ranks) -> list[ReplicaHas]:
    """Make checkpoints that only replicas have visible; return what those have, on rank 0."""
    found: list[ReplicaHas] = []

    def look() -> dict[str, str]:
        if not ranks.rank.is_first:
            return {}
        found[:] = look_at_replicas(near, wanted.tiers)
        return only_there(near, found)

    told = ranks.broadcast(0, msgspec.msgpack.encode(collective(ranks, look)))
    places = msgspec.msgpack.decode(told, type=dict[str, str])
    stores = collective(ranks, lambda: {url: open_store(url) for url in {*places.values()}})
    for folder, url in places.items():
        near.stand_in(folder, stores[url])
    return found


def _look_into_memory(near: NearestStore, ranks: Ranks) -> None:
    """Agree on the in-memory snapshots that all ranks use. On one node these are the snapshots that
    rank 0 finds and every other rank can open. On several nodes the first rank of each broadcasts
    the parts found there, and only snapshots that are also committed in the run are used."""
    nodes = [note.decode() for note in ranks.all_gather(near.node.encode())]
    encode, is_first = msgspec.msgpack.encode, ranks.rank.is_first
    stored: set[str] | None = None
    if len(set(nodes)) > 1:
        leaders = {node: nodes.index(node) for node in nodes}
        leads = ranks.rank.number in leaders.values()
        note = collective(ranks, lambda: encode(near.left_here()) if leads else b"")
        sizes = ranks.all_gather(encode(len(note)))
        parts: dict[str, tuple[NodePart, ...]] = {}
        if sum(map(msgspec.msgpack.decode, sizes)) <= _RECORDS_BYTES:
            decode = msgspec.msgpack.Decoder(ready(tuple[NodePart, ...])).decode
            parts = {n: decode(ranks.broadcast(leader, note)) for n, leader in leaders.items()}
        collective(ranks, lambda: near.open_parts(nodes, parts))
        committed = collective(ranks, lambda: near.committed() if is_first else [])
        stored = set(msgspec.msgpack.decode(ranks.broadcast(0, encode(committed))))
    else:
        found = collective(ranks, lambda: near.look() if is_first else {})
        if ranks.size == 1:
            return
        places = {folder: checkpoint.segments for folder, checkpoint in found.items()}
        told = ranks.broadcast(0, encode(places))
        named = msgspec.msgpack.decode(told, type=dict[str, tuple[str, ...]])
        collective(ranks, lambda: None if is_first else near.open(named))
    here = [set(msgspec.msgpack.decode(n)) for n in ranks.all_gather(encode(list(near.look())))]
    near.keep(set.intersection(*here, *([] if stored is None else [stored])))


def _refuse_hidden_run(store: Store, ranks: Ranks) -> None:
    """Raise `StorageError` if only another rank sees a run: a new run would abandon that one."""
    if ranks.size == 1 or store.same_everywhere:
        return

    def sees_it() -> bool:
        with contextlib.suppress(NotFoundError):
            Run.open(store)
            return True
        return False

    seen = ranks.all_max(collective(ranks, sees_it) * ranks.rank.number)
    if seen:
        raise StorageError(
            "rank 0 sees no run where another rank does",
            where=store.url,
            expected="all ranks to see the same folder",
            found=f"a run on rank {seen}",
            remedy="check that the filesystem is mounted on rank 0's machine",
        )


# --- the choice ---------------------------------------------------------------------------------


class Choosing:
    """The checkpoints to try, one after the other, on all ranks."""

    def __init__(
        self,
        store: Store,
        near: NearestStore | None,
        run: Run,
        wanted: RestoreRequest,
        ranks: Ranks,
        bus: Bus,
        saw: Callable[[Seen], None],
        replicas: Sequence[ReplicaHas],
    ) -> None:
        """`near` is `store` if the run has tiers. Raise `NotFoundError` if the run lacks what is
        wanted. `replicas` is empty on other ranks than 0."""
        self._store, self._run = store, run
        self.near = near
        self._wanted = wanted
        self._is_named = wanted.step is not None or wanted.peeked is not None
        """True if no other checkpoint may replace the requested one."""
        self._ranks = ranks
        self._bus = bus
        self._saw = saw
        self._replicas = list(replicas)
        self._lineage: list[Listed] = []
        self._left: list[Listed] = []
        self._passed: set[str] = set(wanted.damaged)
        self._skipped: list[Skipped] = []
        """Checkpoints that are damaged, or were deleted between listing and opening."""
        self._failures: list[str] = []
        """One line for each of these, without digests, which would hide the rest."""
        self._unseen_s: float | None = None
        """Monotonic time when a rank first missed a file that rank 0 sees; None if none does."""
        collective(ranks, self._list)

    def skipped(self, chosen: Chosen) -> tuple[Skipped, ...]:
        return tuple(skipped for skipped in self._skipped if skipped.step > chosen.step)

    def until_one_succeeds(self, attempt: Callable[[Chosen], _Found]) -> _Found | None:
        """Call `attempt` until it succeeds; return None if there is nothing to try."""
        last: LaststepError | None = None
        while (chosen := self._next()) is not None:
            signals.check_signals()
            try:
                return attempt(chosen)
            except (CorruptError, NotFoundError) as error:
                self._go_on_after(chosen, error)
                last = error
        if last is not None:
            is_damaged = any(skipped.reason != _DELETED for skipped in self._skipped)
            steps = [f"step {skipped.step}" for skipped in self._skipped]
            failed = (CorruptError if is_damaged else NotFoundError)(
                f"none of the {len(self._skipped)} checkpoints of this run can be restored",
                where=self._store.url,
                found=f"{'damage' if is_damaged else 'no files'} in {constants.listed(steps)}"
                if steps
                else last.without_remedy(),
                remedy=(
                    f"`laststep verify {self._store.url}` lists all damage; "
                    "try a copy of the run, or start a new run elsewhere"
                ),
            )
            failed.lines = tuple(self._failures)
            raise failed from last
        return None

    def _go_on_after(self, chosen: Chosen, error: CorruptError | NotFoundError) -> None:
        """Decide what to try next; raise the error if no other checkpoint may replace this one."""
        why = error.without_remedy()
        if self.near is not None and self.near.spoil(chosen.folder, why):
            # The snapshot in memory is dropped: try the stored copy, or a replica's.
            self._try_again(chosen)
            left = {listed.folder for listed in self._left}
            if self._ranks.all_max(self._ranks.rank.is_first and chosen.folder not in left):
                self._use_replica(chosen, why)
            return
        verdict = self._judge(chosen, error)
        if verdict is _Finding.UNSEEN:
            self._wait_to_see(chosen, error)
        elif verdict is _Finding.DELETED and not self._is_named:
            level = system.shared_warning()
            log.log(level, "%s is gone, listing the run again: %s", chosen.folder, error)
            self._skip(chosen, _DELETED, _DELETED)
            collective(self._ranks, self._list)
        elif self._use_replica(chosen, why):
            return
        elif self._is_named or isinstance(error, NotFoundError):
            raise error
        else:
            # Without the remedy, which is to restore the newest good one: that happens here.
            short = without_digests(error).without_remedy().replace(f"{self._store.url}/", "")
            self._skip(chosen, why, short)
            self._bus.emit(PassedOver(step=chosen.step, folder=chosen.folder, reason=why))
            self._unseen_s = None
            if self._left:
                self._left.pop()

    def _skip(self, chosen: Chosen, reason: str, short: str) -> None:
        self._failures.append(f"step {chosen.step}: {short}")
        self._skipped.append(Skipped(step=chosen.step, folder=chosen.folder, reason=reason))

    def _list(self) -> None:
        """List the run on rank 0. Retention deletes a checkpoint only after a commit, so there may
        be a newer one when it is listed again."""
        self._unseen_s = None
        if not self._ranks.rank.is_first:
            return
        self._saw(newest_point(self._store if self.near is None else self.near.without_tiers()))
        listed = self._run.checkpoints()
        requested = self._requested(listed) if self._is_named else None
        self._lineage, self._left = [], []
        for entry in listed:
            # A superseded checkpoint is on the lineage again if its replacement is newer than the
            # restored one.
            if entry.on_lineage or entry.superseded_by is not None:
                self._lineage.append(entry)
            is_wanted = entry.on_lineage if requested is None else entry is requested
            if is_wanted and entry.folder not in self._passed:
                self._left.append(entry)

    def _requested(self, listed: Sequence[Listed]) -> Listed:
        """Return the peeked checkpoint, or that of the requested step: the one on the lineage, else
        the last one committed off it. Raise `NotFoundError` if there is none."""
        peeked, step, url = self._wanted.peeked, self._wanted.step, self._store.url
        if peeked is not None:
            found = next((entry for entry in listed if entry.folder == peeked), None)
            if found is None:
                raise NotFoundError(
                    "the checkpoint that peek() returned is gone",
                    where=f"{url}/{peeked}",
                    remedy="call peek() again, and restore that checkpoint from the beginning",
                )
            return found
        of_step = [entry for entry in listed if entry.step == step]
        if not of_step:
            raise NotFoundError(
                f"there is no checkpoint of step {step}",
                where=url,
                found=nearest_steps((entry.step for entry in listed), step or 0),
                remedy="restore() without a step takes the newest",
            )
        found = max(of_step, key=lambda entry: entry.on_lineage)
        if not found.on_lineage:
            found = of_step[-1]
            log.warning("step %d is not on the lineage of this run: %s", step, found.folder)
        return found

    def _next(self) -> Chosen | None:
        """Return rank 0's next checkpoint to try, on all ranks; None after the last."""
        chosen: Chosen | None = None
        if self._left:
            listed = self._left[-1]
            self._passed.add(listed.folder)
            place = self._place_of(listed.folder)
            if place is not self._store:
                log.warning("%s is read at %s", listed.folder, place.url)
            steps: list[int] = []
            for earlier in self._lineage:
                steps.append(earlier.step)
                if earlier.folder == listed.folder:
                    break
            else:
                steps = [listed.step]  # it is not on the lineage
            encoded = b""
            if listed.commit is not None and self._ranks.size > 1:
                encoded = manifest.encode(listed.commit)
            chosen = Chosen(
                step=listed.step,
                term=listed.term,
                attempt=listed.attempt,
                manifest=encoded,
                lineage_steps=tuple(steps),
            )
        if self._ranks.size == 1:
            return chosen
        told = self._ranks.broadcast(0, msgspec.msgpack.encode(chosen))
        return msgspec.msgpack.decode(told, type=ready(Chosen | None))

    def _place_of(self, folder: str) -> Store:
        """Return the store to read a checkpoint from; damage is reported with its URL."""
        return self._store if self.near is None else self.near.place_of(folder)

    def open(self, chosen: Chosen) -> Content:
        """Open the checkpoint as this rank sees it; raise on all ranks if any rank fails."""

        def work() -> Content:
            store, number = self._place_of(chosen.folder), self._ranks.rank.number
            where = f"{store.url}/{chosen.folder}"
            commit: Commit | Abort | None = None
            error: LaststepError | None = None
            if number == 0:
                commit, error = self._left[-1].commit, self._left[-1].error
            elif chosen.manifest:
                commit = manifest.decode(chosen.manifest, where=where)
            if not isinstance(commit, Commit):
                raise error or CorruptError("the manifest cannot be read", where=where)
            by_rank = self._ranks.size > 1
            return Content(store, chosen.folder, commit, rank=number, by_rank=by_rank)

        return collective(self._ranks, work)

    def _try_again(self, chosen: Chosen) -> None:
        """List the run again, with a checkpoint that has been tried and is now read elsewhere."""
        self._passed.discard(chosen.folder)
        collective(self._ranks, self._list)

    def _use_replica(self, chosen: Chosen, why: str) -> bool:
        """Switch a damaged checkpoint to the next replica that has it, or return False. A folder of
        the same name there is the same save, because a replica belongs to the same run."""
        url = ""
        for at, has in enumerate(self._replicas):  # empty on other ranks
            remaining = tuple(listed for listed in has.listed if listed.folder != chosen.folder)
            if len(remaining) < len(has.listed):
                url, self._replicas[at] = has.url, has._replace(listed=remaining)
                log.warning("%s is damaged, trying %s: %s", chosen.folder, url, why)
                break
        url = self._ranks.broadcast(0, url.encode()).decode()
        if not url:
            return False
        assert self.near is not None  # noqa: S101 (there are replicas)
        self.near.stand_in(chosen.folder, collective(self._ranks, lambda: open_store(url)))
        self._try_again(chosen)
        return True

    def _judge(self, chosen: Chosen, error: CorruptError | NotFoundError) -> _Finding:
        """Return, on all ranks, rank 0's verdict about an error that at least one rank found."""

        def look() -> _Finding:
            if self._ranks.rank.is_first:
                if deleted(self._store, chosen.folder) is not None:
                    return _Finding.DELETED
                if error.missing is not None and _is_there(self._store, error.missing):
                    return _Finding.UNSEEN
            return _Finding.DAMAGED

        finding = collective(self._ranks, look)
        return _Finding(self._ranks.broadcast(0, finding.encode()).decode())

    def _wait_to_see(self, chosen: Chosen, error: LaststepError) -> None:
        """Give the rank that misses a file time to see it; raise once `PATIENCE_S` is over."""
        first_time = self._unseen_s is None
        self._unseen_s = self._unseen_s or time.monotonic()
        if first_time and self._ranks.rank.is_first:
            log.warning(
                "%s: a rank sees different files than rank 0; trying again for %g s: %s",
                chosen.folder,
                PATIENCE_S,
                error.without_remedy(),
            )
        late = time.monotonic() - self._unseen_s >= PATIENCE_S
        if self._ranks.all_max(self._ranks.rank.is_first and late):
            raise StorageError(
                "a rank sees a different checkpoint than rank 0",
                where=f"{self._place_of(chosen.folder).url}/{chosen.folder}",
                found=self._ranks.broadcast(0, error.without_remedy().encode()).decode(),
                remedy=(
                    "all ranks must see the same folder: check the mount on that rank's machine, "
                    "then call restore() again"
                ),
            ) from error
        signals.check_signals()
        time.sleep(PAUSE_S)  # poll: another machine's cache sends no event


def _is_there(store: Store, name: str) -> bool:
    """Return whether a file is listed and can be opened: a listed link may have lost its target."""
    folder, _, last = name.rpartition("/")
    is_listed = any(entry.name == last for entry in store.list(folder))
    return is_listed and exists(store, name)
