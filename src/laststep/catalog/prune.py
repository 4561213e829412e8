"""Carry out what retention decided: a plan that is a value, and its execution.

Deletes only committed checkpoints that the plan drops; what crashes leave behind is `cleaning`'s.
Each loses its manifest durably before anything else, so at any instant it is there whole or not at
all. Later commits go first, because a manifest may refer to earlier checkpoints, never to later;
but a replaced checkpoint goes before its replacement, or a crash in between would bring it back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.indexes import sharing_of
from laststep.catalog.listing import Listed
from laststep.catalog.names import PIN_NAME
from laststep.catalog.retention import Keep, Verdict, decide, missing_metric
from laststep.storage.store import Store
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.run import Run
    from laststep.catalog.sharing import Sharing

_log = logging.getLogger(__name__)


class PrunePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What stays and what goes, in the order of commits."""

    store: Store
    listed: tuple[Listed, ...]
    verdicts: tuple[Verdict, ...]
    deletions: tuple[str, ...]
    """The folders that go, in the order in which they do."""

    lacking: str | None
    """Says, in words, that no checkpoint has the metric of a best-k rule, which then keeps all."""

    @property
    def freed_bytes(self) -> int:
        """What the execution gives back."""
        return self.sharing().freed_bytes(self.deletions)

    def sharing(self) -> Sharing:
        """Which of the checkpoints have files in common; may read indexes."""
        return sharing_of(self.store, self.listed)

    def execute(
        self,
        *,
        before: Callable[[], None] | None = None,
        each: Callable[[str], None] | None = None,
    ) -> tuple[str, ...]:
        """Delete what goes, and return it; one that was pinned since the plan was made stays.

        `before` is asked before each deletion, and raises where the plan no longer holds.
        """
        deleted: list[str] = []
        replacements = {item.folder: item.superseded_by for item in self.listed}
        kept: set[str | None] = set()
        for folder in self.deletions:
            if before is not None:
                before()
            if any(entry.name == PIN_NAME for entry in self.store.list(folder)):
                _log.info("kept %s: pinned meanwhile", folder)
                kept.add(replacements[folder])
                continue
            if folder in kept:
                _log.info("kept %s: it replaces one that was pinned meanwhile", folder)
                continue
            self.store.delete_folder(folder, first=MANIFEST_NAME)
            deleted.append(folder)
            _log.info("pruned %s", folder)
            if each is not None:
                each(folder)
        return tuple(deleted)


def plan_prune(
    run: Run,
    keep: Keep,
    *,
    resumed_from: str | None = None,
    in_use: frozenset[str] = frozenset(),
) -> PrunePlan:
    """What the rules would delete now; `in_use` are folders that a save under way refers to."""
    listed, _ = run.look()
    return plan(run.store, listed, keep, resumed_from=resumed_from, pinned=in_use)


def plan(
    store: Store,
    listed: tuple[Listed, ...],
    keep: Keep,
    *,
    resumed_from: str | None = None,
    pinned: frozenset[str] = frozenset(),
) -> PrunePlan:
    """The plan for what is listed. Pure: `store` is only kept for the execution."""
    verdicts = decide(listed, keep, resumed_from=resumed_from, pinned=pinned)
    points = {item.folder: item.point for item in listed}
    replaced = {item.folder for item in listed if item.superseded_by}
    doomed = [verdict.folder for verdict in verdicts if not verdict.keep]
    doomed.sort(key=lambda folder: (folder in replaced, points[folder]), reverse=True)
    lacking = missing_metric(listed, keep)
    return PrunePlan(
        store=store, listed=listed, verdicts=verdicts, deletions=tuple(doomed), lacking=lacking
    )
