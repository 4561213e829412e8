"""Retention: decide which checkpoints to keep. The only implementation of the rules, used by users,
the flusher and `prune`.

`decide` is pure: it maps the listed checkpoints and a `Keep` to one verdict each. Regardless of the
rules, these are kept: the newest good checkpoint of the lineage, the one that the run was resumed
from, pinned ones, links, and the replacement of a kept checkpoint, without which the replaced one
would count again. Everything is kept in a run in which a later version of laststep has written,
because its manifests may refer to other checkpoints in an unknown way.

Rules count only good checkpoints on the lineage: those with a readable manifest and all files
present at full length. Other checkpoints are evidence and are kept unless `abandoned=False`; only a
checkpoint whose step was committed again is deleted without that. If no checkpoint has the metric
of a rule (it may be misspelt), nothing is deleted.

A prune is planned first (`PrunePlan`), purely, and then executed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeGuard

import msgspec

from laststep.catalog.indexes import sharing_of
from laststep.catalog.lineage import PIN_NAME
from laststep.catalog.listing import Listed
from laststep.checks import Checked
from laststep.constants import MANIFEST_NAME
from laststep.errors import NotFoundError, UsageError
from laststep.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from laststep.catalog.indexes import Sharing
    from laststep.catalog.run import Run


_Count = Annotated[int, msgspec.Meta(ge=1)]


class Keep(Checked, frozen=True, kw_only=True):
    """Retention rules: a checkpoint is kept if any rule matches it. Pinned checkpoints, the newest
    good one and the one that the run was resumed from are always kept. Without any rule everything
    is kept."""

    last: _Count | None = None
    """Keep the last N checkpoints."""
    every: _Count | None = None
    """Keep checkpoints whose step is a multiple of N."""
    best: _Count | None = None
    """Keep the best N checkpoints by `metric`; of equal ones the later. All are kept as long as
    none has the metric as a number."""
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    """Smaller (`min`) or larger (`max`) values of the metric are better."""
    abandoned: bool = True
    """Keep abandoned branches, unreadable manifests and incomplete checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.best is None) != (self.metric is None):
            raise UsageError(
                "Keep needs both best and metric",
                found=repr(self),
                remedy=f"pass Keep(best={self.best or 1}, metric={self.metric or 'loss'!r})",
            )

    @staticmethod
    def shown(name: str) -> str:
        return f"Keep({name}=…)"

    @staticmethod
    def advice(name: str, value: object) -> str:
        if value == 0:
            return f"leave {name} out to disable the rule; Keep(last=1) keeps only the newest"
        return Checked.advice(name, value)

    def bound(self) -> int | None:
        """Return the largest number of checkpoints that these rules keep; None if it grows with the
        run."""
        if self.every is not None or (self.last is None and self.best is None):
            return None
        return (self.last or 0) + (self.best or 0) + 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision to keep or delete one checkpoint, with all reasons."""

    folder: str
    step: int
    keep: bool
    reasons: tuple[str, ...]


def decide(
    listed: Sequence[Listed],
    keep: Keep,
    *,
    resumed_from: str | None = None,
    pinned: frozenset[str] = frozenset(),
) -> tuple[Verdict, ...]:
    """Return one verdict per checkpoint. `listed` MUST be in the order of commits."""
    reasons: dict[str, list[str]] = {item.folder: [] for item in listed}
    good = [item for item in listed if item.on_lineage and item.is_whole]
    _always(reasons, listed, good, resumed_from, pinned)
    _by_rule(reasons, good, keep)
    if keep.abandoned:
        for item in listed:
            flaw = _flaw(item)
            if flaw and (item.error is not None or item.superseded_by is None):
                reasons[item.folder].append(f"{flaw}: kept as evidence")
    _by_need(reasons, listed)
    return tuple(
        Verdict(
            folder=item.folder,
            step=item.step,
            keep=bool(reasons[item.folder]),
            reasons=tuple(reasons[item.folder]) or (_why_not(item),),
        )
        for item in listed
    )


def _always(
    reasons: dict[str, list[str]],
    listed: Sequence[Listed],
    good: Sequence[Listed],
    resumed_from: str | None,
    pinned: frozenset[str],
) -> None:
    if good:
        reasons[good[-1].folder].append("the newest")
    for item in listed:
        if item.folder == resumed_from:
            reasons[item.folder].append("resumed from")
        if item.pinned or item.folder in pinned:
            reasons[item.folder].append("pinned")
        if item.is_link:
            reasons[item.folder].append("a symbolic link, which is never deleted")
    later = [item.folder for item in listed if isinstance(item.error, UsageError)]
    if later:
        _add(reasons, listed, f"{later[-1]} is of a later format and may need it")


def _by_rule(reasons: dict[str, list[str]], good: Sequence[Listed], keep: Keep) -> None:
    if keep.last is None and keep.every is None and keep.best is None:
        _add(reasons, good, "no retention rule")
    if keep.last is not None:
        _add(reasons, good[-keep.last :], f"one of the last {keep.last}")
    if keep.every is not None:
        chosen = [item for item in good if item.step % keep.every == 0]
        _add(reasons, chosen, f"every {keep.every} steps")
    if keep.best is not None and keep.metric is not None:
        best = _best(good, keep.metric, keep)[: keep.best]
        text = f"one of the best {keep.best} by {keep.metric}"
        _add(reasons, best or good, text if best else f"until one has {keep.metric!r} as a number")


def missing_metric(listed: Sequence[Listed], keep: Keep) -> str | None:
    """Return a warning if no good checkpoint has the metric of a best-k rule as a number, else
    None."""
    metric = keep.metric
    good = [item for item in listed if item.on_lineage and item.is_whole]
    if metric is None or not good or _best(good, metric, keep):
        return None
    metrics = [item.commit.metrics for item in good if item.commit is not None]
    there = dict.fromkeys(name for each in metrics for name in each if _is_number(each[name]))
    how = " as a number" if any(metric in each for each in metrics) else ""
    names = ", ".join(there) or "none"
    return f"no checkpoint has the metric {metric!r}{how}; there are: {names}"


def _best(good: Sequence[Listed], metric: str, keep: Keep) -> list[Listed]:
    """Return the checkpoints that have the metric as a number (NaN is not one), best first."""
    sign = 1 if keep.mode == "min" else -1
    ranked = []
    for place, item in enumerate(good):
        value = None if item.commit is None else item.commit.metrics.get(metric)
        if _is_number(value):
            ranked.append((sign * value, -place, item))
    ranked.sort(key=lambda entry: entry[:2])
    return [item for _, _, item in ranked]


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a metric can be compared. Integers may be larger than any float."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _by_need(reasons: dict[str, list[str]], listed: Sequence[Listed]) -> None:
    """Also keep, transitively, the replacements of kept checkpoints, so that a replaced checkpoint
    stays replaced."""
    by_folder = {item.folder: item for item in listed}
    waiting = [item for item in listed if reasons[item.folder]]

    def keep(folder: str | None, reason: str) -> None:
        if folder in by_folder:
            if not reasons[folder]:
                waiting.append(by_folder[folder])
            reasons[folder].append(reason)

    while waiting:
        item = waiting.pop()
        if item.is_whole:
            keep(item.superseded_by, f"replaces {item.folder}, which stays")


def _add(reasons: dict[str, list[str]], items: Iterable[Listed], reason: str) -> None:
    for item in items:
        reasons[item.folder].append(reason)


def _why_not(item: Listed) -> str:
    if item.superseded_by is not None:
        return f"its step was saved again in {item.superseded_by}"
    return _flaw(item) or "no rule keeps it"


def _flaw(item: Listed) -> str:
    """Return the reason why no rule counts this checkpoint; "" for a good one on the lineage."""
    if item.error is not None:
        return "its manifest cannot be read"
    if item.incomplete is not None:
        return f"incomplete ({item.incomplete})"
    return "" if item.on_lineage else "on an abandoned branch"


_log = logging.getLogger(__name__)


class PrunePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints to keep and to delete, in the order of commits."""

    store: Store
    listed: tuple[Listed, ...]
    verdicts: tuple[Verdict, ...]
    deletions: tuple[str, ...]
    """The folders to delete, in the order of deletion."""

    lacking: str | None
    """A warning that no checkpoint has the metric of a best-k rule, which then keeps all; else
    None."""

    @property
    def freed_bytes(self) -> int:
        """The bytes that `execute` frees."""
        return self.sharing().freed_bytes(self.deletions)

    def sharing(self) -> Sharing:
        """Return the files that the checkpoints share. May read indexes."""
        return sharing_of(self.store, self.listed)

    def execute(
        self, *, before: Callable[[], None] | None = None, each: Callable[[str], None] | None = None
    ) -> tuple[str, ...]:
        """Delete the planned folders and return those that were deleted. A checkpoint that was
        pinned after planning is kept.

        `before` is called before each deletion and raises if the plan is no longer valid; `each` is
        called with the name of each deleted folder.
        """
        deleted: list[str] = []
        replacements = {item.folder: item.superseded_by for item in self.listed}
        kept: set[str | None] = set()
        if self.deletions:
            self._sync_newest()
        for folder in self.deletions:
            if before is not None:
                before()
            if any(entry.name == PIN_NAME for entry in self.store.list(folder)):
                _log.info("kept %s: pinned in the meantime", folder)
                kept.add(replacements[folder])
                continue
            if folder in kept:
                _log.info("kept %s: it replaces one that was pinned in the meantime", folder)
                continue
            self.store.delete_folder(folder, first=MANIFEST_NAME)
            deleted.append(folder)
            _log.info("pruned %s", folder)
            if each is not None:
                each(folder)
        return tuple(deleted)

    def _sync_newest(self) -> None:
        """Make the name of the newest kept checkpoint durable. Its writer may have died before
        that, and the deletions may remove every other checkpoint."""
        gone = set(self.deletions)
        whole = [item.folder for item in self.listed if item.is_whole and item.folder not in gone]
        for folder in whole[-1:]:
            with contextlib.suppress(NotFoundError):  # deleted meanwhile
                self.store.sync_folder(folder)


def plan_prune(
    run: Run, keep: Keep, *, resumed_from: str | None = None, in_use: frozenset[str] = frozenset()
) -> PrunePlan:
    """Return the deletions that the rules call for now. `in_use` are folders that a save in
    progress refers to."""
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
    """Return the plan for these checkpoints. Pure: `store` is only kept for the execution."""
    verdicts = decide(listed, keep, resumed_from=resumed_from, pinned=pinned)
    points = {item.folder: item.point for item in listed}
    replaced = {item.folder for item in listed if item.superseded_by}
    doomed = [verdict.folder for verdict in verdicts if not verdict.keep]
    doomed.sort(key=lambda folder: (folder in replaced, points[folder]), reverse=True)
    lacking = missing_metric(listed, keep)
    return PrunePlan(
        store=store, listed=listed, verdicts=verdicts, deletions=tuple(doomed), lacking=lacking
    )
