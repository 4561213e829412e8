"""The helper process. Imports no more than it needs: every start of a job waits for it."""

from __future__ import annotations

import signal
import socket

import msgspec

from laststep.catalog.epochs import Trainer
from laststep.flush.protocol import Connection, Orders
from laststep.flush.server import Flusher
from laststep.memory.segments import Mapping
from laststep.process import system
from laststep.process.signals import OF_SCHEDULERS
from laststep.storage.registry import register_store

NOT_FOR_THE_HELPER = tuple(signal.Signals[name] for name in OF_SCHEDULERS)
"""A person's Ctrl-C is for the trainer, and so is what a scheduler sends to all processes of a job;
the helper ends with it, after its work is done."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the helper process is told on its command line."""

    run: str
    opener: str | None
    """What opens the run's store, where that is no folder."""
    pool_fd: int
    pool_bytes: int
    socket_fd: int
    trainer: Trainer
    trainer_pidfd: int
    orders: Orders
    rank: int | None = None
    """Which of several ranks the trainer is, for the log."""


def main(text: str) -> None:
    """Serve until the trainer is gone; `text` is a `Setup` as JSON. Signals are blocked."""
    setup = msgspec.json.decode(text, type=Setup)
    system.speak_as(setup.rank)
    if setup.opener is not None:
        register_store(setup.run.partition(":")[0], setup.opener)
    for tier in setup.orders.further:
        if tier.opener is not None:
            register_store(tier.url.partition(":")[0], tier.opener)
    for number in NOT_FOR_THE_HELPER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_HELPER)
    connection = Connection(socket.socket(fileno=setup.socket_fd), peer=setup.trainer_pidfd)
    mapping = Mapping(setup.pool_fd, setup.pool_bytes)
    flusher = Flusher(
        connection,
        mapping.view,
        run=setup.run,
        trainer=setup.trainer,
        orders=setup.orders,
        pool_fd=setup.pool_fd,
    )
    flusher.start()
    flusher.serve()
