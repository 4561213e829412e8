"""One verified reader: damage is a value, confirmed by a second look, and hides no other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from laststep.codecs.digests import block_digests, digest
from laststep.errors import CorruptError, StorageError
from laststep.read.blocks import Extent, Extents, refuse
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

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
    digests = block_digests(memoryview(DATA))
    return Extent(reader, "f", "here/f", AT, AT + len(DATA), digests, first=5)


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
        ("f", "block 6", AT + BLOCK_BYTES, AT + 2 * BLOCK_BYTES),
        ("f", "block 8", AT + 3 * BLOCK_BYTES, AT + len(DATA)),
    ]
    with pytest.raises(
        CorruptError, match=r"have changed at here/f, block 6 \(bytes 1052672-2101248\)"
    ):
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
def test_of_a_file_that_is_cut_every_block_that_is_not_whole_is_told(kept: int) -> None:
    extent = blocks_of(MemoryReader(file_with()[: AT + kept]))
    damage = extent.read(memoryview(bytearray(len(DATA))))
    assert [one.what for one in damage] == [f"block {5 + n}" for n in range(kept // BLOCK_BYTES, 4)]
    cut = kept % BLOCK_BYTES
    assert damage[0].stop - damage[0].start == cut
    assert damage[0].found.startswith(f"only {cut} of ")
    told = f"found {AT + kept} bytes" if kept else f"found at most {AT} bytes"
    with pytest.raises(CorruptError, match=f"too short at here/f: expected at least .*{told}"):
        refuse(damage)


def test_a_header_has_one_digest_however_long_it_is() -> None:
    reader = MemoryReader(file_with(BLOCK_BYTES + 1))
    extent = Extent(reader, "f", "here/f", AT, AT + len(DATA), digest(DATA), "header")
    (damage,) = extent.read(memoryview(bytearray(len(DATA))))
    assert (damage.what, damage.start, damage.stop) == ("header", AT, AT + len(DATA))
    assert damage.expected == f"xxh3-128:{digest(DATA).hex()}"


def test_no_bytes_have_a_digest_too() -> None:
    reader = MemoryReader(file_with())
    right = Extent(reader, "f", "here/f", AT, AT, digest(b""), "header")
    assert right.read(memoryview(bytearray())) == []
    wrong = right._replace(digests=bytes(16))
    assert [damage.what for damage in wrong.read(memoryview(bytearray()))] == ["header"]


def test_damage_is_placed_in_the_tensor_area() -> None:
    """Wherever its bytes lie in the file."""
    extent = blocks_of(MemoryReader(file_with(BLOCK_BYTES)))._replace(image_at=5 * BLOCK_BYTES)
    (damage,) = extent.read(memoryview(bytearray(len(DATA))))
    assert damage.start == AT + BLOCK_BYTES
    assert damage.data == (6 * BLOCK_BYTES, 7 * BLOCK_BYTES)


def test_extents_of_several_files_are_read_as_one() -> None:
    whole = blocks_of(MemoryReader(file_with()))
    cut = BLOCK_BYTES
    other = MemoryReader(DATA[cut:])
    parts = [
        whole._replace(stop=AT + cut, digests=whole.digests[:16]),
        Extent(other, "g", "g", 0, len(DATA) - cut, whole.digests[16:], None, 6, cut),
    ]
    both, image = Extents(parts), memoryview(bytearray(len(DATA)))
    assert (both.size_bytes, both.stored_bytes) == (len(DATA), len(DATA))
    assert both.read(image) == []
    assert image == DATA
    image[:] = bytes(len(DATA))
    assert both.verify(image, both.fill(image)) == []
    assert image == DATA
    other.data = other.data[:-1]
    (damage,) = both.verify(image, both.fill(image))
    assert (damage.file, damage.what) == ("g", "block 8")
    other.data = b"x" + DATA[cut + 1 :]
    (damage,) = both.read(image)
    assert (damage.file, damage.what, damage.data) == ("g", "block 6", (cut, 2 * cut))


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
