"""Files of encoded or borrowed blocks, written by several threads in any order: they come back, and
what they lend is what is on the disk."""

from __future__ import annotations

import mmap
import random
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from laststep.catalog.run import Run
from laststep.errors import StorageFailed
from laststep.flush import lending, packed
from laststep.flush.coder import Compressor
from laststep.flush.packed import CannotBorrow, PackedImage
from laststep.flush.protocol import FileBegin, Orders
from laststep.flush.writer import SaveFlush
from laststep.format.header import reserve_bytes
from laststep.format.manifest import Commit, ItemRecord
from laststep.format.safetensors import TensorEntry
from laststep.read.files import DataFile, open_file
from laststep.storage.directory import DirectoryStore
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.flush.lending import Lender

NAME = "model.safetensors"
TREE = "model/~6tree"
SIZE = 5 * BLOCK_BYTES + 1234


def plan(size: int = SIZE) -> FileBegin:
    """bf16 in front, bytes behind."""
    narrow = size // 2 // 2 * 2
    entries = (
        TensorEntry("a", "bfloat16", (narrow // 2,), 0, narrow),
        TensorEntry("b", "uint8", (size - narrow,), narrow, size),
    )
    region = reserve_bytes(item="model", tensors=entries, object_names=(TREE,), tensor_bytes=size)
    return FileBegin(
        name=NAME, item="model", region_bytes=region, tensor_bytes=size, has_objects=True,
        entries=entries, object_names=(TREE,),
    )  # fmt: skip


class History:
    """Saves of one file into a run, each with what the last one lends."""

    def __init__(self, path: Path, *, compression: str = "max", size: int = SIZE) -> None:
        self.store = DirectoryStore(path)
        self.run = Run.open_or_create(self.store)
        self.epoch = self.run.claim_epoch(None)
        self.plan = plan(size)
        self.compressor = Compressor(
            Orders(writers=4, compression=compression), memory_bytes=64 << 20
        )
        self.lenders: dict[str, Lender] = {}
        self.step = 0
        self.folder = ""

    def begin(self) -> SaveFlush:
        self.step += 1
        self.folder = self.run.begin(step=self.step, epoch=self.epoch, attempt=self.step)
        return SaveFlush(self.store, self.folder, (self.plan,), self.lenders, self.compressor)

    def save(self, data: bytes, tree: bytes = b"tree", seed: int = 0) -> SaveFlush:
        """By several threads, in some order."""
        flush = self.begin()
        steps = [BLOCK_BYTES, 2 * BLOCK_BYTES]
        chance, step = random.Random(seed), steps[seed % 2]
        starts = list(range(0, len(data), step))
        chance.shuffle(starts)

        def write(some: list[int]) -> None:
            for start in some:
                size = min(step, len(data) - start)
                slot = mmap.mmap(-1, align_up(size, ALIGN_BYTES))
                slot[:size] = data[start : start + size]
                flush.write(0, start, memoryview(slot), size)

        threads = [threading.Thread(target=write, args=(starts[n::3],)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.records = flush.finish(((0, TREE, tree),))
        flush.close()
        return flush

    def commit(self, flush: SaveFlush) -> None:
        item = ItemRecord(
            name="model", kind="value", file=NAME, tensors=2, size_bytes=self.plan.tensor_bytes
        )
        commit = Commit(
            run=self.run.id, step=self.step, epoch=self.epoch, attempt=self.step, created_s=1.0,
            laststep="test", items=(item,), files=self.records, metrics={}, metadata=None,
            continues=None,
        )  # fmt: skip
        self.run.commit(self.folder, commit)
        self.lenders = flush.lenders()

    def read(self) -> tuple[bytes, bytes]:
        """The image and the object of the last save."""
        among = {record.name: record for record in self.records}
        file: DataFile = open_file(self.store, self.folder, self.records[0], among).sound()
        image = bytearray(align_up(self.plan.tensor_bytes, ALIGN_BYTES))
        assert file.blocks(0, self.plan.tensor_bytes).read(memoryview(image)) == []
        [tree] = file.header.objects
        found = bytes(image[: self.plan.tensor_bytes]), file.read_object(tree)
        file.close()
        return found


def drawn(seed: int, size: int = SIZE) -> bytes:
    """bf16 numbers, zeros and noise."""
    chance = np.random.default_rng(seed)
    numbers = chance.standard_normal(size // 4, np.float32).view(np.uint32) >> 16
    half = numbers.astype(np.uint16).tobytes()
    return (half + bytes(BLOCK_BYTES) + chance.bytes(size))[:size]


def changed(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for block in range(-(-len(data) // BLOCK_BYTES)):
        low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(data))
        kind = chance.random()
        if kind < 0.3:
            for _ in range(chance.randrange(1, 30)):
                found[chance.randrange(low, high)] ^= 1
        elif kind < 0.45:
            found[low:high] = drawn(chance.randrange(999))[: high - low]
    return bytes(found)


@pytest.mark.parametrize("size", [1, 4095, BLOCK_BYTES, BLOCK_BYTES + 1, SIZE])
def test_what_several_threads_write_in_any_order_comes_back(tmp_path: Path, size: int) -> None:
    history = History(tmp_path, size=size)
    for seed in range(2):
        data = drawn(seed, size)
        history.save(data, tree=b"tree" * seed * 99, seed=seed)
        assert history.read() == (data, b"tree" * seed * 99)
        assert [record.name for record in history.records] == [NAME]


@pytest.mark.parametrize("seed", range(4))
def test_what_a_save_lends_is_what_is_found_on_the_disk(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "LEAST_BYTES", 0)
    monkeypatch.setattr(lending, "MAX_FILES", 4)
    chance, history, data = random.Random(seed), History(tmp_path), drawn(seed)
    many = 0
    for step in range(8):
        if chance.random() < 0.2:
            history.compressor = Compressor(
                Orders(writers=4, compression=chance.choice(["max", "none", "planes"])),
                memory_bytes=4 << 20,
            )
        flush = history.save(data, tree=str(step // 3).encode(), seed=step)
        assert history.read() == (data, str(step // 3).encode())
        history.commit(flush)
        [mine], [found] = history.lenders.values(), lending.of_checkpoint(
            history.store, history.folder, [NAME]
        ).values()  # fmt: skip
        assert msgspec.structs.replace(mine, changed_blocks=None, overdue=False) == found
        names = {path.name for path in (tmp_path / history.folder).iterdir()}
        assert names == {"manifest.json"} | {record.name for record in history.records}
        many += len(history.records) > 2
        data = changed(data, chance)
    assert many  # or nothing was mixed


def test_a_save_that_was_never_committed_is_nobodys_anchor(tmp_path: Path) -> None:
    history, data = History(tmp_path), drawn(0)
    history.commit(history.save(data))
    lost = bytearray(data)
    lost[: 2 * BLOCK_BYTES] = drawn(7)[: 2 * BLOCK_BYTES]
    history.save(bytes(lost))  # its blocks are in memory now
    for path in (tmp_path / history.folder).iterdir():
        path.unlink()
    lost[5] ^= 1
    lost[3 * BLOCK_BYTES + 5] ^= 1
    history.save(bytes(lost), seed=1)
    assert history.read() == (bytes(lost), b"tree")
    assert {record.origin for record in history.records[1:]} == {"step-00000001.1-1"}


def test_where_nothing_changed_the_last_file_is_linked(tmp_path: Path) -> None:
    history, data = History(tmp_path), drawn(0)
    history.commit(history.save(data))
    data = data[:-5] + b"12345"
    history.commit(history.save(data))
    history.commit(history.save(data, seed=1))
    assert [record.sharers for record in history.records] == [1, 2]
    assert history.read() == (data, b"tree")
    history.commit(history.save(data, tree=b"other"))
    assert history.read() == (data, b"other")


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_the_first_error_of_any_thread_ends_it(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, left = History(tmp_path), iter(range(after))
    encode = history.compressor.coder

    def coder(*arguments: object, **more: object) -> object:
        made = encode(*arguments, **more)  # type: ignore[arg-type]
        whole = made.encode

        def fails(*block: object) -> object:
            if next(left, None) is None:
                raise MemoryError("no more")
            return whole(*block)  # type: ignore[arg-type]

        made.encode = fails  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(history.compressor, "coder", coder)
    with pytest.raises(StorageFailed, match="MemoryError"):
        history.save(drawn(0))


def test_what_is_gone_is_not_borrowed_of_but_written_encoded(tmp_path: Path) -> None:
    history, data = History(tmp_path), drawn(0)
    history.commit(history.save(data))
    (tmp_path / history.folder / NAME).unlink()
    with pytest.raises(CannotBorrow):
        PackedImage(
            history.store, lambda *_: pytest.fail("nothing is written"), history.folder,
            history.plan, before=history.lenders[NAME], retired=frozenset(), coder=None,
        )  # fmt: skip
    changed_data = b"\1" + data[1:]
    history.save(changed_data)
    assert [record.name for record in history.records] == [NAME]
    assert history.records[0].size_bytes < SIZE
    assert history.read() == (changed_data, b"tree")


@pytest.mark.parametrize("tree", [b"tree", b"other"])
def test_an_image_that_borrows_nothing_after_all_stands_alone(tmp_path: Path, tree: bytes) -> None:
    history, data = History(tmp_path), drawn(0)
    history.commit(history.save(data))
    data = drawn(1)[: 3 * BLOCK_BYTES] + bytes(range(256)) * 9999
    data = data[:SIZE]
    history.commit(history.save(data, tree=tree))
    assert [record.name for record in history.records] == [NAME]
    names = {path.name for path in (tmp_path / history.folder).iterdir()}
    assert names == {NAME, "manifest.json"}
    assert history.read() == (data, tree)
    assert history.lenders == {
        name: msgspec.structs.replace(one, changed_blocks=frozenset(range(len(one.places))))
        for name, one in lending.of_checkpoint(history.store, history.folder, [NAME]).items()
    }
    data = b"\1" + data[1:]
    history.commit(history.save(data, tree=tree))
    assert len(history.records) == 2
    assert history.read() == (data, tree)


def test_a_header_leaves_no_room_for_many_names_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_NAMES_SHARE", 1 << 40)
    monkeypatch.setattr(lending, "LEAST_BYTES", 0)
    history, data = History(tmp_path, size=400_000), drawn(0, 400_000)
    narrow = [(f"tensor {n}", "bfloat16", (100,), 200 * n, 200 * n + 200) for n in range(2000)]
    history.plan = msgspec.structs.replace(
        history.plan, entries=tuple(map(TensorEntry._make, narrow)), region_bytes=1 << 20
    )
    history.commit(history.save(data))
    assert history.records[0].header_bytes > 50_000
    data = drawn(1, 400_000)
    history.commit(history.save(data))
    assert history.records[0].header_bytes < 9000
    assert history.read() == (data, b"tree")
