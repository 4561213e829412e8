"""The pool: shared memory, ready ahead of time in steps, never beyond its cap."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import raises, warned
from laststep.constants import CHUNK_BYTES
from laststep.errors import StorageError
from laststep.memory import pool
from laststep.memory import segments as memory
from laststep.memory.pool import Pool, ReadBuffers
from laststep.memory.segments import Mapping
from laststep.process import system
from waiting import PATIENCE_S, wait_ready

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_STEP_SLOTS", 2)


def make(slots: int) -> Pool:
    return Pool(slots * CHUNK_BYTES, pinned=False)


def test_memory_is_made_ready_as_asked_for_and_grows_by_steps_to_the_cap() -> None:
    made = make(5)
    try:
        made.want(CHUNK_BYTES + 1)
        wait_ready(made)
        assert made.ready_bytes == 2 * CHUNK_BYTES
        slots = [made.lease(PATIENCE_S) for _ in range(5)]
        assert sorted(slots) == [0, 1, 2, 3, 4]
        assert made.ready_bytes == 5 * CHUNK_BYTES
        assert made.lease(0.05) is None  # at the cap
        made.want(100 * CHUNK_BYTES)
        wait_ready(made)
        assert made.ready_bytes == 5 * CHUNK_BYTES
        threading.Timer(0.05, made.release, (3,)).start()
        assert made.lease(PATIENCE_S) == 3
    finally:
        made.close()


def test_a_restore_reads_through_memory_of_its_own_while_the_pool_makes_nothing_ready() -> None:
    made = make(1)
    try:
        with made.reading(8) as room:
            assert isinstance(room, ReadBuffers)
            # No more than the pool may have itself, and at the least as much as keeps two reading.
            leased = [room.lease(PATIENCE_S) for _ in range(CHUNK_BYTES // room.slot_bytes)]
            assert sorted(leased) == [0, 1, 2, 3]
            assert room.lease(0.05) is None
            made.want(CHUNK_BYTES)
            assert made.lease(0.05) is None
        assert made.lease(PATIENCE_S) == 0
    finally:
        made.close()


def test_a_restore_that_begins_while_memory_is_made_ready_waits_for_one_slot_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go, made_pages = threading.Event(), threading.Event(), list[int]()
    allocate = Mapping.allocate

    def slow(self: Mapping, start: int, size_bytes: int) -> None:
        made_pages.append(start)
        begun.set()
        go.wait(PATIENCE_S)
        allocate(self, start, size_bytes)

    monkeypatch.setattr(Mapping, "allocate", slow)
    made = make(4)
    try:
        made.want(4 * CHUNK_BYTES)
        assert begun.wait(PATIENCE_S)
        with made.reading(1):
            go.set()
            assert made.lease(PATIENCE_S) == 0
            assert made_pages == [0]
        wait_ready(made)
        assert made.ready_bytes == 4 * CHUNK_BYTES
    finally:
        made.close()


def test_a_restore_reads_through_a_pool_that_is_pinned() -> None:
    made = make(4)
    try:
        made.pin()
        with made.reading(1) as room:
            assert room is made
    finally:
        made.close()


def test_tensors_and_bytes_of_a_slot_are_the_same_shared_memory() -> None:
    made = make(2)
    try:
        made.want(2 * CHUNK_BYTES)
        slot = made.lease(PATIENCE_S)
        assert slot is not None
        made.tensor(slot)[:4] = 7
        other = Mapping(made.fd, made.cap_bytes)
        assert bytes(other.view[slot * CHUNK_BYTES :][:4]) == b"\7" * 4
        made.view(slot)[0] = 9
        assert made.tensor(slot)[0] == 9
        assert len(made.view(slot)) == CHUNK_BYTES
    finally:
        made.close()


def test_a_pool_that_cannot_grow_goes_on_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = Mapping.allocate

    def short(self: Mapping, start: int, size_bytes: int) -> None:
        if start >= 2 * CHUNK_BYTES:
            raise MemoryError("no more pages")
        allocate(self, start, size_bytes)

    monkeypatch.setattr(Mapping, "allocate", short)
    made = make(6)
    try:
        made.want(6 * CHUNK_BYTES)
        wait_ready(made)
        assert made.ready_bytes == 2 * CHUNK_BYTES
        assert made.lease(PATIENCE_S) is not None
        assert made.lease(PATIENCE_S) is not None
        assert made.lease(0.05) is None
        made.want(6 * CHUNK_BYTES)
        wait_ready(made)
    finally:
        made.close()
    assert warned(caplog, 2 * CHUNK_BYTES)


def test_a_pool_without_any_memory_is_an_error_for_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Mapping, start: int, size_bytes: int) -> None:
        raise MemoryError("no pages at all")

    monkeypatch.setattr(Mapping, "allocate", fail)
    made = make(2)
    try:
        made.want(CHUNK_BYTES)
        with raises(StorageError, found="no pages at all", expected=str(CHUNK_BYTES)):
            made.lease(PATIENCE_S)
    finally:
        made.close()


@pytest.mark.parametrize("had", [0, 1])
def test_a_pool_that_could_not_grow_tries_again_for_the_next_save_and_the_next_restore(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, had: int
) -> None:
    allocate, tries = Mapping.allocate, []

    def short(self: Mapping, start: int, size_bytes: int) -> None:
        if start >= had * CHUNK_BYTES:
            tries.append(start)
            raise MemoryError("no more pages")
        allocate(self, start, size_bytes)

    made = make(3)
    try:
        made.want(had * CHUNK_BYTES)
        wait_ready(made)
        monkeypatch.setattr(Mapping, "allocate", short)
        for number in range(1, 4):
            made.want(2 * CHUNK_BYTES)
            wait_ready(made)
            assert len(tries) == number
        assert made.room_bytes == had * CHUNK_BYTES
        made.slots.reset()
        if not had:
            for _ in range(2):
                with pytest.raises(StorageError, match="no more pages"):
                    made.lease(PATIENCE_S)
        monkeypatch.setattr(Mapping, "allocate", allocate)
        with made.reading(1):
            pass
        assert made.lease(PATIENCE_S) is not None
        made.want(3 * CHUNK_BYTES)
        wait_ready(made)
        assert made.ready_bytes == 3 * CHUNK_BYTES
    finally:
        made.close()
    assert len(warned(caplog, had * CHUNK_BYTES)) == 1


def test_pages_are_touched_where_the_kernel_cannot_populate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system, "advise", lambda *_: errno.EINVAL)
    fd = memory.create(CHUNK_BYTES)
    mapping = Mapping(fd, CHUNK_BYTES)
    try:
        assert os.fstat(fd).st_blocks == 0
        mapping.populate(0, CHUNK_BYTES)
        assert os.fstat(fd).st_blocks * 512 == CHUNK_BYTES
    finally:
        mapping.close()
        os.close(fd)


def test_pages_for_which_there_is_no_room_are_an_error_and_not_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What the kernel says where whoever touches such a page gets SIGBUS: a filesystem is full.
    monkeypatch.setattr(system, "advise", lambda *_: errno.EFAULT)
    fd = memory.create(CHUNK_BYTES)
    mapping = Mapping(fd, CHUNK_BYTES)
    try:
        with pytest.raises(OSError, match="No space left"):
            mapping.populate(0, CHUNK_BYTES)
        assert os.fstat(fd).st_blocks == 0
    finally:
        mapping.close()
        os.close(fd)


def test_closing_a_pool_ends_its_thread_and_its_descriptor() -> None:
    before = set(threading.enumerate())
    made = make(4)
    made.want(4 * CHUNK_BYTES)
    fd = made.fd
    made.close()
    made.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_available_memory_is_that_of_the_machine_or_its_control_group() -> None:
    available = memory.available_bytes()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available <= total


def test_memory_that_is_ready_is_pinned_when_a_device_turns_up_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[int] = []
    all_pinned = threading.Event()

    def note(_self: Pool, slot: int) -> None:
        pinned.append(slot)
        if len(pinned) == 5:
            all_pinned.set()

    monkeypatch.setattr(Pool, "_pin", note)
    made = make(5)
    try:
        made.want(3 * CHUNK_BYTES)
        wait_ready(made)
        assert pinned == []
        made.pin()
        made.want(5 * CHUNK_BYTES)
        assert all_pinned.wait(PATIENCE_S)
        assert sorted(pinned) == [0, 1, 2, 3, 4]
    finally:
        made.close()


def _status_of(child: Callable[[], object]) -> int:
    """How a forked child that does this ends: 0, or the negative number of a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_pool_that_is_closed_in_a_forked_child_leaves_alone_what_lies_there_now() -> None:
    made = make(4)

    def child() -> None:
        # A child does not have the parent's mapping, so one of its own goes into the same hole:
        # the first, unless the kernel finds another hole above it.
        tried = [own := make(4)]
        while own._mapping.address != made._mapping.address:
            assert len(tried) < 100
            tried.append(own := make(4))
        made.close()
        slot = own.lease(PATIENCE_S)
        assert slot is not None
        own.view(slot)[:] = bytes(CHUNK_BYTES)  # not by torch: OpenMP does not survive a fork
        own.close()

    try:
        assert _status_of(child) == 0
    finally:
        made.close()


def test_a_forked_child_keeps_none_of_the_memory() -> None:
    pool = make(2)
    lent = os.dup(pool.fd)
    try:
        which = os.fstat(pool.fd)

        def look() -> None:
            for entry in list(Path("/proc/self/fd").iterdir()):
                with contextlib.suppress(OSError):  # that of the listing is closed by now
                    assert not os.path.samestat(os.fstat(int(entry.name)), which)

        assert _status_of(look) == 0
        os.fstat(pool.fd)  # the parent's own stay
    finally:
        os.close(lent)
        pool.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_mapping_that_is_collected_in_a_forked_child_leaves_alone_what_lies_there_now(
    closed: bool,
) -> None:
    fd = memory.create(CHUNK_BYTES)
    inherited = [Mapping(fd, CHUNK_BYTES)]
    looking = inherited[0].view[:1] if closed else None  # so that it stays mapped
    if closed:
        inherited[0].close()

    def child() -> None:
        nonlocal looking
        own = Mapping(memory.create(CHUNK_BYTES), CHUNK_BYTES)  # the parent's file is closed
        assert own.address == inherited[0].address
        inherited.clear()
        looking = None
        gc.collect()
        own.populate(0, CHUNK_BYTES)
        own.view[0] = 1

    assert _status_of(child) == 0
    inherited.clear()
    os.close(fd)


def test_pages_of_memory_that_is_pinned_are_made_a_step_ahead_and_never_beyond_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_when: dict[int, int] = {}
    """For each byte from which pages were made: how many slots were pinned by then."""
    pinned: list[int] = []
    begun = threading.Semaphore(0)

    def populate(self: Mapping, start: int, size_bytes: int) -> None:
        made_when[start] = len(pinned)
        begun.release()

    def pin(self: Pool, slot: int) -> None:
        if not pinned:  # of the first step all pages are there, of the second one all are asked for
            for _ in range(2 * 2 * 2):
                assert begun.acquire(timeout=PATIENCE_S)
        pinned.append(slot)

    monkeypatch.setattr(Mapping, "populate", populate)
    monkeypatch.setattr(Pool, "_pin", pin)
    made = Pool(8 * CHUNK_BYTES, pinned=True)
    try:
        made.want(5 * CHUNK_BYTES)
        wait_ready(made)
        assert pinned == [0, 1, 2, 3, 4]
        assert sorted(made_when) == [n * CHUNK_BYTES // 2 for n in range(2 * 5)]
        assert {made_when[n * CHUNK_BYTES // 2] for n in range(2 * 4)} == {0}
    finally:
        made.close()


def test_pinned_memory_for_which_there_are_no_pages_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = [3]

    def populate(self: Mapping, start: int, size_bytes: int) -> None:
        if start >= room[0] * CHUNK_BYTES:
            raise OSError("no more pages")

    monkeypatch.setattr(Mapping, "populate", populate)
    monkeypatch.setattr(Pool, "_pin", lambda *_: None)
    made, told = Pool(8 * CHUNK_BYTES, pinned=True), list[int]()
    made.tell_slots = told.append
    try:
        made.want(6 * CHUNK_BYTES)
        wait_ready(made)
        assert (made.ready_bytes, told) == (2 * CHUNK_BYTES, [2])
        room[0] = 8
        made.want(6 * CHUNK_BYTES)
        wait_ready(made)
        assert made.ready_bytes == 6 * CHUNK_BYTES
        made.close()
        assert told == [2, 4, 6]
    finally:
        made.close()


def test_what_others_have_of_the_cap_is_left_to_them_but_for_the_least_that_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = [5 * CHUNK_BYTES]
    made, told = make(8), list[int]()
    made.share(lambda: taken[0], least_bytes=2 * CHUNK_BYTES)
    made.tell_slots = told.append
    try:
        for others, ready in ((5, 4), (2, 6), (0, 8)):  # a step goes beyond the least
            taken[0] = others * CHUNK_BYTES
            made.want(8 * CHUNK_BYTES)
            wait_ready(made)
            assert made.ready_bytes == ready * CHUNK_BYTES
    finally:
        made.close()
    assert [slots for slots in told if slots in (4, 6)][:1] == [4]
    assert told[-1] == 8
    assert warned(caplog, 5 * CHUNK_BYTES)
