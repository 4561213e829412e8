"""Checkpoints whose files are not all there, or not whole: seen by a look, counted by no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from expect import names
from laststep.catalog.listing import nearest_steps
from laststep.catalog.retention import Keep, plan_prune
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.catalog.run import Run

Save = Callable[..., str]


@pytest.fixture
def five(run: Run, save: Save) -> list[str]:
    """The folders of five checkpoints, the best of which is the last."""
    term = run.claim_term(None)
    return [save(run, step, term, step, metrics={"loss": 9.0 - step}) for step in range(1, 6)]


def spoil(folder: Path, how: str) -> None:
    file = folder / "m.safetensors"
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(file.read_bytes()[:4999])
    elif how == "long":
        file.write_bytes(file.read_bytes() + b"x")
    elif how == "folder":
        file.unlink()
        file.mkdir()
    elif how == "no index":
        (folder / "index-r00000").unlink()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("missing", ("m.safetensors",)),
        ("short", ("m.safetensors", "4999", "5000")),
        ("long", ("m.safetensors", "5001", "5000")),
        ("folder", ("m.safetensors",)),
        ("no index", ("index-r00000",)),
    ],
)
def test_a_checkpoint_with_a_wrong_file_is_incomplete_and_not_the_newest(
    how: str, told: tuple[str, ...], run: Run, five: list[str], tmp_path: Path
) -> None:
    spoil(tmp_path / "run" / five[-1], how)
    item = run.checkpoints()[-1]
    assert names(item.incomplete, *told)
    assert item.commit is not None
    assert item.on_lineage
    assert not item.is_whole
    newest = run.newest()
    assert newest is not None
    assert newest.folder == five[-2]
    run.check_step_free(5)  # what cannot be restored blocks no step


def test_a_file_that_does_not_belong_there_makes_nothing_incomplete(
    run: Run, five: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run" / five[-1] / "exported.safetensors").write_bytes(b"x")
    assert run.checkpoints()[-1].is_whole


def test_what_is_incomplete_counts_for_no_rule_and_the_newest_whole_one_stays(
    run: Run, five: list[str], tmp_path: Path
) -> None:
    for number in (3, 4):
        spoil(tmp_path / "run" / five[number], "short")
    plan = plan_prune(run, Keep(last=1))
    assert plan.deletions == (five[1], five[0])
    reasons = {verdict.folder: verdict.reasons for verdict in plan.verdicts}
    assert five[2] not in plan.deletions
    assert all(text in reasons[five[4]][0] for text in ("m.safetensors", "4999", "5000"))
    best = plan_prune(run, Keep(best=1, metric="loss", abandoned=False))
    kept = [verdict.folder for verdict in best.verdicts if verdict.keep]
    assert kept == [five[2]]
    reasons = {verdict.folder: verdict.reasons for verdict in best.verdicts}
    assert all(text in reasons[five[4]][0] for text in ("m.safetensors", "4999", "5000"))


def test_what_would_be_freed_is_what_is_there(run: Run, five: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run" / five[0]
    spoil(folder, "missing")
    plan = plan_prune(run, Keep(last=4, abandoned=False))
    assert plan.deletions == (five[0],)
    assert plan.sharing().freed_bytes(plan.deletions) == sum(
        path.stat().st_size for path in folder.iterdir()
    )
    assert run.checkpoints()[0].size_bytes == 5000


def test_one_that_is_incomplete_supersedes_nothing(run: Run, save: Save, tmp_path: Path) -> None:
    term = run.claim_term(None)
    old, new = save(run, 7, term, 1), save(run, 7, term, 2)
    spoil(tmp_path / "run" / new, "short")
    assert [item.folder for item in run.lineage()] == [old, new]
    plan = plan_prune(run, Keep(last=1))
    assert plan.deletions == ()
    (tmp_path / "run" / new / "m.safetensors").write_bytes(bytes(5000))
    assert plan_prune(run, Keep(last=1)).deletions == (old,)


def test_a_retention_looks_once_into_each_folder(
    run: Run, five: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.checkpoints()  # from here on manifests are remembered
    looked: list[str] = []
    look = DirectoryStore.list
    monkeypatch.setattr(
        DirectoryStore, "list", lambda self, name: looked.append(name) or look(self, name)
    )
    monkeypatch.setattr(
        DirectoryStore, "read", lambda self, name, **_: pytest.fail(f"{name} was read")
    )
    monkeypatch.setattr(
        DirectoryStore, "open_reader", lambda self, name, **_: pytest.fail(f"{name} was opened")
    )
    plan_prune(run, Keep(last=2))
    assert sorted(looked) == ["", *five]


@pytest.mark.parametrize(
    ("steps", "wanted", "text"),
    [
        ([], 5, "no checkpoint"),
        ([10], 5, "steps 10"),
        ([30, 10, 20, 20], 25, "steps 10, 20, 30"),
        (range(0, 1000, 10), 55, "100 steps, the nearest: 30, 40, 50, 60, 70, 80"),
        (range(0, 1000, 10), 5000, "100 steps, the nearest: 940, 950, 960, 970, 980, 990"),
    ],
)
def test_the_nearest_steps_are_named(steps: list[int], wanted: int, text: str) -> None:
    assert nearest_steps(steps, wanted) == text


def test_a_file_of_somebody_else_hides_no_file_that_is_cut_short(
    run: Run, five: list[str], tmp_path: Path
) -> None:
    newest = tmp_path / "run" / five[-1]
    (newest / "merged.safetensors").write_bytes(bytes(100))
    assert run.checkpoints()[-1].incomplete is None
    spoil(newest, "short")
    incomplete = run.checkpoints()[-1].incomplete
    assert all(text in incomplete for text in ("m.safetensors", "4999", "5000"))
    assert five[3] not in plan_prune(run, Keep(last=1)).deletions
