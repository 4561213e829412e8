"""What the ranks of a job do together while they restore: tell each other, and pass bytes on.

A gloo group of our own, on the host, so that a failure in it leaves the groups that train alone;
much that is passed on between devices goes over NCCL, where the job has it (`ranks.carriers`).
Collective: every rank makes the same calls in the same order. Called on the training thread, in
`restore()` only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from laststep.errors import (
    CorruptError,
    LaststepError,
    MismatchError,
    NotFoundError,
    StorageError,
    from_wire,
)
from laststep.process import system
from laststep.ranks.carriers import HOST, Carrier, DeviceCarrier, Transit, has_nccl
from laststep.ranks.missing_ranks import awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from laststep.ranks.rank import Rank

log = logging.getLogger(__name__)

T = TypeVar("T")
Parcel = tuple[bytes, torch.Tensor]
"""What one rank passes on to another: a head, and bytes."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its new name, where torch has it: the old one warns there."""


_NOTE_BYTES, _LENGTH_BYTES = 512, 8
WORTH_BYTES = 256 << 20
"""Where no rank passes on as much, connecting over NCCL would take longer than it saves."""


class _IncomingParcel(NamedTuple):
    """A parcel that is coming, while another goes."""

    head: Transit
    data: Transit


class Ranks(Protocol):
    """Who restores."""

    rank: Rank
    size: int
    """How many do so together."""

    def arrive(self) -> None:
        """Wait for all to restore, and say in the log for whom."""

    def gather(self, note: bytes) -> list[bytes]:
        """The notes of all ranks, on all ranks."""

    def tell(self, who: int, note: bytes) -> bytes:
        """The note of that rank, on all ranks."""

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""

    def carrying(
        self, device: torch.device, most_bytes: int
    ) -> AbstractContextManager[torch.device]:
        """Get ready for exchanges in which this rank, whose state lies on that device, passes on so
        many bytes; gives the device on which all parcels of this rank are to lie meanwhile."""

    def exchange(self, each: Mapping[int, Parcel], to_all: Parcel | None) -> Iterator[Parcel]:
        """Send parcels, some to one rank each, one to all others; get theirs, which are to be used
        one after the other."""


class Alone:
    """One rank by itself, whether there are others in its job or not."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.size = 1

    def arrive(self) -> None:
        pass

    def gather(self, note: bytes) -> list[bytes]:
        return [note]

    def tell(self, who: int, note: bytes) -> bytes:
        return note

    def largest(self, number: int) -> int:
        return number

    def carrying(
        self, device: torch.device, most_bytes: int
    ) -> AbstractContextManager[torch.device]:
        return contextlib.nullcontext(HOST)

    def exchange(self, each: Mapping[int, Parcel], to_all: Parcel | None) -> Iterator[Parcel]:
        return iter(())


class RankGroup:
    """The ranks of a job of several; made by all of them at once."""

    def __init__(
        self, rank: Rank, name: str, *, deadline_s: float, call: str = "restore()"
    ) -> None:
        """`name` is this group's, on all ranks, which make that `call` now."""
        self.rank = rank
        self.size = rank.ranks
        self._name = name
        self._deadline_s = deadline_s
        self._arrivals = 0
        timeout = timedelta(seconds=deadline_s)
        self._group = self._awaited(lambda: dist.new_group(backend="gloo", timeout=timeout), call)
        self._carrier = self._host = Carrier(self._group)

    def arrive(self) -> None:
        self._awaited(lambda: self.largest(0))

    def _awaited(self, act: Callable[[], T], call: str = "restore()") -> T:
        self._arrivals += 1

        def work() -> T:
            name = f"{self._name}/restore/{self._arrivals}"
            with awaited(self.rank, call, name, self._deadline_s):
                return act()

        return _asked(work)

    def gather(self, note: bytes) -> list[bytes]:
        rows = self._gather(_head(note), _NOTE_BYTES)
        sizes = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        if max(sizes) > _NOTE_BYTES - _LENGTH_BYTES:
            rows = self._gather(note, max(sizes))
            return [row[:size] for row, size in zip(rows, sizes, strict=True)]
        return [
            row[_LENGTH_BYTES : _LENGTH_BYTES + size] for row, size in zip(rows, sizes, strict=True)
        ]

    def _gather(self, note: bytes, width: int) -> list[bytes]:
        """The notes of all, each filled up to `width` bytes."""
        mine = torch.frombuffer(bytearray(note.ljust(width, b"\0")), dtype=torch.uint8)
        return [row.tobytes() for row in self._gather_rows(mine).numpy()]

    def _gather_rows(self, mine: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, which are of one length."""
        rows = torch.empty(self.size * len(mine), dtype=mine.dtype)
        _asked(lambda: _ALL_GATHER(rows, mine, group=self._group))
        return rows.view(self.size, len(mine))

    def largest(self, number: int) -> int:
        value = torch.tensor([number], dtype=torch.int64)
        _asked(lambda: dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group))
        return int(value)

    def tell(self, who: int, note: bytes) -> bytes:
        head = self._told(who, _head(note), _NOTE_BYTES)
        size = int.from_bytes(head[:_LENGTH_BYTES], "little")
        if size > _NOTE_BYTES - _LENGTH_BYTES:
            return self._told(who, note, size)
        return head[_LENGTH_BYTES : _LENGTH_BYTES + size]

    def _told(self, who: int, note: bytes, width: int) -> bytes:
        """The note of that rank, which has, filled up, `width` bytes."""
        mine = note if who == self.rank.number else b""
        data = torch.frombuffer(bytearray(mine.ljust(width, b"\0")), dtype=torch.uint8)
        _asked(lambda: dist.broadcast(data, group_src=who, group=self._group))
        return data.numpy().tobytes()

    @contextlib.contextmanager
    def carrying(self, device: torch.device, most_bytes: int) -> Iterator[torch.device]:
        on_device = device.type == "cuda" and has_nccl()
        if self.largest(not on_device) or self.largest(most_bytes) < WORTH_BYTES:
            yield HOST
            return
        carrier = self._on_device(device)
        if carrier is None:
            yield HOST
            return
        self._carrier = carrier
        try:
            with torch.cuda.device(device):
                yield device
        except BaseException:
            carrier.abandon()
            raise
        else:
            carrier.close()
        finally:
            self._carrier = self._host

    def _on_device(self, device: torch.device) -> DeviceCarrier | None:
        """NCCL, where every rank has it; None on all of them where one does not."""
        carrier: DeviceCarrier | None = None
        try:
            carrier = DeviceCarrier(device)
        except RuntimeError as error:
            log.warning("restoring over the host: NCCL failed: %s", _first_line(error))
        if not self.largest(carrier is None):
            return carrier
        if carrier is not None:
            log.warning("restoring over the host: NCCL failed on another rank")
            carrier.abandon()
        return None

    def exchange(self, each: Mapping[int, Parcel], to_all: Parcel | None) -> Iterator[Parcel]:
        head, data = to_all or (b"", _NOTHING)
        mine = torch.tensor([len(each), len(head), data.numel()])
        announced = self._gather_rows(mine).tolist()
        if any(parcels for parcels, _, _ in announced):
            yield from self._pass_each(each)
        for who, (_, head_bytes, data_bytes) in enumerate(announced):
            if head_bytes:
                own = who == self.rank.number
                heard = self._tell(self._host, who, _tensor(head) if own else None, head_bytes)
                came = self._tell(self._carrier, who, data if own else None, data_bytes)
                if not own:
                    yield heard.numpy().tobytes(), came

    def _pass_each(self, each: Mapping[int, Parcel]) -> Iterator[Parcel]:
        """To every rank what is for it alone, and from every rank what is for this one: first to
        the next rank and from the one before, then over two, and so on. Two parcels at most are
        coming at a time, however many ranks have something for this one."""
        mine = self.rank.number
        out = [each.get(rank, (b"", _NOTHING)) for rank in range(self.size)]
        sent = torch.tensor([[len(head), data.numel()] for head, data in out])
        come = torch.empty_like(sent)
        _asked(lambda: dist.all_to_all_single(come, sent, group=self._group))
        sizes = come.tolist()
        coming: _IncomingParcel | None = None
        for apart in range(1, self.size):
            to, source = (mine + apart) % self.size, (mine - apart) % self.size
            (head, data), (head_bytes, data_bytes) = out[to], sizes[source]
            if not head and not head_bytes:
                continue
            swap = functools.partial(self._swap, to=to, source=source)
            before = coming
            coming = _IncomingParcel(
                swap(self._host, _tensor(head), come_bytes=head_bytes, tag=0),
                swap(self._carrier, data, come_bytes=data_bytes, tag=1),
            )
            yield from _arrived(before)
        yield from _arrived(coming)

    @staticmethod
    def _swap(
        carrier: Carrier, data: torch.Tensor, *, to: int, source: int, come_bytes: int, tag: int
    ) -> Transit:
        return _asked(lambda: carrier.swap(to, data, source, come_bytes, tag))

    @staticmethod
    def _tell(
        carrier: Carrier, who: int, data: torch.Tensor | None, size_bytes: int
    ) -> torch.Tensor:
        return _asked(lambda: carrier.tell(who, data, size_bytes))

    def close(self) -> None:
        self._host.close()


def _arrived(coming: _IncomingParcel | None) -> Iterator[Parcel]:
    if coming is None:
        return
    head, data = _asked(coming.head.wait), _asked(coming.data.wait)
    if head.numel():
        yield head.numpy().tobytes(), data


def _asked(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:
        raise StorageError(
            "the ranks of this job could not restore together",
            found=_first_line(error),
            remedy="a rank has ended, hangs, or did not call restore(); see the logs of the others"
            + _after_restart(),
        ) from error


def _after_restart() -> str:
    """More to look for where torchrun has started the ranks again in the store of the dead ones."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not again or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "; or the ranks, which torchrun has started again, find the addresses of the dead ones in "
        "a store that it kept: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use "
        "--rdzv-backend=c10d instead of --master-addr and --master-port"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _head(note: bytes) -> bytes:
    """How a note begins: mostly it is short and fits beside its length, and one round is enough."""
    return len(note).to_bytes(_LENGTH_BYTES, "little") + note[: _NOTE_BYTES - _LENGTH_BYTES]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING


_CONSEQUENCES = (CorruptError, NotFoundError)
"""What a rank may conclude because another has failed, the likeliest first: no cause if there is
another. A checkpoint is passed over for `CorruptError`, so nothing else may look like it."""


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do something on every rank. Where it fails on any, it fails on all, with an error of the kind
    that is the cause (`_weight`), on the first rank that has one: all go on alike."""
    error: LaststepError | None = None
    result: T | None = None
    try:
        result = work()
    except LaststepError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 (raised again below, when the others know)
        short = system.is_one(raised)  # of this machine: no word about the checkpoint either
        error = system.error_for("go on", raised) if short else _Foreign(repr(raised))
        error.__cause__ = raised
    try:
        if ranks.largest(error is not None):
            raise _cause(ranks, error)
    finally:
        # An error and the frames it came through would hold each other, and what is restored.
        del error
    return result  # type: ignore[return-value]


class _Foreign(LaststepError):
    """Stands for an error that is not ours, such as one of a provider, until all have heard."""


def _weight(kind: str, fields: Mapping[str, str | None]) -> int:
    """Which of several errors is the cause: the one of the least weight. What a rank found missing
    weighs more than what it found wrong: it may only not have seen it."""
    names = [consequence.__name__ for consequence in _CONSEQUENCES]
    weight = 2 * (names.index(kind) + 1) if kind in names else 0
    return weight + ("missing" in fields)


def _cause(ranks: Ranks, error: LaststepError | None) -> BaseException:
    """The error that is the cause of all others, or this rank's own if it is of the same kind."""
    notes = ranks.gather(b"" if error is None else _encode(error))
    errors = [(rank, *msgspec.msgpack.decode(note)) for rank, note in enumerate(notes) if note]
    rank, kind, fields = min(errors, key=lambda sent: _weight(*sent[1:]))
    own = error is not None and _weight(*error.to_wire()) == _weight(kind, fields)
    if error is not None and (rank == ranks.rank.number or (own and type(error).__name__ == kind)):
        if isinstance(error, _Foreign) and error.__cause__ is not None:
            return error.__cause__
        return error
    fields["what"] = f"rank {rank}: {fields['what']}"
    cause = from_wire(kind, fields)
    cause.__cause__ = error
    return cause


def _encode(error: LaststepError) -> bytes:
    kind, fields = error.to_wire()
    lines = error.problems.lines() if isinstance(error, MismatchError) else ()
    if lines:
        fields["found"] = "; ".join(lines[:20])
    return msgspec.msgpack.encode((kind, fields))
