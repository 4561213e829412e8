"""Planned reads of stored files: verified, delivered whole, and read again if wrong once."""

from __future__ import annotations

import mmap
import random
import threading
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.errors import CorruptError
from laststep.plan.reads import Chunk, plan_chunks
from laststep.read.blocks import BlockReader
from laststep.read.reader import read_all
from read.sources import blocks_over, bytes_wanted
from saves_of import MODEL, History, bytes_layout

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.read.blocks import LayoutBlocks


class Room:
    """Slots for reading, from plain memory."""

    lands_all = True
    slot_bytes = CHUNK_BYTES

    def __init__(self) -> None:
        self._maps = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(3)]
        self._free = threading.Semaphore(3)
        self._slots = [0, 1, 2]
        self.leased = 0

    def lease(self, timeout_s: float | None = None) -> int | None:
        self._free.acquire()
        self.leased += 1
        return self._slots.pop()

    def view(self, slot: int) -> memoryview:
        return memoryview(self._maps[slot])

    def release(self, slot: int) -> None:
        self._slots.append(slot)
        self.leased -= 1
        self._free.release()


def saved(path: Path, *images: bytes) -> tuple[LayoutBlocks, Path]:
    """The data file of the last of these saves, and its path."""
    history = History(path, bytes_layout(len(images[0])))
    for image in images:
        history.save(image)
    opened = BlockReader(history.store, history.folder, history.index()).sound()
    return opened.layouts[0], path / history.folder / MODEL


def delivered(file: LayoutBlocks, wants: list[range], room: Room) -> list[bytes]:
    got = [bytearray(len(want)) for want in wants]

    def deliver(chunk: Chunk, data: memoryview) -> None:
        for stored, box, at in chunk.boxes():
            got[stored.tensor][box.start[0] : box.stop[0]] = data[at : at + box.volume]

    requests = [bytes_wanted(want.start, want.stop, number) for number, want in enumerate(wants)]
    reads = plan_chunks(requests, {0: file.layout.tensor_bytes})
    assert read_all([file], reads, room, deliver, threads=3) == sum(r.stop - r.start for r in reads)
    return list(map(bytes, got))


@pytest.mark.parametrize("saves", [1, 2])
def test_wanted_bytes_are_delivered_whole(tmp_path: Path, saves: int) -> None:
    """Also if they lie in several files."""
    image = random.Random(2).randbytes(CHUNK_BYTES + 5 * BLOCK_BYTES + 99)
    changed = bytearray(image)
    for block in (2, 7, 9):
        changed[block * BLOCK_BYTES + 9] ^= 1
    images = [image, bytes(changed)][:saves]
    file, _ = saved(tmp_path, *images)
    assert len(file.files()) == saves
    wants = [range(10, 3 * BLOCK_BYTES + 5), range(CHUNK_BYTES - 7, len(image))]
    room = Room()
    found = delivered(file, wants, room)
    assert found == [images[-1][want.start : want.stop] for want in wants]
    assert room.leased == 0
    file.reader.close()


def test_a_changed_byte_is_found_and_its_block_is_named(tmp_path: Path) -> None:
    image = random.Random(3).randbytes(4 * BLOCK_BYTES)
    file, path = saved(tmp_path, image)
    with path.open("r+b") as handle:
        handle.seek(file.layout.header_bytes + 2 * BLOCK_BYTES + 17)
        handle.write(bytes([image[2 * BLOCK_BYTES + 17] ^ 1]))
    room = Room()
    seen: list[Chunk] = []
    reads = plan_chunks([bytes_wanted(0, len(image))], {0: len(image)})
    with pytest.raises(CorruptError, match="block 2"):
        read_all([file], reads, room, lambda read, data: seen.append(read), threads=2)
    assert seen == []
    assert room.leased == 0
    path.write_bytes(path.read_bytes()[: file.layout.header_bytes + BLOCK_BYTES])
    with raises(CorruptError, where="model.safetensors", found=True):
        read_all([file], reads, room, lambda read, data: None, threads=2)
    file.reader.close()


def test_a_damaged_header_does_not_hurt(tmp_path: Path) -> None:
    image = random.Random(3).randbytes(BLOCK_BYTES)
    file, path = saved(tmp_path, image)
    with path.open("r+b") as handle:
        handle.write(bytes(file.layout.header_bytes))
    assert delivered(file, [range(len(image))], Room()) == [image]
    file.reader.close()


def test_a_block_that_is_wrong_only_once_is_read_again() -> None:
    image = random.Random(4).randbytes(BLOCK_BYTES)

    class Flaky:
        """A reader whose first answer is wrong."""

        alignment_bytes = 1
        size_bytes = len(image)
        calls = 0

        def read_into(self, offset: int, into: memoryview) -> int:
            self.calls += 1
            into[: len(image)] = image
            into[5] ^= 255 * (self.calls == 1)
            return len(image)

        def close(self) -> None:
            pass

    flaky = Flaky()
    reads = plan_chunks([bytes_wanted(0, len(image))], {0: len(image)})
    read_all([blocks_over(image, f=flaky)], reads, Room(), lambda read, data: None, threads=1)
    assert flaky.calls == 2
