"""The memory that a restore reads through: in huge pages where the system has them, and its own."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from laststep.memory.pool import SLOT_BYTES, ReadBuffers
from laststep.memory.segments import Mapping
from smaps import flags_at

HUGE_PAGE_BYTES = 2 << 20


def test_the_bytes_of_a_slot_are_no_other_slots() -> None:
    with ReadBuffers(2) as room:
        slots = [room.lease(0) for _ in range(4)]
        for slot in slots:
            assert slot is not None
            room.view(slot)[:] = bytes([slot + 1]) * SLOT_BYTES
        for slot in slots:
            assert slot is not None
            assert room.view(slot).nbytes == room.slot_bytes == SLOT_BYTES
            assert set(bytes(room.view(slot))) == {slot + 1}
        assert room.lease(0) is None
        room.release(2)
        assert room.lease(0) == 2


def test_slots_lie_in_huge_pages() -> None:
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("this system has none")
    with ReadBuffers(1) as room:
        address = ctypes.addressof(ctypes.c_char.from_buffer(room.view(0)))
        assert address % HUGE_PAGE_BYTES == 0
        assert "hg" in flags_at(address)


def test_a_forked_child_has_none_of_it_and_leaves_alone_what_lies_there_now() -> None:
    with ReadBuffers(1) as room:
        inherited = [room]
        pid = os.fork()
        if pid == 0:
            try:
                own = Mapping(-1, room._mapping.size_bytes)
                assert own.address == room._mapping.address
                room.__exit__(None, None, None)
                inherited.clear()
                gc.collect()
                own.view[0] = 1
            except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        room.view(0)[0] = 1  # the parent's stays
