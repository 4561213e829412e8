"""A commit whose name cannot be made durable: one answer, and it is true."""

from __future__ import annotations

import errno
import math
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

import attempts
from expect import raises
from laststep.catalog.run import Run
from laststep.errors import StorageError
from laststep.format.manifest import Commit
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RankFiles


class Unsynced(Disk):
    """Cannot sync folders once a manifest has got its name, so often."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self._linked = False

    def link(self, path: str, new: str) -> None:
        super().link(path, new)
        self._linked = self._linked or new.endswith("manifest.json")

    def sync_folder(self, path: str) -> None:
        if self._linked and self.failures:
            self.failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_folder(path)


@pytest.fixture
def begun(
    tmp_path: Path, commit_of: Callable[..., Commit], files_of: Callable[..., RankFiles]
) -> Callable[[Disk], tuple[Run, str, Commit]]:
    """`begun(disk)`: a run, and an attempt in it that is ready to be committed."""

    def make(disk: Disk) -> tuple[Run, str, Commit]:
        run = Run.open_or_create(DirectoryStore(tmp_path / "run", disk=disk))
        folder = run.begin(step=1, term=run.claim_term(None), attempt=1).folder
        for name, data in files_of().content.items():
            write_file(run.store, f"{folder}/{name}", data)
        return run, folder, commit_of(step=1, term=1, attempt=1)

    return make


def test_a_sync_that_fails_once_is_repeated_and_the_commit_stands(begun: object) -> None:
    disk = Unsynced(1)
    run, folder, commit = begun(disk)
    attempts.commit(run, folder, commit)
    assert disk.failures == 0
    assert [one.folder for one in run.lineage()] == [folder]


def test_a_commit_that_cannot_be_made_durable_is_reported_as_unknown(begun: object) -> None:
    run, folder, commit = begun(Unsynced(3))
    with pytest.raises(StorageError) as raised:
        attempts.commit(run, folder, commit)
    assert not raised.value.transient
    with pytest.raises(StorageError):
        attempts.abort(run, folder, "it failed")  # as another rank would that looks for itself
    # The files are durable and sound, and whoever finds the commit makes its name durable too.
    assert isinstance(attempts.abort(run, folder, "it failed"), Commit)
    assert [listed.folder for listed in run.lineage()] == [folder]


def test_who_finds_a_commit_makes_it_durable_before_it_tells(begun: object) -> None:
    disk = Unsynced(0)
    run, folder, commit = begun(disk)
    attempts.commit(run, folder, commit)
    disk.failures = 1
    with raises(StorageError, where=folder, found="EIO"):
        attempts.abort(run, folder, "too late")
    assert isinstance(attempts.abort(run, folder, "too late"), Commit)


@pytest.mark.parametrize("failures", [0, 1])
def test_a_commit_with_a_metric_that_is_not_a_number_is_known_again(
    failures: int, begun: object
) -> None:
    run, folder, commit = begun(Unsynced(failures))
    commit = msgspec.structs.replace(commit, metrics={"loss": math.nan})
    attempts.commit(run, folder, commit)
    attempts.commit(run, folder, commit)
    assert [one.folder for one in run.lineage()] == [folder]
