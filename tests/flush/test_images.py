"""Images written to a store in any order of chunks become valid files; the first error is kept."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import random
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.errors import Corrupt, NotFound, StorageFailed
from laststep.flush import files
from laststep.flush.protocol import FileBegin
from laststep.flush.writer import SaveFlush
from laststep.format.header import decode_header, reserve_bytes
from laststep.format.safetensors import TensorEntry
from laststep.plan.load import Read, Want, plan_reads
from laststep.read.files import DataFile, open_file
from laststep.read.reader import read_all
from laststep.storage.directory import DirectoryStore
from laststep.storage.disk import Disk
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, CHUNK_BYTES, align_up
from laststep.testing.faults import FailingDisk, Kind

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.flush.lending import Lender

OBJECTS = {"x/~6tree": b"{}", "y/~6tree": b"tree" * 3000}


def begin(name: str, size: int, object_names: tuple[str, ...] = ()) -> FileBegin:
    entries = (TensorEntry(name="t", dtype="uint8", shape=(size,), start=0, stop=size),)
    region = reserve_bytes(item="x", tensors=entries, object_names=object_names, tensor_bytes=size)
    return FileBegin(
        name=name, item="x", region_bytes=region, tensor_bytes=size,
        has_objects=bool(object_names), entries=entries,
    )  # fmt: skip


def chunks_of(size: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def write(flush: SaveFlush, number: int, data: bytes, start: int, size: int) -> None:
    slot = mmap.mmap(-1, align_up(size, ALIGN_BYTES))
    slot[:size] = data[start : start + size]
    flush.write(number, start, memoryview(slot), size)


@given(
    size=st.one_of(
        st.integers(0, 3 * BLOCK_BYTES),
        st.sampled_from([0, 1, 4095, 4096, BLOCK_BYTES, BLOCK_BYTES + 1]),
    ),
    with_objects=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=12)
def test_chunks_in_any_order_become_the_file_that_was_planned(
    size: int, with_objects: bool, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = DirectoryStore(tmp_path_factory.mktemp("store"))
    store.make_folder("a")
    chance = random.Random(seed)
    data = chance.randbytes(size)
    named = OBJECTS if with_objects else {}
    plan = begin("f.safetensors", size, tuple(named))
    flush = SaveFlush(store, "a", (plan,))
    parts = chunks_of(size, BLOCK_BYTES)
    chance.shuffle(parts)
    for start, length in parts:
        write(flush, 0, data, start, length)
    (record,) = flush.finish(tuple((0, name, text) for name, text in named.items()))
    flush.close()
    stored = store.read("a/f.safetensors", limit_bytes=1 << 30)
    assert len(stored) == record.size_bytes
    header = decode_header(
        stored[: record.header_bytes], data_bytes=len(stored) - record.header_bytes, where="here"
    )
    body = stored[record.header_bytes :]
    assert body[:size] == data
    assert {o.name: body[o.start : o.stop] for o in header.objects} == named
    assert len(body) == size + sum(map(len, named.values()))


def test_several_threads_may_write_at_once(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.make_folder("a")
    data = random.Random(1).randbytes(2 * CHUNK_BYTES + 12345)
    flush = SaveFlush(store, "a", (begin("f.safetensors", len(data)),))
    threads = [
        threading.Thread(target=write, args=(flush, 0, data, start, size))
        for start, size in chunks_of(len(data), CHUNK_BYTES // 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (record,) = flush.finish(())
    assert flush.written_bytes == len(data)
    stored = store.read("a/f.safetensors", limit_bytes=1 << 30)
    assert stored[record.header_bytes :] == data


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.SYNC, Kind.TRUNCATE, Kind.SYNC_FOLDER])
def test_after_the_first_error_nothing_is_published(kind: Kind, tmp_path: Path) -> None:
    DirectoryStore(tmp_path).make_folder("a")
    disk = FailingDisk(2 if kind is Kind.WRITE else 1, errno.EIO, kinds=frozenset({kind}))
    store = DirectoryStore(tmp_path, disk=disk)
    data = bytes(3 * BLOCK_BYTES)
    flush = SaveFlush(store, "a", (begin("f", len(data)), begin("g", len(data))))
    for number in (0, 1):
        for start, size in chunks_of(len(data), BLOCK_BYTES):
            write(flush, number, data, start, size)
    if kind is Kind.WRITE:
        assert flush.error is not None
        calls = disk.calls
        write(flush, 0, data, 0, BLOCK_BYTES)
        assert disk.calls == calls
    with pytest.raises(StorageFailed, match=r"Input/output error|device failed"):
        flush.finish(())
    flush.close()


class Room:
    """Slots for reading, from plain memory."""

    lands_all = True

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


def stored_file(tmp_path: Path, data: bytes) -> tuple[DirectoryStore, DataFile]:
    store = DirectoryStore(tmp_path)
    store.make_folder("a")
    flush = SaveFlush(store, "a", (begin("f", len(data)),))
    for start, size in chunks_of(len(data), BLOCK_BYTES):
        write(flush, 0, data, start, size)
    (record,) = flush.finish(())
    return store, open_file(store, "a", record).sound()


def test_what_is_read_is_verified_and_delivered_whole(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(CHUNK_BYTES + 5 * BLOCK_BYTES + 99)
    _, file = stored_file(tmp_path, data)
    wants = [Want(10, 3 * BLOCK_BYTES + 5, 0), Want(CHUNK_BYTES - 7, len(data), 1)]
    got = [bytearray(want.stop - want.start) for want in wants]
    room = Room()

    def deliver(read: Read, data: memoryview) -> None:
        for part in read.parts:
            piece = data[part.at : part.at + part.size_bytes]
            got[part.target][part.target_at : part.target_at + part.size_bytes] = piece

    reads = plan_reads(0, len(data), wants)
    assert read_all([file], reads, room, deliver, threads=3) == sum(r.stop - r.start for r in reads)
    assert [bytes(g) for g in got] == [data[w.start : w.stop] for w in wants]
    assert room.leased == 0
    file.reader.close()


def test_a_changed_byte_is_found_and_its_block_is_named(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(4 * BLOCK_BYTES)
    _, file = stored_file(tmp_path, data)
    path = tmp_path / "a" / "f"
    with path.open("r+b") as handle:
        handle.seek(file.record.header_bytes + 2 * BLOCK_BYTES + 17)
        handle.write(bytes([data[2 * BLOCK_BYTES + 17] ^ 1]))
    room = Room()
    seen: list[Read] = []
    reads = plan_reads(0, len(data), [Want(0, len(data), 0)])
    with pytest.raises(Corrupt, match="block 2"):
        read_all([file], reads, room, lambda read, data: seen.append(read), threads=2)
    assert seen == []
    assert room.leased == 0
    path.write_bytes(path.read_bytes()[: file.record.header_bytes + BLOCK_BYTES])
    with pytest.raises(Corrupt, match="too short"):
        read_all([file], reads, room, lambda read, data: None, threads=2)
    file.reader.close()


def test_a_block_that_is_wrong_only_once_is_read_again(tmp_path: Path) -> None:
    data = random.Random(4).randbytes(BLOCK_BYTES)
    _, file = stored_file(tmp_path, data)

    class Flaky:
        """A reader whose first answer is wrong."""

        alignment_bytes = 1
        calls = 0

        def read_into(self, offset: int, into: memoryview) -> int:
            self.calls += 1
            got = file.reader.read_into(offset, into)
            if self.calls == 1:
                into[5] ^= 255
            return got

    flaky = Flaky()
    wrapped = dataclasses.replace(file, files=(file.files[0]._replace(reader=flaky),))
    reads = plan_reads(0, len(data), [Want(0, len(data), 0)])
    read_all([wrapped], reads, Room(), lambda read, data: None, threads=1)
    assert flaky.calls == 2
    file.reader.close()


def test_a_writer_that_fails_in_an_unknown_way_fails_the_save_and_not_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.make_folder("a")
    data = bytes(BLOCK_BYTES)
    flush = SaveFlush(store, "a", (begin("f", len(data)),))

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no memory for the header")

    monkeypatch.setattr(files, "encode_header", broken)
    write(flush, 0, data, 0, len(data))  # completes the file, and with it writes its header
    with pytest.raises(StorageFailed, match="no memory for the header"):
        flush.finish(())
    flush.close()


def test_files_may_lie_in_folders_within_the_attempts_which_several_ranks_make(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path, disk=(disk := RecordingDisk()))
    store.make_folder("a")
    flushes = [SaveFlush(store, "a", (begin(f"r00000/f{n}", 100),)) for n in range(2)]
    for number, flush in enumerate(flushes):
        write(flush, 0, bytes(100), 0, 100)
        disk.synced.clear()
        (record,) = flush.finish(())
        assert record.name == f"r00000/f{number}"
        assert disk.synced == [str(tmp_path / "a" / "r00000"), str(tmp_path / "a")]
        flush.close()


def test_a_rank_that_is_late_does_not_bring_back_an_attempt_that_was_given_up(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path)
    flush = SaveFlush(store, "a", (begin("r00000/f", 100),))
    assert isinstance(flush.error, NotFound)
    assert list(tmp_path.iterdir()) == []


class RecordingDisk(Disk):
    """Notes the folders that are synced."""

    def __init__(self) -> None:
        self.synced: list[str] = []

    def sync_folder(self, path: str) -> None:
        self.synced.append(path)
        super().sync_folder(path)


def test_chunks_that_did_not_change_are_granted_where_somebody_lends(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    data = random.Random(3).randbytes(4 * CHUNK_BYTES + 99)
    starts = range(0, len(data), CHUNK_BYTES)
    sizes = {start: min(CHUNK_BYTES, len(data) - start) for start in starts}
    folders = ["step-00000001.1-1", "step-00000002.1-2"]
    for folder in folders:
        store.make_folder(folder)
    first = SaveFlush(store, folders[0], (begin("f.safetensors", len(data)),))
    assert first.borrow([(0, 0, CHUNK_BYTES)]) == ()  # nobody lends to the first
    for start, size in sizes.items():
        write(first, 0, data, start, size)
    first.finish(())
    plan = begin("f.safetensors", len(data))
    second = SaveFlush(store, folders[1], (plan,), first.lenders())
    same = [(0, start, size) for start, size in sizes.items() if start != CHUNK_BYTES]
    assert second.borrow(same[:1]) == ()  # too little of the file to be told so early
    second = SaveFlush(store, folders[1], (plan,), first.lenders())
    assert second.borrow(same) == tuple((0, start) for _, start, _ in same)
    changed = bytes(CHUNK_BYTES)
    data = data[:CHUNK_BYTES] + changed + data[2 * CHUNK_BYTES :]
    write(second, 0, data, CHUNK_BYTES, CHUNK_BYTES)
    records = {record.name: record for record in second.finish(())}
    file = open_file(store, folders[1], records["f.safetensors"], records).sound()
    got = bytearray(len(data))
    for start, size in sizes.items():
        extent = file.blocks(start, start + size)
        assert extent.read(memoryview(got)[start : start + size]) == []
    file.close()
    assert got == data


def test_what_did_not_change_outlives_the_folder_that_it_is_borrowed_of(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    data = random.Random(3).randbytes(2 * BLOCK_BYTES)
    folders = ["step-00000001.1-1", "step-00000002.1-2"]
    lenders: dict[str, Lender] = {}
    for folder in folders:
        store.make_folder(folder)
        flush = SaveFlush(store, folder, (begin("f.safetensors", len(data)),), lenders)
        write(flush, 0, data, 0, len(data))
        if folder == folders[1]:
            store.delete_folder(folders[0])  # retention, after a commit in between
        (record,) = flush.finish(())
        lenders = flush.lenders()
    assert [path.name for path in (tmp_path / folders[1]).iterdir()] == ["f.safetensors"]
    assert record.origin == folders[0]
    open_file(store, folders[1], record).sound().close()
