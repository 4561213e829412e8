"""What a look at a run costs: counted in calls and comparisons, which grow with its checkpoints."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from laststep.catalog.attempt import AttemptName
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.catalog.terms import Seen
from laststep.format import manifest
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RankFiles
    from laststep.format.manifest import Commit
    from laststep.storage.store import StoreEntry

MANY = 400


@pytest.fixture
def many(
    tmp_path: Path, commit_of: Callable[..., Commit], files_of: Callable[..., RankFiles]
) -> DirectoryStore:
    """A run of many small checkpoints, written past everything that would sync them."""
    store = DirectoryStore(tmp_path / "run")
    Run.open_or_create(store).claim_term(None)
    for step in range(1, MANY + 1):
        folder = tmp_path / "run" / f"step-{step:08d}.1-{step}"
        folder.mkdir()
        for name, data in files_of().content.items():
            (folder / name).write_bytes(data)
        commit = commit_of(step=step, term=1, attempt=step)
        (folder / "manifest.json").write_bytes(manifest.encode(commit))
    return store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each way to look at a store was called, and names of attempts were compared."""
    found: Counter[str] = Counter()

    def count(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def counted(*arguments: object, **more: object) -> object:
            found[name] += 1
            return real(*arguments, **more)

        monkeypatch.setattr(kind, name, counted)

    for name in ("list", "read", "file_names", "folder_names"):
        count(DirectoryStore, name)
    for name in ("__hash__", "__eq__"):
        count(AttemptName, name)
    return found


def test_listing_looks_once_into_each_folder_and_compares_each_name_a_few_times(
    many: DirectoryStore, calls: Counter[str]
) -> None:
    run = Run.open(many)
    calls.clear()
    assert len(run.lineage()) == MANY
    assert calls["list"] == MANY + 1
    assert calls["read"] == MANY + 1  # manifests, and the record of the term
    assert calls["file_names"] == 1
    assert calls["__hash__"] + calls["__eq__"] < 20 * MANY


def test_a_second_look_reads_nothing_again(many: DirectoryStore, calls: Counter[str]) -> None:
    run = Run.open(many)
    run.lineage()
    calls.clear()
    plan = plan_prune(run, Keep(last=3))
    assert len(plan.deletions) == MANY - 3
    assert calls["read"] == 0
    assert calls["list"] == MANY + 1
    assert calls["__hash__"] + calls["__eq__"] < 20 * MANY


def test_the_newest_is_found_by_looking_into_one_folder(
    many: DirectoryStore, calls: Counter[str]
) -> None:
    newest = Run.open(many).newest()
    assert newest is not None
    assert newest.step == MANY
    assert newest == Run.open(many).lineage()[-1]
    calls.clear()
    Run.open(many).newest()
    assert calls["list"] == 2
    assert calls["read"] == 3  # run, term, manifest


def test_a_step_that_no_folder_has_is_free_without_a_look_into_any(
    many: DirectoryStore, calls: Counter[str]
) -> None:
    run = Run.open(many)
    calls.clear()
    run.check_step_free(MANY + 1)
    assert calls["list"] == calls["read"] == 0
    run.newest_point()
    assert (calls["list"], calls["read"]) == (0, 1)  # the last manifest
    assert calls["folder_names"] == 2


def test_a_save_that_has_its_folder_finds_its_step_free_without_reading_the_others(
    many: DirectoryStore, calls: Counter[str]
) -> None:
    run = Run.open(many)
    run.begin(step=MANY + 1, term=1, attempt=MANY + 1)
    calls.clear()
    run.check_step_free(MANY + 1)
    assert calls["list"] == 0
    assert calls["read"] == 1  # whether its own folder is decided


def test_the_newest_is_the_last_that_is_whole(many: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "run" / f"step-{MANY:08d}.1-{MANY}" / "m.safetensors").unlink()
    (tmp_path / "run" / f"step-{MANY - 1:08d}.1-{MANY - 1}" / "manifest.json").write_bytes(b"x")
    (tmp_path / "run" / f"step-{MANY - 2:08d}.1-{MANY - 2}" / "manifest.json").unlink()
    newest = Run.open(many).newest()
    assert newest is not None
    assert newest.step == MANY - 3


def test_a_new_writer_reads_no_manifest_of_another_before_its_first_save(
    many: DirectoryStore, calls: Counter[str]
) -> None:
    left = "step-00000401.1-401"
    many.make_folder(left)
    run = Run.open(many)
    calls.clear()
    run.claim_term((1, MANY), seen=Seen(term=1, commit=(1, MANY)))
    assert left not in many.folder_names("")
    assert calls["read"] < 10
    assert calls["list"] < 20


def test_folders_in_an_object_store_are_looked_at_side_by_side(many: DirectoryStore) -> None:
    together = threading.Barrier(16)

    class Remote(DirectoryStore):
        same_everywhere = True

        def list(self, folder: str) -> list[StoreEntry]:
            if folder.startswith("step-"):
                together.wait(30)  # broken if they come one after the other
            return super().list(folder)

    listed = Run.open(Remote(many.url)).checkpoints()
    assert [one.step for one in listed] == [one.step for one in Run.open(many).checkpoints()]
