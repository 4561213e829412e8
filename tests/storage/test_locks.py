"""Locks: who holds them, what others see, and what must not let go of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.errors import StorageError
from laststep.storage import locks
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from laststep.testing.stores import in_child
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from laststep.storage.store import Lock


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "s")


def seen_elsewhere(store: DirectoryStore) -> bool:
    """Whether another process sees the lock."""
    return in_child(lambda: DirectoryStore(store.url).is_locked("x.lock"))


def test_reading_and_copying_the_file_leaves_the_lock_alone(
    store: DirectoryStore, tmp_path: Path
) -> None:
    lock = store.lock("x.lock")
    shutil.copytree(store.url, tmp_path / "copy")
    assert seen_elsewhere(store)
    lock.close()
    assert not seen_elsewhere(store)


def in_a_child_that_outlives_its_parent(first: Callable[[], object]) -> tuple[int, int]:
    """A child does that and forks a grandchild; once the child is dead, the grandchild's id and a
    pipe whose closing ends it."""
    told, tell = os.pipe()
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        kept = first()
        os.close(end)
        if os.fork() == 0:
            os.write(tell, b"%d" % os.getpid())
            os.read(ended, 1)
            os._exit(int(kept is None))
        signal.pause()
    os.close(tell)
    os.close(ended)
    worker = int(os.read(told, 20))
    os.close(told)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return worker, end


def test_a_worker_that_outlives_the_holder_does_not_hold_it(store: DirectoryStore) -> None:
    worker, end = in_a_child_that_outlives_its_parent(lambda: store.lock("x.lock"))
    os.kill(worker, 0)  # it lives
    assert not store.is_locked("x.lock")
    os.close(end)


def test_who_was_handed_the_descriptor_holds_it_after_the_first_holder_died(
    store: DirectoryStore,
) -> None:
    here, there = socket.socketpair()

    def hand_over() -> bool:
        lock = store.lock("x.lock")
        lock.mark(3)
        socket.send_fds(there, [b"."], [lock.fileno()])
        return True

    assert in_child(hand_over)
    there.close()
    assert store.is_locked("x.lock")  # by the message alone, which nobody has read
    _, (fd,), _, _ = socket.recv_fds(here, 1, 1)
    lock = locks.FileLock(fd, "x.lock")
    assert store.marked("x.lock") == ((3, 3),)
    lock.clear(3)
    assert store.marked("x.lock") == ()
    assert store.is_locked("x.lock")
    lock.close()
    assert not store.is_locked("x.lock")
    here.close()


def test_a_fork_waits_for_a_lock_that_is_being_taken(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of the moment between would hold it and not know."""
    inside, forked = threading.Event(), threading.Event()
    real = fcntl.fcntl

    def slow(fd: int, command: int, *more: bytes) -> object:
        found = real(fd, command, *more)
        if command == fcntl.F_OFD_SETLK:
            inside.set()
            forked.wait(0.2)  # in vain, since it waits for this
        return found

    monkeypatch.setattr(fcntl, "fcntl", slow)
    taken: list[Lock] = []
    taking = threading.Thread(target=lambda: taken.append(store.lock("x.lock")))
    taking.start()
    assert inside.wait(PATIENCE_S)
    r, w = os.pipe()
    ready, running = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(w)
        os.write(running, b"1")
        os.read(r, 1)  # outlives the lock
        os._exit(0)
    assert os.read(ready, 1)
    forked.set()
    taking.join()
    taken[0].close()
    try:
        assert not store.is_locked("x.lock")
    finally:
        os.close(w)
        os.waitpid(child, 0)
        for descriptor in (r, ready, running):
            os.close(descriptor)


def test_marks_are_seen_and_cleared_one_by_one(store: DirectoryStore) -> None:
    lock = store.lock("x.lock")
    assert store.marked("x.lock") == ()
    for place in (1, 4, 5, 6, 1 << 40):
        lock.mark(place)
    lock.mark(4)
    assert store.marked("x.lock") == ((1, 1), (4, 6), (1 << 40, 1 << 40))
    lock.clear(5)
    lock.clear(9)
    assert store.marked("x.lock") == ((1, 1), (4, 4), (6, 6), (1 << 40, 1 << 40))
    lock.close()
    assert store.marked("x.lock") == store.marked("absent.lock") == ()


def test_a_link_in_the_place_of_a_lock_is_refused(store: DirectoryStore, tmp_path: Path) -> None:
    store.make_folder("terms")
    for name, target in (("a", "nowhere"), ("b", "there")):
        (tmp_path / "there").write_bytes(b"")
        (tmp_path / "s" / "terms" / name).symlink_to(tmp_path / target)
        with raises(StorageError, where=tmp_path / "s" / "terms", found="ELOOP"):
            store.lock(f"terms/{name}")
    assert not (tmp_path / "nowhere").exists()


def test_a_child_forked_inside_of_a_lock_call_can_lock_on_other_threads(tmp_path: Path) -> None:
    def lock_on_another_thread() -> None:
        thread = threading.Thread(target=lambda: locks.take(Disk(), str(tmp_path / "a.lock")))
        thread.start()
        thread.join(60)
        os._exit(int(thread.is_alive()))

    with locks._mutex:  # as if a signal handler ran inside of `take` and forked
        child = os.fork()
        if child == 0:
            lock_on_another_thread()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
