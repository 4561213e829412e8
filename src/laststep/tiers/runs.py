"""Copy a run, or one step of it, between any two places.

The plan (which checkpoints, in which order) is a value. One that is damaged or deleted meanwhile
does not prevent the others from being copied. Those of the lineage are copied first, oldest first,
so at any time the target is the run as it once was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from laststep.catalog.attempt import RUN_NAME, deleted, is_checkpoint, looks, parse_folder
from laststep.catalog.listing import Listed, nearest_steps, remedy_for_no_run
from laststep.catalog.run import Run
from laststep.errors import CorruptError, NotFoundError, UsageError
from laststep.plan.files import omitted_items_of
from laststep.storage.registry import open_parent, open_store
from laststep.tiers.copying import Copier, Pacing, Progress

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Sequence

    from laststep.storage.store import Store

__all__ = ["CopyPlan", "CopyReport", "copy", "plan_copy"]

CopyOutcome = int | CorruptError | Literal["deleted"] | None
"""The bytes that were copied of a checkpoint; None if the target already had it."""
Watch = Callable[[Listed], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The outcome of a copy, by checkpoint folder."""

    copied: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    """Checkpoints that the target already had."""
    deleted: tuple[str, ...] = ()
    """Checkpoints that were deleted before they could be copied."""
    damaged: tuple[tuple[str, CorruptError], ...] = ()
    """Unreadable checkpoints, which were not copied, and the errors."""
    copied_bytes: int = 0
    """Bytes of data files, without those that were linked or had been left by an earlier copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The checkpoints to copy, in order; `there` names those that the target already has."""

    source: Store
    target: Store
    checkpoints: tuple[Listed, ...]
    there: frozenset[str]
    items: tuple[str, ...] | None = None
    """The items to copy; None: all."""
    is_named: bool = False
    """True if the caller named one checkpoint: if it is deleted, no other is copied instead."""

    @property
    def size_bytes(self) -> int:
        """The bytes of data files to copy, including shared ones; only of `items` if given."""
        to_come = [item for item in self.checkpoints if item.folder not in self.there]
        if self.items is None:
            return sum(item.size_bytes for item in to_come)
        records = [record for item in to_come if item.commit for record in item.commit.items]
        return sum(record.size_bytes for record in records if record.name in self.items)

    def execute(
        self,
        *,
        threads: int = 4,
        pacing: Pacing | None = None,
        watch: Watch = lambda _: nullcontext(),
        ended: Callable[[Listed, CopyOutcome], None] = lambda *_: None,
    ) -> CopyReport:
        """Copy the checkpoints. `watch` is entered for each one before it is copied and returns its
        progress callback; `ended` is called with its outcome. If one is deleted meanwhile, list
        the run again, for a newer one, or raise `NotFoundError` if the caller named it."""
        copier = Copier(self.source, self.target, self.items, threads=threads, pacing=pacing)
        outcomes: dict[str, CopyOutcome] = {}
        pending = self.checkpoints
        for _ in looks():
            for item in pending:
                with watch(item) as progress:
                    outcomes[item.folder] = self._copy(copier, item, progress)
                ended(item, outcomes[item.folder])
            if not any(outcomes[item.folder] == "deleted" for item in pending):
                break
            run = Run(self.source, None)
            listed = _chosen(run, run.checkpoints(), None, None)
            pending = tuple(item for item in listed if item.folder not in outcomes)
            _check_items(pending, self.items)
        Run(self.target, None).clean()  # there may never be a writer that does it
        results = outcomes.items()
        copied = {name: result for name, result in results if isinstance(result, int)}
        damaged = [(name, result) for name, result in results if isinstance(result, CorruptError)]
        return CopyReport(
            copied=tuple(copied),
            there=tuple(folder for folder, outcome in outcomes.items() if outcome is None),
            deleted=tuple(folder for folder, outcome in outcomes.items() if outcome == "deleted"),
            damaged=tuple(damaged),
            copied_bytes=sum(copied.values()),
        )

    def _copy(self, copier: Copier, item: Listed, progress: Progress | None) -> CopyOutcome:
        try:
            if item.error is not None:
                raise item.error
            return copier.copy(item.folder, progress)
        except NotFoundError:
            if self.is_named or deleted(self.source, item.folder) is None:
                raise
            return "deleted"
        except CorruptError as error:
            return error


def plan_copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    step: int | None = None,
    items: Sequence[str] | None = None,
) -> CopyPlan:
    """Plan the copy of a run, a step of it or a checkpoint's folder; each must have all `items`."""
    if items is not None and (isinstance(items, str) or not items):
        raise UsageError("items are some names", found=repr(items), remedy="pass items=('model',)")
    store, folder = open_store(source), None
    if is_checkpoint(store):
        store, folder = open_parent(source)
        if step is not None or parse_folder(folder) is None:
            raise UsageError(
                "cannot copy a step of a checkpoint, or a checkpoint that is not in a run",
                where=f"{store.url}/{folder}",
                remedy="leave the step out, or copy the folder with any tool: it is self-contained",
            )
    place = open_store(target)
    if place.url == store.url:
        raise UsageError(
            "cannot copy a run to itself", where=store.url, remedy="name another place"
        )
    run = Run.open(store)
    _check_place(place)
    chosen = _chosen(run, run.checkpoints(), step, folder)
    _check_items(chosen, items)
    copier = Copier(store, place, items)
    present = set()
    for item in chosen:
        with suppress(NotFoundError):  # being deleted: the copy reports it
            if copier.is_there(item.folder):
                present.add(item.folder)
    return CopyPlan(
        source=store,
        target=place,
        checkpoints=chosen,
        there=frozenset(present),
        items=None if items is None else tuple(items),
        is_named=step is not None or folder is not None,
    )


def _check_items(listed: Sequence[Listed], items: Sequence[str] | None) -> None:
    """Raise `NotFoundError` if a checkpoint lacks one of the items to copy."""
    for item in listed:
        if items is not None and item.commit is not None:
            omitted_items_of(item.commit, items)


def _check_place(place: Store) -> None:
    """Raise `UsageError` if the target is a single checkpoint or a folder of runs."""
    remedy = "name its run, or another place" if is_checkpoint(place) else None
    if remedy is None and RUN_NAME not in place.file_names(""):
        remedy = remedy_for_no_run(place)
    if remedy is not None:
        raise UsageError(
            "cannot copy to that place",
            where=place.url,
            expected="an empty place, or a copy of the same run",
            remedy=remedy,
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
    """Copy a run, or one step of it, to another place and verify it; with `items`, only these, into
    partial checkpoints. A repeated copy resumes an interrupted one and copies what is new.

    Another thread may set `stop`, which raises `AbortedError`. If a checkpoint is damaged,
    `CorruptError` is raised after all others have been copied.
    """
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
