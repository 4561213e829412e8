"""Data files as they lie: all that a checkpoint uses of them is in a range that verifies it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from laststep.constants import BLOCK_BYTES
from laststep.read.blocks import BlockReader, file_ranges
from saves_of import History, bytes_layout, layout_of

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.read.blocks import FileRanges, StoredRange

SIZE = 5 * BLOCK_BYTES + 78


def numbers(seed: int, size: int) -> bytes:
    """bf16, which can be encoded."""
    drawn = np.random.default_rng(seed).standard_normal(size // 2 + 1, np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:size]


def plain(path: Path) -> History:
    history = History(path, bytes_layout(SIZE), bytes_layout(100, "other.safetensors"))
    history.save(numbers(1, SIZE), bytes(100))
    return history


def shared(path: Path) -> History:
    history, image = plain(path), bytearray(numbers(1, SIZE))
    image[2 * BLOCK_BYTES] ^= 1
    history.save(bytes(image), bytes(100))
    return history


def encoded(path: Path) -> History:
    """Blocks of three saves, some of them encoded against others."""
    history = History(path, layout_of(("w", "bfloat16", SIZE)), compression="max")
    image = numbers(1, SIZE)
    history.save(image)
    for block in (1, 1, 3):
        image = bytearray(image)
        image[block * BLOCK_BYTES] ^= 1
        history.save(bytes(image))
    return history


MADE = {make.__name__: make for make in (plain, shared, encoded)}


@pytest.fixture(params=sorted(MADE))
def history(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    return MADE[request.param](tmp_path)


def opened(history: History) -> BlockReader:
    return BlockReader(history.store, history.folder, history.index()).sound()


def content(file: FileRanges, part: StoredRange) -> memoryview:
    view = memoryview(bytearray(part.stop - part.start))
    assert file.reader.read_into(part.start, view) == len(view)
    return view


def test_every_block_and_header_is_in_a_range(history: History) -> None:
    index = opened(history)
    files = file_ranges(index)
    assert [file.file for file in files] == list(index.index.files)
    for file in files:
        for key, part in file.ranges.items():
            assert key == (part.start, part.stop)
            assert 0 <= part.start < part.stop <= file.file.size_bytes
            assert part.content.verify_stored(content(file, part), file.reader) == []
    for stored in index.index.layouts:
        for ref in stored.refs():
            ranges = files[ref.file].ranges
            stop = ref.offset + ref.size_bytes
            assert any(start <= ref.offset and stop <= end for start, end in ranges)
            if ref.base is not None and ref.base.block.encoding == 0:
                base = ref.base.block
                assert any(start <= base.offset < end for start, end in files[base.file].ranges)
    for file in files:
        is_plain = file.file.name.endswith(".safetensors")
        assert bool(file.header_bytes) == is_plain
        assert ((0, file.header_bytes) in file.ranges) == is_plain
    index.close()


def test_a_changed_byte_in_any_range_is_found(history: History) -> None:
    index = opened(history)
    chance = random.Random(1)
    for file in file_ranges(index):
        path = history.path / history.folder / file.file.name
        for part in file.ranges.values():
            at = chance.randrange(part.start, part.stop)
            whole = bytearray(path.read_bytes())
            whole[at] ^= 1
            path.write_bytes(whole)
            damage = part.content.verify_stored(content(file, part), file.reader)
            assert [wrong.file for wrong in damage] == [file.file.name]
            whole[at] ^= 1
            path.write_bytes(whole)
            assert part.content.verify_stored(content(file, part), file.reader) == []
    index.close()


def test_bytes_that_are_wrong_only_once_are_read_again(history: History) -> None:
    index = opened(history)
    for file in file_ranges(index):
        for part in file.ranges.values():
            view = content(file, part)
            right = bytes(view)
            view[len(view) // 2] ^= 1
            assert part.content.verify_stored(view, file.reader) == []
            assert view == right
    index.close()
