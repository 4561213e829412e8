"""Bytes of any length, appended by several threads, lie in the file where it was said."""

from __future__ import annotations

import itertools
import random
import threading
from typing import TYPE_CHECKING

import pytest

from laststep.errors import StorageFailed
from laststep.flush import files
from laststep.flush.files import Appender

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
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset % self.alignment_bytes == 0
        assert len(data) % self.alignment_bytes == 0
        with self._lock:
            if len(self.writes) == self.fails_after:
                raise StorageFailed("a write", found="EIO")
            self.writes.append((offset, offset + len(data)))
        self.data[offset : offset + len(data)] = data

    def finish(self, size_bytes: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_APPENDED_BYTES", PIECE)


def overlap(writes: Sequence[tuple[int, int]]) -> bool:
    ordered = sorted(writes)
    return any(one[1] > two[0] for one, two in itertools.pairwise(ordered))


@pytest.mark.parametrize("alignment", [1, 512, 4096])
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [PIECE - 1],
        [PIECE],
        [PIECE + 1],
        [PIECE - 1, 1, 1],
        [PIECE, PIECE],
        [3 * PIECE + 5, 0, 7],
        [4095, 1, 4096, PIECE - 8192, 3],
    ],
    ids=str,
)
def test_what_is_appended_lies_where_it_was_said(sizes: list[int], alignment: int) -> None:
    chance = random.Random(sum(sizes))
    memory = Memory(alignment, 8192 + sum(sizes) + 4096)
    appender = Appender(memory, 8192)
    said = [(appender.append(data), data) for data in map(chance.randbytes, sizes)]
    appender.finish()
    assert appender.size_bytes == sum(sizes)
    at = 0
    for start, data in said:
        assert start == at
        assert memory.data[8192 + start : 8192 + start + len(data)] == data
        at += len(data)
    assert not any(memory.data[:8192])
    assert not overlap(memory.writes)


def test_several_threads_append_at_once() -> None:
    memory = Memory(4096, 4096 + (16 << 20))
    appender = Appender(memory, 4096)
    said: list[tuple[int, bytes]] = []

    def go(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            data = chance.randbytes(chance.choice([1, 100, 4096, PIECE - 1, PIECE, PIECE + 9]))
            said.append((appender.append(data), data))

    threads = [threading.Thread(target=go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    appender.finish()
    assert len(said) == 240
    assert sum(len(data) for _, data in said) == appender.size_bytes
    for start, data in said:
        assert memory.data[4096 + start : 4096 + start + len(data)] == data
    assert not overlap(memory.writes)
    assert len(memory.writes) == -(-appender.size_bytes // PIECE)


def test_a_write_that_fails_is_told_to_whoever_filled_the_piece() -> None:
    memory = Memory(4096, 1 << 20)
    memory.fails_after = 1
    appender = Appender(memory, 0)
    appender.append(bytes(PIECE))
    appender.append(bytes(PIECE - 1))
    with pytest.raises(StorageFailed):
        appender.append(b"1")


def test_no_more_memory_is_held_than_a_piece_for_each_thread() -> None:
    memory = Memory(1, 10 * PIECE)
    appender = Appender(memory, 0)
    for _ in range(9):
        appender.append(bytes(PIECE))
    assert len(appender._spare) <= 1
