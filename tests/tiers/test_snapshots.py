"""A snapshot is read where it lies, and whoever reads it changes nothing there."""

from __future__ import annotations

import mmap
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.memory.pool import ReadBuffers
from laststep.storage.directory import DirectoryStore
from laststep.storage.store import InPlace
from laststep.tiers import snapshots
from laststep.tiers.recovery import snapshots_of
from tiers.failed_job import fail_after, job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from laststep.storage.store import FileReading

CHUNKS = 2


@pytest.fixture
def base(tmp_path: Path, run_folder: Path) -> Path:
    """Where a job that failed has left a save of bytes that are all 7."""
    place, state = tmp_path / "shm", torch.zeros(CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    place.mkdir()
    fail_after(job(place, run_folder, state), state, {1: 7})
    return place


@pytest.fixture
def pool(base: Path, run_folder: Path) -> Iterator[FileReading]:
    """The only data file of that save."""
    (found,) = snapshots_of(DirectoryStore(run_folder), str(base))
    with closing(found):
        yield found.open_reader(found.indexes[0].files[0].name)


def restored(base: Path, run_folder: Path) -> torch.Tensor:
    state = torch.zeros(CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    with job(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 1
    return state


def test_a_restore_takes_it_from_where_it_lies_and_through_no_other_memory(
    base: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing needs to land anywhere")

    monkeypatch.setattr(ReadBuffers, "lease", refuse)
    assert bool((restored(base, run_folder) == 7).all())


def test_memory_that_cannot_be_mapped_is_read(
    base: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        PROT_READ = mmap.PROT_READ

        @staticmethod
        def mmap(*_: object, **__: object) -> None:
            raise OSError("there is no room for that many addresses")

    monkeypatch.setattr(snapshots, "mmap", Refused)
    assert bool((restored(base, run_folder) == 7).all())


def test_bytes_in_place_are_what_a_read_gives_and_read_only(pool: FileReading) -> None:
    assert isinstance(pool, InPlace)
    for first in (0, BLOCK_BYTES, CHUNK_BYTES - 1, pool.size_bytes - 5):
        size = min(BLOCK_BYTES, pool.size_bytes - first)
        there = pool.in_place(first, size)
        read = memoryview(bytearray(size))
        assert pool.read_into(first, read) == size
        assert there == read
        assert there is not None
        assert there.readonly


def test_a_pool_that_was_cut_gives_way_to_the_store(
    base: Path, run_folder: Path, pool: FileReading
) -> None:
    (path,) = base.glob("*/*/pool")
    with path.open("r+b") as file:
        file.truncate(0)
    assert isinstance(pool, InPlace)
    assert pool.in_place(0, 1) is None
    assert pool.read_into(0, memoryview(bytearray(1))) == 0
    assert bool((restored(base, run_folder) == 7).all()), "out of the run"
