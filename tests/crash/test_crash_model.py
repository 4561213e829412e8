"""A crash after any system call leaves the old checkpoints or the new ones, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import crashed_disk
import pytest
import scenarios
from scenarios import SCENARIOS, Scenario, Violated, explore, random_scenario

from disks import RecordingDisk
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUDGET = int(os.environ.get("LASTSTEP_CRASH_BUDGET", "256"))
_SEEDS = int(os.environ.get("LASTSTEP_CRASH_SEEDS", "2"))


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one: the model knows what is durable, the disk need not."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_crash_leaves_the_old_or_the_new(scenario: Scenario, place: Path) -> None:
    explored = explore(place, budget=_BUDGET, scenarios=(scenario,))
    assert explored.cuts > 20
    assert explored.distinct > 40


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_a_crash_in_any_history_leaves_the_old_or_the_new(seed: int, place: Path) -> None:
    # Names that are never synced again pile up over a history, so the ways to lose them do too.
    explore(place, budget=_BUDGET // 16, seed=seed, scenarios=(random_scenario(seed),))


class _NoSync(RecordingDisk):
    def sync(self, fd: int) -> None:
        return None


class _NoFolderSync(RecordingDisk):
    def sync_folder(self, path: str) -> None:
        return None


@pytest.mark.parametrize("disk", [_NoSync, _NoFolderSync])
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one, marks=() if one in (SCENARIOS[1], SCENARIOS[-1]) else pytest.mark.long)
        for one in (*SCENARIOS[:4], SCENARIOS[5], SCENARIOS[-1])
    ],
    ids=lambda scenario: scenario.name,
)
def test_the_model_catches_a_missing_sync(
    scenario: Scenario, disk: type[RecordingDisk], place: Path
) -> None:
    with pytest.raises(Violated):
        explore(place, budget=_BUDGET, make_disk=disk, scenarios=(scenario,))


def test_the_model_catches_a_file_that_gets_its_name_before_its_bytes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: DirectoryStore, name: str, data: bytes) -> None:
        path = f"{self.url}/{name}"
        self._make_root()
        fd = self._disk.create_file(path, direct=False)
        self._disk.write(fd, memoryview(data), 0)
        self._disk.sync(fd)
        self._disk.close(fd)
        self._disk.sync_folder(str(Path(path).parent))

    monkeypatch.setattr(DirectoryStore, "create", create)
    with pytest.raises(Violated):
        explore(place, budget=_BUDGET, scenarios=SCENARIOS[1:2])


def test_the_model_catches_a_deletion_that_takes_the_data_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_folder(self: DirectoryStore, name: str, *, first: str | None = None) -> None:
        self._remove_tree(f"{self.url}/{name}", may_stay=False)

    monkeypatch.setattr(DirectoryStore, "delete_folder", delete_folder)
    with pytest.raises(Violated):
        explore(place, budget=_BUDGET, scenarios=SCENARIOS[1:2])


def test_the_model_catches_a_commit_before_the_data_files_have_durable_names(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryStore, "sync_folder", lambda self, name: None)
    with pytest.raises(Violated, match="no such file"):
        explore(place, budget=_BUDGET, scenarios=SCENARIOS[1:2])


def test_everything_synced_is_exactly_what_is_on_disk(place: Path) -> None:
    recorded = scenarios.record(SCENARIOS[1], place / "made", RecordingDisk())
    world = crashed_disk.World(str(place / "made"), recorded.base)
    for change in recorded.changes:
        world.perform(change)
    trees = list(world.crashes(1 << 12, seed=0))
    assert crashed_disk.fingerprint(crashed_disk.read_tree(place / "made")) in map(
        crashed_disk.fingerprint, trees
    )
