"""Messages between trainer and flusher, and the connection that carries them.

Length-prefixed msgpack over a socket pair; only slot numbers are sent, never tensor bytes. Messages
are validated while they are parsed. One thread may receive; any thread may send. The framing is our
own because `multiprocessing.connection` cannot pass descriptors, waits forever for the rest of a
message whose sender died, and slows the start of the flusher by a tenth.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from laststep.catalog.attempt import AttemptName
from laststep.catalog.retention import Keep
from laststep.catalog.terms import Seen
from laststep.format.layout import FileLayout
from laststep.format.manifest import ItemRecord, LayoutGroupRecord, WrittenIndexes
from laststep.memory.pool import Filled
from laststep.process.threads import ready
from laststep.settings import Compression, Compressions
from laststep.tiers.replicating import ReplicaOrder, TierStatus

if TYPE_CHECKING:
    from collections.abc import Callable


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    pass


class OfSave(_Message, frozen=True, kw_only=True):
    save: int = 0
    """Its number; 0 for none."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a flusher, for all saves."""

    writers: int
    """Number of threads that write."""
    keep: Keep | None = None
    compression: Compressions = Compression.NONE
    lossy: dict[str, str] = {}
    segment: str | None = None
    """Folder of the segment that contains the pool, if saves are kept in memory."""
    replicas: tuple[ReplicaOrder, ...] = ()
    """Tiers that checkpoints are replicated to."""
    rank: int = 0
    ranks: int = 1

    @property
    def encodes(self) -> bool:
        """True if blocks may be encoded."""
        return bool(self.lossy) or self.compression != Compression.NONE


Role = Literal["alone", "first", "member"]
"""Way in which a save is decided: by the flusher alone in a job of one rank; otherwise the trainers
of all ranks agree, and the flusher of rank 0 ("first") commits."""


class Begin(OfSave, frozen=True, kw_only=True):
    """A save starts: its step and its files."""

    step: int
    overwrite: bool
    files: tuple[FileLayout, ...]
    role: Role = "alone"
    liveness: str | None = None
    """Name of the lock that marks pending saves, this one already, while the trainer or the flusher
    holds it. Its descriptor is sent with this message, once to each flusher."""


class Begun(OfSave, frozen=True, kw_only=True):
    """The attempt of a save exists. Sent by the flusher that created its folder; on the other
    ranks, sent by the trainer, which got it from rank 0, to its own flusher."""

    at: AttemptName


class Chunks(OfSave, frozen=True, kw_only=True):
    """These slots are filled; the flusher owns them until it frees them."""

    filled: list[Filled]


class Unchanged(OfSave, frozen=True, kw_only=True):
    """Chunks with the same contents as in an earlier save: (file, start, bytes) of each. The
    flusher answers with those that it reuses; the trainer sends the others."""

    of: int
    """Number of the earlier save with the same contents."""
    chunks: tuple[tuple[int, int, int], ...]


class CaptureDone(OfSave, frozen=True, kw_only=True):
    """Everything of a save has been handed over; it may be committed even if the trainer dies."""

    values: dict[str, bytes]
    """Plain values by name, as the index stores them."""
    items: tuple[ItemRecord, ...]
    metrics: bytes
    metadata: bytes
    receipt: bytes = b""
    """In a job of several ranks: this rank's receipt, without the files."""


class Decide(OfSave, frozen=True, kw_only=True):
    """Commit a save with these items and indexes of all ranks, or give it up for a reason."""

    reason: str | None = None
    by_all: bool = True
    """True if all ranks have decided this; False if only this rank gives up its part."""
    items: tuple[ItemRecord, ...] = ()
    written: WrittenIndexes = WrittenIndexes()
    layout_groups: tuple[LayoutGroupRecord, ...] = ()
    ranks: int = 1


class Continue(msgspec.Struct, frozen=True, kw_only=True):
    """Saves from now on continue this checkpoint, or none, under a new term."""

    after: AttemptName | None = None
    seen: Seen
    """Newest term and last commit at the time of this decision. If another job instance takes a
    term or commits after that, the run belongs to that instance."""
    resumed_from: str | None = None
    """The checkpoint that the trainer restored, which retention keeps."""
    was_read: bool = True
    """True if all of it was read from the run itself and verified; else none of it is reused."""


class Instruct(_Message, frozen=True, kw_only=True):
    """Change settings from now on; None leaves a setting unchanged."""

    continues: Continue | None = None
    pool_slots: int | None = None
    """Number of slots of the pool, which cannot grow for now because memory is short. Until this is
    sent, the pool can grow to its limit."""
    replicate: AttemptName | None = None
    """The last checkpoint of a job that is ending: copy it to all replicas, due there or not."""


class Bye(_Message, frozen=True, kw_only=True):
    """No more saves will come."""

    waits: bool = True
    """False if the trainer exits without waiting; then nobody reads the flusher's messages."""


class Freed(_Message, frozen=True, kw_only=True):
    slots: list[int]


class CodingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Encodings chosen for the blocks of one file."""

    file: str
    mode: str
    """The setting: `adaptive`, `max` or the name of a codec."""
    picked: str
    """`raw`, or the codecs that were used, most blocks first."""
    why: str
    raw_bytes: int = 0
    """Unencoded size of the blocks that were encoded or could have been."""
    stored_bytes: int = 0
    """Stored size of the same blocks."""
    encode_s: float = 0.0
    """CPU time spent on encoding, over all threads."""


class Flushed(OfSave, frozen=True, kw_only=True):
    """All files of a save are durable."""

    written: WrittenIndexes
    coding: tuple[CodingReport, ...] = ()
    """Reports for the files with compression."""


class Ended(OfSave, frozen=True, kw_only=True):
    """A save is committed, or has failed."""

    at: AttemptName | None = None
    """The attempt that is committed; None if the save failed."""
    kind: str = ""
    """Kind of error, for `errors.from_wire`."""
    fields: dict[str, str | None] = {}


class DiskNeed(_Message, frozen=True, kw_only=True):
    """Disk space that saves need, and the free space: fields of `events.Preflight`."""

    state_bytes: int
    free_disk_bytes: int | None
    needed_disk_bytes: int
    kept_checkpoints: int | None
    ranks: int = 1


class News(OfSave, frozen=True, kw_only=True):
    """Information that nothing waits for."""

    kind: Literal["ready", "written", "removed", "logged"]
    """ready: the flusher is running. written: `done_bytes` of a save. removed: retention has
    deleted `folder`. logged: a log record of the helper process, which the trainer logs."""
    done_bytes: int = 0
    step: int = 0
    folder: str = ""
    logger: str = ""
    level: int = 0
    text: str = ""


ToFlusher = Begin | Begun | Chunks | Unchanged | CaptureDone | Decide | Instruct | Bye
ToTrainer = Begun | Freed | Unchanged | TierStatus | Flushed | Ended | DiskNeed | News

_LENGTH = struct.Struct("<Q")
_LIMIT_BYTES = 4 << 30
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_encode = msgspec.msgpack.Encoder().encode
in_flusher: Callable[[bytes], ToFlusher] = msgspec.msgpack.Decoder(ready(ToFlusher)).decode
in_trainer: Callable[[bytes], ToTrainer] = msgspec.msgpack.Decoder(ready(ToTrainer)).decode
_Received = TypeVar("_Received")


class Connection:
    """One end of the socket pair. `peer` is a pidfd of the other side's process: forked children of
    a dead process may hold its end open, so the socket alone would never show the death. Without
    one, the peer is a thread of this process."""

    def __init__(self, end: socket.socket, *, peer: int | None = None) -> None:
        self._socket = end
        self._peer = peer
        self._sending = threading.Lock()
        self.descriptors: list[int] = []
        """Descriptors received with messages; whoever takes one closes it."""
        self.is_read = True
        """False once the other side has said that it reads no more."""

    def send(self, message: ToFlusher | ToTrainer, *, descriptor: int | None = None) -> None:
        """Send one message, with a copy of `descriptor`. Do nothing if the peer is gone: the thread
        that receives reports that."""
        data = _encode(message)
        head = _LENGTH.pack(len(data))
        with self._sending, contextlib.suppress(OSError):
            if descriptor is not None:
                socket.send_fds(self._socket, [head], [descriptor])
                head = b""
            self._socket.sendall(head + data)

    def receive(self, decode: Callable[[bytes], _Received]) -> _Received | None:
        """Return the next message, as this side decodes it; None if the other side is gone."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > _LIMIT_BYTES:
            raise OSError(f"a message of {size} bytes is not one of ours")
        data = self._exactly(size)
        return None if data is None else decode(data)

    def peer_is_dead(self) -> bool:
        """Return True if the process on the other side has ended, even if it left messages."""
        return self._peer is not None and bool(_ready([self._peer], 0.0))

    def is_cut(self) -> bool:
        """Return True if nobody reads messages any more. A dying process hangs up first."""
        own_fd = self._socket.fileno()
        if own_fd < 0 or not self.is_read or self.peer_is_dead():
            return True
        poll = select.poll()
        poll.register(own_fd, 0)  # still reports a hang-up
        return bool(poll.poll(0))

    def detach(self) -> None:
        """Close this process's copy of the descriptor without shutting down the connection."""
        self._socket.close()

    def hang_up(self) -> None:
        """Shut down both directions; threads waiting to send or receive return at once."""
        with contextlib.suppress(OSError):  # the other side closed first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _exactly(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view, got, own_fd = memoryview(buffer), 0, self._socket.fileno()
        while got < size:
            if (
                self._peer is not None
                and own_fd not in _ready([own_fd, self._peer], None)
                and own_fd not in _ready([own_fd], 0.0)
            ):
                return None  # the peer died and left no bytes
            try:
                n, sent, _, _ = self._socket.recvmsg_into(
                    [view[got:]], _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError:
                return None
            for _, _, packed in sent:
                self.descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
            if n == 0:
                return None
            got += n
        return bytes(buffer)


def _ready(descriptors: list[int], timeout_s: float | None) -> list[int]:
    """Return the descriptors that are readable; a pidfd is when its process has ended."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)]
