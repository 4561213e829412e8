"""Object stores: what every store must do, and folders that are markers, on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from laststep.storage import objects, transfers
from laststep.storage.objects import ObjectStore
from laststep.testing.stores import SharedStoreConformance, in_child, write_file
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

_OPEN = (
    "import sys; from laststep.storage.objects import ObjectStore; s = ObjectStore(sys.argv[1]);"
)


def elsewhere(store: ObjectStore, code: str) -> subprocess.Popen[str]:
    """A process of its own that runs `code`, with the store as `s`."""
    command = [sys.executable, "-c", f"{_OPEN} {code}", store.url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def said(process: subprocess.Popen[str]) -> str:
    """All that it prints, once it has ended."""
    return process.communicate(timeout=PATIENCE_S)[0].strip()


class TestObjectStore(SharedStoreConformance):
    """Of the tests with another process, those that fork are replaced by ones that start one:
    obstore's threads stay in the parent of a fork."""

    races = 1

    @pytest.fixture(autouse=True)
    def _server(self, s3: str) -> None:
        self.url = s3

    def make_store(self, folder: Path) -> ObjectStore:
        return ObjectStore(f"{self.url}/{folder.relative_to('/')}")

    def test_a_lock_is_seen_and_respected_by_another_process(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        lock = store.lock("x.lock")
        attempt = "print(s.is_locked('x.lock')); s.lock('x.lock').close(); print('got it')"
        assert said(elsewhere(store, attempt)) == "True"
        lock.close()
        assert said(elsewhere(store, attempt)) == "False\ngot it"

    def test_a_lock_goes_with_the_process_that_held_it(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        child = elsewhere(store, "l = s.lock('x.lock'); print('held', flush=True); input()")
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert store.is_locked("x.lock")
        with pytest.raises(AlreadyExistsError):
            store.lock("x.lock")
        child.kill()
        child.communicate()
        assert not store.is_locked("x.lock")
        store.lock("x.lock").close()

    def test_a_forked_child_does_not_inherit_a_lock(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        lock = store.lock("x.lock")

        def close_mine() -> bool:
            lock.close()
            try:
                store.is_locked("x.lock")
            except UsageError:
                return True
            return False

        assert in_child(close_mine), "a forked child waits for threads that it does not have"
        assert store.is_locked("x.lock")
        lock.close()


@pytest.fixture
def store(s3: str, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"{s3}{tmp_path}")


def test_who_slept_while_a_folder_was_deleted_cannot_bring_it_back(
    store: ObjectStore, s3: str, tmp_path: Path
) -> None:
    sleeper = ObjectStore(store.url)
    store.make_folder("a/deep")
    writer = sleeper.open_writer("a/x", expected_bytes=3)
    sleeper.create("a/deep/y", b"1")
    store.delete_folder("a")
    writer.write_at(0, memoryview(b"123"))
    with pytest.raises(NotFoundError):
        writer.finish(3)
    with pytest.raises(NotFoundError):
        sleeper.create("a/deep/z", b"1")
    assert store.list("") == store.list("a") == store.list("a/deep") == []
    assert store._bucket.below(store._bucket.prefix) == []


def test_a_folder_that_was_made_again_is_not_the_one_that_a_sleeper_knew(
    store: ObjectStore,
) -> None:
    sleeper = ObjectStore(store.url)
    store.make_folder("a")
    sleeper.create("a/x", b"1")
    store.delete_folder("a")
    store.make_folder("a")
    with pytest.raises(NotFoundError):
        sleeper.create("a/manifest", b"1")
    assert store.list("a") == []


def test_a_new_folder_is_empty_whatever_a_dead_writer_left_under_its_name(
    store: ObjectStore,
) -> None:
    store.make_folder("a")
    store.delete_folder("a")
    store._bucket.create(store._key("a/manifest"), b"of one that died before it looked again")
    assert store.list("a") == []
    store.make_folder("a")
    assert store.list("a") == []
    store.create("a/manifest", b"mine")


def test_what_a_dead_deleter_left_is_listed_as_temporary_and_can_be_deleted(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.make_folder("a")
    store.create("a/x", b"1")

    def die(key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "_empty", die)
        with pytest.raises(KeyboardInterrupt):
            store.delete_folder("a")
    [left] = store.list("")
    assert left.is_folder
    assert left.name.startswith("a.tmp-")
    assert store.list("a") == []
    store.delete_folder(left.name)
    assert store._bucket.below(store._bucket.prefix) == []


def test_the_name_of_a_marker_is_refused(store: ObjectStore) -> None:
    with raises(UsageError, found="'.a.folder'"):
        store.create(".a.folder", b"1")


def test_a_lease_that_is_not_renewed_ends_by_the_clock_of_the_server(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects.Holder, "is_gone", False)
    lock = store.lock("x.lock")
    other = ObjectStore(store.url)
    now = other._leases.now_s()
    monkeypatch.setattr("time.time", lambda: now + 1e6)  # our own clock has no say
    assert other.is_locked("x.lock")
    with monkeypatch.context() as later:
        later.setattr(objects.Leases, "now_s", lambda self: now + objects.DEAD_S + 2)
        assert not other.is_locked("x.lock")
        taken = other.lock("x.lock")
    lock._renew_now()
    assert lock._over.is_set()
    lock.close()
    assert other.is_locked("x.lock"), "who has lost a lease let go of another's"
    taken.close()
    assert not store.is_locked("x.lock")


def test_a_lease_that_is_renewed_stays(store: ObjectStore) -> None:
    lock = store.lock("x.lock")
    before = store._bucket.head(store._key("x.lock"))
    lock._renew_now()
    after = store._bucket.head(store._key("x.lock"))
    assert before is not None
    assert after is not None
    assert after.token != before.token
    assert store.is_locked("x.lock")
    assert not lock._over.is_set()
    lock.close()


@pytest.mark.parametrize("early_bytes", [transfers.EARLY_BYTES, transfers.PART_BYTES])
def test_writes_in_any_order_make_the_file(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, early_bytes: int
) -> None:
    """What does not fit into memory until its turn waits on the disk."""
    monkeypatch.setattr(transfers, "EARLY_BYTES", early_bytes)
    step = transfers.PART_BYTES // 2 + 123
    size = 6 * step + 77
    data = memoryview(os.urandom(size))
    writer = store.open_writer("x", expected_bytes=size)
    for start in (5 * step, 2 * step, 0, 3 * step, 6 * step, step, 4 * step):
        piece = bytearray(data[start : start + step])
        writer.write_at(start, memoryview(piece))
        piece[:] = bytes(len(piece))  # the memory of a write is used again
    writer.finish(size)
    back = bytearray(size)
    assert store.open_reader("x").read_into(0, memoryview(back)) == size
    assert back == data


def test_several_files_are_written_by_few_threads_in_a_bad_order(store: ObjectStore) -> None:
    step, files = 2 * transfers.PART_BYTES, ("x", "y", "z")
    data = os.urandom(3 * step)
    writers = {name: store.open_writer(name, expected_bytes=len(data)) for name in files}
    chunks = [(name, start) for start in (2 * step, step, 0) for name in files]

    def write(name: str, start: int) -> None:
        writers[name].write_at(start, memoryview(data)[start : start + step])

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write, *chunk) for chunk in chunks]:
            done.result(timeout=PATIENCE_S)
    for name in files:
        writers[name].finish(len(data))
        assert store.read(name, limit_bytes=len(data)) == data


def test_bytes_that_never_came_are_zeros_and_those_that_were_sent_are_not_cut(
    store: ObjectStore,
) -> None:
    part = transfers.PART_BYTES
    writer = store.open_writer("x", expected_bytes=3 * part)
    writer.write_at(2 * part, memoryview(b"1" * part))
    writer.finish(3 * part + 5)
    assert store.read("x", limit_bytes=4 * part) == bytes(2 * part) + b"1" * part + bytes(5)
    writer = store.open_writer("y", expected_bytes=3 * part)
    writer.write_at(0, memoryview(bytes(2 * part)))
    with pytest.raises(UsageError):
        writer.write_at(part, memoryview(bytes(part)))
    with pytest.raises(UsageError):
        writer.finish(part)
    assert store.file_names("") == ("x",)


def test_parts_grow_with_the_file_so_that_there_are_never_too_many() -> None:
    assert transfers.part_bytes_of(1 << 30) == transfers.PART_BYTES
    for expected in (1 << 37, 1 << 40, 4 << 40):
        size = transfers.part_bytes_of(expected)
        assert size % (1 << 20) == 0
        assert expected * 5 // 4 <= 10_000 * size


def test_a_bucket_that_the_server_does_not_have_is_named(s3: str) -> None:
    with pytest.raises(StorageError, match="404 NoSuchBucket") as caught:
        ObjectStore("s3://nowhere/run").list("")
    assert caught.value.where == "s3://nowhere/run"


def test_names_may_have_any_letters(store: ObjectStore) -> None:
    data = os.urandom(transfers.PART_BYTES + 1)
    store.make_folder("a ö%20+&=")
    for name in ("x y", "ü", "50%", "a+b&c=d", "~'()!*"):
        write_file(store, f"a ö%20+&=/{name}", data)
        assert store.read(f"a ö%20+&=/{name}", limit_bytes=len(data)) == data
    assert len(store.file_names("a ö%20+&=")) == 5
