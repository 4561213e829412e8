"""A commit whose name cannot be made durable: one answer, and it is true."""

from __future__ import annotations

import errno
import math
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from laststep.catalog import decision
from laststep.catalog.run import Run
from laststep.errors import StorageError
from laststep.format.manifest import Abort, Commit
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RankFiles


class Unsynced(Disk):
    """Cannot sync folders once a manifest has got its name, so often; nor rename, if told so."""

    def __init__(self, failures: int, *, renames: bool = True) -> None:
        self.failures = failures
        self._renames = renames
        self._linked = False
        self.between: Callable[[], None] | None = None
        """What another process does just before the last of the failures."""

    def link(self, path: str, new: str) -> None:
        super().link(path, new)
        self._linked = self._linked or new.endswith("manifest.json")

    def sync_folder(self, path: str) -> None:
        if self._linked and self.failures:
            self.failures -= 1
            if self.failures == 0 and self.between is not None:
                self.between()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_folder(path)

    def rename(self, path: str, new: str) -> None:
        if not self._renames:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(path, new)


@pytest.fixture
def begun(
    tmp_path: Path, commit_of: Callable[..., Commit], files_of: Callable[..., RankFiles]
) -> Callable[[Disk], tuple[Run, str, Commit]]:
    """`begun(disk)`: a run, and an attempt in it that is ready to be committed."""

    def make(disk: Disk) -> tuple[Run, str, Commit]:
        run = Run.open_or_create(DirectoryStore(tmp_path / "run", disk=disk))
        folder = run.begin(step=1, epoch=run.claim_epoch(None), attempt=1)
        for name, data in files_of().content.items():
            write_file(run.store, f"{folder}/{name}", data)
        return run, folder, commit_of(step=1, epoch=1, attempt=1)

    return make


def test_a_sync_that_fails_once_is_repeated_and_the_commit_stands(begun: object) -> None:
    disk = Unsynced(1)
    run, folder, commit = begun(disk)
    run.commit(folder, commit)
    assert disk.failures == 0
    assert [one.folder for one in run.lineage()] == [folder]


def test_what_cannot_be_made_durable_is_taken_back_and_its_step_is_free(begun: object) -> None:
    run, folder, commit = begun(Unsynced(2))
    with pytest.raises(StorageError, match="taken back"):
        run.commit(folder, commit)
    assert run.checkpoints() == ()
    assert run.decision(folder) is None
    run.check_step_free(1)
    assert isinstance(run.abort(folder, "it failed"), Abort)


def test_where_it_cannot_be_taken_back_either_nobody_claims_to_know(begun: object) -> None:
    run, folder, commit = begun(Unsynced(99, renames=False))
    with pytest.raises(StorageError, match="not known whether"):
        run.commit(folder, commit)
    with pytest.raises(StorageError, match="sync"):
        run.abort(folder, "it failed")  # as another rank would that looks for itself


def test_who_finds_a_commit_makes_it_durable_before_it_tells(begun: object) -> None:
    disk = Unsynced(0)
    run, folder, commit = begun(disk)
    run.commit(folder, commit)
    disk.failures = 1
    with pytest.raises(StorageError, match="sync"):
        run.abort(folder, "too late")
    assert isinstance(run.abort(folder, "too late"), Commit)


def test_what_another_rank_has_made_durable_and_told_is_not_taken_back(
    begun: object, tmp_path: Path
) -> None:
    disk, told = Unsynced(2), []
    run, folder, commit = begun(disk)
    other = DirectoryStore(tmp_path / "run")
    disk.between = lambda: told.append(decision.abort(other, folder, "the flusher stands still"))
    run.commit(folder, commit)
    assert told == [commit]
    assert [one.folder for one in run.lineage()] == [folder]


def test_a_commit_that_is_being_taken_back_is_none_to_who_finds_it(
    begun: object, tmp_path: Path
) -> None:
    class Dying(Unsynced):
        def rename(self, path: str, new: str) -> None:
            raise KeyboardInterrupt  # in place of a kill

    run, folder, commit = begun(Dying(2))
    with pytest.raises(KeyboardInterrupt):
        run.commit(folder, commit)
    other = Run.open(DirectoryStore(tmp_path / "run"))
    for _ in range(2):  # whoever comes first: it is one thing to all
        assert other.checkpoints() == ()
        assert decision.standing(other.store, folder) is None
        assert isinstance(other.decision(folder), Abort)
        other.check_step_free(1)
        assert isinstance(other.abort(folder, "the flusher is gone"), Abort)
    other.claim_epoch(None)
    other.clean()
    assert other.store.list(folder) == []


@pytest.mark.parametrize("fate", [b"", b"stands\n", b"taken", b"x" * 5000])
def test_a_fate_that_says_nothing_known_takes_no_checkpoint_away(
    fate: bytes, begun: object
) -> None:
    run, folder, commit = begun(Unsynced(0))
    run.commit(folder, commit)
    run.store.create(f"{folder}/fate", fate)
    assert isinstance(run.abort(folder, "too late"), Commit)
    assert [one.folder for one in run.lineage()] == [folder]


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_commit_with_a_metric_that_is_not_a_number_is_known_again(
    failures: int, begun: object
) -> None:
    run, folder, commit = begun(Unsynced(failures))
    commit = msgspec.structs.replace(commit, metrics={"loss": math.nan})
    if failures == 2:
        with pytest.raises(StorageError, match="taken back"):
            run.commit(folder, commit)
        assert run.checkpoints() == ()
    else:
        run.commit(folder, commit)
        run.commit(folder, commit)
        assert [one.folder for one in run.lineage()] == [folder]


def test_who_finds_a_commit_that_is_being_taken_back_may_finish_that(
    begun: object, tmp_path: Path
) -> None:
    told = []

    class Slow(Unsynced):
        def rename(self, path: str, new: str) -> None:
            told.append(decision.abort(DirectoryStore(tmp_path / "run"), folder, "too late"))
            super().rename(path, new)

    run, folder, commit = begun(Slow(2))
    with pytest.raises(StorageError, match="taken back"):
        run.commit(folder, commit)
    assert [type(one) for one in told] == [Abort]
    assert run.checkpoints() == ()
