"""A save is announced once, before any of its chunks, whichever threads hand them over."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from expect import raises
from laststep.catalog.instances import Start, coming
from laststep.constants import CHUNK_BYTES
from laststep.errors import StorageError
from laststep.events import Bus
from laststep.flush.client import Client
from laststep.flush.protocol import Begin, Chunks
from laststep.flush.saves import Save
from laststep.memory.pool import Filled, Pool
from laststep.plan.files import plan_save
from laststep.storage.directory import DirectoryStore

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

    def announce(self, begin: Begin) -> None:
        assert all(self.there.acquire(timeout=60) for _ in range(THREADS))
        self.sent.append(begin)

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_no_chunk_overtakes_the_announcement_of_its_save() -> None:
    client = SlowClient()
    save = Save(client, 7)
    save.plan = plan_save(())

    def hand_over(number: int) -> None:
        client.there.release()
        save.chunks([Filled(0, number, 1, number)])

    threads = [threading.Thread(target=hand_over, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *rest = client.sent
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
        save = Save(client, 7)
        client.begin(save, plan_save(()), lambda: None)
        started[0].kill()
        with raises(StorageError, step=7, found="killed"):
            save.handle.wait(60)
        save.begin()  # the capture thread comes to it only now
        assert coming(store) == ()  # or every restore would wait for it while this process lives
    finally:
        client.close()
        pool.close()
