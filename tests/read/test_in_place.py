"""What a reader has in memory: verified and delivered where it lies, and doubted like all else."""

from __future__ import annotations

import warnings

import pytest
import torch

from expect import raises
from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError
from laststep.memory.pool import ReadBuffers
from laststep.plan.reads import Chunk, plan_chunks
from laststep.read.reader import read_all
from laststep.restoring.exchange import tensor_over
from read.sources import blocks_over, bytes_wanted

DATA = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.int32).view(torch.uint8).numpy().tobytes()


class InMemory:
    """A reader of bytes in memory; the first answers are wrong, or the file has lost its end."""

    alignment_bytes = 1
    at_hand = False

    def __init__(self, data: bytes, wrong: int = 0) -> None:
        self._data, self._wrong = data, wrong
        self.size_bytes = len(data)
        self.handed = self.copied = 0

    def _answer(self, offset: int, size: int) -> bytes:
        part = self._data[offset : offset + size]
        self._wrong -= 1
        return part if self._wrong < 0 else bytes([part[0] ^ 1]) + part[1:]

    def in_place(self, offset: int, size_bytes: int) -> memoryview:
        self.handed += 1
        return memoryview(self._answer(offset, size_bytes))

    def read_into(self, offset: int, into: memoryview) -> int:
        self.copied += 1
        part = self._answer(offset, into.nbytes)
        into[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


def restored(reader: InMemory, *, lands_all: bool = False) -> bytes:
    """What comes of all the blocks of a file."""
    files = [blocks_over(DATA, f=reader)]
    target = torch.zeros(len(DATA), dtype=torch.uint8)
    with ReadBuffers(1) as room:
        room.lands_all = lands_all
        reads = plan_chunks([bytes_wanted(0, len(DATA))], {0: len(DATA)}, room.slot_bytes)

        def deliver(chunk: Chunk, data: memoryview) -> None:
            for _, box, at in chunk.boxes():
                target[box.start[0] : box.stop[0]] = tensor_over(data)[at : at + box.volume]

        read_all(files, reads, room, deliver, threads=1)
        assert room.lease(0) is not None
        assert room.lease(0) is not None, "a slot has not come back"
    return target.numpy().tobytes()


def test_what_a_reader_has_in_memory_is_not_copied_into_a_slot() -> None:
    reader = InMemory(DATA)
    assert restored(reader) == DATA
    assert (reader.handed, reader.copied) == (1, 0)


def test_all_lands_in_slots_where_a_device_wants_pinned_memory() -> None:
    reader = InMemory(DATA)
    assert restored(reader, lands_all=True) == DATA
    assert (reader.handed, reader.copied) == (0, 1)


@pytest.mark.parametrize("wrong", [1, 2])
def test_what_was_in_memory_and_is_wrong_is_read_again(wrong: int) -> None:
    reader = InMemory(DATA, wrong)
    assert restored(reader) == DATA
    assert (reader.handed, reader.copied) == (1, wrong)


def test_what_stays_wrong_is_damage_of_the_block() -> None:
    with pytest.raises(CorruptError, match="block 0"):
        restored(InMemory(DATA, 99))


def test_a_file_that_has_lost_its_end_has_nothing_in_place_and_is_damaged() -> None:
    reader = InMemory(DATA[:-1])
    with raises(CorruptError, where="f", found=str(len(DATA) - 1)):
        restored(reader)
    assert reader.handed == 0


def test_a_tensor_over_bytes_that_nobody_may_write_keeps_them_and_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_over(memoryview(bytes(range(200))))
    assert tensor.tolist() == list(range(200))
