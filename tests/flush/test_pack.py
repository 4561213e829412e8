"""Blocks of any length, appended by several threads, lie in the pack at the offsets returned."""

from __future__ import annotations

import itertools
import random
import threading
from typing import TYPE_CHECKING

import pytest

from laststep.errors import StorageError
from laststep.flush import writer as writing
from laststep.flush.writer import PackWriter
from laststep.storage.store import write_aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

PIECE = 1 << 16
"""In place of the 4 MiB of the library."""


class Memory:
    """A file in memory that insists on its alignment."""

    def __init__(self, alignment_bytes: int, size_bytes: int) -> None:
        self.alignment_bytes = alignment_bytes
        self.data = bytearray(size_bytes)
        self.writes: list[tuple[int, int]] = []
        self.fails_after = -1
        self.finished: int | None = None
        self.is_closed = False
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset % self.alignment_bytes == 0
        assert len(data) % self.alignment_bytes == 0
        with self._lock:
            if len(self.writes) == self.fails_after:
                raise StorageError("a write", found="EIO")
            self.writes.append((offset, offset + len(data)))
        self.data[offset : offset + len(data)] = data

    def finish(self, size_bytes: int) -> None:
        self.finished = size_bytes

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PIECE_BYTES", PIECE)


def overlap(writes: Sequence[tuple[int, int]]) -> bool:
    return any(left[1] > right[0] for left, right in itertools.pairwise(sorted(writes)))


@pytest.mark.parametrize("alignment", [1, 512, 4096])
@pytest.mark.parametrize("aligned", ["none", "all", "every other"])
@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [PIECE - 1],
        [PIECE],
        [PIECE + 1],
        [PIECE - 1, 1, 1],
        [PIECE, PIECE],
        [3 * PIECE + 5, 7],
        [4095, 1, 4096, PIECE - 8192, 3],
    ],
    ids=str,
)
def test_blocks_lie_at_the_offsets_returned(sizes: list[int], aligned: str, alignment: int) -> None:
    chance = random.Random(sum(sizes))
    memory = Memory(alignment, sum(sizes) + 4096)
    writer = PackWriter(memory)
    in_memory = itertools.cycle({"none": [False], "all": [True]}.get(aligned, [True, False]))
    blocks = [
        (writer.append(data, is_aligned=next(in_memory)), data)
        for data in map(chance.randbytes, sizes)
    ]
    writer.finish()
    assert writer.size_bytes == memory.finished == sum(sizes)
    at = 0
    for start, data in blocks:
        assert start == at
        assert memory.data[start : start + len(data)] == data
        at += len(data)
    assert not overlap(memory.writes)


def test_aligned_memory_is_written_without_a_copy() -> None:
    memory = Memory(4096, 1 << 20)
    writer = PackWriter(memory)
    writer.append(bytes(5 * 4096), is_aligned=True)
    assert memory.writes == [(0, 5 * 4096)]
    writer.append(bytes(2 * 4096 + 1), is_aligned=True)
    assert memory.writes[1:] == [(5 * 4096, 7 * 4096)]
    writer.append(bytes(4096), is_aligned=True)  # behind a byte that waits in a piece
    assert len(memory.writes) == 2
    writer.finish()
    assert memory.writes[2:] == [(7 * 4096, 9 * 4096)]
    assert memory.finished == 8 * 4096 + 1


def test_several_threads_append_at_once() -> None:
    memory = Memory(4096, 16 << 20)
    writer = PackWriter(memory)
    blocks: list[tuple[int, bytes]] = []

    def go(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            data = chance.randbytes(chance.choice([1, 100, 4096, PIECE - 1, PIECE, PIECE + 9]))
            blocks.append((writer.append(data, is_aligned=chance.random() < 0.5), data))

    threads = [threading.Thread(target=go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    assert len(blocks) == 240
    assert sum(len(data) for _, data in blocks) == writer.size_bytes == memory.finished
    for start, data in blocks:
        assert memory.data[start : start + len(data)] == data
    assert not overlap(memory.writes)


def test_closing_closes_the_file() -> None:
    memory = Memory(1, 100)
    writer = PackWriter(memory)
    writer.append(b"a")
    writer.close()
    assert memory.is_closed


def test_the_thread_that_fills_a_piece_sees_its_write_fail() -> None:
    memory = Memory(4096, 1 << 20)
    memory.fails_after = 1
    writer = PackWriter(memory)
    writer.append(bytes(PIECE))
    writer.append(bytes(PIECE - 1))
    with pytest.raises(StorageError):
        writer.append(b"1")


def test_one_thread_holds_memory_for_one_piece() -> None:
    memory = Memory(1, 10 * PIECE)
    writer = PackWriter(memory)
    for _ in range(9):
        writer.append(bytes(PIECE))
    assert len(writer._spare) <= 1


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097])
def test_ordinary_memory_is_written_aligned(size: int) -> None:
    memory, data = Memory(4096, 3 * 4096), random.Random(size).randbytes(size)
    write_aligned(memory, 4096, data)
    assert memory.data[4096 : 4096 + size] == data
    assert not any(memory.data[4096 + size :])
