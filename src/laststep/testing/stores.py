"""The test suite that every store must pass: subclass `StoreConformance`, implement `make_store`.

    class TestMyStore(SharedStoreConformance):
        def make_store(self, folder):
            return MyStore(f"my://{folder}")

`SharedStoreConformance` adds the tests for a store that several processes open at once, such as a
trainer and its flusher. Any test framework works that calls methods named `test_…` with an empty
folder of their own as `tmp_path`, as pytest does. `make_store` is called again with the same folder
for a second view of the same files; for a shared store also in a forked child.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from laststep.errors import (
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from laststep.storage.store import FileWriting, Lock, Store

_BAD_NAMES = ("", "/", "/etc/x", "..", "../x", "a/../b", "a/./b", "a//b", "a/", ".", "a\0b")


__all__ = ["SharedStoreConformance", "StoreConformance"]


class StoreConformance:
    """One test for each MUST of the protocol."""

    races = 20
    """Number of races to create one name; use fewer if the server is slow."""

    def make_store(self, folder: Path) -> Store:
        """Return a store of the files in `folder`, or in another place that the name identifies."""
        raise NotImplementedError

    # Names

    def test_a_name_that_could_leave_the_store_is_refused_everywhere(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        for name in _BAD_NAMES:
            for call in calls_with(store, name):
                expect(UsageError, call)

    # Folders

    def test_looking_finds_nothing_and_does_not_make_the_place(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        check(bool(store.url), "url is empty")
        for folder in ("", "nowhere/at-all"):
            check(store.list(folder) == [], f"{folder!r} of a new store is not empty")
            check(store.file_names(folder) == (), f"{folder!r} of a new store has files")
        free = store.free_bytes()
        check(free is None or free >= 0, f"free_bytes is {free}")
        check(not store.is_locked("x.lock"), "an absent lock is held")
        check(not (tmp_path / "s").exists(), "looking made the root")

    def test_a_folder_is_made_with_its_parents_and_only_once(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        store.make_folder("a/b/c")
        expect(AlreadyExistsError, lambda: store.make_folder("a/b/c"))
        expect(AlreadyExistsError, lambda: store.make_folder("a"))
        store.make_folder("a/b/d", parents=False)
        expect(NotFoundError, lambda: store.make_folder("x/y", parents=False))
        expect(NotFoundError, lambda: store.create("nowhere/x", b"1"))
        expect(NotFoundError, lambda: store.open_writer("nowhere/x", expected_bytes=1))
        expect(NotFoundError, lambda: store.lock("nowhere/x"))
        store.sync_folder("a/b")
        store.sync_folder("")
        names = [(entry.name, entry.is_folder) for entry in store.list("a/b")]
        check(names == [("c", True), ("d", True)], f"listed {names}")

    def test_entries_come_by_name_with_size_and_time(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        before = time.time()
        store.create("b", b"12345")
        store.create("a", b"")
        store.make_folder("c/folder")
        for name in ("y", "x"):
            store.create(f"c/{name}", b"1")
        entries = store.list("")
        seen = [(entry.name, entry.is_folder) for entry in entries]
        check(seen == [("a", False), ("b", False), ("c", True)], f"listed {entries}")
        check([entry.size_bytes for entry in entries[:2]] == [0, 5], f"listed {entries}")
        check(all(abs(entry.modified_s - before) < 600 for entry in entries), f"listed {entries}")
        check(sorted(store.file_names("")) == ["a", "b"], "other names than the list has")
        check(sorted(store.file_names("c")) == ["x", "y"], "other names than the list has")

    def test_a_folder_is_deleted_with_all_below_it_though_somebody_reads(
        self, tmp_path: Path
    ) -> None:
        store = self.make_store(tmp_path / "s")
        store.make_folder("a/deep/down")
        write_file(store, "a/deep/down/x", os.urandom(1 << 16))
        store.create("a/manifest", b"2")
        store.create("keep", b"3")
        reader = store.open_reader("a/deep/down/x", cached=True)
        store.delete_folder("a", first="manifest")
        check([entry.name for entry in store.list("")] == ["keep"], "something is left")
        store.delete_folder("a")
        for _ in range(2):  # the name is free again
            store.make_folder("a")
            check(store.list("a") == [], "something of it is still there")
            store.create("a/x", b"1")
            store.delete_folder("a", first="manifest")
        reader.close()

    # Small files

    def test_what_was_created_is_read_back_until_it_is_deleted(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        expect(NotFoundError, lambda: store.read("x", limit_bytes=1))
        expect(NotFoundError, lambda: store.open_reader("x"))
        expect(NotFoundError, lambda: store.open_reader("x", cached=True))
        data = bytes(range(256)) * 41
        store.create("x", data)
        check(store.read("x", limit_bytes=len(data)) == data, "other bytes came back")
        expect(CorruptError, lambda: store.read("x", limit_bytes=len(data) - 1))
        again = self.make_store(tmp_path / "s")
        check(again.read("x", limit_bytes=1 << 20) == data, "a second store reads other bytes")
        for name in ("x", "x", "nowhere/x"):
            store.delete(name)
        expect(NotFoundError, lambda: store.read("x", limit_bytes=9))

    def test_a_taken_name_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        store.create("x", b"first")
        store.make_folder("f")
        for name in ("x", "f"):
            expect(AlreadyExistsError, functools.partial(store.create, name, b"second"))
        expect(AlreadyExistsError, lambda: store.open_writer("x", expected_bytes=0))
        check(store.read("x", limit_bytes=99) == b"first", "it was overwritten")
        check([entry.name for entry in store.list("")] == ["f", "x"], "debris is left")

    def test_of_many_who_create_one_name_exactly_one_wins(self, tmp_path: Path) -> None:
        for turn in range(self.races):
            stores = [self.make_store(tmp_path / "s") for _ in range(8)]
            won, lost = race_to_create(stores, f"x{turn}")
            stored = stores[0].read(f"x{turn}", limit_bytes=1000)
            check(won == [stored], f"{len(won)} won, or the file is not the winner's")
            is_told = all(isinstance(error, AlreadyExistsError) for error in lost)
            check(is_told, f"others failed with {lost}")

    def test_a_reader_never_sees_a_part_of_a_created_file(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        data = os.urandom(1 << 16)
        stop = threading.Event()

        def look() -> None:
            other = self.make_store(tmp_path / "s")
            while not stop.is_set():
                for turn in range(10):
                    with contextlib.suppress(NotFoundError):
                        content = other.read(f"x{turn}", limit_bytes=1 << 20)
                        check(content == data, f"a part of {len(content)} bytes was seen")

        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            try:
                for turn in range(10):
                    store.create(f"x{turn}", data)
            finally:
                stop.set()
            looking.result()

    # Large files

    def test_a_file_is_read_back_from_any_offset_and_up_to_its_end(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        places = [(0, 4096), (4096, 8192), (1, 4095), (4095, 2), (8192, 5000), (12288, 1)]
        places += [(0, 6 << 20), (3, 1 << 20), ((5 << 20) + 1, 12344), (5 << 20, 12345)]
        for length in (0, 1, 4096, 4097, 10000, (5 << 20) + 12345):
            data = os.urandom(length)
            write_file(store, f"x{length}", data)
            ends = tuple((offset, 16384) for offset in (0, length, length + 1, length + 8192))
            for cached in (False, True):
                reader = store.open_reader(f"x{length}", cached=cached)
                check(reader.size_bytes == length, f"size is {reader.size_bytes}")
                for offset, size in (*ends, *(places if length > 1 << 20 else ())):
                    for shift in (0, 1):
                        with aligned(size + shift) as view:
                            count = reader.read_into(offset, view[shift : shift + size])
                            wanted = data[offset : offset + size]
                            check(count == len(wanted), f"{count} of {size} bytes at {offset}")
                            check(view[shift : shift + count] == wanted, f"bytes at {offset}")
                reader.close()
                reader.close()

    def test_a_file_has_exactly_the_size_it_was_finished_with(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        for size, expected in ((0, 1 << 20), (1, 0), (4095, 4096), (4097, 1 << 20), (9000, 1)):
            name = f"x{size}"
            writer = store.open_writer(name, expected_bytes=expected)
            with aligned(12288) as view:
                view[:] = b"\1" * 12288
                writer.write_at(0, view)
            writer.finish(size)
            entry = next(entry for entry in store.list("") if entry.name == name)
            check(entry.size_bytes == size, f"size is {entry.size_bytes}, not {size}")
            check(store.read(name, limit_bytes=1 << 20) == b"\1" * size, "other bytes")

    def test_several_threads_write_one_file(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        data = os.urandom(1 << 20)
        writer = store.open_writer("x", expected_bytes=len(data))
        step = 1 << 16
        run_all(
            lambda offset: write_piece(writer, offset, data[offset : offset + step]),
            [(offset,) for offset in range(0, len(data), step)],
        )
        writer.finish(len(data))
        check(store.read("x", limit_bytes=1 << 20) == data, "other bytes came back")

    def test_a_second_name_outlives_the_first(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        for folder in ("a", "b", "c"):
            store.make_folder(folder)
        data = os.urandom(5000)
        write_file(store, "a/x", data)
        if not store.link("a/x", "b/y"):  # a store may have no links
            return
        expect(AlreadyExistsError, lambda: store.link("a/x", "b/y"))
        expect(NotFoundError, lambda: store.link("a/absent", "b/z"))
        check(store.link("b/y", "c/z"), "a second name cannot be linked")
        store.delete_folder("a", first="absent")
        store.delete("b/y")
        entries = [(entry.name, entry.size_bytes) for entry in store.list("c")]
        check(entries == [("z", len(data))], f"listed {entries}")
        reader = store.open_reader("c/z", cached=True)
        with contextlib.closing(reader), aligned(8192) as view:
            count = reader.read_into(0, view)
            check(bytes(view[:count]) == data, "other bytes came back")

    def test_a_writer_refuses_what_is_not_aligned_and_more_once_it_is_closed(
        self, tmp_path: Path
    ) -> None:
        store = self.make_store(tmp_path / "s")
        writer = store.open_writer("x", expected_bytes=0)
        alignment = writer.alignment_bytes
        check(alignment >= 1 and alignment & (alignment - 1) == 0, f"alignment {alignment}")
        with aligned(2 * alignment) as view:
            if alignment > 1:
                expect(UsageError, lambda: writer.write_at(1, view[:alignment]))
                expect(UsageError, lambda: writer.write_at(0, view[: alignment - 1]))
            writer.finish(0)
            writer.close()
            expect(LaststepError, lambda: writer.write_at(0, view))
        expect(LaststepError, lambda: writer.finish(0))

    # Locks

    def test_a_lock_is_refused_to_a_second_holder_in_the_same_process(self, tmp_path: Path) -> None:
        first, second = self.make_store(tmp_path / "s"), self.make_store(tmp_path / "s")
        lock = first.lock("x.lock")
        for store in (first, second):
            expect(AlreadyExistsError, functools.partial(store.lock, "x.lock"))
            check(store.is_locked("x.lock"), "it does not look held")
        lock.close()
        lock.close()
        check(not second.is_locked("x.lock"), "it looks held")
        second.lock("x.lock").close()

    def test_what_is_marked_on_a_lock_is_seen_until_it_is_cleared(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        lock = store.lock("x.lock")
        for place in (3, 4, 9):
            lock.mark(place)
        seen = [place for low, high in store.marked("x.lock") for place in range(low, high + 1)]
        check(seen in ([], [3, 4, 9]), f"marked are {seen}")  # a store may have no marks
        for place in (3, 4, 9):
            lock.clear(place)
        check(store.marked("x.lock") == (), "a mark is left")
        lock.close()


class SharedStoreConformance(StoreConformance):
    """The tests of `StoreConformance`, and more for a store that several processes open."""

    def test_a_lock_is_seen_and_respected_by_another_process(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        lock = store.lock("x.lock")

        def attempt() -> bool:
            other = self.make_store(tmp_path / "s")
            if not other.is_locked("x.lock"):
                return False
            try:
                other.lock("x.lock")
            except AlreadyExistsError:
                return True
            return False

        # This query must not release the lock: closing a second descriptor drops a POSIX lock.
        check(store.is_locked("x.lock"), "it does not look held")
        check(in_child(attempt), "another process does not see the lock")
        lock.close()
        check(not in_child(attempt), "another process still sees the lock")

    def test_a_lock_goes_with_the_process_that_held_it(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        held: list[Lock] = []  # not closed before the child ends

        def take() -> bool:
            held.append(self.make_store(tmp_path / "s").lock("x.lock"))
            return store.is_locked("x.lock")

        check(in_child(take), "the child did not get the lock")
        check(not store.is_locked("x.lock"), "the lock outlived its holder")
        store.lock("x.lock").close()

    def test_a_forked_child_does_not_inherit_a_lock(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "s")
        lock = store.lock("x.lock")

        def close_mine() -> bool:
            lock.close()
            return store.is_locked("x.lock")

        check(in_child(close_mine), "the child let go of its parent's lock")
        check(store.is_locked("x.lock"), "the lock is lost")
        lock.close()


def race_to_create(stores: Sequence[Store], name: str) -> tuple[list[bytes], list[LaststepError]]:
    """Create one name in all stores at once; return the winners' data and the losers' errors."""
    barrier = threading.Barrier(len(stores))
    won: list[bytes] = []
    lost: list[LaststepError] = []

    def contend(store: Store, data: bytes) -> None:
        barrier.wait()
        try:
            store.create(name, data)
        except LaststepError as error:
            lost.append(error)
        else:
            won.append(data)

    run_all(contend, [(store, b"%d" % number * 100) for number, store in enumerate(stores)])
    return won, lost


def calls_with(store: Store, name: str) -> list[Callable[[], object]]:
    """Return every call that takes a name; for "" only those that do not take it as the root."""
    calls: list[Callable[[], object]] = [
        lambda: store.read(name, limit_bytes=10),
        lambda: store.create(name, b"x"),
        lambda: store.open_writer(name, expected_bytes=0),
    ]
    plain = (store.make_folder, store.delete, store.delete_folder, store.open_reader, store.lock)
    looking = (store.list, store.file_names, store.folder_names, store.sync_folder)
    named = (*plain, store.is_locked, *(looking if name else ()))
    return calls + [functools.partial(call, name) for call in named]


def check(holds: object, found: str) -> None:
    if not holds:
        raise AssertionError(found)


def expect(kind: type[LaststepError], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


@contextlib.contextmanager
def aligned(size_bytes: int) -> Iterator[memoryview]:
    pages = mmap.mmap(-1, max(1, size_bytes))
    with memoryview(pages) as view:
        yield view[:size_bytes]


def write_piece(writer: FileWriting, offset: int, data: bytes) -> None:
    """Write bytes from page-aligned memory, padded to the writer's alignment."""
    padded = -(-len(data) // writer.alignment_bytes) * writer.alignment_bytes
    with aligned(padded) as view:
        view[: len(data)] = data
        writer.write_at(offset, view)


def write_file(store: Store, name: str, data: bytes) -> None:
    """Write a whole data file in pieces, from the last to the first."""
    writer = store.open_writer(name, expected_bytes=len(data))
    step = 1 << 20
    for offset in reversed(range(0, len(data), step)):
        write_piece(writer, offset, data[offset : offset + step])
    writer.finish(len(data))


def run_all(target: Callable[..., object], calls: Sequence[tuple[object, ...]]) -> None:
    """Call `target` with each of these arguments, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda arguments: target(*arguments), calls))


def in_child(question: Callable[[], bool]) -> bool:
    """Call `question` in a forked child process and return its result."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if question() else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    check(status in (0, 1), f"the child failed with {status}")
    return status == 0
