"""What lies in shared memory is found by whoever comes to its run, by whatever path."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.errors import StorageError
from laststep.memory import segments
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


class Places:
    """A run by its own path, and by a link to the folder that it lies in; shared memory."""

    def __init__(self, folder: Path) -> None:
        self.base, self.real, self.link = folder / "shm", folder / "real", folder / "link"
        self.base.mkdir()
        self.real.mkdir()
        self.link.symlink_to(self.real)
        self.state = torch.zeros(5 * MB)

    def trainer(self, run: Path) -> laststep.Checkpointer:
        return laststep.Checkpointer(
            tiers=[f"shm://{self.base}", str(run)],
            items={"state": {"all": self.state}},
            options=laststep.Options(progress=False, flush="thread"),
            host_memory_bytes=320 * MB,
        )

    def restored(self, run: Path) -> tuple[int | None, float]:
        self.state.zero_()
        with self.trainer(run) as ckpt:
            return ckpt.restore().step, float(self.state.max())

    def steps(self, run: Path) -> list[int]:
        return laststep.open(run).steps()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Step 1 is in the run `real/run`, step 2 in memory alone: the disk was full."""
    places = Places(tmp_path)
    with places.trainer(places.real / "run") as ckpt:
        ckpt.restore()
        places.state.fill_(1)
        ckpt.save(1).result()

    def full(*_: object, **__: object) -> None:
        raise StorageError("no room is left")

    with monkeypatch.context() as patched, places.trainer(places.real / "run") as ckpt:
        ckpt.restore()
        patched.setattr(DirectoryStore, "open_writer", full)
        places.state.fill_(2)
        assert isinstance(ckpt.save(2).exception(), StorageError)
    assert places.steps(places.real / "run") == [1]
    assert len(segments.found(str(places.base))) == 1
    return places


def test_by_a_link_to_its_run_it_is_found(places: Places) -> None:
    assert places.restored(places.link / "run") == (2, 2.0)
    assert places.steps(places.real / "run") == [1, 2]


def test_by_its_path_it_is_found_though_it_was_saved_by_a_link(places: Places) -> None:
    def train() -> None:
        with places.trainer(places.link / "run") as ckpt:
            ckpt.restore()
            ckpt.save(3).result()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    (left,) = segments.found(str(places.base), str(places.real / "run"))
    assert left.records() == ["3-1"]


def test_a_rescue_by_a_link_stores_it(places: Places) -> None:
    report = laststep.recover(places.link / "run", base=places.base)
    assert [save.state for one in report.segments for save in one.saves] == ["recovered"]
    assert places.steps(places.real / "run") == [1, 2]
    assert segments.found(str(places.base)) == []


def test_a_run_that_was_moved_finds_it_when_it_is_moved_back(places: Places) -> None:
    moved = places.real / "moved"
    (places.real / "run").rename(moved)
    assert places.restored(moved) == (1, 1.0)
    assert not laststep.recover(base=places.base).ok
    moved.rename(places.real / "run")
    assert laststep.recover(base=places.base).ok
    assert places.steps(places.real / "run") == [1, 2]


def test_a_link_that_points_to_another_run_now_does_not_bring_it_there(
    places: Places, tmp_path: Path
) -> None:
    places.link.unlink()
    (tmp_path / "other").mkdir()
    places.link.symlink_to(tmp_path / "other")
    with places.trainer(places.link / "run") as ckpt:
        assert ckpt.restore().step is None
        ckpt.save(7).result()
    assert places.restored(places.real / "run") == (2, 2.0)


def test_a_copy_of_its_run_does_not_take_it(places: Places, tmp_path: Path) -> None:
    shutil.copytree(places.real / "run", tmp_path / "copy")
    with places.trainer(tmp_path / "copy") as ckpt:
        assert ckpt.restore().step == 1
        ckpt.save(5).result()
    assert places.restored(places.real / "run") == (2, 2.0)


def test_a_full_disk_takes_nothing_from_the_snapshot_of_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path)
    places.state = torch.zeros(48 * MB)  # 12 chunks, most of which arrive after the disk has failed

    def full(*_: object, **__: object) -> None:
        raise StorageError("no room is left")

    with monkeypatch.context() as patched, places.trainer(places.real / "run") as ckpt:
        ckpt.restore()
        patched.setattr(DirectoryStore, "open_writer", full)
        places.state.fill_(1)
        handle = ckpt.save(1)
        assert isinstance(handle.exception(), StorageError)
        assert handle.report.tiers.keys() == {"shm://"}
    assert places.restored(places.real / "run") == (1, 1.0)
