"""Checkpoints whose files lie in folders of ranks: what a look sees there, what deleting takes, and
what it leaves alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

import attempts
from disks import FailingDisk, Kind, RecordingDisk
from laststep.catalog import listing
from laststep.catalog.retention import QUIET_S, Keep, RemovalReason, plan_prune
from laststep.catalog.run import Run
from laststep.constants import MANIFEST_NAME
from laststep.errors import LaststepError
from laststep.format.manifest import Commit
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RankFiles
    from laststep.catalog.listing import Listed

Write = Callable[..., tuple[str, Commit]]

SIZE = 5000
STRANGE = ("a\nb", "\udcff\udcfe", "-rf *", " ", "r99999", "index-r00000.json", "..x", "é" * 100)


@pytest.fixture(params=[4096, 7], ids=["few", "very many"])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Eight files are few, or very many."""
    monkeypatch.setattr(listing, "_VERY_MANY", request.param)
    return int(request.param)


@pytest.fixture
def very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_VERY_MANY", 7)


@pytest.fixture
def looked(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The folders that were listed with sizes, and those by names alone."""
    calls: dict[str, list[str]] = {"list": [], "file_names": []}
    for method, folders in calls.items():
        real = getattr(run.store, method)
        monkeypatch.setattr(
            run.store, method, lambda name, f=folders, r=real: f.append(name) or r(name)
        )
    return calls


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def index_bytes_in(folder: Path) -> int:
    """Of the indexes in the folders of ranks, whose sizes no manifest knows."""
    return sum(path.stat().st_size for path in folder.glob("r*/index-r*"))


def only(run: Run) -> Listed:
    (listed,), _ = run.look()
    return listed


# Looking


@pytest.mark.parametrize("deep", [False, True])
def test_sizes_are_those_on_disk(
    deep: bool, most: int, write: Write, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=deep)
    stored = bytes_in(tmp_path / "run" / folder)
    if most < 8:  # then nobody has looked how large indexes in folders are
        stored -= index_bytes_in(tmp_path / "run" / folder)
    for listed in (*run.checkpoints(), only(run)):
        assert listed.is_whole
        assert listed.size_bytes == 8 * SIZE
        assert listed.stored_bytes == stored


@pytest.mark.parametrize("lost", [None, "r00004/m-r00005.safetensors"])
def test_a_data_file_beside_the_folders_counts_once(
    lost: str | None,
    most: int,
    write: Write,
    files_of: Callable[..., RankFiles],
    run: Run,
    tmp_path: Path,
) -> None:
    folder, commit = write(deep=True, commit=False)
    beside = files_of()
    write_file(run.store, f"{folder}/{beside.data}", beside.content[beside.data])
    more = msgspec.structs.replace(beside.written, indexes=b"")
    attempts.commit(run, folder, msgspec.structs.replace(commit, written=commit.written.plus(more)))
    place = tmp_path / "run" / folder
    stored = bytes_in(place)
    if lost is not None:
        (place / lost).unlink()
        stored -= SIZE
    elif most < 8:
        stored -= index_bytes_in(place)
    listed = only(run)
    assert listed.stored_bytes == stored
    assert (listed.incomplete or "").split()[:1] == ([] if lost is None else [lost])


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", ["index-r00002", "m-r00003.safetensors"])
@pytest.mark.usefixtures("most")
def test_what_is_missing_makes_it_incomplete(
    name: str, deep: bool, write: Write, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=deep)
    name = f"r00000/{name}" if deep else name
    (tmp_path / "run" / folder / name).unlink()
    listed = only(run)
    assert not listed.is_whole
    assert name in listed.incomplete
    assert listed.stored_bytes == bytes_in(tmp_path / "run" / folder)
    run.check_step_free(1)  # what cannot be restored blocks no step


@pytest.mark.usefixtures("very_many")
def test_every_rank_that_restores_leaves_the_folders_of_very_many_files_alone(
    write: Write, run: Run, looked: dict[str, list[str]]
) -> None:
    write(1, deep=True)
    left, _ = write(2, deep=True, commit=False)
    looked["list"].clear()
    assert [one.is_whole for one in run.checkpoints()] == [True]
    assert [one.folder for one in run.attempts()] == [left]
    run.check_step_free(3)
    assert [name for names in looked.values() for name in names if "/" in name] == []


@pytest.mark.usefixtures("very_many")
def test_of_very_many_files_that_are_all_there_no_sizes_are_asked_for(
    write: Write, run: Run, looked: dict[str, list[str]]
) -> None:
    folder, _ = write(deep=True)
    looked["list"].clear()
    assert only(run).is_whole
    assert [name for name in looked["list"] if "/" in name] == []
    assert [name for name in looked["file_names"] if name != "terms"] == [
        f"{folder}/r00000",
        f"{folder}/r00004",
    ]


@pytest.mark.usefixtures("very_many")
def test_retention_keeps_the_last_whole_one_where_a_newer_one_has_lost_files(
    write: Write, run: Run, tmp_path: Path
) -> None:
    folders = [write(step, deep=True)[0] for step in (1, 2, 3)]
    (tmp_path / "run" / folders[2] / "r00004" / "m-r00006.safetensors").unlink()
    plan = plan_prune(run, Keep(last=1))
    assert plan.deletions == (folders[0],)
    first = tmp_path / "run" / folders[0]
    assert plan.sharing().freed_bytes(plan.deletions) == bytes_in(first) - index_bytes_in(first)


@pytest.mark.usefixtures("very_many")
def test_a_checkpoint_that_goes_while_its_names_are_counted_is_not_listed(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = write(deep=True)
    count = run.store.file_names

    def overtaken(name: str) -> tuple[str, ...]:
        run.store.delete_folder(folder, first=MANIFEST_NAME)
        return count(name)

    monkeypatch.setattr(run.store, "file_names", overtaken)
    assert run.look() == ((), ())


# Deleting


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.usefixtures("most")
def test_pruning_takes_folders_with_it(deep: bool, write: Write, run: Run, tmp_path: Path) -> None:
    folder, _ = write(1, deep=deep)
    write(2, deep=deep)
    assert plan_prune(run, Keep(last=1)).execute() == (folder,)
    assert not (tmp_path / "run" / folder).exists()
    assert not list((tmp_path / "run").rglob("*.tmp-*"))


def test_the_manifest_goes_first_then_the_name_and_only_then_what_is_in_folders(
    write: Write, tmp_path: Path
) -> None:
    folder, _ = write(1, deep=True)
    newest, _ = write(2, deep=True)
    disk = RecordingDisk()
    plan_prune(Run.open(DirectoryStore(tmp_path / "run", disk=disk)), Keep(last=1)).execute()
    made_sure, first, synced, renamed, durable, *rest = disk.changes
    assert (made_sure.kind, made_sure.path) == (Kind.SYNC_FOLDER, str(tmp_path / "run" / newest))
    assert (first.kind, first.path) == (Kind.UNLINK, str(tmp_path / "run" / folder / MANIFEST_NAME))
    assert (renamed.kind, renamed.path) == (Kind.RENAME, str(tmp_path / "run" / folder))
    assert {synced.kind, durable.kind} == {Kind.SYNC_FOLDER}
    assert renamed.to is not None
    assert all(change.path.startswith(renamed.to) for change in rest)
    kinds = [change.kind for change in rest]
    assert kinds.count(Kind.UNLINK) == 8 + 8
    assert kinds.count(Kind.REMOVE_FOLDER) == 2 + 1


@pytest.mark.parametrize("at", range(1, 5 + 16 + 3 + 1))
@pytest.mark.usefixtures("most")
def test_a_deletion_that_stops_anywhere_leaves_it_whole_or_gone_and_is_finished_later(
    at: int, write: Write, run: Run, tmp_path: Path
) -> None:
    victim, _ = write(1, deep=True)
    newest, _ = write(2, deep=True)
    store = DirectoryStore(tmp_path / "run", disk=FailingDisk(at, errno.EIO, lasting=True))
    with pytest.raises(LaststepError):
        plan_prune(Run.open(store), Keep(last=1)).execute()
    after, _ = run.look()
    assert all(one.is_whole for one in after)
    assert [one.folder for one in after] == ([victim, newest] if at <= 2 else [newest])
    plan_prune(run, Keep(last=1)).execute()
    run.clean(now_s=(tmp_path / "run").stat().st_mtime + 2 * QUIET_S)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == [newest]


@pytest.mark.usefixtures("most")
def test_what_a_killed_attempt_left_in_folders_is_counted_and_goes_with_it(
    write: Write, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=True, commit=False)
    (tmp_path / "run" / folder / "r00004" / "m-r00007.safetensors").write_bytes(b"half")
    _, (attempt,) = run.look()
    assert attempt.size_bytes == bytes_in(tmp_path / "run" / folder)
    (removed,) = run.clean()
    assert (removed.name, removed.why) == (folder, RemovalReason.DEAD_WRITER)
    assert removed.size_bytes == attempt.size_bytes
    assert not (tmp_path / "run" / folder).exists()


@pytest.mark.usefixtures("most")
def test_an_attempt_of_another_machine_is_quiet_only_if_its_folders_are(
    write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laststep.catalog.retention.is_here", lambda _: False)
    folder, _ = write(deep=True, commit=False)
    now_s = (tmp_path / "run" / folder).stat().st_mtime + 2 * QUIET_S
    growing = tmp_path / "run" / folder / "r00004" / "m-r00007.safetensors"
    os.utime(growing, (now_s, now_s))
    assert run.clean(now_s=now_s) == ()
    assert [one.name for one in run.clean(now_s=now_s + 2 * QUIET_S)] == [folder]


def test_debris_beside_the_folders_of_ranks_goes_and_all_else_stays(
    write: Write, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=True)
    debris = tmp_path / "run" / folder / "manifest.json.tmp-111111111111"
    debris.write_bytes(b"")
    within = tmp_path / "run" / folder / "r00000.tmp-222222222222"
    within.mkdir()
    (within / "file").write_bytes(b"1")
    now_s = debris.stat().st_mtime + 2 * QUIET_S
    removed = {orphan.name for orphan in run.clean(now_s=now_s)}
    assert removed == {f"{folder}/{debris.name}", f"{folder}/{within.name}"}
    assert only(run).is_whole
    assert not within.exists()


# What does not belong there


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
@pytest.mark.usefixtures("most")
def test_strange_folders_and_files_are_neither_in_the_way_nor_left_behind(
    name: str, write: Write, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(1, deep=True)
    write(2, deep=True)
    place = tmp_path / "run" / folder
    for inner in (place, place / "r00000"):
        (inner / name / name).mkdir(parents=True)
        (inner / name / "x.safetensors").mkdir()
        (inner / f"{name}~").write_bytes(b"1")
    assert all(one.is_whole for one in run.look()[0])
    assert run.clean(now_s=place.stat().st_mtime + 2 * QUIET_S) == ()
    assert plan_prune(run, Keep(last=1)).execute() == (folder,)
    assert not place.exists()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is not in the run, with old files that look like debris and like data."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("precious", "x.tmp-111111111111", "m-r00003.safetensors"):
        (outside / name).write_bytes(bytes(SIZE))
    return outside


def test_a_linked_folder_is_not_looked_into_and_only_the_link_is_deleted(
    most: int, write: Write, run: Run, outside: Path, tmp_path: Path
) -> None:
    folder, _ = write(1, deep=True)
    write(2, deep=True)
    place = tmp_path / "run" / folder
    size = bytes_in(place) - (index_bytes_in(place) if most < 8 else 0)
    for inner in (place, place / "r00000"):
        (inner / "elsewhere").symlink_to(outside)
        (inner / "y.tmp-222222222222").symlink_to(outside)
        (inner / "loop").symlink_to(inner / "loop")
        (inner / "nowhere").symlink_to(inner / "gone")
    assert run.look()[0][0].stored_bytes == size
    now_s = outside.stat().st_mtime + 2 * QUIET_S
    assert f"{folder}/y.tmp-222222222222" in [one.name for one in run.clean(now_s=now_s)]
    assert plan_prune(run, Keep(last=1)).execute() == (folder,)
    assert not place.exists()
    assert len(list(outside.iterdir())) == 3


@pytest.mark.usefixtures("most")
def test_files_behind_a_linked_folder_are_not_those_of_the_checkpoint(
    write: Write, run: Run, tmp_path: Path
) -> None:
    folder, _ = write(deep=True)
    place = tmp_path / "run" / folder / "r00004"
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    assert "r00004/index-r00004" in only(run).incomplete


@pytest.mark.usefixtures("most")
def test_a_checkpoint_that_is_a_link_stays_and_does_not_keep_others_from_going(
    write: Write, run: Run, tmp_path: Path
) -> None:
    folders = [write(step, deep=True)[0] for step in (1, 2, 3)]
    left, _ = write(4, deep=True, commit=False)
    for name in (folders[1], left):
        (tmp_path / "run" / name).rename(tmp_path / name)
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    debris = tmp_path / folders[1] / "x.tmp-111111111111"
    debris.write_bytes(b"")
    plan = plan_prune(run, Keep(last=1))
    assert plan.execute() == (folders[0],)
    kept = {verdict.folder: verdict.reasons for verdict in plan.verdicts if verdict.keep}
    assert folders[1] in kept
    assert run.clean(now_s=debris.stat().st_mtime + 2 * QUIET_S) == ()
    assert debris.exists()
    assert (tmp_path / left).exists()
