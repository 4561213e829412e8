"""Entry point of the helper process. Imports as little as possible, because every start of a job
waits for it."""

from __future__ import annotations

import signal
import socket

import msgspec

from laststep.catalog.terms import Trainer
from laststep.flush.protocol import Connection, Orders
from laststep.flush.server import Flusher
from laststep.memory.segments import Mapping
from laststep.process import system
from laststep.process.signals import OF_SCHEDULERS
from laststep.storage.registry import register_store

NOT_FOR_THE_HELPER = tuple(signal.Signals[name] for name in OF_SCHEDULERS)
"""Ctrl-C and the signals that a scheduler sends to all processes of a job are meant for the
trainer. The helper ignores them and exits after the trainer, when its work is done."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings passed to the helper process on its command line."""

    run: str
    opener: str | None
    """Import path of the function that opens the run's store; None for a directory."""
    pool_fd: int
    pool_bytes: int
    socket_fd: int
    trainer: Trainer
    trainer_pidfd: int
    orders: Orders
    rank: int | None = None
    """Rank of the trainer in a job of several ranks, for the log."""


def main(text: str) -> None:
    """Serve until the trainer is gone. `text` is a `Setup` as JSON. The process starts with the
    signals of `NOT_FOR_THE_HELPER` blocked."""
    setup = msgspec.json.decode(text, type=Setup)
    system.log_as_rank(setup.rank)
    if setup.opener is not None:
        register_store(setup.run.partition(":")[0], setup.opener)
    for tier in setup.orders.replicas:
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
