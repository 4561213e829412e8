"""What lies in shared memory beside segments, and who may clean it up."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.errors import StorageError
from laststep.memory import segments
from laststep.process import system

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(tmp_path)


def make(base: str) -> tuple[segments.Segment, int]:
    return segments.make(base, "/runs/gpt", rank=0, ranks=1, size_bytes=1 << 20)


def test_what_was_half_made_or_half_removed_is_debris(base: str, tmp_path: Path) -> None:
    segment, fd = make(base)
    own = tmp_path / f"laststep-{os.getuid()}"
    (own / "new-1").mkdir()
    (own / "new-1" / "pool").write_bytes(b"half made")
    (own / "2").mkdir()
    (own / "2" / "pool").write_bytes(b"half removed")
    (own / "runs" / "gpt").mkdir(parents=True)
    (own / "other").mkdir()
    (own / "other" / "owner.json").write_text("of a later version")
    os.close(fd)
    assert segments.remove_debris(base) == [f"{own}/2", f"{own}/new-1"]
    assert {str(path) for path in own.iterdir()} == {segment.folder, f"{own}/other", f"{own}/runs"}


def test_what_somebody_is_making_is_no_debris(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ftruncate, seen = os.ftruncate, []

    def in_the_midst(fd: int, size: int) -> None:
        seen.append(segments.remove_debris(base))
        ftruncate(fd, size)

    monkeypatch.setattr(os, "ftruncate", in_the_midst)
    segment, fd = make(base)
    os.close(fd)
    assert seen == [[]]
    assert [one.folder for one in segments.found(base)] == [segment.folder]


def test_where_there_is_nothing_nothing_is_made(base: str, tmp_path: Path) -> None:
    assert segments.remove_debris(base) == []
    assert list(tmp_path.iterdir()) == []


def test_what_lies_on_a_disk_is_no_memory_for_a_device(run_folder: Path) -> None:
    run_folder.mkdir()
    segments.refuse_disks("/dev/shm")
    if system.filesystem_of(str(run_folder)) in ("tmpfs", "ramfs"):
        pytest.skip("this machine has no disk")
    with raises(StorageError, found=True, expected="tmpfs, ramfs"):
        segments.refuse_disks(str(run_folder))
