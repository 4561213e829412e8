"""Indexes of checkpoints of several ranks: which are read, second looks, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.catalog.attempt import read_index, read_indexes
from laststep.catalog.retention import Keep, plan_prune, sharing_of
from laststep.constants import MANIFEST_NAME
from laststep.errors import CorruptError, NotFoundError, StorageError
from laststep.format.manifest import Commit
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RankFiles
    from laststep.catalog.run import Run
    from laststep.storage.files import FileReader

SIZE = 5000
"""Of the data file of each rank."""
Checkpoint = tuple[str, Commit]
Write = Callable[..., Checkpoint]


class Watched(DirectoryStore):
    """Notes what is opened, and shows too few bytes of it so often."""

    def __init__(self, path: str | Path, lies: int = 0) -> None:
        super().__init__(path)
        self.opened: list[str] = []
        self.lies = lies

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        self.opened.append(name.partition("/")[2])
        reader = super().open_reader(name, cached=cached)
        if self.lies:
            self.lies -= 1
            reader.size_bytes -= 1
        return reader


@pytest.mark.parametrize("deep", [False, True])
def test_each_index_is_read_once(
    deep: bool, write: Write, files_of: Callable[..., RankFiles], run: Run
) -> None:
    folder, commit = write(deep=deep)
    store = Watched(run.store.url)
    names = [files_of(rank, 8).index for rank in range(8)]
    assert [index.rank for index in read_indexes(store, folder, commit)] == list(range(8))
    assert store.opened == names


@pytest.mark.parametrize("lies", [1, 2])
def test_an_index_that_seems_wrong_is_read_a_second_time(lies: int, write: Write, run: Run) -> None:
    folder, commit = write()
    store = Watched(run.store.url, lies=lies)
    if lies == 1:
        assert read_index(store, folder, commit, 0).rank == 0
        assert len(store.opened) == 2
    else:
        with raises(CorruptError, where="index-r00000", found="xxh3-128:"):
            read_index(store, folder, commit, 0)


def test_an_index_that_is_missing_is_damage(write: Write, run: Run, tmp_path: Path) -> None:
    folder, commit = write()
    (tmp_path / "run" / folder / "index-r00003").unlink()
    with raises(CorruptError, where="index-r00003", missing="index-r00003"):
        read_indexes(run.store, folder, commit)


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damage(write: Write, run: Run) -> None:
    folder, commit = write()
    run.store.delete_folder(folder, first=MANIFEST_NAME)
    with pytest.raises(NotFoundError):
        read_indexes(run.store, folder, commit)


def test_an_index_of_another_rank_is_damage(write: Write, run: Run, tmp_path: Path) -> None:
    folder, commit = write()
    place = tmp_path / "run" / folder
    (place / "index-r00002").write_bytes((place / "index-r00001").read_bytes())
    with raises(CorruptError, where="index-r00002"):
        read_index(run.store, folder, commit, 2)


@pytest.mark.parametrize("deep", [False, True])
def test_what_only_a_damaged_index_knows_is_reported_as_unchecked(
    deep: bool, write: Write, files_of: Callable[..., RankFiles], run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=deep)
    damaged = files_of(5, 8).index
    (tmp_path / "run" / folder / damaged).write_bytes(b"x" * 100)
    report = verify_checkpoint(run.store, folder)
    assert [(damage.file, damage.what) for damage in report.damage] == [(damaged, "index")]
    assert (report.blocks, report.unchecked_bytes) == (7, SIZE)


def test_a_store_that_cannot_be_reached_is_not_damage(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = write()

    def fail(name: str, *, cached: bool = False) -> FileReader:
        raise StorageError("cannot open")

    monkeypatch.setattr(run.store, "open_reader", fail)
    with pytest.raises(StorageError):
        read_indexes(run.store, folder, commit)


# Sharing


def test_what_ranks_share_with_an_earlier_checkpoint_counts_once(write: Write, run: Run) -> None:
    first, _ = write()
    second, commit = write(2, origin=first)
    assert commit.written.shared_bytes == 2 * SIZE
    listed = run.checkpoints()
    sharing = sharing_of(run.store, listed)
    whole = sum(item.stored_bytes for item in listed)
    assert sharing.stored_bytes() == whole - 2 * SIZE
    assert sharing.freed_bytes([first]) == listed[0].stored_bytes - 2 * SIZE
    assert sharing.sharers(second) == (first,)
    plan = plan_prune(run, Keep(last=1))
    assert plan.deletions == (first,)
    assert plan.sharing().freed_bytes(plan.deletions) == listed[0].stored_bytes - 2 * SIZE


def test_a_run_that_shares_nothing_is_counted_without_reading_indexes(
    write: Write, run: Run
) -> None:
    folder, _ = write()
    store = Watched(run.store.url)
    sharing = sharing_of(store, run.checkpoints())
    assert sharing.freed_bytes([folder]) == run.checkpoints()[0].stored_bytes
    assert store.opened == []


def test_a_checkpoint_whose_index_cannot_be_read_shares_nothing_that_is_known(
    write: Write, run: Run, tmp_path: Path
) -> None:
    first, _ = write()
    second, _ = write(2, origin=first)
    (tmp_path / "run" / second / "index-r00000").write_bytes(b"x")
    listed = run.checkpoints()
    sharing = sharing_of(run.store, listed)
    assert sharing.sharers(first) == ()
    assert sharing.freed_bytes([first]) == listed[0].stored_bytes
