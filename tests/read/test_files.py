"""Open what an index lists: whatever is wrong is a value, and no reader is left open."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError, StorageError, UsageError
from laststep.memory.pool import ReadBuffers
from laststep.plan.reads import Chunk
from laststep.read import reader as reading
from laststep.read.blocks import BlockReader, headers
from laststep.storage.directory import DirectoryStore
from saves_of import MODEL, History, bytes_layout, images_in

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.format.index import Index
    from laststep.read.blocks import Damage
    from laststep.storage.files import FileReader

OTHER = "other.safetensors"
SIZE = 3 * BLOCK_BYTES + 1000
IMAGE, SMALL = random.Random(5).randbytes(SIZE), bytes(range(250))


class OpenedStore(DirectoryStore):
    """Knows what it has opened to read; names in `failing` cannot be."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, direct=False)
        self.readers: list[FileReader] = []
        self.failing: set[str] = set()

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        if name in self.failing:
            raise StorageError("cannot open", where=name)
        self.readers.append(super().open_reader(name, cached=cached))
        return self.readers[-1]

    def all_are_closed(self) -> bool:
        for reader in self.readers:
            with raises(StorageError, where=True):
                reader.read_into(0, memoryview(bytearray(1)))
        return bool(self.readers)


class Saved:
    """A checkpoint of two data files."""

    def __init__(self, path: Path) -> None:
        self.store = OpenedStore(path)
        layouts = bytes_layout(SIZE), bytes_layout(len(SMALL), OTHER)
        self.history = History(path, *layouts, store=self.store)
        self.index: Index = self.history.save(IMAGE, SMALL)
        self.store.readers.clear()

    @property
    def folder(self) -> Path:
        return self.history.path / self.history.folder

    def open(self) -> BlockReader:
        return BlockReader(self.store, self.history.folder, self.index)


def damage_in(reader: BlockReader) -> list[Damage]:
    return [damage for file in reader.files() for damage in file.damage]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_bytes_of_a_sound_file_are_found(saved: Saved) -> None:
    opened = saved.open().sound()
    model, other = opened.layouts
    assert (model.layout.name, other.layout.name) == (MODEL, OTHER)
    buffer = bytearray(BLOCK_BYTES)
    assert model.blocks(BLOCK_BYTES + 10, BLOCK_BYTES + 20).read(memoryview(buffer)) == []
    assert buffer == IMAGE[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert [[there.file.name for there in file.files()] for file in (model, other)] == [
        [MODEL],
        [OTHER],
    ]
    assert damage_in(opened) == []
    opened.close()
    assert saved.store.all_are_closed()
    opened.close()  # once more does nothing


@pytest.mark.parametrize("name", [MODEL, OTHER])
def test_a_missing_file_is_damage(saved: Saved, name: str) -> None:
    (saved.folder / name).unlink()
    opened = saved.open()
    assert [(damage.file, damage.what) for damage in damage_in(opened)] == [(name, "missing file")]
    for file, image in zip(opened.layouts, (IMAGE, SMALL), strict=True):
        damage = file.blocks(0, len(image)).read(memoryview(bytearray(len(image))))
        assert bool(damage) == (file.layout.name == name)  # of the other one all is there
    with raises(CorruptError, where=name) as caught:
        opened.sound()
    assert caught.value.missing == f"{saved.history.folder}/{name}"
    assert saved.store.all_are_closed()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_the_wrong_size_is_damage(saved: Saved, change: int) -> None:
    path, size = saved.folder / MODEL, bytes_layout(SIZE).size_bytes
    path.write_bytes((path.read_bytes() + b"x")[: size + change])
    opened = saved.open()
    (damage,) = damage_in(opened)
    assert (damage.file, damage.what) == (MODEL, "size")
    assert (damage.start, damage.stop) == (min(size, size + change), size + change)
    image = bytearray(BLOCK_BYTES)
    assert opened.layouts[0].blocks(0, 1).read(memoryview(image)) == []
    assert image == IMAGE[:BLOCK_BYTES]
    with raises(CorruptError, where=MODEL, expected=str(size), found=str(size + change)):
        opened.sound()
    assert saved.store.all_are_closed()


def test_all_that_is_wrong_is_told(saved: Saved) -> None:
    (saved.folder / MODEL).unlink()
    (saved.folder / OTHER).write_bytes(b"")
    opened = saved.open()
    assert [damage.what for damage in damage_in(opened)] == ["missing file", "size"]
    opened.close()


def test_a_store_that_fails_leaves_nothing_open(saved: Saved) -> None:
    saved.store.failing = {f"{saved.history.folder}/{OTHER}"}
    with pytest.raises(StorageError):
        saved.open().sound()
    assert len(saved.store.readers) == 1
    assert saved.store.all_are_closed()


def test_a_changed_header_hurts_nobody_but_can_be_found(saved: Saved) -> None:
    path = saved.folder / MODEL
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    opened = saved.open().sound()
    assert images_in(saved.store, saved.history.folder, saved.index) == [IMAGE, SMALL]
    (_, model), (_, other) = headers(opened)
    (damage,) = model.read()
    assert (damage.file, damage.what) == (MODEL, "header")
    assert (damage.start, damage.stop) == (0, len(model.content))
    assert other.read() == []
    opened.close()


def test_blocks_may_lie_in_several_files(saved: Saved) -> None:
    changed = bytearray(IMAGE)
    changed[BLOCK_BYTES] ^= 1
    saved.index = saved.history.save(bytes(changed), SMALL)
    opened = saved.open().sound()
    model = opened.layouts[0]
    names = {"blocks-r00000.pack", "model~1-1.safetensors"}
    assert {there.file.name for there in model.files()} == names
    found = {header.file.file.name for _, header in headers(opened)}
    assert found == {"model~1-1.safetensors", OTHER}, "the file that is shared has one too"
    assert all(header.read() == [] for _, header in headers(opened))
    for start, stop in [(0, SIZE), (10, 20), (BLOCK_BYTES, BLOCK_BYTES + 1), (SIZE - 1, SIZE)]:
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        extent = model.blocks(start, stop)
        image = bytearray(extent.size_bytes)
        assert extent.read(memoryview(image)) == []
        assert image == changed[first * BLOCK_BYTES : last * BLOCK_BYTES]
    opened.close()


def test_damage_of_a_shared_file_names_it_and_the_bytes_that_it_touches(saved: Saved) -> None:
    changed = bytearray(IMAGE)
    changed[BLOCK_BYTES] ^= 1
    saved.index = saved.history.save(bytes(changed), SMALL)
    path = saved.folder / "model~1-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    opened = saved.open().sound()
    (damage,) = opened.layouts[0].blocks(0, SIZE).read(memoryview(bytearray(SIZE)))
    assert (damage.file, damage.what) == (path.name, "block 3")
    assert damage.data == (3 * BLOCK_BYTES, SIZE)
    opened.close()


def test_only_the_files_of_wanted_layouts_are_opened(saved: Saved) -> None:
    (saved.folder / OTHER).unlink()
    model, other = (opened := saved.open()).layouts
    assert saved.store.readers == []
    model.open()
    assert len(saved.store.readers) == 1
    assert model.blocks(0, SIZE).read(memoryview(bytearray(SIZE))) == []
    assert len(saved.store.readers) == 1
    with raises(CorruptError, where=OTHER):
        other.open()
    opened.close()
    assert saved.store.all_are_closed()
    with pytest.raises(UsageError):
        opened.file(1)


def test_files_of_many_layouts_are_closed_when_they_have_been_read(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MANY_LAYOUTS", 3)
    opened = [saved.open() for _ in range(3)]
    layouts = [layout for index in opened for layout in index.layouts]
    sizes = [layout.layout.tensor_bytes for layout in layouts]
    reads = [Chunk(at, 0, size, ()) for at, size in enumerate(sizes)]
    with ReadBuffers(1) as room:
        done = reading.read_all(layouts, reads, room, lambda read, data: None, threads=1)
    assert done == 3 * (SIZE + len(SMALL))
    assert saved.store.all_are_closed()
    assert layouts[0].blocks(0, SIZE).read(memoryview(bytearray(SIZE))) == [], "it is opened again"
    opened[0].close()


def test_cached_bytes_are_preferred_if_all_readers_can(saved: Saved) -> None:
    opened = saved.open().sound()
    assert all(file.prefer_cached() for file in opened.layouts)
    assert not any(file.in_memory for file in opened.layouts)
    opened.close()


def test_an_empty_layout_has_a_file_and_no_blocks(tmp_path: Path) -> None:
    history = History(tmp_path, bytes_layout(0))
    index = history.save(b"")
    opened = BlockReader(history.store, history.folder, index).sound()
    (file,) = opened.layouts
    assert file.blocks(0, 0).read(memoryview(b"")) == []
    assert [header.file.file.name for _, header in headers(opened)] == [MODEL]
    opened.close()
