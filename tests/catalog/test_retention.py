"""Retention: what it keeps, and what it never drops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import names
from laststep.catalog.listing import Listed
from laststep.catalog.retention import Keep, decide, missing_metric
from laststep.errors import CorruptError, UsageError
from laststep.format.manifest import Commit, Metric

if TYPE_CHECKING:
    from collections.abc import Callable


def _listed(
    step: int,
    *,
    on_lineage: bool = True,
    superseded_by: str | None = None,
    bad: bool = False,
    incomplete: bool = False,
    metrics: dict[str, Metric] | None = None,
    pinned: bool = False,
    attempt: int | None = None,
) -> Listed:
    attempt = step + 1 if attempt is None else attempt
    commit = Commit(
        run="r",
        step=step,
        term=1,
        attempt=attempt,
        created_s=0.0,
        laststep="0",
        items=(),
        metrics=metrics or {},
    )
    return Listed(
        step=step,
        term=1,
        attempt=attempt,
        commit=None if bad else commit,
        error=CorruptError("bad") if bad else None,
        on_lineage=on_lineage,
        superseded_by=superseded_by,
        pinned=pinned,
        size_bytes=10,
        stored_bytes=12,
        created_s=0.0,
        incomplete="a file is missing" if incomplete else None,
    )


def _kept(listed: list[Listed], keep: Keep, **more: object) -> list[int]:
    verdicts = decide(listed, keep, **more)  # type: ignore[arg-type]
    return [verdict.step for verdict in verdicts if verdict.keep]


@st.composite
def _runs(draw: st.DrawFn) -> list[Listed]:
    listed: list[Listed] = []
    for attempt in range(1, draw(st.integers(1, 12)) + 1):
        state = draw(st.sampled_from(["on", "on", "on", "off", "replaced", "bad", "short"]))
        again = listed and listed[-1].superseded_by is not None
        step = listed[-1].step if again else draw(st.integers(0, 30))
        listed.append(
            _listed(
                step,
                attempt=attempt,
                on_lineage=state in ("on", "bad", "short"),
                superseded_by=f"step-{step:08}.1-{attempt + 1}" if state == "replaced" else None,
                bad=state == "bad",
                incomplete=state == "short",
                pinned=draw(st.booleans()) and draw(st.booleans()),
                metrics={"loss": draw(st.floats(allow_nan=True))} if draw(st.booleans()) else {},
            )
        )
    return listed


_small = st.none() | st.integers(1, 5)
_policies = st.builds(
    lambda last, every, best, mode, abandoned: Keep(
        last=last,
        every=every,
        best=best,
        metric=None if best is None else "loss",
        mode=mode,
        abandoned=abandoned,
    ),
    _small,
    _small,
    _small,
    st.sampled_from(["min", "max"]),
    st.booleans(),
)


@given(_runs(), _policies, st.data())
def test_retention_never_drops_what_is_needed(
    listed: list[Listed], keep: Keep, data: st.DataObject
) -> None:
    folders = [item.folder for item in listed]
    resumed_from = data.draw(st.none() | st.sampled_from(folders))
    pinned = frozenset(data.draw(st.lists(st.sampled_from(folders), max_size=2)))
    verdicts = decide(listed, keep, resumed_from=resumed_from, pinned=pinned)
    kept = {verdict.folder for verdict in verdicts if verdict.keep}
    assert [verdict.folder for verdict in verdicts] == folders
    assert all(verdict.reasons for verdict in verdicts)
    for item in listed:
        if item.folder in kept and item.is_whole and item.superseded_by in folders:
            assert item.superseded_by in kept
        if item.pinned or item.folder in pinned or item.folder == resumed_from:
            assert item.folder in kept
    good = [item for item in listed if item.on_lineage and item.is_whole]
    if good:
        assert good[-1].folder in kept
    if keep.last is not None:
        assert {item.folder for item in good[-keep.last :]} <= kept
    values = [item.commit.metrics.get("loss", math.nan) for item in good if item.commit is not None]
    if keep.best is not None and all(math.isnan(value) for value in values):  # type: ignore[arg-type]
        assert {item.folder for item in good} <= kept


@given(_runs(), _policies)
def test_what_is_not_whole_changes_nothing_about_what_is(listed: list[Listed], keep: Keep) -> None:
    """Retention decides about whole checkpoints as if the others on the lineage were not there."""
    whole = [item for item in listed if item.is_whole or not item.on_lineage]
    verdicts = {verdict.folder: verdict for verdict in decide(listed, keep)}
    for verdict in decide(whole, keep):
        assert verdicts[verdict.folder] == verdict


@given(_runs(), _policies)
def test_deciding_again_about_what_was_kept_keeps_the_last_and_the_best(
    listed: list[Listed], keep: Keep
) -> None:
    kept = {verdict.folder for verdict in decide(listed, keep) if verdict.keep}
    left = [item for item in listed if item.folder in kept]
    again = {verdict.folder for verdict in decide(left, keep) if verdict.keep}
    rules = {
        verdict.folder
        for verdict in decide(listed, keep)
        if any(reason.startswith(("one of", "every", "the newest")) for reason in verdict.reasons)
    }
    assert rules <= again


def test_the_last_k_are_counted_on_the_lineage_only() -> None:
    listed = [_listed(step) for step in range(5)]
    listed[3] = _listed(3, on_lineage=False)
    listed[4] = _listed(4, bad=True)
    assert _kept(listed, Keep(last=2)) == [1, 2, 3, 4]
    assert _kept(listed, Keep(last=2, abandoned=False)) == [1, 2]


def test_without_any_rule_everything_stays_but_what_was_saved_again() -> None:
    listed = [_listed(1, attempt=1, on_lineage=False, superseded_by="x"), _listed(1, attempt=2)]
    verdicts = decide(listed, Keep())
    assert [verdict.keep for verdict in verdicts] == [False, True]
    assert "x" in verdicts[0].reasons[0].split()


def test_every_n_steps_stay_beside_the_newest() -> None:
    assert _kept([_listed(step) for step in range(1, 8)], Keep(every=3)) == [3, 6, 7]


@pytest.mark.parametrize(("mode", "expected"), [("min", [1, 4]), ("max", [3, 4])])
def test_the_best_stay_and_nan_is_never_best(mode: str, expected: list[int]) -> None:
    values: list[Metric] = [math.nan, 0.1, 0.2, 0.9, "text"]
    listed = [_listed(step, metrics={"loss": value}) for step, value in enumerate(values)]
    keep = Keep(best=1, metric="loss", mode=mode)  # type: ignore[arg-type]
    assert _kept(listed, keep) == expected


@pytest.mark.parametrize("value", [None, "0.3", True, math.nan])
def test_a_metric_that_nobody_has_as_a_number_deletes_nothing(value: Metric | None) -> None:
    more: dict[str, Metric] = {} if value is None else {"nope": value}
    listed = [_listed(step, metrics={"loss": 1.0, "acc": 2, **more}) for step in range(5)]
    keep = Keep(best=1, metric="nope")
    assert _kept(listed, keep) == [0, 1, 2, 3, 4]
    told = missing_metric(listed, keep)
    assert told is not None
    assert names(told, "'nope'", "acc", "loss")
    reason = "until one has 'nope' as a number"
    assert all(reason in verdict.reasons for verdict in decide(listed, keep))
    listed.append(_listed(5, metrics={"nope": 0.5}))
    assert _kept(listed, keep) == [5]


def test_of_equally_good_ones_the_later_stays() -> None:
    listed = [_listed(step, metrics={"loss": 1.0}) for step in range(3)] + [_listed(9)]
    assert _kept(listed, Keep(best=1, metric="loss")) == [2, 9]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Keep(last=0),
        lambda: Keep(last=True),
        lambda: Keep(every=1.5),  # type: ignore[arg-type]
        lambda: Keep(best=1, metric=3),  # type: ignore[arg-type]
        lambda: Keep(abandoned=None),  # type: ignore[arg-type]
        lambda: Keep(every=-1),
        lambda: Keep(best=1),
        lambda: Keep(metric="loss"),
        lambda: Keep(best=1, metric="x", mode="avg"),  # type: ignore[arg-type]
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(wrong: Callable[[], Keep]) -> None:
    with pytest.raises(UsageError):
        wrong()
