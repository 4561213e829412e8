"""No copy writes anything but its own bytes, whatever has become of its sources."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from expect import raises
from laststep.capture.gather import copy_each, fill, gather, hold_all, join
from laststep.capture.layout import ElementRange, StagingGroup
from laststep.constants import CHUNK_BYTES
from laststep.errors import TornCaptureError, UsageError
from laststep.memory import segments as memory
from laststep.memory.pool import Pool
from laststep.state.tree import Piece

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY = 0xEE


def planned(
    shape: tuple[int, ...], count: int
) -> tuple[list[torch.Tensor], StagingGroup, torch.Tensor]:
    """Tensors, a group of all of them that begins at byte 16, and a buffer with room behind it."""
    sources = [torch.full(shape, float(n)) for n in range(count)]
    elements = sources[0].numel()
    spans = tuple(ElementRange(n, 0, elements, True) for n in range(count))
    stop = 16 + 4 * elements * count
    group = StagingGroup(dtype="float32", device="cpu", start=16, stop=stop, spans=spans)
    return sources, group, torch.full((stop + 4096,), EMPTY, dtype=torch.uint8)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "larger": lambda t: torch.ones(t.numel() + 50),
    "smaller": lambda t: torch.ones(max(t.numel() - 1, 0)),
    "one element": lambda _: torch.ones(1),
    "no elements": lambda _: torch.ones(0),
    "another dtype": lambda t: t.double(),
    "integers": lambda t: t.int(),
    "larger and strided": lambda _: torch.ones(40, 8).t(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", [(7,), (3, 4), ()])
@pytest.mark.parametrize("count", [1, 5])
def test_a_source_that_is_not_as_planned_fails_its_copy_and_nothing_is_written_outside(
    change: str, shape: tuple[int, ...], count: int
) -> None:
    sources, group, buffer = planned(shape, count)
    sources[-1].data = CHANGES[change](sources[-1])
    if shape == () and change == "one element":
        gather(buffer, [group], sources)  # as many elements, of the same dtype
    else:
        with raises(TornCaptureError, expected="torch.", found="torch."):
            gather(buffer, [group], sources)
    assert bool((buffer[:16] == EMPTY).all())
    assert bool((buffer[group.stop :] == EMPTY).all())
    assert buffer.numel() == group.stop + 4096


@pytest.mark.parametrize("how", [gather, fill])
def test_a_source_as_planned_is_copied(how: Callable[..., None]) -> None:
    for shape in ((7,), (3, 4), ()):
        sources, group, buffer = planned(shape, 5)
        how(buffer, [group], sources)
        wanted = torch.cat([source.reshape(-1) for source in sources])
        assert torch.equal(buffer[16 : group.stop].view(torch.float32), wanted)


def test_copies_neither_repeat_nor_convert_nor_resize() -> None:
    with pytest.raises(TornCaptureError):
        copy_each([torch.zeros(4)], [torch.ones(1)])
    with pytest.raises(TornCaptureError):
        copy_each([torch.zeros(4)], [torch.ones(4, dtype=torch.float64)])
    with pytest.raises(TornCaptureError):
        join(torch.zeros(4), [torch.ones(2), torch.ones(3)])
    with pytest.raises(TornCaptureError):
        join(torch.zeros(4), [torch.ones(2), torch.ones(2).long()])


def piece(tensor: torch.Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece("t", "float32", shape, tensor.nbytes, "cpu", tensor.is_contiguous(), False)


def test_what_is_held_stays_whatever_is_assigned_to_the_live_tensor() -> None:
    live = torch.arange(10.0)
    (source,) = hold_all([live], [piece(live)]) or ()
    live.data = torch.zeros(100)
    assert source.in_place()
    assert torch.equal(source.tensor, torch.arange(10.0))
    source.tensor.untyped_storage().resize_(0)
    assert not source.in_place()


def test_a_tensor_that_is_not_its_piece_any_more_is_not_held() -> None:
    live = torch.arange(12.0).view(3, 4)
    planned_as = piece(live)
    for other in (torch.ones(5), live.int(), live.t()):
        assert hold_all([live, other], [planned_as, planned_as]) is None


def test_memory_that_is_gone_is_noticed_and_nobody_dies() -> None:
    fd = memory.create(4 * mmap.PAGESIZE)
    view = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    view.write(b"x" * 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    page = mmap.PAGESIZE
    assert memory.write_from(fd, 10, [(address, 3), (address + 5, 0), (address + 9, 4)])
    mapped = memory.Mapping(fd, 4 * page)
    assert bytes(mapped.view[9:18]) == b"\0" + 7 * b"x" + b"\0"
    many = [(address + n, 1) for n in range(3000)]
    assert memory.write_from(fd, 0, many)
    assert bytes(mapped.view[:3001]) == 3000 * b"x" + b"\0"
    view.close()
    assert not memory.write_from(fd, 0, [(address, page)])


def test_a_copy_that_would_leave_its_slot_is_refused() -> None:
    pool = Pool(2 * CHUNK_BYTES, pinned=False)
    try:
        source = torch.ones(64, dtype=torch.uint8)
        with raises(UsageError, found=True):
            pool.land(0, CHUNK_BYTES - 63, [(source.data_ptr(), 64)])
    finally:
        pool.close()


COPY_ON_MANY_THREADS_AFTER_A_FORK = """
import os, sys, threading
import torch
from laststep.capture.gather import copy_each

def copy():
    start.wait()
    copy_each([torch.empty(300, 300)], [torch.empty(300, 300)])

torch.set_num_threads(2)
torch.ones(100_000).sum()  # starts the threads of the pool
sys.stderr = open(os.devnull, "w")
failed = 0
for _ in range(40):
    child = os.fork()
    if child:
        failed += os.waitpid(child, 0)[1] != 0
        continue
    errors = []
    threading.excepthook = errors.append
    start = threading.Barrier(8)
    threads = [threading.Thread(target=copy) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    os._exit(len(errors))
print(failed)
"""


def test_threads_of_a_forked_process_can_copy_at_once() -> None:
    command = [sys.executable, "-W", "error", "-c", COPY_ON_MANY_THREADS_AFTER_A_FORK]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0", "torch's thread pool was renewed by several threads"
