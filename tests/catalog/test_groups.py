"""Checkpoints of several groups of ranks: whose files are read, and second looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from laststep.catalog import groups
from laststep.catalog.groups import files_of
from laststep.catalog.prune import plan_prune
from laststep.catalog.retention import Keep
from laststep.errors import Corrupt, Exists, NotFound, StorageFailed
from laststep.format.manifest import Commit, FileRecord
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.catalog.run import Run
    from laststep.storage.files import FileReader

SIZE = 5000
"""Of the file of each rank."""
Written = tuple[str, Commit]
FileOf = Callable[..., FileRecord]


class Watched(DirectoryStore):
    """Notes what is opened, and tells lies about it."""

    def __init__(self, path: Path, lies: int = 0) -> None:
        super().__init__(path)
        self.opened: list[str] = []
        self.lies = lies

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        self.opened.append(name.rpartition("/")[2])
        reader = super().open_reader(name, cached=cached)
        if self.lies:
            self.lies -= 1
            reader.size_bytes -= 1
        return reader


def test_only_the_manifests_of_the_groups_that_are_wanted_are_read(
    write: Callable[..., Written], file_of: FileOf, run: Run
) -> None:
    folder, commit = write()
    store = Watched(run.store.url)
    assert files_of(store, folder, commit) == tuple(file_of(rank, deep=False) for rank in range(8))
    assert store.opened == [f"r{first:05d}.json" for first in (0, 2, 4, 6)]
    store.opened.clear()
    found = files_of(store, folder, commit, ranks=[6, 3])
    assert found == (file_of(3, deep=False), file_of(6, deep=False))
    assert store.opened == ["r00002.json", "r00006.json"]
    assert files_of(store, folder, commit, ranks=[]) == ()


def test_a_checkpoint_without_groups_lists_its_files_itself(
    run: Run, saved: Callable[..., list[str]]
) -> None:
    (folder,) = saved(1)
    (listed,) = run.checkpoints()
    assert listed.commit is not None
    assert files_of(run.store, folder, listed.commit) == listed.commit.files
    assert files_of(run.store, folder, listed.commit, ranks=[1]) == ()


def test_a_manifest_of_a_group_is_made_once(write: Callable[..., Written], run: Run) -> None:
    folder, commit = write(commit=False)
    manifest = groups.read(run.store, folder, commit, commit.groups[0])
    with pytest.raises(Exists):
        groups.write(run.store, folder, manifest)
    run.store.delete_folder(folder)
    with pytest.raises(NotFound):
        groups.write(run.store, folder, manifest)
    assert run.store.list(folder) == []  # a late rank does not bring it back


@pytest.mark.parametrize("lies", [1, 2])
def test_what_seems_wrong_is_read_a_second_time(
    lies: int, write: Callable[..., Written], run: Run
) -> None:
    folder, commit = write()
    store = Watched(run.store.url, lies=lies)
    if lies == 1:
        assert len(files_of(store, folder, commit)) == 8
    else:
        with pytest.raises(Corrupt, match=r"groups/r00000\.json"):
            files_of(store, folder, commit)


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damage(
    write: Callable[..., Written], run: Run
) -> None:
    folder, commit = write()
    run.store.delete_folder(folder, first="manifest.json")
    with pytest.raises(NotFound):
        files_of(run.store, folder, commit)


def test_a_manifest_of_another_attempt_is_corrupt(
    write: Callable[..., Written], run: Run, tmp_path: Path
) -> None:
    folder, commit = write(1)
    other, _ = write(2)
    path = tmp_path / "run"
    name = commit.groups[1].name
    (path / folder / name).write_bytes((path / other / name).read_bytes())
    with pytest.raises(Corrupt):
        files_of(run.store, folder, commit)


@pytest.mark.parametrize("deep", [False, True])
def test_without_a_manifest_verify_still_finds_all_files(
    deep: bool, write: Callable[..., Written], file_of: FileOf, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=deep)
    assert len(verify_checkpoint(run.store, folder).damage) == 8  # files of zeros are no files
    (tmp_path / "run" / folder / "manifest.json").write_bytes(b"")
    report = verify_checkpoint(run.store, folder)
    assert {damage.file for damage in report.damage} == {
        "manifest.json",
        *(file_of(rank, deep=deep).name for rank in range(8)),
    }


def test_a_store_that_cannot_be_reached_is_not_damage(
    write: Callable[..., Written], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = write()

    def fail(name: str, *, cached: bool = False) -> FileReader:
        raise StorageFailed("cannot open")

    monkeypatch.setattr(run.store, "open_reader", fail)
    with pytest.raises(StorageFailed):
        files_of(run.store, folder, commit)


def test_what_groups_of_ranks_share_counts_once(write: Callable[..., Written], run: Run) -> None:
    first, _ = write()
    second, commit = write(2, origin=first)
    assert commit.shared_bytes == 2 * SIZE
    listed = run.checkpoints()
    sharing = groups.sharing_of(run.store, listed)
    whole = sum(item.stored_bytes for item in listed)
    assert sharing.stored_bytes() == whole - 2 * SIZE
    assert sharing.freed_bytes([first]) == listed[0].stored_bytes - 2 * SIZE
    assert sharing.sharers(second) == (first,)
    plan = plan_prune(run, Keep(last=1))
    assert plan.deletions == (first,)
    assert plan.freed_bytes == listed[0].stored_bytes - 2 * SIZE


def test_a_run_that_shares_nothing_is_counted_without_reading_groups(
    write: Callable[..., Written], run: Run
) -> None:
    folder, _ = write()
    store = Watched(run.store.url)
    sharing = groups.sharing_of(store, run.checkpoints())
    assert sharing.freed_bytes([folder]) == run.checkpoints()[0].stored_bytes
    assert store.opened == []


def test_a_group_that_cannot_be_read_shares_nothing_that_is_known(
    write: Callable[..., Written], run: Run, tmp_path: Path
) -> None:
    first, _ = write()
    second, _ = write(2, origin=first)
    (tmp_path / "run" / second / "groups" / "r00000.json").write_bytes(b"{}")
    listed = run.checkpoints()
    sharing = groups.sharing_of(run.store, listed)
    assert sharing.sharers(first) == ()
    assert sharing.freed_bytes([first]) == listed[0].stored_bytes
