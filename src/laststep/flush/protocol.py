"""What trainer and flusher say to each other, and how it travels.

Length-prefixed msgpack over a socket pair; the bytes of tensors never travel, only slot numbers do.
Messages are validated while they are parsed. One thread may receive; any thread may send.
The framing is written by hand: `multiprocessing.connection` passes no descriptors along, waits for
ever for the rest of a message whose sender died while a child of it holds the socket, and brings
`tempfile` and `subprocess` into the flusher, a tenth of its start.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from typing import Literal

import msgspec

from laststep.catalog.lineage import AttemptName, Seen
from laststep.catalog.retention import Keep
from laststep.format.layout import FileLayout
from laststep.format.manifest import ClassRecord, ItemRecord, WrittenIndexes
from laststep.memory.filled import Filled
from laststep.plan.files import MasterPair
from laststep.settings import Compression
from laststep.tiers.drains import Drained, DrainFailed, Draining, DrainOrder


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    pass


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a flusher is told when it starts, for all saves."""

    writers: int
    """How many threads write."""
    keep: Keep | None = None
    compression: str | dict[str, str] = Compression.NONE.value
    lossy: dict[str, str] = {}
    segment: str | None = None
    """The folder of the segment that the pool lies in, if saves are to be kept there."""
    further: tuple[DrainOrder, ...] = ()
    """The tiers that checkpoints are drained to."""
    rank: int = 0
    ranks: int = 1

    @property
    def encodes(self) -> bool:
        """Whether blocks may be encoded."""
        return bool(self.lossy) or self.compression != Compression.NONE


Role = Literal["alone", "first", "member"]
"""Who decides: the writer itself where it is alone; in a job the trainers of all ranks agree, and
the first rank's flusher carries it out."""


class Begin(_Message, frozen=True, kw_only=True):
    """A save starts: its attempt and its files."""

    save: int
    step: int
    overwrite: bool
    files: tuple[FileLayout, ...]
    derived: tuple[MasterPair, ...] = ()
    """What may be stored as the rounding of something else."""
    is_declared: bool = False
    """Whether the user has said that it is: then it is tried at each save."""
    role: Role = "alone"


class Located(_Message, frozen=True, kw_only=True):
    """Where the first rank has begun the save that this member takes part in."""

    save: int
    at: AttemptName


class Chunks(_Message, frozen=True, kw_only=True):
    """These slots are filled; they are the flusher's until it frees them."""

    save: int
    filled: list[Filled]


class PoolSlots(_Message, frozen=True, kw_only=True):
    """The pool has so many slots, and cannot get more for now: there is no memory. Until that is
    said, it can grow to its cap."""

    slots: int


class Unchanged(_Message, frozen=True, kw_only=True):
    """These chunks hold what they held in an earlier save: (file, start, bytes) of each. They come
    only where they are not `Granted`."""

    save: int
    of: int
    """The number of the save that they are the same as in."""
    chunks: tuple[tuple[int, int, int], ...]


class Seal(_Message, frozen=True, kw_only=True):
    """Everything of a save has been handed over; it may be committed even if the trainer dies."""

    save: int
    values: dict[str, bytes]
    """Plain values by name, as the index stores them."""
    items: tuple[ItemRecord, ...]
    metrics: bytes
    metadata: bytes
    receipt: bytes = b""
    """In a job of several ranks: what this one will report of it, but for the files."""


class Decide(_Message, frozen=True, kw_only=True):
    """What the ranks of a job agreed on: to commit with these items and indexes; or, with a
    reason, to give the save up."""

    save: int
    reason: str | None = None
    items: tuple[ItemRecord, ...] = ()
    written: WrittenIndexes = WrittenIndexes()
    classes: tuple[ClassRecord, ...] = ()
    ranks: int = 1


class Drop(_Message, frozen=True, kw_only=True):
    """A save is given up by the trainer."""

    save: int
    reason: str


class Continue(_Message, frozen=True, kw_only=True):
    """From here on, saves continue this checkpoint under a new epoch; or none."""

    after: AttemptName | None = None
    seen: Seen
    """The newest epoch and the last commit when that was decided: if another start takes one or
    commits anything since, the run is its own."""
    resumed_from: str | None = None
    """The checkpoint that the trainer restored, which retention keeps."""
    was_read: bool = True
    """Whether all of it was read in the run itself, and found sound; else nothing is borrowed of
    it, which may be damaged there."""


class Witness(_Message, frozen=True, kw_only=True):
    """Shows others which saves are coming, as long as any of the two holds it: the descriptor of a
    lock goes with this message. The number of each save is marked in it before its `Begin`."""

    name: str


class DrainLast(_Message, frozen=True, kw_only=True):
    """The last checkpoint of a job that is to end goes to all further tiers, due there or not."""

    at: AttemptName


class Bye(_Message, frozen=True, kw_only=True):
    """No more saves will come."""


class Freed(_Message, frozen=True, kw_only=True):
    slots: list[int]


class Begun(_Message, frozen=True, kw_only=True):
    """The flusher of who commits has made the folder of a save."""

    save: int
    at: AttemptName


class Granted(_Message, frozen=True, kw_only=True):
    """Of the chunks that did not change, those that are borrowed and need not come: (file, start)
    of each."""

    save: int
    chunks: tuple[tuple[int, int], ...]


class WrittenBytes(_Message, frozen=True, kw_only=True):
    save: int
    done_bytes: int


class CodingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the blocks of one file."""

    file: str
    mode: str
    """What was asked for: `adaptive`, `max` or the name of a codec; or `derived`."""
    picked: str
    """`raw`, or the codecs that were used, by how many blocks each has."""
    why: str
    raw_bytes: int = 0
    """Of the blocks that were encoded, or could have been, as they are."""
    stored_bytes: int = 0
    """The same as stored."""
    encode_s: float = 0.0
    """The CPU time that it took, of all threads together."""


class Held(_Message, frozen=True, kw_only=True):
    """A tier holds a save."""

    save: int
    tier: str


class Flushed(_Message, frozen=True, kw_only=True):
    """All files of a save are durable."""

    save: int
    size_bytes: int
    """Of the state: tensors and plain values."""
    written: WrittenIndexes
    opened_s: float
    """From here on counted from the save's announcement: files made, bytes written, all durable."""
    written_s: float
    seconds: float
    coding: tuple[CodingReport, ...] = ()
    """Of the files for which compression was asked, or of which something may be derived."""


class Decided(_Message, frozen=True, kw_only=True):
    """A save is committed."""

    save: int
    at: AttemptName
    seconds: float


class Failed(_Message, frozen=True, kw_only=True):
    save: int
    kind: str
    fields: dict[str, str | None]


class Removed(_Message, frozen=True, kw_only=True):
    """Retention removed a checkpoint."""

    step: int
    folder: str


class NoMetric(_Message, frozen=True, kw_only=True):
    """Retention found that no checkpoint has the metric by which the best are to be kept."""

    reason: str


class Ready(_Message, frozen=True, kw_only=True):
    """The flusher runs."""

    pid: int


ToFlusher = (
    Begin
    | Located
    | Chunks
    | Unchanged
    | Seal
    | Decide
    | Drop
    | Continue
    | Witness
    | DrainLast
    | PoolSlots
    | Bye
)
ToTrainer = (
    Begun
    | Freed
    | Granted
    | WrittenBytes
    | Held
    | Drained
    | Draining
    | DrainFailed
    | Flushed
    | Decided
    | Failed
    | Removed
    | NoMetric
    | Ready
)

_LENGTH = struct.Struct("<Q")
_LIMIT_BYTES = 4 << 30
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_encode = msgspec.msgpack.Encoder().encode
_decode_in_flusher = msgspec.msgpack.Decoder(ToFlusher).decode
_decode_in_trainer = msgspec.msgpack.Decoder(ToTrainer).decode


class Connection:
    """One end of the socket pair.

    `peer` is the other side's process, as a pidfd: forked children of a dead process may hold its
    end open, so that the socket alone would never tell. Without one, the peer is a thread of this
    process.
    """

    def __init__(self, end: socket.socket, *, peer: int | None = None) -> None:
        self._socket = end
        self._peer = peer
        self._sending = threading.Lock()
        self._descriptors: list[int] = []
        """What came with messages and was not taken yet."""

    def send(self, message: ToFlusher | ToTrainer, *, descriptor: int | None = None) -> None:
        """Send one message whole, with a copy of that descriptor; `OSError` when the other side is
        gone."""
        data = _encode(message)
        with self._sending:
            if descriptor is not None:
                socket.send_fds(self._socket, [_LENGTH.pack(len(data))], [descriptor])
                self._socket.sendall(data)
            else:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the last message, if one did; the caller closes it."""
        return self._descriptors.pop() if self._descriptors else None

    def receive_in_flusher(self) -> ToFlusher | None:
        """The next message, or None when the trainer is gone."""
        data = self._receive()
        return None if data is None else _decode_in_flusher(data)

    def receive_in_trainer(self) -> ToTrainer | None:
        """The next message, or None when the flusher is gone."""
        data = self._receive()
        return None if data is None else _decode_in_trainer(data)

    def peer_is_dead(self) -> bool:
        """Whether the process on the other side has ended, whatever it has left here to read."""
        return self._peer is not None and bool(_ready([self._peer], 0.0))

    def detach(self) -> None:
        """Close this process's copy of the descriptor and leave the connection itself alone."""
        self._socket.close()

    def hang_up(self) -> None:
        """Nothing more goes either way; whoever waits to send or to receive hears so."""
        with contextlib.suppress(OSError):  # the other side closed first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()
        while (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def _receive(self) -> bytes | None:
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > _LIMIT_BYTES:
            raise OSError(f"a message of {size} bytes is not one of ours")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            if self._peer is not None and not self._wait_readable(self._peer):
                return None
            try:
                n, sent, _, _ = self._socket.recvmsg_into(
                    [view[got:]], _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError:
                return None
            for _, _, packed in sent:
                self._descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
            if n == 0:
                return None
            got += n
        return bytes(buffer)

    def _wait_readable(self, peer: int) -> bool:
        """Wait for bytes; False when the peer died and left none."""
        mine = self._socket.fileno()
        return mine in _ready([mine, peer], None) or mine in _ready([mine], 0.0)


def _ready(descriptors: list[int], timeout_s: float | None) -> list[int]:
    """Which of them have something to read, or whose process has ended."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)]
