"""Reading ahead: in order, in bounded memory, and no thread is left behind."""

from __future__ import annotations

import itertools
import random
import threading
from typing import TYPE_CHECKING

import pytest

from laststep.codecs.digests import block_digests
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.errors import StorageError
from laststep.format.index import BlockRun
from laststep.read.reader import read_ahead
from read.sources import blocks_over

if TYPE_CHECKING:
    from laststep.read.blocks import Extent

SIZES = [10, BLOCK_BYTES + 1, 0, CHUNK_BYTES, CHUNK_BYTES + 5, 3, 4, 5]
DATA = random.Random(3).randbytes(sum(SIZES))


class Reader:
    """A file in memory, which knows into what it was read; offsets in `failing` cannot be."""

    alignment_bytes = 1
    size_bytes = len(DATA)

    def __init__(self, *failing: int) -> None:
        self.read: list[int] = []
        self._failing = failing
        self._lock = threading.Lock()

    def read_into(self, offset: int, into: memoryview) -> int:
        with self._lock:
            self.read.append(offset)
        if offset in self._failing:
            failed = StorageError("cannot read")
            failed.transient = True
            raise failed
        part = DATA[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


def extents(reader: Reader, damaged: int | None = None) -> list[Extent]:
    """Of each size one, all in one file; of one the digests are wrong."""
    found, at = [], 0
    for number, size in enumerate(SIZES):
        data = DATA[at : at + size]
        run = BlockRun(-(-size // BLOCK_BYTES), 0, at)
        digests = block_digests(memoryview(data))
        if number == damaged:
            digests = bytes(len(digests))
        layout = blocks_over(data, *[run][: bool(size)], digests=digests, f=reader)
        found.append(layout.blocks(0, size))
        at += size
    return found


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_all_comes_in_order_whatever_its_size(threads: int) -> None:
    parts = extents(Reader())
    found = [(bytes(data), damage) for data, damage in read_ahead(parts, threads=threads)]
    stops = [0, *itertools.accumulate(SIZES)]
    assert found == [(DATA[start:stop], []) for start, stop in itertools.pairwise(stops)]
    assert list(read_ahead([], threads=threads)) == []


def test_damage_comes_with_its_bytes_and_ends_nothing() -> None:
    parts = extents(Reader(), damaged=1)
    damage = [[one.what for one in damage] for _, damage in read_ahead(parts, threads=2)]
    assert damage == [[], ["block 0", "block 1"], *[[]] * (len(parts) - 2)]


def test_no_more_is_read_ahead_than_there_are_threads() -> None:
    reader = Reader()
    parts = [extents(reader)[0]] * 50
    reads = read_ahead(parts, threads=3)
    next(reads)
    reads.close()  # waits for the threads
    assert len(reader.read) <= 4
    assert not [one for one in threading.enumerate() if "laststep-ahead" in one.name]


def test_what_cannot_be_read_now_raises_in_its_turn() -> None:
    parts = extents(reader := Reader(10))
    reads = read_ahead(parts, threads=2)
    assert bytes(next(reads)[0]) == DATA[:10]
    with pytest.raises(StorageError):
        next(reads)
    assert len(reader.read) <= 4
