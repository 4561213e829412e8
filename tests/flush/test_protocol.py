"""Messages between trainer and flusher: whole, of any size, and nonsense is refused."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.catalog.attempt import AttemptName
from laststep.catalog.terms import Seen
from laststep.flush import protocol as wire
from laststep.flush.protocol import (
    Begin,
    Begun,
    Bye,
    CaptureDone,
    Chunks,
    Connection,
    Continue,
    Decide,
    Ended,
    Filled,
    Flushed,
    Freed,
    Instruct,
    News,
    Unchanged,
)
from laststep.format.layout import FileLayout, Part, TensorEntry
from laststep.format.manifest import ItemRecord, LayoutGroupRecord, Span, WrittenIndexes
from laststep.tiers.replicating import TierStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY = TensorEntry(name="a/b", dtype="float32", shape=(2, 3), start=0, stop=24)
LAYOUT = FileLayout(
    name="r00000/m-r00003.safetensors",
    item=None,
    header_bytes=4096,
    tensor_bytes=24,
    tensors=(ENTRY,),
    parts={"a/b": Part("b", (4, 3), (2, 0))},
)
WRITTEN = WrittenIndexes(
    indexes=bytes(range(32)), files=3, size_bytes=9, shared_bytes=4, lossy=("bf16", "int8")
)
AT = AttemptName(step=7, term=2, attempt=3)
BEGIN = Begin(save=1, step=7, overwrite=False, files=(), liveness="terms/start.lock")
TO_FLUSHER = [
    Begin(save=1, step=7, overwrite=True, files=(LAYOUT,)),
    Chunks(save=1, filled=[Filled(file=0, start=0, size_bytes=24, slot=3)]),
    Unchanged(save=1, of=0, chunks=((0, 0, 24),)),
    CaptureDone(
        save=1,
        values={"x": b"\0\xff"},
        metrics=b"{}",
        metadata=b"null",
        items=(ItemRecord(name="x", kind="value", tensors=1, size_bytes=24),),
    ),
    Decide(
        save=1,
        written=WRITTEN,
        ranks=4,
        layout_groups=(
            LayoutGroupRecord(local_layout="0" * 32, spans=(Span(0, 2, 2), Span(1, 1))),
        ),
    ),
    Decide(save=1, reason="why", by_all=False),
    Instruct(continues=Continue(seen=Seen(term=3, commit=(2, 2))), pool_slots=3),
    Instruct(
        continues=Continue(after=AT, seen=Seen(term=2, commit=(2, 3)), resumed_from=AT.folder)
    ),
    Instruct(replicate=AT),
    Begun(save=1, at=AT),
    Bye(),
]
TO_TRAINER = [
    Freed(slots=[1, 2]),
    Flushed(save=1, written=WRITTEN),
    Unchanged(save=1, of=0, chunks=((0, 8, 16),)),
    Begun(save=1, at=AT),
    Ended(save=1, at=AT),
    Ended(save=1, kind="TornCaptureError", fields={"what": "x", "where": None}),
    TierStatus(at=AT, tier="far", state="failed", reason="why"),
    News(kind="ready"),
    News(kind="written", save=1, done_bytes=5),
    News(kind="removed", step=3, folder="f"),
    News(kind="logged", logger="laststep.flush", level=30, text="t"),
]


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    left, right = socket.socketpair()
    a, b = Connection(left), Connection(right)
    yield a, b
    a.close()
    b.close()


def test_every_message_arrives_as_it_was_sent(pair: tuple[Connection, Connection]) -> None:
    trainer, flusher = pair
    for message in TO_FLUSHER:
        trainer.send(message)
        assert flusher.receive(wire.in_flusher) == message
    for message in TO_TRAINER:
        flusher.send(message)
        assert trainer.receive(wire.in_trainer) == message


def test_a_message_far_beyond_the_sockets_buffer_arrives_whole_among_others(
    pair: tuple[Connection, Connection],
) -> None:
    trainer, flusher = pair
    entries = tuple(
        TensorEntry(name=f"layers.{n}.weight", dtype="float32", shape=(1,), start=n, stop=n + 1)
        for n in range(100_000)
    )
    file = FileLayout(name="m", item="m", header_bytes=0, tensor_bytes=0, tensors=entries)
    big = Begin(save=1, step=1, overwrite=False, files=(file,))
    small = [Decide(save=n, reason="x" * n) for n in range(50)]

    def send_small() -> None:
        for message in small:
            trainer.send(message)

    threads = [
        threading.Thread(target=send_small),
        threading.Thread(target=trainer.send, args=(big,)),
    ]
    for thread in threads:
        thread.start()
    got = [flusher.receive(wire.in_flusher) for _ in range(51)]
    for thread in threads:
        thread.join()
    assert [m for m in got if isinstance(m, Decide)] == small
    assert next(m for m in got if isinstance(m, Begin)) == big


def test_the_end_of_the_other_side_is_none_even_in_the_midst_of_a_message() -> None:
    for sent in (b"", b"\1", struct.pack("<Q", 100) + b"half"):
        left, right = socket.socketpair()
        left.sendall(sent)
        left.close()
        connection = Connection(right)
        assert connection.receive(wire.in_trainer) is None
        connection.close()


def test_sending_to_one_who_is_gone_does_nothing() -> None:
    left, right = socket.socketpair()
    right.close()
    connection = Connection(left)
    connection.send(Bye())
    assert connection.receive(wire.in_trainer) is None
    connection.close()


@given(st.binary(max_size=60))
def test_nonsense_is_refused_while_it_is_parsed(data: bytes) -> None:
    try:
        known = msgspec.msgpack.decode(data, type=wire.ToFlusher)
    except (msgspec.MsgspecError, ValueError):
        known = None
    left, right = socket.socketpair()
    left.sendall(struct.pack("<Q", len(data)) + data)
    connection = Connection(right)
    if known is None:
        with pytest.raises((ValueError, OSError)):
            connection.receive(wire.in_flusher)
    else:
        assert connection.receive(wire.in_flusher) == known
    left.close()
    connection.close()


def test_a_length_beyond_reason_is_refused_before_memory_is_taken() -> None:
    left, right = socket.socketpair()
    left.sendall(struct.pack("<Q", 1 << 60))
    connection = Connection(right)
    with pytest.raises(OSError, match=str(1 << 60)):
        connection.receive(wire.in_flusher)
    left.close()
    connection.close()


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_a_peer_that_died_is_noticed_though_a_child_of_it_holds_its_end_open(
    peer: subprocess.Popen[bytes],
) -> None:
    left, right = socket.socketpair()
    copy = os.dup(left.fileno())  # what a forked worker would hold
    pidfd = os.pidfd_open(peer.pid)
    connection = Connection(right, peer=pidfd)
    Connection(left).send(Decide(save=1, reason="last words"))
    left.close()
    assert not connection.peer_is_dead()
    peer.kill()
    assert connection.receive(wire.in_flusher) == Decide(save=1, reason="last words")
    assert connection.receive(wire.in_flusher) is None
    assert connection.peer_is_dead()
    os.close(copy)
    os.close(pidfd)
    connection.close()


def test_a_descriptor_travels_with_its_message_and_is_a_copy(
    pair: tuple[Connection, Connection],
) -> None:
    trainer, flusher = pair
    read, write = os.pipe()
    trainer.send(Bye())
    trainer.send(BEGIN, descriptor=write)
    trainer.send(Bye())
    os.close(write)
    assert flusher.receive(wire.in_flusher) == Bye()
    assert not flusher.descriptors
    assert flusher.receive(wire.in_flusher) == BEGIN
    copy = flusher.descriptors.pop()
    assert not os.get_inheritable(copy)
    assert flusher.receive(wire.in_flusher) == Bye()
    os.write(copy, b"x")
    assert os.read(read, 1) == b"x"
    os.close(copy)
    os.close(read)


def test_a_descriptor_that_nobody_took_goes_with_the_connection() -> None:
    left, right = socket.socketpair()
    read, write = os.pipe()
    trainer, flusher = Connection(left), Connection(right)
    trainer.send(BEGIN, descriptor=write)
    os.close(write)
    flusher.receive(wire.in_flusher)
    flusher.close()
    assert os.read(read, 1) == b""  # nobody holds the other end
    os.close(read)
    trainer.close()
