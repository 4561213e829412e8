"""Copy a run, or one step of it, between any two places: which checkpoints, in which order.

The plan is a value; carrying it out goes checkpoint by checkpoint, and neither one that is damaged
nor one that is deleted meanwhile keeps the others from being copied. Those of the lineage come
first, oldest first: at any instant the target is the run as it once was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from laststep.catalog import decision, lineage
from laststep.catalog.listing import Listed, nearest_steps, remedy_for_no_run
from laststep.catalog.run import Run
from laststep.errors import CorruptError, NotFoundError, UsageError
from laststep.plan.files import left_out_of
from laststep.storage.registry import open_parent, open_store
from laststep.tiers.bringing import CopyRoute, Moved, Pacing, Progress
from laststep.tiers.copying import Copier

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Sequence

    from laststep.storage.store import Store

__all__ = ["CopyPlan", "CopyReport", "copy", "plan_copy"]

Fate = Moved | CorruptError | Literal["deleted"] | None
"""What became of a checkpoint; None: it was there already."""
Watch = Callable[[Listed], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What became of the checkpoints that were to be copied, by their folders."""

    copied: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    """The target had these already."""
    deleted: tuple[str, ...] = ()
    """Somebody deleted these before their turn came."""
    damaged: tuple[tuple[str, CorruptError], ...] = ()
    """These cannot be read, and why; they are not at the target."""
    copied_bytes: int = 0
    linked_bytes: int = 0
    """Of files that the target had in another checkpoint."""
    kept_bytes: int = 0
    """Of files that an interrupted copy had left there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Which checkpoints are to be copied, in which order, and which of them are there."""

    source: Store
    target: Store
    checkpoints: tuple[Listed, ...]
    there: frozenset[str]
    items: tuple[str, ...] | None = None
    """Which items of them; None: all."""
    is_named: bool = False
    """Whether the caller named one checkpoint: if it is deleted, no other is copied instead."""

    @property
    def size_bytes(self) -> int:
        """Of the data files that are to come, shared or not; where only some items are, of these
        items."""
        to_come = [one for one in self.checkpoints if one.folder not in self.there]
        if self.items is None:
            return sum(one.size_bytes for one in to_come)
        records = [record for one in to_come if one.commit for record in one.commit.items]
        return sum(record.size_bytes for record in records if record.name in self.items)

    def execute(
        self,
        *,
        threads: int = 4,
        pacing: Pacing | None = None,
        watch: Watch = lambda _: nullcontext(),
        ended: Callable[[Listed, Fate], None] = lambda *_: None,
    ) -> CopyReport:
        """Copy them. `watch` is entered for each checkpoint when its turn comes, and gives what is
        told of its bytes; `ended` is told what became of it. An error that is not of one checkpoint
        alone ends it: what was copied by then stays, and the next copy goes on from there.

        If any of them is deleted meanwhile, the run is listed again: retention deletes only after a
        newer commit, which is then copied too. `NotFoundError` if that one was named."""
        doing = _Doing(self, threads, pacing or Pacing())
        pending = self.checkpoints
        for _ in range(decision.MOST_TRIES):
            if not pending:
                break
            fates = []
            for item in pending:
                with watch(item) as progress:
                    fates.append(doing.one(item, progress))
                ended(item, fates[-1])
            pending = doing.missed() if "deleted" in fates else ()
        Run(self.target, None).clean()  # nobody may ever save there, and do it
        return doing.report()


class _Doing:
    """A plan that is carried out."""

    def __init__(self, plan: CopyPlan, threads: int, pacing: Pacing) -> None:
        self._source = plan.source
        self._run = Run(plan.source, None)
        self._plan = plan
        self._progress: Progress | None = None
        self._copier = Copier(
            CopyRoute(
                source=plan.source,
                target=plan.target,
                threads=threads,
                pacing=pacing,
                progress=self._tell,
            ),
            plan.items,
        )
        self._fates: dict[str, Fate] = {}
        self._moved = Moved()

    def one(self, item: Listed, progress: Progress | None) -> Fate:
        self._progress = progress
        fate: Fate
        try:
            if item.error is not None:
                raise item.error
            fate = self._copier.copy(item.folder)
        except NotFoundError:
            if self._plan.is_named or decision.deleted(self._source, item.folder) is None:
                raise
            fate = "deleted"
        except CorruptError as error:
            fate = error
        if isinstance(fate, Moved):
            self._moved += fate
        self._fates[item.folder] = fate
        return fate

    def missed(self) -> tuple[Listed, ...]:
        """List the checkpoints of the run that were committed since the last listing."""
        listed = _chosen(self._run, self._run.checkpoints(), None, None)
        new = tuple(item for item in listed if item.folder not in self._fates)
        _check_items(new, self._plan.items)
        return new

    def report(self) -> CopyReport:
        fates = self._fates.items()
        return CopyReport(
            copied=tuple(folder for folder, fate in fates if isinstance(fate, Moved)),
            there=tuple(folder for folder, fate in fates if fate is None),
            deleted=tuple(folder for folder, fate in fates if fate == "deleted"),
            damaged=tuple(
                (folder, fate) for folder, fate in fates if isinstance(fate, CorruptError)
            ),
            copied_bytes=self._moved.copied_bytes,
            linked_bytes=self._moved.linked_bytes,
            kept_bytes=self._moved.kept_bytes,
        )

    def _tell(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)


def plan_copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    step: int | None = None,
    items: Sequence[str] | None = None,
) -> CopyPlan:
    """What copying a run, one step of it, or the folder of one checkpoint in it would bring; of
    these items alone, if any are named, which each checkpoint has to have."""
    if items is not None and (isinstance(items, str) or not items):
        raise UsageError("items are some names", found=repr(items), remedy="pass items=('model',)")
    store, folder = open_store(source), None
    if decision.is_checkpoint(store):
        store, folder = open_parent(source)
        if step is not None:
            raise UsageError(
                "one checkpoint has but one step", where=str(source), remedy="leave it out"
            )
        if lineage.parse_folder(folder) is None:
            raise UsageError(
                "cannot copy a checkpoint that is in no run",
                where=f"{store.url}/{folder}",
                expected="the folder of a run, or of a checkpoint in one",
                found="a folder alone",
                remedy="copy the folder as any other: it is whole by itself",
            )
    place = open_store(target)
    if place.url == store.url:
        raise UsageError(
            "cannot copy a run to itself", where=store.url, remedy="name another place"
        )
    run = Run.open(store)
    _check_place(place)
    listed = run.checkpoints()
    chosen = _chosen(run, listed, step, folder)
    _check_items(chosen, items)
    copier = Copier(CopyRoute(source=store, target=place), items)
    there = set()
    for item in chosen:
        with suppress(NotFoundError):  # it is being deleted, which the copy will tell
            if copier.is_there(item.folder):
                there.add(item.folder)
    return CopyPlan(
        source=store,
        target=place,
        checkpoints=chosen,
        there=frozenset(there),
        items=None if items is None else tuple(items),
        is_named=step is not None or folder is not None,
    )


def _check_items(listed: Sequence[Listed], items: Sequence[str] | None) -> None:
    """Raise `NotFoundError` if a checkpoint lacks one of the items that are to be copied."""
    for item in listed:
        if items is not None and item.commit is not None:
            left_out_of(item.commit, items)


def _check_place(place: Store) -> None:
    """`UsageError` for a place that is no run and is none for one: one checkpoint, or a folder of
    runs, into which `cp` would put another."""
    found, remedy = "one checkpoint", "name its run, or another place"
    if not decision.is_checkpoint(place):
        if lineage.RUN_NAME in place.file_names(""):
            return
        found, remedy = "a folder of runs", remedy_for_no_run(place) or ""
        if not remedy:
            return
    raise UsageError(
        "cannot copy to that place",
        where=place.url,
        found=found,
        remedy=remedy,
        expected="a place for one run: a copy of it, or empty",
    )


def _chosen(
    run: Run, listed: Sequence[Listed], step: int | None, folder: str | None
) -> tuple[Listed, ...]:
    if folder is not None:
        return tuple(item for item in listed if item.folder == folder)
    if step is None:
        return tuple(sorted(listed, key=lambda item: not item.on_lineage))
    same = sorted((i for i in listed if i.step == step), key=lambda item: item.on_lineage)
    if not same:
        raise NotFoundError(
            f"there is no checkpoint of step {step}",
            where=run.store.url,
            found=nearest_steps((item.step for item in listed), step),
            remedy="`laststep ls` lists them",
        )
    return (same[-1],)


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    step: int | None = None,
    *,
    items: Sequence[str] | None = None,
    threads: int = 4,
    bytes_per_s: float | None = None,
    stop: threading.Event | None = None,
) -> CopyReport:
    """Copy a run, or one step of it, to another place, verified; what is there stays there. With
    `items`, only these: what lies there then are excerpts, which say what they lack.

    Copying again goes on where an interrupted copy ended, and brings what is new. `stop` may be set
    by another thread: that raises `AbortedError`. A damaged checkpoint is `CorruptError`, once all
    others are copied."""
    report = plan_copy(source, target, step, items).execute(
        threads=threads, pacing=Pacing(bytes_per_s=bytes_per_s, stop=stop)
    )
    for folder, error in report.damaged:
        raise CorruptError(
            f"{folder} is damaged and was not copied: {error.what}",
            where=error.where,
            expected=error.expected,
            found=error.found,
            remedy=error.remedy,
        ) from error
    return report
