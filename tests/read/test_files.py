"""Open what an index lists: whatever is wrong is a value, and no reader is left open."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from laststep.errors import CorruptError, StorageError, UsageError
from laststep.read.blocks import Extent
from laststep.read.files import OpenIndex
from laststep.storage.directory import DirectoryStore
from laststep.terms import BLOCK_BYTES
from saves_of import MODEL, History, bytes_layout, images_in

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.format.index import Index
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
            with pytest.raises(UsageError, match="has been closed"):
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

    def open(self) -> OpenIndex:
        return OpenIndex(self.store, self.history.folder, self.index)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_bytes_of_a_sound_file_are_found(saved: Saved) -> None:
    opened = saved.open().sound()
    model, other = opened.layouts
    assert (model.layout.name, other.layout.name, model.rank) == (MODEL, OTHER, 0)
    buffer = bytearray(BLOCK_BYTES)
    assert model.blocks(BLOCK_BYTES + 10, BLOCK_BYTES + 20).read(memoryview(buffer)) == []
    assert buffer == IMAGE[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert [[there.name for there in file.files] for file in (model, other)] == [[MODEL], [OTHER]]
    assert opened.damage == ()
    opened.close()
    assert saved.store.all_are_closed()
    opened.close()  # once more does nothing


@pytest.mark.parametrize("name", [MODEL, OTHER])
def test_a_missing_file_is_damage(saved: Saved, name: str) -> None:
    (saved.folder / name).unlink()
    opened = saved.open()
    assert [(damage.file, damage.what) for damage in opened.damage] == [(name, "missing file")]
    for file, image in zip(opened.layouts, (IMAGE, SMALL), strict=True):
        damage = file.blocks(0, len(image)).read(memoryview(bytearray(len(image))))
        assert bool(damage) == (file.layout.name == name)  # of the other one all is there
    with pytest.raises(CorruptError, match="a data file is missing") as caught:
        opened.sound()
    assert caught.value.missing == f"{saved.history.folder}/{name}"
    assert saved.store.all_are_closed()


@pytest.mark.parametrize(("change", "how"), [(-1, "short"), (1, "long")])
def test_a_file_of_the_wrong_size_is_damage(saved: Saved, change: int, how: str) -> None:
    path, size = saved.folder / MODEL, bytes_layout(SIZE).size_bytes
    path.write_bytes((path.read_bytes() + b"x")[: size + change])
    opened = saved.open()
    (damage,) = opened.damage
    assert (damage.file, damage.what) == (MODEL, "size")
    assert (damage.start, damage.stop) == (min(size, size + change), size + change)
    image = bytearray(BLOCK_BYTES)
    assert opened.layouts[0].blocks(0, 1).read(memoryview(image)) == []
    assert image == IMAGE[:BLOCK_BYTES]
    with pytest.raises(CorruptError, match=f"a data file is too {how}"):
        opened.sound()
    assert saved.store.all_are_closed()


def test_all_that_is_wrong_is_told(saved: Saved) -> None:
    (saved.folder / MODEL).unlink()
    (saved.folder / OTHER).write_bytes(b"")
    opened = saved.open()
    assert [damage.what for damage in opened.damage] == ["missing file", "size"]
    opened.close()


def test_a_store_that_fails_leaves_nothing_open(saved: Saved) -> None:
    saved.store.failing = {f"{saved.history.folder}/{OTHER}"}
    with pytest.raises(StorageError):
        saved.open()
    assert len(saved.store.readers) == 1
    assert saved.store.all_are_closed()


def test_a_changed_header_hurts_nobody_but_can_be_found(saved: Saved) -> None:
    path = saved.folder / MODEL
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    opened = saved.open().sound()
    model, other = opened.layouts
    assert images_in(saved.store, saved.history.folder, saved.index) == [IMAGE, SMALL]
    (header,) = model.headers()
    (damage,) = header.read(memoryview(bytearray(header.size_bytes)))
    assert (damage.file, damage.what) == (MODEL, "header")
    assert (damage.start, damage.stop) == (0, model.layout.header_bytes)
    (header,) = other.headers()
    assert header.read(memoryview(bytearray(header.size_bytes))) == []
    opened.close()


def test_blocks_may_lie_in_several_files(saved: Saved) -> None:
    changed = bytearray(IMAGE)
    changed[BLOCK_BYTES] ^= 1
    saved.index = saved.history.save(bytes(changed), SMALL)
    opened = saved.open().sound()
    model = opened.layouts[0]
    names = {"blocks-r00000.pack", "model~1-1.safetensors"}
    assert {there.name for there in model.files} == names
    (header,) = model.headers()  # that of the file that the checkpoint shares
    assert header.file == "model~1-1.safetensors"
    assert header.read(memoryview(bytearray(header.size_bytes))) == []
    for start, stop in [(0, SIZE), (10, 20), (BLOCK_BYTES, BLOCK_BYTES + 1), (SIZE - 1, SIZE)]:
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        extent = model.blocks(start, stop)
        image = bytearray(extent.size_bytes)
        assert extent.read(memoryview(image)) == []
        assert image == changed[first * BLOCK_BYTES : last * BLOCK_BYTES]
    one = model.blocks(BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert isinstance(one, Extent)
    assert (one.file, one.start, one.first, one.image_at) == (
        "blocks-r00000.pack",
        0,
        1,
        BLOCK_BYTES,
    )
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


def test_cached_bytes_are_preferred_if_all_readers_can(saved: Saved) -> None:
    opened = saved.open().sound()
    assert all(file.prefer_cached() for file in opened.layouts)
    assert not any(file.in_memory for file in opened.layouts)
    assert [there.name for there in opened.files] == [MODEL, OTHER]
    opened.close()


def test_an_empty_layout_has_a_file_and_no_blocks(tmp_path: Path) -> None:
    history = History(tmp_path, bytes_layout(0))
    index = history.save(b"")
    opened = OpenIndex(history.store, history.folder, index).sound()
    (file,) = opened.layouts
    assert [there.name for there in file.files] == [MODEL]
    assert file.blocks(0, 0).read(memoryview(b"")) == []
    assert len(file.headers()) == 1
    opened.close()
