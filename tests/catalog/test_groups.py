"""Checkpoints of several groups of ranks: whose files are read, what is found missing, and second
looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from laststep.catalog import groups, listing
from laststep.catalog.groups import files_of
from laststep.catalog.prune import plan
from laststep.catalog.retention import Policy
from laststep.catalog.verify import verify_checkpoint
from laststep.errors import Corrupt, Exists, NotFound, StorageFailed
from laststep.format.group import GroupManifest
from laststep.format.manifest import Commit, FileRecord
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from laststep.catalog.run import Run
    from laststep.storage.files import FileReader

SIZE = 5000


def file(rank: int, *, deep: bool) -> FileRecord:
    folder = f"r{rank - rank % 4:05d}/" if deep else ""
    return FileRecord(
        name=f"{folder}m-r{rank:05d}.safetensors", size_bytes=SIZE, header_bytes=4096,
        header_digest="xxh3-128:" + "0" * 32, rank=rank,
    )  # fmt: skip


Written = tuple[str, Commit]


@pytest.fixture
def write(run: Run, commit_of: Callable[..., Commit]) -> Callable[..., Written]:
    """Write and commit a checkpoint of eight ranks in four groups; its folder, and its commit."""
    epoch = run.claim_epoch(None)

    def act(step: int = 1, *, deep: bool = False, commit: bool = True) -> Written:
        folder = run.begin(step=step, epoch=epoch, attempt=step)
        for place in ("r00000", "r00004") if deep else ():
            run.store.make_folder(f"{folder}/{place}", parents=False)
        records = []
        for first in range(0, 8, 2):
            files = (file(first, deep=deep), file(first + 1, deep=deep))
            for one in files:
                write_file(run.store, f"{folder}/{one.name}", bytes(SIZE))
            manifest = GroupManifest(
                step=step, epoch=epoch, attempt=step, first=first, ranks=2, files=files
            )
            records.append(groups.write(run.store, folder, manifest))
        decided = commit_of(step=step, epoch=epoch, attempt=step)
        item = msgspec.structs.replace(decided.items[0], file=file(0, deep=deep).name)
        decided = msgspec.structs.replace(
            decided, files=(), groups=tuple(records), ranks=8, items=(item,)
        )
        if commit:
            run.commit(folder, decided)
        return folder, decided

    return act


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
    write: Callable[..., Written], run: Run
) -> None:
    folder, commit = write()
    store = Watched(run.store.url)
    assert files_of(store, folder, commit) == tuple(file(rank, deep=False) for rank in range(8))
    assert store.opened == [f"r{first:05d}.json" for first in (0, 2, 4, 6)]
    store.opened.clear()
    found = files_of(store, folder, commit, ranks=[6, 3])
    assert found == (file(3, deep=False), file(6, deep=False))
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


@pytest.mark.parametrize("most", [4096, 7])
@pytest.mark.parametrize("deep", [False, True])
def test_sizes_are_known_from_the_totals(
    deep: bool, most: int, write: Callable[..., Written], run: Run, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(listing, "_LOOKED_THROUGH", most)
    folder, _ = write(deep=deep)
    (listed,) = run.checkpoints()
    assert listed.is_whole
    assert listed.size_bytes == 8 * SIZE
    there = [path for path in (tmp_path / "run" / folder).rglob("*") if path.is_file()]
    assert listed.stored_bytes == sum(path.stat().st_size for path in there)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", ["groups/r00004.json", "m-r00003.safetensors"])
def test_what_is_missing_makes_it_incomplete(
    name: str, deep: bool, write: Callable[..., Written], run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=deep)
    name = f"r00000/{name}" if deep and name.startswith("m") else name
    (tmp_path / "run" / folder / name).unlink()
    (listed,) = run.checkpoints()
    assert not listed.is_whole
    expected = f"{name} is missing"
    if name.endswith(".safetensors"):
        expected = f"7 data files of {7 * SIZE} bytes instead of 8 of {8 * SIZE}"
    assert listed.incomplete == expected


def test_the_folders_of_very_many_files_are_not_looked_through(
    write: Callable[..., Written], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_LOOKED_THROUGH", 7)
    folder, _ = write(deep=True)
    looked, look = [], run.store.list
    monkeypatch.setattr(run.store, "list", lambda name: looked.append(name) or look(name))
    (listed,) = run.checkpoints()
    assert listed.is_whole
    assert [name for name in looked if name.startswith(folder)] == [folder, f"{folder}/groups"]


def test_an_attempt_is_counted_with_its_folders_and_cleaned_up_with_them(
    write: Callable[..., Written], run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=True, commit=False)
    (attempt,) = run.attempts()
    there = [path for path in (tmp_path / "run" / folder).rglob("*") if path.is_file()]
    assert attempt.size_bytes == sum(path.stat().st_size for path in there)
    assert attempt.changed_s >= max(path.stat().st_mtime for path in there)
    debris = tmp_path / "run" / write(2)[0] / "groups" / "r00000.json.tmp-1"
    debris.write_bytes(b"")
    removed = {one.name for one in run.clean(now_s=debris.stat().st_mtime + 7200)}
    assert removed == {folder, f"step-00000002.1-2/groups/{debris.name}"}
    assert not (tmp_path / "run" / folder).exists()


@pytest.mark.parametrize("deep", [False, True])
def test_pruning_takes_folders_with_it(
    deep: bool, write: Callable[..., Written], run: Run, tmp_path: Path
) -> None:
    folder, _ = write(1, deep=deep)
    write(2, deep=deep)
    assert plan(run.store, run.checkpoints(), Policy(keep_last=1)).execute() == (folder,)
    assert not (tmp_path / "run" / folder).exists()
    assert not list((tmp_path / "run").rglob("*.tmp-*"))


@pytest.mark.parametrize("deep", [False, True])
def test_without_a_manifest_verify_still_finds_all_files(
    deep: bool, write: Callable[..., Written], run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=deep)
    assert len(verify_checkpoint(run.store, folder).damage) == 8  # files of zeros are no files
    (tmp_path / "run" / folder / "manifest.json").write_bytes(b"")
    report = verify_checkpoint(run.store, folder)
    assert {damage.file for damage in report.damage} == {
        "manifest.json",
        *(file(rank, deep=deep).name for rank in range(8)),
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
