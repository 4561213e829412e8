"""A save is announced once, before any of its chunks, whichever threads hand them over."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from laststep.catalog.starts import Start, coming
from laststep.errors import StorageError
from laststep.events import Bus
from laststep.flush.client import Client
from laststep.flush.protocol import Begin, Chunks
from laststep.flush.saves import SaveUnderWay
from laststep.memory.filled import Filled
from laststep.memory.pool import Pool
from laststep.plan.files import plan_save
from laststep.storage.directory import DirectoryStore
from laststep.terms import CHUNK_BYTES

if TYPE_CHECKING:
    import socket
    from pathlib import Path

THREADS = 8


class SlowClient:
    """Sends an announcement only when all threads are there that could overtake it: one of 100,000
    tensors takes that long."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.there = threading.Semaphore(0)

    def announce(self, number: int) -> None:
        self.sent.append(number)

    def send(self, message: object) -> None:
        if isinstance(message, Begin):
            assert all(self.there.acquire(timeout=60) for _ in range(THREADS))
        self.sent.append(message)


def test_no_chunk_overtakes_the_announcement_of_its_save() -> None:
    client = SlowClient()
    save = SaveUnderWay(client, 7)
    save.planned(plan_save(()), lambda: None)

    def hand_over(number: int) -> None:
        client.there.release()
        save.chunks([Filled(0, number, 1, number)])

    threads = [threading.Thread(target=hand_over, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    number, first, *rest = client.sent
    assert number == save.number  # others may see that it is coming before anybody works on it
    assert isinstance(first, Begin)
    assert first.step == 7
    assert all(isinstance(message, Chunks) for message in rest)
    assert sorted(chunk.slot for message in rest for chunk in message.filled) == list(
        range(THREADS)
    )


class Flusher:
    """Is there and does nothing, until it is killed."""

    pid = pidfd = None

    def __init__(self, end: socket.socket) -> None:
        self.kill = end.close

    def join(self, _timeout_s: float) -> bool:
        return True

    end = join

    def how_it_ended(self) -> str:
        return "killed"


def test_a_save_that_failed_before_it_was_announced_leaves_no_mark(tmp_path: Path) -> None:
    store, started = DirectoryStore(tmp_path / "run"), []
    pool = Pool(CHUNK_BYTES, pinned=False)

    def launch(end: socket.socket) -> Flusher:
        started.append(Flusher(end))
        return started[-1]

    start = Start(store)
    client = Client(launch, pool, Bus(), start)
    try:
        save = SaveUnderWay(client, 7)
        client.begin(save, plan_save(()), lambda: None)
        started[0].kill()
        with pytest.raises(StorageError, match="the flusher ended"):
            save.handle.wait(60)
        save.begin()  # the capture thread comes to it only now
        assert coming(store) == ()  # or every restore would wait for it while this process lives
    finally:
        client.close()
        pool.close()
