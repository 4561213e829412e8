"""One verified reader: damage is a value, confirmed by a second look, and hides no other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError, StorageError
from laststep.format.index import BlockRun
from laststep.read.blocks import refuse
from read.sources import blocks_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.read.blocks import Extent

DATA = random.Random(7).randbytes(3 * BLOCK_BYTES + 1000)
AT = 4096
"""Where the data begin in the file."""


class MemoryReader:
    """A file in memory, which counts its reads; `change` may change what a read gives."""

    alignment_bytes = 1

    def __init__(self, data: bytes, change: Callable[[int, memoryview], None] | None = None):
        self.data = data
        self.reads = 0
        self.size_bytes = len(data)
        self._change = change

    def read_into(self, offset: int, into: memoryview) -> int:
        self.reads += 1
        part = self.data[offset : offset + len(into)]
        into[: len(part)] = part
        if self._change is not None:
            self._change(self.reads, into)
        return len(part)

    def close(self) -> None:
        pass


def blocks_of(reader: MemoryReader) -> Extent:
    return blocks_over(DATA, BlockRun(4, 0, AT), f=reader).blocks(0, len(DATA))


def file_with(*changed: int) -> bytes:
    data = bytearray(AT) + DATA
    for at in changed:
        data[AT + at] ^= 1
    return bytes(data)


def test_what_is_right_is_read_once_also_into_a_larger_buffer() -> None:
    reader = MemoryReader(file_with())
    buffer = bytearray(len(DATA) + 8192)
    assert blocks_of(reader).read(memoryview(buffer)) == []
    assert buffer[: len(DATA)] == DATA
    assert reader.reads == 1


def test_every_changed_block_is_told_with_its_number_and_its_bytes() -> None:
    reader = MemoryReader(file_with(BLOCK_BYTES, len(DATA) - 1))
    damage = blocks_of(reader).read(memoryview(bytearray(len(DATA))))
    assert reader.reads == 2
    assert [(one.file, one.what, one.start, one.stop) for one in damage] == [
        ("f.pack", "block 1", AT + BLOCK_BYTES, AT + 2 * BLOCK_BYTES),
        ("f.pack", "block 3", AT + 3 * BLOCK_BYTES, AT + len(DATA)),
    ]
    with raises(CorruptError, where="here/x/f.pack, block 1 (bytes 1052672-2101248)"):
        refuse(damage)


def test_what_is_wrong_only_once_is_no_damage() -> None:
    def flip_first(read: int, into: memoryview) -> None:
        into[17] ^= read == 1

    reader = MemoryReader(file_with(), flip_first)
    buffer = bytearray(len(DATA))
    assert blocks_of(reader).read(memoryview(buffer)) == []
    assert buffer == DATA
    assert reader.reads == 2


@pytest.mark.parametrize("kept", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 10, len(DATA) - 1])
def test_of_a_file_that_is_cut_all_that_is_not_whole_is_told(kept: int) -> None:
    extent = blocks_of(MemoryReader(file_with()[: AT + kept]))
    damage = extent.read(memoryview(bytearray(len(DATA))))
    first, cut = divmod(kept, BLOCK_BYTES)
    (lost,) = damage
    assert (lost.what, lost.data) == (f"block {first}", (kept - cut, len(DATA)))
    assert damage[0].stop - damage[0].start == cut
    told = str(AT + kept)
    assert told in damage[0].found
    with raises(CorruptError, where="here/x/f.pack", found=told):
        refuse(damage)


def test_blocks_of_several_files_are_read_as_one() -> None:
    cut, other = BLOCK_BYTES, MemoryReader(DATA[BLOCK_BYTES:])
    runs = BlockRun(1, 0, AT), BlockRun(3, 1, 0)
    both = blocks_over(DATA, *runs, f=MemoryReader(file_with()), g=other).blocks(0, len(DATA))
    image = memoryview(bytearray(len(DATA)))
    assert (both.size_bytes, both.stored()) == (len(DATA), (len(DATA), 4))
    assert both.read(image) == []
    assert image == DATA
    image[:] = bytes(len(DATA))
    assert both.verify(image, both.fill(image)) == []
    assert image == DATA
    other.data = other.data[:-1]
    (damage,) = both.verify(image, both.fill(image))
    assert (damage.file, damage.what) == ("g.pack", "block 3")
    other.data = b"x" + DATA[cut + 1 :]
    (damage,) = both.read(image)
    assert (damage.file, damage.what, damage.data) == ("g.pack", "block 1", (cut, 2 * cut))


def test_neighbours_are_fetched_together() -> None:
    """Also if they lie a little apart; those that lie before others are not neighbours."""
    gap, cut = 1000, BLOCK_BYTES
    reader = MemoryReader(DATA[:cut] + bytes(gap) + DATA[cut : 2 * cut] + DATA[2 * cut :])
    runs = BlockRun(1, 0, 0), BlockRun(3, 0, cut + gap)
    extent = blocks_over(DATA, *runs, f=reader).blocks(0, len(DATA))
    image = memoryview(bytearray(len(DATA)))
    assert extent.read(image) == []
    assert (bytes(image), reader.reads) == (DATA, 1)
    reader = MemoryReader(DATA[cut:] + DATA[:cut])
    runs = BlockRun(1, 0, len(DATA) - cut), BlockRun(3, 0, 0)
    extent = blocks_over(DATA, *runs, f=reader).blocks(0, len(DATA))
    assert extent.read(image) == []
    assert (bytes(image), reader.reads) == (DATA, 2)


@pytest.mark.parametrize("device_failed", [True, False])
def test_a_device_that_fails_is_damage_and_a_store_that_denies_access_raises(
    device_failed: bool,
) -> None:
    failed = StorageError("cannot read", found="EIO")
    failed.device_failed = device_failed

    def fail(read: int, into: memoryview) -> None:
        raise failed

    extent = blocks_of(MemoryReader(file_with(), fail))
    if not device_failed:
        with pytest.raises(StorageError):
            extent.read(memoryview(bytearray(len(DATA))))
        return
    damage = extent.read(memoryview(bytearray(len(DATA))))
    assert [(one.start, one.stop, one.found) for one in damage] == [(AT, AT + len(DATA), "EIO")]
    with pytest.raises(StorageError):
        refuse(damage)
