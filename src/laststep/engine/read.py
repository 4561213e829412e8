"""Read planned ranges of stored files through the pool, verify every block, deliver the bytes.

Knows nothing of what the bytes mean, nor of torch. Several threads read, each into a slot of its own;
a block whose digest is wrong is read a second time before it counts as damage. The first error stops
all of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laststep.codecs.digests import DIGEST_BYTES, block_digests
from laststep.errors import Corrupt
from laststep.plan.load import Read
from laststep.storage.store import Reader
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """A file to read from: its data start at `data_at`, `blocks` are its blocks' digests."""

    reader: Reader
    data_at: int
    blocks: bytes
    where: str


class Room(Protocol):
    """Where reads land: the pool."""

    def lease(self, timeout_s: float | None = None) -> int | None: ...

    def view(self, slot: int) -> memoryview: ...

    def release(self, slot: int) -> None: ...


Deliver = Callable[[Read, int], None]


def read_all(
    files: Sequence[ReadFile], reads: Sequence[Read], room: Room, deliver: Deliver, *, threads: int
) -> int:
    """Carry out all reads; `deliver(read, slot)` is called on the reading threads with verified
    bytes, which are gone when it returns. Returns the number of bytes read. Raises the first error."""
    todo: queue.SimpleQueue[Read] = queue.SimpleQueue()
    for read in reads:
        todo.put(read)
    errors: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                try:
                    read = todo.get_nowait()
                except queue.Empty:
                    return
                _one(files[read.file], read, room, deliver)
        except BaseException as error:
            errors.append(error)
            stop.set()

    workers = [
        threading.Thread(target=work, name=f"laststep-read-{n}", daemon=True)
        for n in range(min(threads, len(reads)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(read.stop - read.start for read in reads)


def _one(file: ReadFile, read: Read, room: Room, deliver: Deliver) -> None:
    slot = room.lease()
    if slot is None:
        return
    try:
        _verified(file, read, room.view(slot))
        deliver(read, slot)
    finally:
        room.release(slot)


def _verified(file: ReadFile, read: Read, into: memoryview) -> None:
    size = read.stop - read.start
    expected = file.blocks[
        read.start // BLOCK_BYTES * DIGEST_BYTES : -(-read.stop // BLOCK_BYTES) * DIGEST_BYTES
    ]
    found = b""
    for _ in range(2):
        got = file.reader.read_into(file.data_at + read.start, into[: align_up(size, ALIGN_BYTES)])
        found = block_digests(into[:size]) if got >= size else b""
        if found == expected:
            return
    raise _damage(file, read, expected, found)


def _damage(file: ReadFile, read: Read, expected: bytes, found: bytes) -> Corrupt:
    if not found:
        return Corrupt("a data file ends too early", where=file.where, expected=f"{read.stop} bytes of data")
    for block in range(len(expected) // DIGEST_BYTES):
        part = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
        if expected[part] != found[part]:
            number = read.start // BLOCK_BYTES + block
            start = file.data_at + number * BLOCK_BYTES
            return Corrupt(
                "stored bytes have changed",
                where=f"{file.where}, block {number} (bytes {start}-{start + BLOCK_BYTES})",
                expected=f"digest {expected[part].hex()}", found=found[part].hex(),
                remedy="`laststep verify` lists all damage",
            )  # fmt: skip
    return Corrupt("stored bytes have changed", where=file.where)
