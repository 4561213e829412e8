"""Choose the checkpoint that all ranks restore: the first rank looks at the run and says which.

The others open what it names, with the manifest that it read: what they see of the run may be older
(a network's filesystem keeps what it has seen for a while) and says nothing about the checkpoint.
Where one of them finds something missing, the first rank looks again. Collective: every rank calls
the same, in the same order.

Tries one checkpoint after the other. Only `CorruptError`, which readers raise after a second look,
makes an older one count; storage that cannot be reached, and state that does not fit, raise.
"""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
from laststep.ranks.group import together
from laststep.read.content import Content
from laststep.restoring.fit import selection
from laststep.storage.registry import open_store
from laststep.tiers.further import look_further, only_there
from laststep.tiers.nearest import NearestStore
from laststep.tiers.nodes import NodePart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.lineage import Seen
    from laststep.catalog.listing import Listed
    from laststep.ranks.group import Ranks
    from laststep.restoring.restore import RestoreRequest
    from laststep.storage.store import Store
    from laststep.tiers.further import TierHas
    from laststep.tiers.nodes import Readers


_RECORDS_BYTES = 64 << 20
"""Of more than so much, which is a job of very many ranks, nodes do not tell each other."""


def look_at_tiers(store: Store, wanted: RestoreRequest, ranks: Ranks) -> list[TierHas]:
    """Have all ranks see, beside what is nearer, the checkpoints that only further tiers have.
    Returns what these have, on the first rank."""
    found: list[TierHas] = []
    if not isinstance(store, NearestStore) or not wanted.tiers:
        return found

    def look() -> dict[str, str]:
        if not ranks.rank.is_first:
            return {}
        found[:] = look_further(store, wanted.tiers)
        return only_there(store, found, wanted.step, lambda item: selection(wanted.only, item)[0])

    told = ranks.tell(0, msgspec.msgpack.encode(together(ranks, look)))
    places = msgspec.msgpack.decode(told, type=dict[str, str])
    stores = together(ranks, lambda: {url: open_store(url) for url in {*places.values()}})
    for folder, url in places.items():
        store.stand_in(folder, stores[url])
    return found


def look_into_memory(store: Store, ranks: Ranks) -> None:
    """Have all ranks see the same in shared memory: what the first rank finds there, as far as
    every other one can open it; or what all nodes have together."""
    if not isinstance(store, NearestStore) or not store.in_memory:
        return
    nodes = [note.decode() for note in ranks.gather(store.node.encode())]
    if len(set(nodes)) > 1:
        _look_into_nodes(store, nodes, ranks)
        return
    found = together(ranks, lambda: store.look() if ranks.rank.is_first else {})
    if ranks.size == 1:
        return
    places = {folder: checkpoint.segments for folder, checkpoint in found.items()}
    told = ranks.tell(0, msgspec.msgpack.encode(places))
    named = msgspec.msgpack.decode(told, type=dict[str, tuple[str, ...]])
    together(ranks, lambda: None if ranks.rank.is_first else store.open(named))
    notes = ranks.gather(msgspec.msgpack.encode(list(store.look())))
    store.keep(set.intersection(*(set(msgspec.msgpack.decode(note)) for note in notes)))


def _look_into_nodes(store: NearestStore, nodes: Sequence[str], ranks: Ranks) -> None:
    """The same where ranks are on several nodes: the first of each says what is there."""
    leaders = {node: nodes.index(node) for node in nodes}
    leads = ranks.rank.number in leaders.values()
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(tuple[NodePart, ...]).decode
    note = together(ranks, lambda: encode(store.left_here()) if leads else b"")
    sizes = ranks.gather(encode(len(note)))
    parts: dict[str, tuple[NodePart, ...]] = {}
    if sum(map(msgspec.msgpack.decode, sizes)) <= _RECORDS_BYTES:
        parts = {node: decode(ranks.tell(leader, note)) for node, leader in leaders.items()}
    together(ranks, lambda: store.open_parts(nodes, parts))
    committed = together(ranks, lambda: store.committed() if ranks.rank.is_first else [])
    stored = set(msgspec.msgpack.decode(ranks.tell(0, encode(committed))))
    notes = ranks.gather(encode(list(store.look())))
    store.keep(stored.intersection(*(msgspec.msgpack.decode(note) for note in notes)))


def seen_in(store: Store) -> Seen:
    """What was newest, in the run and in memory: what tiers have is of its past."""
    return newest_point(store.without_tiers() if isinstance(store, NearestStore) else store)


log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""So long ranks are given to see what the first one sees: filesystems of networks keep what they
have seen of a folder for up to a minute."""
PAUSE_S = 0.5


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank asks for; all have to ask for the same."""

    step: int | None
    only: tuple[str, ...] | None
    strict: bool
    exact: bool = False
    in_memory: bool = False
    """Whether it looks at shared memory first."""
    tiers: int = 0
    """In how many further ones it looks."""
    peeked: str | None = None
    """The checkpoint that it has peeked at."""
    call: str = "restore()"

    def __str__(self) -> str:
        text = f"{self.call} of " + ("the newest" if self.step is None else f"step {self.step}")
        text += "" if self.peeked is None else f", which is to be {self.peeked}"
        text += "" if self.only is None else f" with only={list(self.only)}"
        text += "" if self.strict else " with strict=False"
        text += " with exact=True" if self.exact else ""
        text += " with a tier in shared memory" if self.in_memory else ""
        return text + (f" with {self.tiers} further tiers" if self.tiers else "")


class Chosen(AttemptName, frozen=True, kw_only=True):
    """A checkpoint, as the first rank has found it."""

    manifest: bytes
    """As it is stored; nothing where the first rank cannot read it."""
    lineage_steps: tuple[int, ...]
    """The steps up to it that the state has then come by."""


class Which(NamedTuple):
    """Which checkpoint is asked for: the newest that is not known to be damaged, a step, or the one
    that was peeked at."""

    step: int | None = None
    peeked: str | None = None
    damaged: frozenset[str] = frozenset()


class StandsOrGone(enum.Enum):
    """What the first rank finds out about a checkpoint in which something was missing."""

    STANDS = "stands"
    """It is there, and what was found wrong with it is."""
    DELETED = "deleted"
    """It is gone, as retention takes checkpoints."""
    UNSEEN = "unseen"
    """The first rank sees what another has not seen."""


def check_asked(ranks: Ranks, asked: Asked) -> None:
    """`UsageError`, on all ranks, where they do not ask for the same."""
    notes = ranks.gather(msgspec.msgpack.encode(asked))
    decode = msgspec.msgpack.Decoder(Asked).decode
    for rank, note in enumerate(notes):
        if note != notes[0]:
            raise UsageError(
                "the ranks of this job do not ask for the same",
                where=asked.call,
                found=f"{decode(notes[0])} on rank 0, {decode(note)} on rank {rank}",
                remedy=f"call {asked.call} with the same arguments on every rank",
            )


def open_run(store: Store, ranks: Ranks) -> Run:
    """The run, at which only the first rank has looked; `NotFoundError` where there is none.
    `StorageError` where the first rank sees none and another does: that one would be abandoned."""

    def look() -> Run | None:
        try:
            return Run.open(store)
        except NotFoundError:
            return None

    unseen = Run(store, None)
    run = together(ranks, lambda: look() if ranks.rank.is_first else unseen)
    if not ranks.largest(run is None):
        assert run is not None  # noqa: S101 (nobody has none)
        return run
    run = None if store.same_everywhere else together(ranks, look)
    if seen := ranks.largest(0 if run is None else ranks.rank.number):
        raise StorageError(
            "the first rank of this job sees no run where another does",
            where=store.url,
            expected="all ranks to see the same folder",
            found=f"a run on rank {seen}",
            remedy="look whether the filesystem is mounted where rank 0 runs",
        )
    return together(ranks, lambda: Run.open(store) if ranks.rank.is_first else unseen)


class Choosing:
    """The checkpoints to try, one after the other, on all ranks."""

    def __init__(
        self,
        run: Run,
        which: Which,
        ranks: Ranks,
        saw: Callable[[Seen], None],
        further: Sequence[TierHas] = (),
    ) -> None:
        """`NotFoundError` where the run has not what is named. `saw` is told, on the first rank,
        which epoch was the newest, and its last commit, before the run was listed; that rank knows
        what
        `further` tiers have."""
        self._store = run.store
        self._near = run.store if isinstance(run.store, NearestStore) else None
        self.url = run.store.url
        self._run = run
        self._which = which
        self._ranks = ranks
        self._saw = saw
        self._further = list(further)
        self._lineage: tuple[Listed, ...] = ()
        self._left: list[Listed] = []
        self._passed: set[str] = set(which.damaged)
        self._unseen_s: float | None = None
        """Since when a rank has not seen what the first one sees."""
        together(ranks, self._list)

    def _list(self) -> None:
        if not self._ranks.rank.is_first:
            return
        self._saw(seen_in(self._store))
        listed = self._run.checkpoints()
        # A checkpoint whose replacement comes after the one that is restored counts again there.
        self._lineage = tuple(c for c in listed if c.on_lineage or c.superseded_by is not None)
        to_try = tuple(c for c in listed if c.on_lineage)
        if self._which.peeked is not None:
            to_try = (_peeked(self._run, self._which.peeked),)
        elif self._which.step is not None:
            to_try = (_named(self._run, self._which.step),)
        self._left = [listed for listed in to_try if listed.folder not in self._passed]

    def next(self) -> Chosen | None:
        """The next to try; None where none is left."""
        note = msgspec.msgpack.encode(self._pop())
        return msgspec.msgpack.decode(self._ranks.tell(0, note), type=Chosen | None)

    def _pop(self) -> Chosen | None:
        if not self._left:
            return None
        listed = self._left[-1]
        self._passed.add(listed.folder)
        if self._near is not None and (url := self._near.tier_of(listed.folder)) is not None:
            log.warning("%s is read at %s", listed.folder, url)
        folders = [earlier.folder for earlier in self._lineage]
        until = folders.index(listed.folder) + 1 if listed.folder in folders else 0
        steps = tuple(earlier.step for earlier in self._lineage[:until]) or (listed.step,)
        stored = b"" if listed.commit is None else manifest.encode(listed.commit)
        return Chosen(
            step=listed.step,
            epoch=listed.epoch,
            attempt=listed.attempt,
            manifest=stored,
            lineage_steps=steps,
        )

    def open(self, chosen: Chosen) -> Content:
        """Its content, in this rank's view; fails on all ranks where it does on one."""

        def work() -> Content:
            number, several = self._ranks.rank.number, self._ranks.size > 1
            commit = self._commit(chosen)
            store = self._store if self._near is None else self._near.place_of(chosen.folder)
            return Content(store, chosen.folder, commit, rank=number, by_rank=several)

        return together(self._ranks, work)

    def _commit(self, chosen: Chosen) -> Commit:
        where = self.where(chosen)
        if not chosen.manifest:
            error = self._left[-1].error if self._left else None
            raise error or CorruptError("the manifest cannot be read", where=where)
        commit = manifest.decode(chosen.manifest, where=where)
        assert isinstance(commit, Commit)  # noqa: S101 (the first rank has listed it as such)
        return commit

    def go_on(self) -> None:
        """Leave the one that was tried."""
        self._unseen_s = None
        if self._left:
            self._left.pop()

    def readers(self, chosen: Chosen) -> Readers | None:
        """Which ranks can read whose files of it, where not all can read all."""
        return None if self._near is None else self._near.readers(chosen.folder)

    def is_at_home(self, chosen: Chosen) -> bool:
        """Whether it is read in the run itself."""
        return self._near is None or self._near.is_at_home(chosen.folder)

    def where(self, chosen: Chosen) -> str:
        """The place where it is read, for errors."""
        tier = None if self._near is None else self._near.tier_of(chosen.folder)
        return f"{tier or self.url}/{chosen.folder}"

    def spoil(self, chosen: Chosen, error: LaststepError) -> bool:
        """Whether it came out of shared memory, which is damaged: then it is listed again as the
        store of the run has it, if that has it."""
        if self._near is None or not self._near.spoil(chosen.folder, error.without_remedy()):
            return False
        self._passed.discard(chosen.folder)
        self.list_again()
        is_gone = self._ranks.rank.is_first and chosen.folder not in {o.folder for o in self._left}
        if self._ranks.largest(is_gone):
            self.stand_in(chosen, error)
        return True

    def stand_in(self, chosen: Chosen, error: LaststepError) -> bool:
        """Whether a further tier has the very checkpoint that is damaged here: then it is listed
        again as that tier has it. Each is tried once."""
        if self._near is None:
            return False
        url = self._ranks.tell(0, self._other_place(chosen).encode()).decode()
        if not url:
            return False
        if self._ranks.rank.is_first:
            why = error.without_remedy()
            log.warning("%s is damaged, and is looked for at %s: %s", chosen.folder, url, why)
        self._near.stand_in(chosen.folder, together(self._ranks, lambda: open_store(url)))
        self._passed.discard(chosen.folder)
        self.list_again()
        return True

    def _other_place(self, chosen: Chosen) -> str:
        """The next tier to try. It is the same run, so what has that name there is the same save,
        though other files of it may have been borrowed."""
        for at, has in enumerate(self._further):
            for one in has.listed:
                if one.folder == chosen.folder:
                    listed = tuple(other for other in has.listed if other is not one)
                    self._further[at] = has._replace(listed=listed)
                    return has.url
        return ""

    def list_again(self) -> None:
        """Retention takes a checkpoint only after a commit, so there may be a newer one now."""
        self._unseen_s = None
        together(self._ranks, self._list)

    def judge(self, chosen: Chosen, error: CorruptError | NotFoundError) -> StandsOrGone:
        """What to make of an error that all ranks have, of one at least that has found it."""

        def look() -> StandsOrGone:
            if not self._ranks.rank.is_first:
                return StandsOrGone.STANDS
            if decision.deleted(self._store, chosen.folder) is not None:
                return StandsOrGone.DELETED
            seen = error.missing is not None and _is_there(self._store, error.missing)
            return StandsOrGone.UNSEEN if seen else StandsOrGone.STANDS

        mine = together(self._ranks, look)
        return StandsOrGone(self._ranks.tell(0, mine.value.encode()).decode())

    def wait_to_see(self, chosen: Chosen, error: LaststepError) -> None:
        """Give the rank that does not see something a while; `StorageError` when that is over."""
        first_time = self._unseen_s is None
        self._unseen_s = self._unseen_s or time.monotonic()
        if first_time and self._ranks.rank.is_first:
            log.warning(
                "%s: a rank does not see what rank 0 sees; trying again for %g s: %s",
                chosen.folder,
                PATIENCE_S,
                error.without_remedy(),
            )
        late = time.monotonic() - self._unseen_s >= PATIENCE_S
        if self._ranks.largest(self._ranks.rank.is_first and late):
            raise StorageError(
                "a rank does not see what rank 0 sees of a checkpoint",
                where=self.where(chosen),
                found=self._ranks.tell(0, error.without_remedy().encode()).decode(),
                remedy="all ranks must see the same folder: look at the mount where that rank "
                "runs, and call restore() again; the checkpoint may be sound",
            ) from error
        signals.let_in()
        time.sleep(PAUSE_S)  # another machine's cache: there is nothing to be woken by


def _is_there(store: Store, name: str) -> bool:
    folder, _, last = name.rpartition("/")
    return any(entry.name == last for entry in store.list(folder))


def _peeked(run: Run, folder: str) -> Listed:
    """The checkpoint of that folder."""
    for listed in run.checkpoints():
        if listed.folder == folder:
            return listed
    raise NotFoundError(
        "the checkpoint that was peeked at is gone",
        where=f"{run.store.url}/{folder}",
        remedy="peek() again, and restore what it gives from the beginning",
    )


def _named(run: Run, step: int) -> Listed:
    """The checkpoint of that step: on the lineage, or else the last one committed beside it."""
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


_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was passed over."""

    step: int
    folder: str
    reason: str


class Attempts:
    """Tries checkpoints, one after the other, on all ranks."""

    def __init__(self, choosing: Choosing, bus: Bus, *, named: bool) -> None:
        """`named`: no other one may stand in for the first."""
        self._choosing = choosing
        self._bus = bus
        self._named = named
        self._skipped: list[Skipped] = []
        self._deleted: list[Skipped] = []
        """Those that were gone when they were to be opened."""

    def until_one_succeeds(
        self, attempt: Callable[[Chosen], _Found]
    ) -> tuple[_Found, tuple[Skipped, ...]] | None:
        """What comes of the first that can be opened and read, and those that were passed over;
        None where there is none to try."""
        last: LaststepError | None = None
        while (chosen := self._choosing.next()) is not None:
            signals.let_in()
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
        """Choose what to try next: the same again, one of a new list, or an older one. One that
        was named has none to stand in for it: its error is raised."""
        if self._choosing.spoil(chosen, error):
            return
        verdict = self._choosing.judge(chosen, error)
        if verdict is StandsOrGone.UNSEEN:
            self._choosing.wait_to_see(chosen, error)
        elif verdict is StandsOrGone.DELETED and not self._named:
            log.warning("%s is gone, and the run is listed again: %s", chosen.folder, error)
            self._deleted.append(_skip(chosen, "it was deleted meanwhile"))
            self._choosing.list_again()
        elif self._choosing.stand_in(chosen, error):
            return
        elif self._named or isinstance(error, NotFoundError):
            raise error
        else:
            # Without the remedy, which is to take the newest good one: so it is done.
            skipped = _skip(chosen, error.without_remedy())
            self._skipped.append(skipped)
            self._bus.emit(
                PassedOver(step=skipped.step, folder=skipped.folder, reason=skipped.reason)
            )
            self._choosing.go_on()

    def _none_left(self) -> LaststepError:
        url, skipped = self._choosing.url, self._skipped
        if not skipped:
            return NotFoundError(
                "the checkpoints of this run were deleted while they were looked at",
                where=url,
                found="; ".join(f"{gone.folder} is gone" for gone in self._deleted[:3]),
                remedy="`laststep ls` lists what is there; restore() again to begin anew if it is "
                "none",
            )
        return CorruptError(
            f"none of the {len(skipped)} checkpoints of this run can be restored",
            where=url,
            found="; ".join(f"step {s.step}: {s.reason}" for s in skipped[:3]),
            remedy=f"`laststep verify {url}` lists all damage; a copy of the run may still be "
            "good, and a new run elsewhere begins from the start",
        )


def _skip(chosen: Chosen, reason: str) -> Skipped:
    return Skipped(step=chosen.step, folder=chosen.folder, reason=reason)
