"""A save is announced once, before any of its chunks, whichever threads hand them over."""

from __future__ import annotations

import threading
import time

from laststep.engine.handle import SaveHandle
from laststep.engine.links import SaveLink
from laststep.engine.wire import Begin, Chunks, Filled
from laststep.plan.save import plan_save


class SlowClient:
    """Takes its time to send an announcement, as one of 100,000 tensors does."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def announce(self, number: int) -> None:
        self.sent.append(number)

    def send(self, message: object) -> None:
        if isinstance(message, Begin):
            time.sleep(0.05)
        self.sent.append(message)


def test_no_chunk_overtakes_the_announcement_of_its_save() -> None:
    client = SlowClient()
    link = SaveLink(client, 1, SaveHandle(7), plan_save(()), lambda: None, overwrite=False)
    threads = [threading.Thread(target=link.chunks, args=([Filled(0, n, 1, n)],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    number, first, *rest = client.sent
    assert number == 1  # others may see that it is coming before anybody works on it
    assert isinstance(first, Begin)
    assert first.step == 7
    assert all(isinstance(message, Chunks) for message in rest)
    assert sorted(chunk.slot for message in rest for chunk in message.filled) == list(range(8))
