"""A sealed save is read where it lies, and whoever reads it changes nothing there."""

from __future__ import annotations

import mmap
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.memory.slots import Landing
from laststep.storage.directory import DirectoryStore
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES
from laststep.tiers import sealed
from laststep.tiers.nearest import sealed_of
from tiers.failed_job import fail_after, job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from laststep.tiers.sealed import SealedCheckpoint, SealedReader

CHUNKS = 2


@pytest.fixture
def base(tmp_path: Path, run_folder: Path) -> Path:
    """Where a job that failed has left a save of bytes that are all 7."""
    place, state = tmp_path / "shm", torch.zeros(CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    place.mkdir()
    fail_after(job(place, run_folder, state), state, {1: 7})
    return place


@pytest.fixture
def checkpoint(base: Path, run_folder: Path) -> Iterator[SealedCheckpoint]:
    (found,) = sealed_of(DirectoryStore(run_folder), str(base))
    with closing(found):
        yield found


def of_tensors(checkpoint: SealedCheckpoint) -> SealedReader:
    (name,) = [name for name, stored in checkpoint.layouts.items() if stored.layout.tensor_bytes]
    return checkpoint.reader(name)


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

    monkeypatch.setattr(Landing, "lease", refuse)
    assert bool((restored(base, run_folder) == 7).all())


def test_memory_that_cannot_be_mapped_is_read(
    base: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        PROT_READ = mmap.PROT_READ

        @staticmethod
        def mmap(*_: object, **__: object) -> None:
            raise OSError("there is no room for that many addresses")

    monkeypatch.setattr(sealed, "mmap", Refused)
    assert bool((restored(base, run_folder) == 7).all())


def test_what_lies_in_place_is_what_a_read_gives(checkpoint: SealedCheckpoint) -> None:
    reader = of_tensors(checkpoint)
    for first in (0, BLOCK_BYTES, CHUNK_BYTES, (CHUNKS * CHUNK_BYTES) - 5):
        size = min(BLOCK_BYTES, CHUNKS * CHUNK_BYTES - first)
        there = reader.in_place(reader.header_bytes + first, size)
        read = memoryview(bytearray(size))
        assert reader.read_into(reader.header_bytes + first, read) == size
        assert there == read
        assert bytes(read) == bytes([7]) * size


def test_what_does_not_lie_together_in_memory_is_read(checkpoint: SealedCheckpoint) -> None:
    reader = of_tensors(checkpoint)
    header, tensors = reader.header_bytes, CHUNKS * CHUNK_BYTES
    assert reader.in_place(0, header) is None
    assert reader.in_place(header + CHUNK_BYTES - 1, 2) is None, "two slots"
    assert reader.in_place(header + tensors - 1, 2) is None, "behind the tensors"
    assert reader.in_place(header + tensors, 1) is None


def test_memory_that_was_cut_is_read(base: Path, checkpoint: SealedCheckpoint) -> None:
    (pool,) = base.glob("*/*/pool")
    with pool.open("r+b") as file:
        file.truncate(0)
    reader = of_tensors(checkpoint)
    assert reader.in_place(reader.header_bytes, 1) is None
    with pytest.raises(laststep.CorruptError, match="shorter"):
        reader.read_into(reader.header_bytes, memoryview(bytearray(1)))


def test_nobody_writes_into_what_lies_in_place(checkpoint: SealedCheckpoint) -> None:
    reader = of_tensors(checkpoint)
    there = reader.in_place(reader.header_bytes, BLOCK_BYTES)
    assert there is not None
    assert there.readonly
