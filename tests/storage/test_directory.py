"""The directory store: the suite that every store passes, faults, direct and buffered I/O."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from disks import FailingDisk, Kind, RecordingDisk
from expect import raises
from laststep.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from laststep.testing.stores import SharedStoreConformance, aligned, write_file, write_piece

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.storage.store import Store


class TestDirectBytes(SharedStoreConformance):
    def make_store(self, folder: Path) -> Store:
        return DirectoryStore(folder)


class TestBufferedBytes(SharedStoreConformance):
    def make_store(self, folder: Path) -> Store:
        return DirectoryStore(folder, direct=False)


def test_a_filesystem_that_counts_no_room_is_not_said_to_be_full() -> None:
    assert DirectoryStore("/proc/laststep").free_bytes() is None
    assert DirectoryStore("/dev/shm/laststep").free_bytes() is not None


class _WithoutLinks(Disk):
    def link(self, path: str, new: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class TestWithoutHardLinks(SharedStoreConformance):
    def make_store(self, folder: Path) -> Store:
        return DirectoryStore(folder, disk=_WithoutLinks())


class _WithoutDirect(Disk):
    def create_file(self, path: str, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().create_file(path, direct=False)


class _RefusesDirectWrites(Disk):
    """Takes the flag, as some FUSE filesystems do, and then refuses the write."""

    def __init__(self) -> None:
        self.direct: set[int] = set()

    def create_file(self, path: str, *, direct: bool) -> int:
        fd = super().create_file(path, direct=direct)
        if direct:
            self.direct.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.direct.discard(fd)
        super().close(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(fd, data, offset)


@pytest.mark.parametrize("kind", [_WithoutDirect, _RefusesDirectWrites])
def test_without_direct_io_it_is_buffered_and_says_so_once(
    tmp_path: Path, kind: type[Disk], caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path, disk=kind())
    with caplog.at_level(logging.INFO):
        for name in ("a", "b"):
            writer = store.open_writer(name, expected_bytes=10)
            assert writer.alignment_bytes == 1
            writer.write_at(0, memoryview(b"0123456789"))
            writer.finish(10)
            assert store.read(name, limit_bytes=99) == b"0123456789"
            assert store.open_reader(name).alignment_bytes == 1
    (told,) = caplog.records
    assert str(tmp_path) in told.getMessage()


def test_on_this_filesystem_direct_io_reads_what_was_written_directly(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    data = os.urandom((3 << 20) + 77)
    write_file(store, "x", data)
    reader = store.open_reader("x")
    with aligned(len(data)) as view:
        assert reader.read_into(0, view) == len(data)
        assert view == data
    reader.close()


def test_a_reader_takes_from_the_page_cache_what_is_there_and_the_second_time_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = DirectoryStore(tmp_path), os.urandom(3 << 20)
    write_file(store, "x", data)
    assert (tmp_path / "x").read_bytes() == data  # now it is there
    reader = store.open_reader("x")
    preadv, lies = os.preadv, list[int]()

    def lying(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        count = preadv(fd, views, offset, flags)
        if flags:
            lies.append(offset)
            views[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lying)
    with aligned(1 << 20) as view:
        reader.read_into(0, view)
        assert (view == data[: 1 << 20], lies) == (True, [])
        reader.prefer_cached()
        for offset in (0, 1 << 20, 1 << 20):
            reader.read_into(offset, view)
        assert lies == [0, 1 << 20]
        assert view == data[1 << 20 : 2 << 20]
    reader.close()


def test_a_reader_asks_the_page_cache_no_more_when_something_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = DirectoryStore(tmp_path), os.urandom(3 << 20)
    write_file(store, "x", data)
    reader = store.open_reader("x")
    reader.prefer_cached()
    tries: list[int] = []
    preadv = os.preadv

    def cold(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            tries.append(offset)
            raise BlockingIOError(errno.EAGAIN, "not there")
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", cold)
    with aligned(1 << 20) as view:
        for offset in (0, 1 << 20):
            reader.read_into(offset, view)
            assert view == data[offset : offset + (1 << 20)]
    assert tries == [0]
    reader.close()


@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_continued(tmp_path: Path, direct: bool) -> None:
    class Short(Disk):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            limit = 4096 if direct else 5000
            return Disk.write(fd, data[: min(len(data), limit)], offset)

    store = DirectoryStore(tmp_path, disk=Short(), direct=direct)
    data = os.urandom(100_000)
    write_file(store, "x", data)
    assert store.read("x", limit_bytes=1 << 20) == data
    store.create("small", data)
    assert store.read("small", limit_bytes=1 << 20) == data


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES]
)
@pytest.mark.parametrize("kind", [Kind.CREATE_FILE, Kind.WRITE, Kind.TRUNCATE, Kind.SYNC])
def test_a_failing_disk_is_reported_with_path_and_remedy(
    tmp_path: Path, kind: Kind, number: int
) -> None:
    disk = FailingDisk(1, number, kinds=frozenset({kind}), lasting=True)
    store = DirectoryStore(tmp_path, disk=disk)
    with pytest.raises(StorageError) as caught:
        write_file(store, "x", bytes(10_000))
    error = caught.value
    assert error.where == str(tmp_path / "x")
    assert os.strerror(number) in str(error)
    assert error.remedy is not None
    assert not error.transient


def test_a_failed_write_keeps_no_hold_of_the_bytes_it_was_given(tmp_path: Path) -> None:
    """Else whoever closes the memory they lie in gets an error that hides this one."""
    disk = FailingDisk(2, errno.ENOSPC, kinds=frozenset({Kind.WRITE}))
    store = DirectoryStore(tmp_path / "s", disk=disk, direct=False)
    writer = store.open_writer("f", expected_bytes=0)
    with mmap.mmap(-1, 8192) as memory, memoryview(memory) as view:
        writer.write_at(0, view)
        with raises(StorageError, found="ENOSPC") as raised:
            writer.write_at(0, view)
    assert raised.value.__cause__ is not None  # which holds every frame that had a view
    writer.close()


def test_no_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    disk = FailingDisk(1, errno.ENOSPC, kinds=frozenset({Kind.ALLOCATE}))
    store = DirectoryStore(tmp_path, disk=disk)
    with raises(StorageError, "1048576", where=tmp_path / "x", found="ENOSPC"):
        store.open_writer("x", expected_bytes=1 << 20)
    assert store.list("") == []


def test_a_filesystem_that_cannot_promise_room_is_used_all_the_same(tmp_path: Path) -> None:
    disk = FailingDisk(1, errno.EOPNOTSUPP, kinds=frozenset({Kind.ALLOCATE}))
    write_file(DirectoryStore(tmp_path, disk=disk), "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_create_is_all_or_nothing_whichever_call_fails(tmp_path: Path) -> None:
    failures = 0
    for n in range(1, 20):
        folder = tmp_path / str(n)
        disk = FailingDisk(n, errno.EIO)
        store = DirectoryStore(folder, disk=disk)
        try:
            store.create("x", b"whole")
        except StorageError:
            failures += 1
        there = [entry.name for entry in store.list("")]
        if "x" in there:
            assert store.read("x", limit_bytes=99) == b"whole"
        if disk.calls < n:
            assert there == ["x"]
            break
    assert failures >= 6


def test_a_file_in_the_way_of_the_root_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = DirectoryStore(tmp_path / "file" / "run")
    with pytest.raises(StorageError):
        store.create("x", b"1")
    with pytest.raises(StorageError):
        store.list("")


def test_without_links_and_exclusive_renames_create_refuses(tmp_path: Path) -> None:
    class Nothing(_WithoutLinks):
        def rename_new(self, path: str, new: str) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    store = DirectoryStore(tmp_path, disk=Nothing())
    with raises(StorageError, where=tmp_path / "x", found="EINVAL"):
        store.create("x", b"1")
    assert "x" not in [entry.name for entry in store.list("")]


def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path: Path) -> None:
    class Lossy(Disk):
        def link(self, path: str, new: str) -> None:
            super().link(path, new)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    store = DirectoryStore(tmp_path, disk=Lossy())
    store.create("x", b"mine")
    assert [entry.name for entry in store.list("")] == ["x"]


def test_create_makes_bytes_durable_before_the_name(tmp_path: Path) -> None:
    disk = RecordingDisk()
    store = DirectoryStore(tmp_path, disk=disk)
    store.create("x", b"1")
    assert [change.kind for change in disk.changes] == [
        Kind.CREATE_FILE,
        Kind.WRITE,
        Kind.SYNC,
        Kind.LINK,
        Kind.SYNC_FOLDER,
        Kind.UNLINK,
    ]


def test_a_deleted_folder_loses_its_manifest_and_its_name_durably_first(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).make_folder("a")
    for name in ("data", "manifest"):
        DirectoryStore(tmp_path).create(f"a/{name}", b"1")
    disk = RecordingDisk()
    DirectoryStore(tmp_path, disk=disk).delete_folder("a", first="manifest")
    assert [change.kind for change in disk.changes] == [
        Kind.UNLINK,
        Kind.SYNC_FOLDER,
        Kind.RENAME,
        Kind.SYNC_FOLDER,
        Kind.UNLINK,
        Kind.REMOVE_FOLDER,
    ]
    assert disk.changes[0].path == str(tmp_path / "a" / "manifest")
    assert list(tmp_path.iterdir()) == []


def test_deleting_a_folder_never_follows_a_symlink(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    store = DirectoryStore(tmp_path / "s")
    store.make_folder("a")
    (tmp_path / "s" / "a" / "link").symlink_to(outside)
    store.delete_folder("a")
    (tmp_path / "s" / "b").symlink_to(outside)
    for name in ("b", "b/c"):
        with raises(UsageError, where=tmp_path / "s" / "b", found=tmp_path / "outside"):
            store.delete_folder(name, first="precious")
    assert (outside / "precious").read_bytes() == b"1"
    assert not (tmp_path / "s" / "a").exists()


def test_a_folder_that_lost_its_name_takes_no_new_files(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.make_folder("a")
    store.delete_folder("a")
    with pytest.raises(NotFoundError):
        store.create("a/manifest", b"1")


def test_links_are_told_from_what_they_point_to(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.make_folder("folder")
    store.create("file", b"12345")
    for name in ("folder", "file"):
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
    (tmp_path / "to itself").symlink_to(tmp_path / "to itself")
    (tmp_path / "through a file").symlink_to(tmp_path / "file" / "x")
    found = [(entry.name, entry.is_folder, entry.is_link) for entry in store.list("")]
    assert found == [
        ("file", False, False),
        ("folder", True, False),
        ("to file", False, True),
        ("to folder", True, True),
    ]
    assert store.list("")[2].size_bytes == 5
    assert sorted(store.file_names("")) == ["file", "to file"]


def test_a_folder_that_cannot_be_listed_is_a_failure(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create("file", b"")
    for look in (store.list, store.file_names):
        with raises(StorageError, where=tmp_path / "file", found="ENOTDIR"):
            look("file")


def test_a_broken_symlink_is_not_an_entry_and_blocks_its_name(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    store = DirectoryStore(tmp_path)
    assert store.list("") == []
    with pytest.raises(AlreadyExistsError):
        store.create("x", b"1")
    with pytest.raises(AlreadyExistsError):
        store.open_writer("x", expected_bytes=0)


def test_writing_to_an_address_that_is_not_aligned_is_a_mistake_of_the_caller(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path)
    writer = store.open_writer("x", expected_bytes=0)
    if writer.alignment_bytes == 1:
        pytest.skip("no direct I/O here")
    with aligned(3 * 4096) as view, raises(UsageError, where=tmp_path / "x", expected="4096"):
        writer.write_at(0, view[1 : 1 + 4096])
    write_piece(writer, 0, b"fine")
    writer.finish(4)
    assert store.read("x", limit_bytes=9) == b"fine"


def test_nothing_is_changed_behind_a_link_within_the_store(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "precious").write_bytes(b"1")
    store = DirectoryStore(tmp_path / "s")
    store.make_folder("real")
    (tmp_path / "s" / "link").symlink_to(outside)
    (tmp_path / "s" / "real" / "link").symlink_to(outside)
    before = sorted(outside.rglob("*"))
    for place in ("link", "link/deep", "real/link"):
        for change in (
            lambda name: store.create(name, b"x"),
            store.make_folder,
            lambda name: store.make_folder(name, parents=False),
            lambda name: store.open_writer(name, expected_bytes=8),
            store.lock,
            store.delete,
            store.delete_folder,
        ):
            with raises(UsageError, where=tmp_path / "s", found=tmp_path / "outside"):
                change(f"{place}/precious")
    assert sorted(outside.rglob("*")) == before
    assert store.read("link/precious", limit_bytes=9) == b"1"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "s").symlink_to(tmp_path / "there")
    store = DirectoryStore(tmp_path / "s")
    store.make_folder("a")
    store.create("a/x", b"1")
    assert (tmp_path / "there" / "a" / "x").read_bytes() == b"1"


def test_a_folder_whose_name_could_not_be_made_durable_is_not_there(tmp_path: Path) -> None:
    disk = FailingDisk(1, errno.EIO, kinds=frozenset({Kind.SYNC_FOLDER}))
    store = DirectoryStore(tmp_path, disk=disk)
    with raises(StorageError, found="EIO"):
        store.make_folder("a")
    assert store.list("") == []
    store.make_folder("a")
    assert disk.calls == 2


@pytest.mark.parametrize("call", ["list", "file_names", "folder_names"])
def test_an_entry_that_cannot_be_looked_at_is_a_storage_error(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StaleEntry:
        name, path = "a", str(tmp_path / "a")

        def is_symlink(self) -> bool:  # a system call where the filesystem tells no types
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext([StaleEntry()]))
    with raises(StorageError, where=str(tmp_path)):
        getattr(DirectoryStore(tmp_path), call)("")
