"""The files of a save: in place or by block, encoded or not, whatever order chunks come in."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attempts
from cases import long
from disks import FailingDisk, Kind
from expect import raises
from laststep.codecs.digests import block_digests
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.errors import NotFoundError, StorageError
from laststep.flush import base as bases
from laststep.flush import writer as writing
from laststep.flush.encoder import Compressor
from laststep.flush.protocol import Orders
from laststep.flush.writer import SaveWriter
from laststep.format import index as index_format
from laststep.format.index import RAW, BlockRun, Encoding, StoredFile, index_name, pack_name
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from saves_of import MODEL, History, bytes_layout, chunks_of, images_in, layout_of, write

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.format.index import Index
    from laststep.format.layout import FileLayout

A = "step-00000001.1-1"
SIZE = 5 * BLOCK_BYTES + 1234
OTHER = "optimizer.safetensors"
PACK = pack_name(0)
INDEX = index_name(0)


def noise(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


def numbers(seed: int, size: int = SIZE) -> bytes:
    """bf16 numbers, zeros and noise."""
    chance = np.random.default_rng(seed)
    drawn = chance.standard_normal(size // 4, np.float32).view(np.uint32) >> 16
    half = drawn.astype(np.uint16).tobytes()
    return (half + bytes(BLOCK_BYTES) + chance.bytes(size))[:size]


def with_block(image: bytes, *blocks: int) -> bytes:
    """The same with one other byte in each of these blocks."""
    changed = bytearray(image)
    for block in blocks:
        changed[block * BLOCK_BYTES] ^= 1
    return bytes(changed)


def numbers_layout(size: int = SIZE) -> FileLayout:
    """bf16 in front, bytes behind."""
    narrow = size // 2 // 2 * 2
    return layout_of(("a", "bfloat16", narrow), ("b", "uint8", size - narrow))


def origins(index: Index) -> dict[str, str]:
    """Of each file the folder of the checkpoint that it was written for."""
    return {file.name: file.origin for file in index.files}


def run_files(index: Index, number: int = 0) -> list[tuple[str, int]]:
    """In which file so many blocks of a layout lie, one run after the other."""
    return [(index.files[run.file].name, run.blocks) for run in index.layouts[number].runs]


class LimitedStore(DirectoryStore):
    """A store that may know no links."""

    has_links = True
    links = 0

    def link(self, name: str, new: str) -> bool:
        self.links += 1
        return self.has_links and super().link(name, new)


# In place


@given(
    size=st.one_of(
        st.integers(0, 3 * BLOCK_BYTES),
        st.sampled_from([0, 1, 4095, 4096, BLOCK_BYTES, BLOCK_BYTES + 1]),
    ),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=12)
def test_chunks_in_any_order_become_the_planned_file(
    size: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = DirectoryStore(tmp_path_factory.mktemp("store"))
    store.make_folder(A)
    chance = random.Random(seed)
    image, layout = chance.randbytes(size), bytes_layout(size)
    writer = SaveWriter(attempts.of(store, A), (layout,))
    parts = chunks_of(size)
    chance.shuffle(parts)
    for start, length in parts:
        write(writer, 0, image, start, length)
    values = {"model": b'{"n":1}', "other": b"tree" * 3000}
    written = writer.finish(values)
    writer.close()
    stored = store.read(f"{A}/{MODEL}", limit_bytes=1 << 30)
    assert stored == layout.header() + image
    data = store.read(f"{A}/{INDEX}", limit_bytes=1 << 30)
    index = index_format.decode(data, where="")
    assert data[:16] == written.indexes
    assert index.values == values
    assert index.files == (StoredFile(name=MODEL, size_bytes=layout.size_bytes),)
    (found,) = index.layouts
    assert found.layout == layout
    assert found.digests == block_digests(memoryview(image))
    assert found.runs == index_format.in_place(layout, 0)
    assert (written.files, written.size_bytes, written.shared_bytes) == (1, len(stored), 0)
    assert set(store_names(store)) == {MODEL, INDEX}


def store_names(store: DirectoryStore) -> list[str]:
    return [entry.name for entry in store.list(A)]


def test_a_data_file_is_plain_safetensors(tmp_path: Path) -> None:
    history = History(tmp_path, layout_of(("w", "float32", 400), ("v", "bfloat16", 20)))
    history.save(noise(1, 420))
    data = (tmp_path / history.folder / MODEL).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    assert size % 4096 == 0
    assert json.loads(data[8:size]) == {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]},
        "v": {"dtype": "BF16", "shape": [10], "data_offsets": [400, 420]},
    }
    assert data[size:] == noise(1, 420)


def test_several_threads_write_at_once(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.make_folder(A)
    image = noise(1, 2 * CHUNK_BYTES + 12345)
    writer = SaveWriter(attempts.of(store, A), (bytes_layout(len(image)),))
    threads = [
        threading.Thread(target=write, args=(writer, 0, image, start, size))
        for start, size in chunks_of(len(image), CHUNK_BYTES // 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish({})
    assert writer.written_bytes == len(image)
    stored = store.read(f"{A}/{MODEL}", limit_bytes=1 << 30)
    assert stored == bytes_layout(len(image)).header() + image


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.SYNC, Kind.TRUNCATE, Kind.SYNC_FOLDER])
def test_the_first_error_is_kept_and_nothing_is_written_after_it(
    kind: Kind, tmp_path: Path
) -> None:
    DirectoryStore(tmp_path).make_folder(A)
    disk = FailingDisk(3 if kind is Kind.WRITE else 1, errno.EIO, kinds=frozenset({kind}))
    store = DirectoryStore(tmp_path, disk=disk)
    image = bytes(3 * BLOCK_BYTES)
    layouts = (bytes_layout(len(image)), bytes_layout(len(image), OTHER))
    writer = SaveWriter(attempts.of(store, A), layouts)
    for number in (0, 1):
        for start, size in chunks_of(len(image)):
            write(writer, number, image, start, size)
    if kind is Kind.WRITE:
        first, calls = writer.error, disk.calls
        assert first is not None
        write(writer, 0, image, 0, BLOCK_BYTES)
        writer.fail(StorageError("a later error"))
        assert disk.calls == calls
        assert writer.error is first
    with raises(StorageError, found="EIO"):
        writer.finish({})
    writer.close()
    assert (tmp_path / A / INDEX).exists() == (kind is Kind.SYNC_FOLDER)
    assert writer.as_base() is None or kind is Kind.SYNC_FOLDER


def test_an_unexpected_error_fails_the_save_and_not_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.make_folder(A)
    writer = SaveWriter(attempts.of(store, A), (bytes_layout(BLOCK_BYTES),))

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no memory for digests")

    monkeypatch.setattr(writing, "block_digests", broken)
    write(writer, 0, bytes(BLOCK_BYTES), 0, BLOCK_BYTES)
    with pytest.raises(StorageError, match="no memory for digests"):
        writer.finish({})
    writer.close()


class RecordingDisk(Disk):
    """Notes the folders that are synced."""

    def __init__(self) -> None:
        self.synced: list[str] = []

    def sync_folder(self, path: str) -> None:
        self.synced.append(path)
        super().sync_folder(path)


def test_several_ranks_may_make_the_folder_that_their_files_lie_in(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, disk=(disk := RecordingDisk()))
    store.make_folder(A)
    writers = [
        SaveWriter(
            attempts.of(store, A), (bytes_layout(100, f"r00000/f{n}.safetensors"),), rank=(n, 300)
        )
        for n in range(2)
    ]
    for number, writer in enumerate(writers):
        write(writer, 0, bytes(100), 0, 100)
        disk.synced.clear()
        writer.finish({})
        assert disk.synced == [str(tmp_path / A / "r00000"), str(tmp_path / A)]
        data = store.read(f"{A}/r00000/index-r{number:05d}", limit_bytes=1 << 20)
        index = index_format.decode(data, where="")
        assert index.rank == number
        assert [file.name for file in index.files] == [f"r00000/f{number}.safetensors"]
        writer.close()


def test_a_late_rank_does_not_make_the_folder_of_an_attempt_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    layout = bytes_layout(100, "r00000/f.safetensors")
    writer = SaveWriter(attempts.of(store, A), (layout,), rank=(0, 300))
    assert isinstance(writer.error, NotFoundError)
    assert list(tmp_path.iterdir()) == []


# By block


def test_only_changed_blocks_are_written(tmp_path: Path) -> None:
    history, image = History(tmp_path, bytes_layout(SIZE)), noise(0)
    history.save(image)
    first = history.folder
    image = with_block(image, 2)
    index = history.save(image)
    assert history.read() == [image]
    assert origins(index) == {PACK: "", "model~1-1.safetensors": first}
    assert run_files(index) == [
        ("model~1-1.safetensors", 2),
        (PACK, 1),
        ("model~1-1.safetensors", 3),
    ]
    assert history.names() == {*origins(index), INDEX}
    assert index_format.written_of(index, b"").shared_bytes == bytes_layout(SIZE).size_bytes
    assert (tmp_path / history.folder / PACK).stat().st_size == BLOCK_BYTES


def test_an_unchanged_file_is_linked_under_its_own_name(tmp_path: Path) -> None:
    layouts = bytes_layout(SIZE), bytes_layout(SIZE, OTHER)
    history, frozen = History(tmp_path, *layouts), noise(0)
    history.save(frozen, noise(1))
    first = history.folder
    for step in range(2, 5):
        other = noise(step)
        index = history.save(frozen, other, seed=step)
        assert origins(index) == {OTHER: "", MODEL: first}
        assert [file.sharers for file in index.files] == [0, step - 1]
        assert history.names() == {MODEL, OTHER, INDEX}
        paths = [tmp_path / folder / MODEL for folder in (first, history.folder)]
        assert paths[0].samefile(paths[1])
        assert history.read() == [frozen, other]


def test_reused_blocks_outlive_the_folder_that_they_were_written_for(tmp_path: Path) -> None:
    history, image = History(tmp_path, bytes_layout(SIZE)), noise(3)
    history.save(image)
    first = history.folder
    image = with_block(image, 1)
    writer = history.write(image)
    history.store.delete_folder(first)  # retention, after a commit in between
    history.finish(writer)
    assert history.read() == [image]
    assert first in origins(history.index()).values()


def test_unchanged_chunks_need_not_come(tmp_path: Path) -> None:
    size = 4 * CHUNK_BYTES + 99
    history, image = History(tmp_path, bytes_layout(size)), noise(3, size)
    chunks = chunks_of(size, CHUNK_BYTES)
    assert history.begin().reuse([(0, 0, CHUNK_BYTES)]) == ()  # there is no base
    history.save(image)
    same = [(0, *chunk) for chunk in chunks if chunk[0] != CHUNK_BYTES]
    assert history.begin().reuse(same[:1]) == ()  # too little of the file to tell so early
    writer = history.begin()
    assert writer.reuse(same) == tuple(same)
    image = image[:CHUNK_BYTES] + bytes(CHUNK_BYTES) + image[2 * CHUNK_BYTES :]
    write(writer, 0, image, CHUNK_BYTES, CHUNK_BYTES)
    index = history.commit(writer)
    assert history.read() == [image]
    assert sum(n for name, n in run_files(index) if name == PACK) == CHUNK_BYTES // BLOCK_BYTES


def test_a_save_of_which_nothing_comes_links_all(tmp_path: Path) -> None:
    history, image = History(tmp_path, bytes_layout(SIZE)), noise(3)
    history.save(image)
    first = history.folder
    writer = history.begin()
    assert writer.reuse([(0, 0, SIZE)]) == ((0, 0, SIZE),)
    assert origins(history.commit(writer)) == {MODEL: first}
    assert history.read() == [image]


def test_a_layout_that_changed_mostly_is_written_in_place(tmp_path: Path) -> None:
    history = History(tmp_path, bytes_layout(SIZE))
    history.save(noise(0))
    index = history.save(noise(1))
    assert origins(index) == {MODEL: ""}
    assert history.names() == {MODEL, INDEX}
    assert history.read() == [noise(1)]


def test_links_that_nothing_needs_are_removed(tmp_path: Path) -> None:
    """The first chunk seems to say that nothing changed; then everything else has."""
    history = History(tmp_path, bytes_layout(SIZE), bytes_layout(SIZE, OTHER))
    frozen, image = noise(9), noise(0)
    history.save(image, frozen)
    image = image[:BLOCK_BYTES] + noise(1, SIZE - BLOCK_BYTES)
    index = history.save(image, frozen)
    assert history.read() == [image, frozen]
    assert set(origins(index)) == {PACK, "model~1-1.safetensors", OTHER}
    image = noise(2, BLOCK_BYTES) + image[BLOCK_BYTES:]
    index = history.save(image, frozen)  # nothing of the first file is left
    assert history.read() == [image, frozen]
    assert "model~1-1.safetensors" not in history.names()
    assert history.names() == {*origins(index), INDEX}


def test_an_uncommitted_save_is_no_base(tmp_path: Path) -> None:
    history, image = History(tmp_path, numbers_layout(), compression="max"), numbers(0)
    history.save(image)
    lost = numbers(7)[: 2 * BLOCK_BYTES] + image[2 * BLOCK_BYTES :]
    history.finish(history.write(lost))  # its blocks are in the compressor's memory now
    for path in (tmp_path / history.folder).iterdir():
        path.unlink()
    lost = with_block(lost, 0, 3)
    index = history.save(lost, seed=1)
    assert history.read() == [lost]
    assert set(origins(index).values()) == {"", "step-00000001.1-1"}


# Retired files


def test_a_file_that_too_many_checkpoints_share_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "MAX_SHARERS", 2)
    history, image = History(tmp_path, bytes_layout(SIZE)), noise(0)
    sharers = []
    for _ in range(6):
        (file,) = history.save(image).files
        assert file.name == MODEL
        sharers.append(file.sharers)
        assert history.read() == [image]
        assert history.names() == {MODEL, INDEX}
    assert sharers == [0, 1, 2, 0, 1, 2]


def test_blocks_of_a_file_that_is_hardly_used_are_written_again(tmp_path: Path) -> None:
    size = 10 * BLOCK_BYTES
    history, image = History(tmp_path, bytes_layout(size)), noise(0, size)
    history.save(image)
    is_used, held = [], []
    for blocks in ([0, 1, 2, 3, 4], [5, 6, 7], [0, 1], [2, 3, 4], [5, 6, 7]):
        image = with_block(image, *blocks)
        index = history.save(image, chunk_bytes=size)
        assert history.read() == [image]
        assert history.names() == {*origins(index), INDEX}
        is_used.append("model~1-1.safetensors" in origins(index))
        held.append(index.size_bytes)
    assert is_used == [True, True, False, False, False]
    assert max(held) < 2 * size


# Where blocks cannot be used again


@pytest.mark.parametrize("compression", ["none", "max"])
def test_a_store_without_links_gets_whole_files(tmp_path: Path, compression: str) -> None:
    store = LimitedStore(tmp_path)
    store.has_links = False
    history = History(tmp_path, numbers_layout(), compression=compression, store=store)
    image = numbers(0)
    for step in range(3):
        index = history.save(image, seed=step)
        assert history.read() == [image]
        assert set(origins(index).values()) == {""}
        assert history.names() == {*origins(index), INDEX}
        assert set(origins(index)) == {MODEL if compression == "none" else PACK}
        image = with_block(image, step)
    assert store.links


@pytest.mark.parametrize("damage", ["gone", "short"])
@pytest.mark.parametrize("compression", ["none", "max"])
def test_a_base_whose_file_is_not_what_it_was_is_not_used(
    tmp_path: Path, compression: str, damage: str
) -> None:
    history = History(tmp_path, numbers_layout(), compression=compression)
    image = numbers(0)
    (file,) = history.save(image).files
    path = tmp_path / history.folder / file.name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    image = with_block(image, 0)
    index = history.save(image)
    assert origins(index) == {file.name: ""}
    assert history.names() == {file.name, INDEX}
    assert history.read() == [image]


def test_one_layout_of_several_may_be_another_one(tmp_path: Path) -> None:
    history, frozen = History(tmp_path, bytes_layout(SIZE), bytes_layout(SIZE, OTHER)), noise(0)
    history.save(frozen, noise(1))
    history.layouts = bytes_layout(SIZE), bytes_layout(SIZE - 1, OTHER)
    index = history.save(frozen, noise(1)[:-1])
    assert origins(index) == {OTHER: "", MODEL: "step-00000001.1-1"}
    assert history.read() == [frozen, noise(1)[:-1]]


def test_a_failed_save_of_another_layout_does_not_confuse_the_next(tmp_path: Path) -> None:
    history, image = History(tmp_path, bytes_layout(SIZE)), noise(0)
    history.save(image)
    history.write(image)  # begun with the layout of the base, and given up
    history.layouts = (bytes_layout(SIZE + BLOCK_BYTES),)
    larger = image + noise(1, BLOCK_BYTES)
    index = history.save(larger)
    assert origins(index) == {MODEL: ""}
    assert history.read() == [larger]


# Encoded


@pytest.mark.parametrize("size", [1, 4095, BLOCK_BYTES, BLOCK_BYTES + 1, SIZE])
def test_encoded_blocks_come_back_whatever_thread_writes_them(tmp_path: Path, size: int) -> None:
    history = History(tmp_path, numbers_layout(size), compression="max")
    for seed in range(2):
        image = numbers(seed, size)
        index = history.save(image, seed=seed)
        assert history.read() == [image]
        assert PACK in origins(index)
        assert history.names() == {*origins(index), INDEX}
    if size == SIZE:
        assert index.size_bytes < 0.8 * size
        assert index.encodings


def test_a_changed_block_is_encoded_against_the_last_one(tmp_path: Path) -> None:
    history, image = History(tmp_path, numbers_layout(), compression="max"), numbers(0)
    history.save(image)
    history.save(image := with_block(image, 0))  # from the second save on, blocks are kept
    base = with_block(numbers(5), 0)[:BLOCK_BYTES] + image[BLOCK_BYTES:]
    history.save(base)
    changed = with_block(base, 0)
    index = history.save(changed)
    assert history.read() == [changed]
    ref = index.layouts[0].refs()[0]
    assert index.encoding(ref.encoding) == Encoding("patches", 2)
    assert ref.base is not None
    assert ref.base.digest == block_digests(memoryview(base)[:BLOCK_BYTES])
    assert ref.size_bytes < 100


def test_encodings_of_reused_blocks_stay_what_they_were(tmp_path: Path) -> None:
    """Each index numbers its encodings by itself."""
    layout = layout_of(("a", "bfloat16", 2 * BLOCK_BYTES), ("b", "float32", 2 * BLOCK_BYTES))
    history = History(tmp_path, layout, compression="max")
    halves = numbers(1, 8 * BLOCK_BYTES)[: 2 * BLOCK_BYTES]
    floats = np.random.default_rng(2).standard_normal(BLOCK_BYTES // 2, np.float32).tobytes()
    history.save(halves + floats)
    before = [history.index().encoding(ref.encoding) for ref in history.index().layouts[0].refs()]
    assert len(set(before)) > 1
    # The last block changes first, and so its encoding is the first that is needed.
    image = halves + floats[:BLOCK_BYTES] + floats[BLOCK_BYTES:][::-1]
    writer = history.begin()
    for start, size in reversed(chunks_of(len(image))):
        write(writer, 0, image, start, size)
    index = history.commit(writer)
    assert history.read() == [image]
    refs = index.layouts[0].refs()
    assert [index.encoding(ref.encoding) for ref in refs[:3]] == before[:3]
    assert history.save(image) is not None  # all of it is used again, and nothing is encoded
    assert history.read() == [image]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_error_of_the_coder_ends_the_save(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, numbers_layout(), compression="max")
    assert history.compressor is not None
    left, make_coder = iter(range(after)), history.compressor.encoder

    def coder(*arguments: object, **more: object) -> object:
        made = make_coder(*arguments, **more)  # type: ignore[arg-type]
        encode = made.encode

        def fails(*block: object) -> object:
            if next(left, None) is None:
                raise MemoryError("no more")
            return encode(*block)  # type: ignore[arg-type]

        made.encode = fails  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(history.compressor, "encoder", coder)
    with pytest.raises(StorageError, match="MemoryError"):
        history.save(numbers(0), seed=1)


def test_rounded_tensors_are_stored_as_they_were_rounded(tmp_path: Path) -> None:
    layout = layout_of(("w", "float32", BLOCK_BYTES), ("v", "float32", BLOCK_BYTES))
    history = History(tmp_path, layout)
    history.compressor = Compressor(
        Orders(writers=1, lossy={"model/w": "bf16"}), memory_bytes=1 << 20
    )
    values = np.random.default_rng(1).standard_normal(BLOCK_BYTES // 2).astype(np.float32)
    index = history.save(values.tobytes())
    (image,) = history.read()
    found = np.frombuffer(image, np.float32)
    half = len(values) // 2
    assert (found[half:] == values[half:]).all()
    assert (found[:half].view(np.uint32) & 0xFFFF == 0).all()
    assert np.abs(found[:half] - values[:half]).max() < 0.02
    assert index.layouts[0].lossy == {"w": "bf16"}
    assert index_format.written_of(index, b"").lossy == ("bf16",)


# Many saves


def changed(image: bytes, chance: random.Random) -> bytes:
    found = bytearray(image)
    for start, size in chunks_of(len(image)):
        kind = chance.random()
        if kind < 0.3:
            for _ in range(chance.randrange(1, 30)):
                found[chance.randrange(start, start + size)] ^= 1
        elif kind < 0.45:
            found[start : start + size] = numbers(chance.randrange(999))[:size]
    return bytes(found)


@pytest.mark.parametrize("seed", [2, *long(0, 1, 3)])
def test_a_save_is_the_base_that_is_found_on_the_disk(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "MOST_FILES", 4)
    chance = random.Random(seed)
    history = History(tmp_path, numbers_layout(), bytes_layout(SIZE, OTHER), compression="max")
    images, most = [numbers(seed), noise(seed)], 0
    for step in range(8):
        if chance.random() < 0.3:
            history.compress(chance.choice(["max", "none", "planes"]), memory_bytes=4 << 20)
        index = history.save(*images, seed=step)
        assert history.read() == images
        base = history.base
        found = bases.of_checkpoint(history.store, history.folder, 0)
        assert base is not None
        assert found is not None
        assert found.index == base.index == index
        assert found.folder == base.folder
        assert history.names() == {INDEX, *origins(index)}
        most = max(most, len(index.files))
        images = [changed(image, chance) for image in images]
    assert most > 2  # or nothing was mixed
    for folder in sorted(path.name for path in tmp_path.glob("step-*"))[:-1]:
        history.store.delete_folder(folder)  # the last one stands alone
    assert images_in(history.store, history.folder, index)


@given(data=st.data(), size=st.integers(1, 6 * BLOCK_BYTES))
@settings(max_examples=10)
def test_any_history_of_changes_is_read_back(
    data: st.DataObject, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run")
    history, image = History(path, bytes_layout(size)), noise(0, size)
    blocks = st.sets(st.integers(0, (size - 1) // BLOCK_BYTES))
    for step in range(data.draw(st.integers(2, 6))):
        if data.draw(st.booleans()):
            history.base = bases.of_checkpoint(history.store, history.folder, 0)
        index = history.save(image, seed=step)
        assert history.read() == [image]
        assert history.names() == {INDEX, *origins(index)}
        image = with_block(image, *data.draw(blocks))


def test_the_runs_of_an_index_are_few(tmp_path: Path) -> None:
    history, image = History(tmp_path, bytes_layout(SIZE)), noise(0)
    history.save(image)
    index = history.save(with_block(image, 5), seed=None)
    header = bytes_layout(SIZE).header_bytes
    numbers_of = {file.name: number for number, file in enumerate(index.files)}
    assert index.layouts[0].runs == (
        BlockRun(5, numbers_of["model~1-1.safetensors"], header),
        BlockRun(1, numbers_of[PACK], 0, RAW),
    )


def test_what_was_chosen_is_reported(tmp_path: Path) -> None:
    history = History(tmp_path, numbers_layout(), compression="max")
    writer = history.write(numbers(0))
    history.commit(writer)
    (report,) = writer.coding()
    assert (report.file, report.mode, report.raw_bytes) == (MODEL, "max", SIZE)
    assert "planes" in report.picked
    assert history.index().size_bytes == report.stored_bytes


def test_a_chunk_that_never_came_is_an_error_not_the_one_before(tmp_path: Path) -> None:
    store, layout = DirectoryStore(tmp_path), bytes_layout(2 * CHUNK_BYTES)
    image, base = noise(1, 2 * CHUNK_BYTES), None
    for folder, missing in (("step-00000001.1-1", 0), ("step-00000002.1-2", 1)):
        store.make_folder(folder)
        save = SaveWriter(attempts.of(store, folder), [layout], base=base)
        for start, size in chunks_of(len(image), CHUNK_BYTES)[: 2 - missing]:
            write(save, 0, image, start, size)
        if missing:
            with pytest.raises(StorageError) as raised:
                save.finish({})
            assert raised.value.found == f"{CHUNK_BYTES} bytes"
        else:
            save.finish({})
        base = save.as_base()
        save.close()


def test_a_header_that_cannot_be_written_leaves_no_file_open(tmp_path: Path) -> None:
    disk = FailingDisk(1, errno.ENOSPC, lasting=True, kinds=frozenset({Kind.WRITE}))
    store = DirectoryStore(tmp_path, disk=disk)
    store.make_folder(A)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 (its own descriptor is in it)
    save = SaveWriter(attempts.of(store, A), [bytes_layout(SIZE)])
    save.close()
    assert save.error is not None
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 (as above)
