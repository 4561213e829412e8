"""What ranks do in the tests of how bytes are passed on."""

from __future__ import annotations

import os
import time
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from reading_tasks import big
from tasks import opened

from laststep.errors import StorageError
from laststep.ranks import transports
from laststep.ranks.group import RankGroup, this_rank

PATIENCE_S = 60.0


class Coming:
    """How much is on its way to this rank, and how much was at most."""

    def __init__(self) -> None:
        self.now_bytes = self.most_bytes = 0
        self._swap, self._wait = transports.Transport.swap, transports.Transit.wait

    def __enter__(self) -> Self:
        def swap(transport: transports.Transport, *args: object) -> transports.Transit:
            under = self._swap(transport, *args)
            self._add(under.came.numel())
            return under

        def wait(under: transports.Transit) -> torch.Tensor:
            came = self._wait(under)
            self._add(-came.numel())
            return came

        transports.Transport.swap, transports.Transit.wait = swap, wait
        return self

    def __exit__(self, *_: object) -> None:
        transports.Transport.swap, transports.Transit.wait = self._swap, self._wait

    def _add(self, size: int) -> None:
        self.now_bytes += size
        self.most_bytes = max(self.most_bytes, self.now_bytes)


def filled(sender: int, receiver: int, size: int) -> torch.Tensor:
    return torch.full((size,), 16 * sender + receiver, dtype=torch.uint8)


def pass_on(size: int, to: str) -> tuple[list[int], int]:
    """Pass parcels on: `each` to every other rank, to the `first` alone, or `some` from even ranks
    to the next; tells from whom parcels came, and the most bytes that were coming at a time."""
    mine, ranks = dist.get_rank(), dist.get_world_size()
    receivers = {
        "each": [rank for rank in range(ranks) if rank != mine],
        "first": [0] if mine else [],
        "some": [mine + 1] if mine % 2 == 0 and mine + 1 < ranks else [],
    }[to]
    group = RankGroup(this_rank(), "passing", deadline_s=PATIENCE_S)
    messages = {rank: (bytes([mine]), filled(mine, rank, size)) for rank in receivers}
    senders = []
    with Coming() as coming:
        for head, data in group.exchange(messages, None):
            (sender,) = head
            assert torch.equal(data, filled(sender, mine, size))
            senders.append(sender)
    group._host.close()
    return sorted(senders), coming.most_bytes


def tell_all(size: int) -> list[int]:
    """Two ranks have something for all others."""
    mine = dist.get_rank()
    group = RankGroup(this_rank(), "passing", deadline_s=PATIENCE_S)
    told = (bytes([mine]), filled(mine, 0, size)) if mine in (0, 2) else None
    senders = []
    for head, data in group.exchange({}, told):
        (sender,) = head
        assert torch.equal(data, filled(sender, 0, size))
        senders.append(sender)
    group._host.close()
    return senders


def tell_notes(sizes: list[int]) -> list[int]:
    """How many rounds it took to be told notes of these sizes, by the last rank."""
    group = RankGroup(this_rank(), "passing", deadline_s=PATIENCE_S)
    rounds, broadcast = list[int](), dist.broadcast
    last = group.size - 1
    for size in sizes:
        times = list[int]()

        def counted(*args: Any, times: list[int] = times, **more: Any) -> object:
            times.append(1)
            return broadcast(*args, **more)

        with patch.object(dist, "broadcast", counted):
            own = bytes([group.rank.number + 1]) * size
            assert group.broadcast(last, own) == bytes([last + 1]) * size
        rounds.append(len(times))
    group._host.close()
    return rounds


def load_and_lose_a_rank(run: str) -> str:
    """The last rank ends when it is to pass something on; the others tell what they heard."""
    swap = transports.Transport.swap

    def dying(transport: transports.Transport, *args: object) -> transports.Transit:
        if dist.get_rank() == dist.get_world_size() - 1:
            os._exit(9)
        return swap(transport, *args)

    transports.Transport.swap = dying
    began = time.monotonic()
    try:
        with opened(run, state=big(1)) as checkpointer:
            checkpointer.restore()
    except StorageError as error:
        in_time = time.monotonic() - began < PATIENCE_S
        os.write(2, f"heard in time: {in_time}: {error}".encode())
    os._exit(0)
