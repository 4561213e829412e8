"""Choose the checkpoint that all ranks restore: rank 0 lists the run and broadcasts its choice.

The other ranks open the checkpoint that rank 0 names, with the manifest that rank 0 read. They do
not list the run themselves, because their view of it may be stale (network filesystems cache
directory contents for a while). If a rank finds a file missing, rank 0 checks again. Everything
here is collective: all ranks make the same calls in the same order.

Checkpoints are tried one after the other. Only `CorruptError`, which readers raise after a second
read, causes a fallback to an older checkpoint. Unreachable storage and state that does not fit
raise.
"""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from laststep.catalog import decision
from laststep.catalog.lineage import AttemptName
from laststep.catalog.listing import nearest_steps
from laststep.catalog.run import Run, newest_point
from laststep.errors import CorruptError, LaststepError, NotFoundError, StorageError, UsageError
from laststep.events import Bus, PassedOver
from laststep.format import manifest
from laststep.format.manifest import Commit
from laststep.process import signals
from laststep.ranks.group import collective
from laststep.read.content import Content
from laststep.restoring.plan import selection
from laststep.storage.registry import open_store
from laststep.tiers.nearest import NearestStore, look_at_replicas, only_there
from laststep.tiers.snapshots import NodePart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.lineage import Seen
    from laststep.catalog.listing import Listed
    from laststep.ranks.group import Ranks
    from laststep.restoring.restore import RestoreRequest
    from laststep.storage.store import Store
    from laststep.tiers.nearest import ReplicaHas
    from laststep.tiers.snapshots import Readers


_RECORDS_BYTES = 64 << 20
"""Limit on the snapshot records that nodes broadcast to each other. Above it, with very many ranks,
a job on several nodes uses no in-memory snapshots."""


def look_at_tiers(store: Store, wanted: RestoreRequest, ranks: Ranks) -> list[ReplicaHas]:
    """Make checkpoints that exist only on replicas visible to all ranks, in addition to those in
    the primary and in memory. Return the contents of the replicas on rank 0, and an empty list
    elsewhere."""
    found: list[ReplicaHas] = []
    if not isinstance(store, NearestStore) or not wanted.tiers:
        return found

    def look() -> dict[str, str]:
        if not ranks.rank.is_first:
            return {}
        found[:] = look_at_replicas(store, wanted.tiers)
        return only_there(store, found, wanted.step, lambda item: selection(wanted.only, item)[0])

    told = ranks.broadcast(0, msgspec.msgpack.encode(collective(ranks, look)))
    places = msgspec.msgpack.decode(told, type=dict[str, str])
    stores = collective(ranks, lambda: {url: open_store(url) for url in {*places.values()}})
    for folder, url in places.items():
        store.stand_in(folder, stores[url])
    return found


def look_into_memory(store: Store, ranks: Ranks) -> None:
    """Agree on the in-memory snapshots that all ranks use. On one node these are the snapshots that
    rank 0 finds and every other rank can open; on several nodes see `_look_into_nodes`."""
    if not isinstance(store, NearestStore) or not store.in_memory:
        return
    nodes = [note.decode() for note in ranks.all_gather(store.node.encode())]
    if len(set(nodes)) > 1:
        _look_into_nodes(store, nodes, ranks)
        return
    found = collective(ranks, lambda: store.look() if ranks.rank.is_first else {})
    if ranks.size == 1:
        return
    places = {folder: checkpoint.segments for folder, checkpoint in found.items()}
    told = ranks.broadcast(0, msgspec.msgpack.encode(places))
    named = msgspec.msgpack.decode(told, type=dict[str, tuple[str, ...]])
    collective(ranks, lambda: None if ranks.rank.is_first else store.open(named))
    notes = ranks.all_gather(msgspec.msgpack.encode(list(store.look())))
    store.keep(set.intersection(*(set(msgspec.msgpack.decode(note)) for note in notes)))


def _look_into_nodes(store: NearestStore, nodes: Sequence[str], ranks: Ranks) -> None:
    """Agree on the in-memory snapshots of a job on several nodes: the first rank of each node
    broadcasts the parts found there. Only snapshots that are also committed in the run are used."""
    leaders = {node: nodes.index(node) for node in nodes}
    leads = ranks.rank.number in leaders.values()
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(tuple[NodePart, ...]).decode
    note = collective(ranks, lambda: encode(store.left_here()) if leads else b"")
    sizes = ranks.all_gather(encode(len(note)))
    parts: dict[str, tuple[NodePart, ...]] = {}
    if sum(map(msgspec.msgpack.decode, sizes)) <= _RECORDS_BYTES:
        parts = {node: decode(ranks.broadcast(leader, note)) for node, leader in leaders.items()}
    collective(ranks, lambda: store.open_parts(nodes, parts))
    committed = collective(ranks, lambda: store.committed() if ranks.rank.is_first else [])
    stored = set(msgspec.msgpack.decode(ranks.broadcast(0, encode(committed))))
    notes = ranks.all_gather(encode(list(store.look())))
    store.keep(stored.intersection(*(msgspec.msgpack.decode(note) for note in notes)))


def seen_in(store: Store) -> Seen:
    """Return the newest point of the run and of shared memory. Replicas are ignored: they only hold
    the run's past."""
    return newest_point(store.without_tiers() if isinstance(store, NearestStore) else store)


log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Time that a rank is given to see the files that rank 0 sees. Network filesystems cache the
contents of a directory for up to a minute."""
PAUSE_S = 0.5


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a rank's call, which must be equal on all ranks."""

    step: int | None
    only: tuple[str, ...] | None
    strict: bool
    exact: bool = False
    in_memory: bool = False
    """True if the rank looks into shared memory first."""
    tiers: int = 0
    """Number of replicas that the rank looks at."""
    peeked: str | None = None
    """Folder of the checkpoint that `peek()` returned on this rank."""
    call: str = "restore()"

    def __str__(self) -> str:
        text = f"{self.call} of " + ("the newest" if self.step is None else f"step {self.step}")
        text += "" if self.peeked is None else f", which is to be {self.peeked}"
        text += "" if self.only is None else f" with only={list(self.only)}"
        text += "" if self.strict else " with strict=False"
        text += " with exact=True" if self.exact else ""
        text += " with a tier in shared memory" if self.in_memory else ""
        return text + (f" with {self.tiers} replicas" if self.tiers else "")


_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was not restored, and the reason."""

    step: int
    folder: str
    reason: str


class Chosen(AttemptName, frozen=True, kw_only=True):
    """The checkpoint that rank 0 chose."""

    manifest: bytes
    """The encoded manifest; empty if rank 0 cannot read it."""
    lineage_steps: tuple[int, ...]
    """Steps of the lineage up to and including this checkpoint."""


class StandsOrGone(enum.Enum):
    """Rank 0's verdict on a checkpoint that failed to open or to verify on some rank."""

    STANDS = "stands"
    """The checkpoint exists and the error is real."""
    DELETED = "deleted"
    """The checkpoint was deleted, as by retention."""
    UNSEEN = "unseen"
    """Rank 0 sees the file that another rank is missing."""


def check_asked(ranks: Ranks, asked: Asked) -> None:
    """Raise `UsageError` on all ranks if their arguments differ."""
    notes = ranks.all_gather(msgspec.msgpack.encode(asked))
    decode = msgspec.msgpack.Decoder(Asked).decode
    for rank, note in enumerate(notes):
        if note != notes[0]:
            raise UsageError(
                "the ranks of this job passed different arguments",
                where=asked.call,
                found=f"{decode(notes[0])} on rank 0, {decode(note)} on rank {rank}",
                remedy=f"call {asked.call} with the same arguments on every rank",
            )


def open_run(store: Store, ranks: Ranks) -> Run:
    """Open the run on rank 0 only; raise `NotFoundError` if there is none. Raise `StorageError` if
    rank 0 sees no run but another rank does: starting a new run would abandon that one."""

    def look() -> Run | None:
        try:
            return Run.open(store)
        except NotFoundError:
            return None

    unseen = Run(store, None)
    run = collective(ranks, lambda: look() if ranks.rank.is_first else unseen)
    if not ranks.all_max(run is None):
        assert run is not None  # noqa: S101 (every rank has one)
        return run
    run = None if store.same_everywhere else collective(ranks, look)
    if seen := ranks.all_max(0 if run is None else ranks.rank.number):
        raise StorageError(
            "rank 0 sees no run where another rank does",
            where=store.url,
            expected="all ranks to see the same folder",
            found=f"a run on rank {seen}",
            remedy="check that the filesystem is mounted on rank 0's machine",
        )
    return collective(ranks, lambda: Run.open(store) if ranks.rank.is_first else unseen)


class Choosing:
    """The checkpoints to try, one after the other, on all ranks."""

    def __init__(
        self,
        run: Run,
        wanted: RestoreRequest,
        ranks: Ranks,
        bus: Bus,
        saw: Callable[[Seen], None],
        replicas: Sequence[ReplicaHas] = (),
    ) -> None:
        """Raise `NotFoundError` if the run lacks the requested checkpoint. `saw` is called on rank
        0 with the newest term and its last commit, each time before the run is listed. `replicas`
        is non-empty only on rank 0."""
        self._store = run.store
        self._near = run.store if isinstance(run.store, NearestStore) else None
        self.url = run.store.url
        self._run = run
        self._wanted = wanted
        self._is_named = wanted.step is not None or wanted.peeked is not None
        """True if a step or a peeked checkpoint was requested, so that no other may replace it."""
        self._ranks = ranks
        self._bus = bus
        self._saw = saw
        self._replicas = list(replicas)
        self._lineage: tuple[Listed, ...] = ()
        self._left: list[Listed] = []
        self._passed: set[str] = set(wanted.damaged)
        self._skipped: list[Skipped] = []
        self._deleted: list[Skipped] = []
        """Checkpoints that were deleted between listing and opening."""
        self._unseen_s: float | None = None
        """Monotonic time when a rank first missed a file that rank 0 sees; None if none does."""
        collective(ranks, self._list)

    def until_one_succeeds(
        self, attempt: Callable[[Chosen], _Found]
    ) -> tuple[_Found, tuple[Skipped, ...]] | None:
        """Call `attempt` with one checkpoint after the other until it succeeds. Return its result
        and the checkpoints skipped before it; None if there is none to try."""
        last: LaststepError | None = None
        while (chosen := self._next()) is not None:
            signals.check_signals()
            try:
                outcome = attempt(chosen)
            except (CorruptError, NotFoundError) as error:
                self._go_on_after(chosen, error)
                last = error
                continue
            newer = [skipped for skipped in self._deleted if skipped.step > chosen.step]
            return outcome, (*newer, *self._skipped)
        if last is not None:
            raise self._none_left() from last
        return None

    def _go_on_after(self, chosen: Chosen, error: CorruptError | NotFoundError) -> None:
        """Decide what to try next: the same checkpoint again, one of a new listing, or an older
        one. Raise the error if a particular checkpoint was requested, since no other may replace
        it."""
        if self._spoil(chosen, error):
            return
        verdict = self._judge(chosen, error)
        if verdict is StandsOrGone.UNSEEN:
            self._wait_to_see(chosen, error)
        elif verdict is StandsOrGone.DELETED and not self._is_named:
            log.warning("%s is gone, listing the run again: %s", chosen.folder, error)
            self._deleted.append(_skip(chosen, "it was deleted in the meantime"))
            self._list_again()
        elif self._stand_in(chosen, error):
            return
        elif self._is_named or isinstance(error, NotFoundError):
            raise error
        else:
            # Without the remedy, which is to restore the newest good one: that happens here.
            skipped = _skip(chosen, error.without_remedy())
            self._skipped.append(skipped)
            self._bus.emit(
                PassedOver(step=skipped.step, folder=skipped.folder, reason=skipped.reason)
            )
            self._unseen_s = None
            if self._left:
                self._left.pop()

    def _none_left(self) -> LaststepError:
        if not self._skipped:
            return NotFoundError(
                "the checkpoints of this run were deleted while they were being listed",
                where=self.url,
                found="; ".join(f"{gone.folder} is gone" for gone in self._deleted[:3]),
                remedy=(
                    "`laststep ls` lists the checkpoints; call restore() again to start a new run "
                    "if there are none"
                ),
            )
        return CorruptError(
            f"none of the {len(self._skipped)} checkpoints of this run can be restored",
            where=self.url,
            found="; ".join(f"step {s.step}: {s.reason}" for s in self._skipped[:3]),
            remedy=(
                f"`laststep verify {self.url}` lists all damage; "
                "try a copy of the run, or start a new run elsewhere"
            ),
        )

    def _list(self) -> None:
        if not self._ranks.rank.is_first:
            return
        self._saw(seen_in(self._store))
        listed = self._run.checkpoints()
        # A superseded checkpoint is on the lineage again if its replacement is newer than the
        # restored one.
        self._lineage = tuple(c for c in listed if c.on_lineage or c.superseded_by is not None)
        to_try = tuple(c for c in listed if c.on_lineage)
        if self._wanted.peeked is not None:
            to_try = (_peeked(self._run, self._wanted.peeked),)
        elif self._wanted.step is not None:
            to_try = (_named(self._run, self._wanted.step),)
        self._left = [listed for listed in to_try if listed.folder not in self._passed]

    def _next(self) -> Chosen | None:
        """Return rank 0's next checkpoint to try, on all ranks; None after the last."""
        chosen: Chosen | None = None
        if self._left:
            listed = self._left[-1]
            self._passed.add(listed.folder)
            if self._near is not None and (url := self._near.tier_of(listed.folder)) is not None:
                log.warning("%s is read at %s", listed.folder, url)
            steps: list[int] = []
            for earlier in self._lineage:
                steps.append(earlier.step)
                if earlier.folder == listed.folder:
                    break
            else:
                steps = [listed.step]
            chosen = Chosen(
                step=listed.step,
                term=listed.term,
                attempt=listed.attempt,
                manifest=b"" if listed.commit is None else manifest.encode(listed.commit),
                lineage_steps=tuple(steps),
            )
        told = self._ranks.broadcast(0, msgspec.msgpack.encode(chosen))
        return msgspec.msgpack.decode(told, type=Chosen | None)

    def open(self, chosen: Chosen) -> Content:
        """Open the checkpoint's content as this rank sees it; raise on all ranks if any rank
        fails."""

        def work() -> Content:
            where = self.where(chosen)
            if not chosen.manifest:
                error = self._left[-1].error if self._left else None
                raise error or CorruptError("the manifest cannot be read", where=where)
            commit = manifest.decode(chosen.manifest, where=where)
            assert isinstance(commit, Commit)  # noqa: S101 (the first rank has listed it as such)
            store = self._store if self._near is None else self._near.place_of(chosen.folder)
            number, several = self._ranks.rank.number, self._ranks.size > 1
            return Content(store, chosen.folder, commit, rank=number, by_rank=several)

        return collective(self._ranks, work)

    def readers(self, chosen: Chosen) -> Readers | None:
        """Return the ranks that can read each writer's files; None if every rank can read all
        files."""
        return None if self._near is None else self._near.readers(chosen.folder)

    def is_in_primary(self, chosen: Chosen) -> bool:
        """Return whether the checkpoint is read from the primary rather than from memory or a
        replica."""
        return self._near is None or self._near.is_in_primary(chosen.folder)

    def where(self, chosen: Chosen) -> str:
        """Return the location that the checkpoint is read from, for error messages."""
        tier = None if self._near is None else self._near.tier_of(chosen.folder)
        return f"{tier or self.url}/{chosen.folder}"

    def _spoil(self, chosen: Chosen, error: LaststepError) -> bool:
        """Drop the checkpoint's in-memory snapshot after an error in it, and list the run again so
        that the stored copy is tried, or a replica's if the run has none. Return False if the
        checkpoint was not in memory."""
        if self._near is None or not self._near.spoil(chosen.folder, error.without_remedy()):
            return False
        self._passed.discard(chosen.folder)
        self._list_again()
        is_gone = self._ranks.rank.is_first and chosen.folder not in {o.folder for o in self._left}
        if self._ranks.all_max(is_gone):
            self._stand_in(chosen, error)
        return True

    def _stand_in(self, chosen: Chosen, error: LaststepError) -> bool:
        """Switch a damaged checkpoint to the next replica that has it, and list the run again.
        Return False if no replica is left; each is tried once."""
        if self._near is None:
            return False
        url = self._ranks.broadcast(0, self._other_place(chosen).encode()).decode()
        if not url:
            return False
        if self._ranks.rank.is_first:
            why = error.without_remedy()
            log.warning("%s is damaged, trying %s: %s", chosen.folder, url, why)
        self._near.stand_in(chosen.folder, collective(self._ranks, lambda: open_store(url)))
        self._passed.discard(chosen.folder)
        self._list_again()
        return True

    def _other_place(self, chosen: Chosen) -> str:
        """Return the URL of the next replica to try for this checkpoint, or an empty string. A
        folder of the same name there is the same save, because a replica belongs to the same run,
        though it may share different files with other checkpoints."""
        for at, has in enumerate(self._replicas):
            for one in has.listed:
                if one.folder == chosen.folder:
                    listed = tuple(other for other in has.listed if other is not one)
                    self._replicas[at] = has._replace(listed=listed)
                    return has.url
        return ""

    def _list_again(self) -> None:
        """List the run again. Retention deletes a checkpoint only after a commit, so there may be a
        newer one now."""
        self._unseen_s = None
        collective(self._ranks, self._list)

    def _judge(self, chosen: Chosen, error: CorruptError | NotFoundError) -> StandsOrGone:
        """Classify, on rank 0, an error that at least one rank found; return its verdict on all
        ranks."""

        def look() -> StandsOrGone:
            if not self._ranks.rank.is_first:
                return StandsOrGone.STANDS
            if decision.deleted(self._store, chosen.folder) is not None:
                return StandsOrGone.DELETED
            seen = error.missing is not None and _is_there(self._store, error.missing)
            return StandsOrGone.UNSEEN if seen else StandsOrGone.STANDS

        mine = collective(self._ranks, look)
        return StandsOrGone(self._ranks.broadcast(0, mine.value.encode()).decode())

    def _wait_to_see(self, chosen: Chosen, error: LaststepError) -> None:
        """Pause before the next try, to give the rank that misses a file time to see it. Raise
        `StorageError` on all ranks once `PATIENCE_S` is over."""
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
                where=self.where(chosen),
                found=self._ranks.broadcast(0, error.without_remedy().encode()).decode(),
                remedy=(
                    "all ranks must see the same folder: check the mount on that rank's machine "
                    "and call restore() again; the checkpoint itself may be intact"
                ),
            ) from error
        signals.check_signals()
        time.sleep(PAUSE_S)  # poll: another machine's cache sends no event


def _is_there(store: Store, name: str) -> bool:
    """Return whether a file is listed and can be opened: a listed link may have lost its target."""
    folder, _, last = name.rpartition("/")
    is_listed = any(entry.name == last for entry in store.list(folder))
    return is_listed and decision.exists(store, name)


def _peeked(run: Run, folder: str) -> Listed:
    """Return the checkpoint in that folder; raise `NotFoundError` if it is gone."""
    for listed in run.checkpoints():
        if listed.folder == folder:
            return listed
    raise NotFoundError(
        "the checkpoint that peek() returned is gone",
        where=f"{run.store.url}/{folder}",
        remedy="call peek() again, and restore that checkpoint from the beginning",
    )


def _named(run: Run, step: int) -> Listed:
    """Return the checkpoint of that step: the one on the lineage, else the last one committed off
    it. Raise `NotFoundError` if there is none."""
    checkpoints: Sequence[Listed] = run.checkpoints()
    of_step = [listed for listed in checkpoints if listed.step == step]
    on_lineage = [listed for listed in of_step if listed.on_lineage]
    if on_lineage:
        return on_lineage[-1]
    if of_step:
        log.warning("step %d is not on the lineage of this run: %s", step, of_step[-1].folder)
        return of_step[-1]
    raise NotFoundError(
        f"there is no checkpoint of step {step}",
        where=run.store.url,
        found=nearest_steps((listed.step for listed in checkpoints), step),
        remedy="restore() without a step takes the newest",
    )


def _skip(chosen: Chosen, reason: str) -> Skipped:
    return Skipped(step=chosen.step, folder=chosen.folder, reason=reason)
