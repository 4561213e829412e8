"""The rank of this process, and the collectives of a restore: broadcast, all_gather, all_max, and
exchange of tensor bytes.

Uses a gloo group of its own on the host, so that a failure here does not break the groups that
train. Large exchanges between devices use NCCL if the job has it (`ranks.transports`). Every rank
makes the same calls in the same order, on the training thread, inside `restore()`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import msgspec
import torch
import torch.distributed as dist

from laststep import errors
from laststep.errors import LaststepError
from laststep.process import system
from laststep.ranks.key_value import awaited
from laststep.ranks.transports import HOST, DeviceTransport, Transit, Transport, has_nccl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
RankMessage = tuple[bytes, torch.Tensor]
"""A header and the bytes that one rank sends to another."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The new name, if this torch has it: the old one warns there."""


_NOTE_BYTES, _LENGTH_BYTES = 512, 8
WORTH_BYTES = 256 << 20
"""If no rank sends this much, connecting NCCL takes longer than it saves."""


class Rank(NamedTuple):
    """The number of this process and the number of processes."""

    number: int
    ranks: int

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which decides for all."""
        return self.number == 0


def this_rank() -> Rank:
    """Return this process's rank, which log lines name from now on."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
        system.log_as_rank(rank.number if rank.ranks > 1 else None)
        return rank
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise errors.UsageError(
            "torch.distributed is not initialized",
            expected="torch.distributed.init_process_group() before the Checkpointer is made",
            found=f"WORLD_SIZE={announced} and no process group",
            remedy="call init_process_group() first, or unset WORLD_SIZE for a job of its own",
        )
    system.log_as_rank(None)
    return Rank(0, 1)


def ranks_on_this_node(rank: Rank) -> int:
    """Return how many ranks share this node's memory: as the launcher says, else all of them."""
    announced = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(max(1, int(announced)), rank.ranks) if announced.isdigit() else rank.ranks


def leaves_cores(rank: Rank) -> bool:
    return rank.ranks == 1 or ranks_on_this_node(rank) < (os.cpu_count() or 1)


class Ranks:
    """The ranks that restore together; here a single one, by itself."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.size = 1

    def arrive(self) -> None:
        """Wait until all ranks call `restore()`, and log which ones are missing."""

    def all_gather(self, note: bytes) -> list[bytes]:
        """Return the bytes of all ranks, on all ranks."""
        return [note]

    def broadcast(self, who: int, note: bytes) -> bytes:
        """Return the bytes of rank `who`, on all ranks."""
        return note

    def all_max(self, number: int) -> int:
        return number


class RankGroup(Ranks):
    """All ranks of a job; constructed by all of them at once."""

    def __init__(
        self, rank: Rank, name: str, *, deadline_s: float, call: str = "restore()"
    ) -> None:
        """`name` identifies this group on all ranks; `call` is the call that they are making."""
        super().__init__(rank)
        self.size = rank.ranks
        self._name = name
        self._deadline_s = deadline_s
        self._arrivals = 0
        timeout = timedelta(seconds=deadline_s)
        self._group = self._awaited(lambda: dist.new_group(backend="gloo", timeout=timeout), call)
        self._transport = self._host = Transport(self._group)

    def arrive(self) -> None:
        self._awaited(lambda: self.all_max(0))

    def _awaited(self, act: Callable[[], T], call: str = "restore()") -> T:
        self._arrivals += 1
        name = f"{self._name}/restore/{self._arrivals}"

        def work() -> T:
            with awaited(self.rank, call, name, self._deadline_s):
                return act()

        return _asked(work)

    def all_gather(self, note: bytes) -> list[bytes]:
        return _complete(note, self._gather)

    def broadcast(self, who: int, note: bytes) -> bytes:
        (told,) = _complete(note, functools.partial(self._told, who))
        return told

    def _gather(self, note: bytes, width: int) -> list[bytes]:
        """Return the bytes of all ranks, each padded to `width`."""
        return [row.tobytes() for row in self._gather_rows(_tensor(note, width)).numpy()]

    def _told(self, who: int, note: bytes, width: int) -> list[bytes]:
        """Return the bytes of rank `who`, padded to `width`."""
        data = _tensor(note[:width], width)
        _asked(dist.broadcast, data, group_src=who, group=self._group)
        return [data.numpy().tobytes()]

    def _gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, which have equal length."""
        rows = torch.empty(self.size * len(row), dtype=row.dtype)
        _asked(_ALL_GATHER, rows, row, group=self._group)
        return rows.view(self.size, len(row))

    def all_max(self, number: int) -> int:
        value = torch.tensor([number], dtype=torch.int64)
        _asked(dist.all_reduce, value, op=dist.ReduceOp.MAX, group=self._group)
        return int(value)

    @contextlib.contextmanager
    def carrying(self, device: torch.device, most_bytes: int) -> Iterator[torch.device]:
        """Prepare to send up to `most_bytes` from `device`; yield the device for all messages."""
        on_device = device.type == "cuda" and has_nccl()
        if self.all_max(not on_device) or self.all_max(most_bytes) < WORTH_BYTES:
            yield HOST
            return
        transport = self._on_device(device)
        if transport is None:
            yield HOST
            return
        self._transport = transport
        try:
            with torch.cuda.device(device):
                yield device
        except BaseException:
            transport.abandon()
            raise
        else:
            transport.close()
        finally:
            self._transport = self._host

    def _on_device(self, device: torch.device) -> DeviceTransport | None:
        """Return an NCCL transport if every rank has NCCL, else None on all ranks."""
        transport: DeviceTransport | None = None
        try:
            transport = DeviceTransport(device)
        except RuntimeError as error:
            log.warning("restoring over the host: NCCL failed: %s", _first_line(error))
        if not self.all_max(transport is None):
            return transport
        if transport is not None:
            log.warning("restoring over the host: NCCL failed on another rank")
            transport.abandon()
        return None

    def exchange(
        self, each: Mapping[int, RankMessage], to_all: RankMessage | None
    ) -> Iterator[RankMessage]:
        """Send one message to each of some ranks and one to all others; yield the messages
        received, each to be used before the next."""
        head, data = to_all or (b"", _NOTHING)
        sizes = torch.tensor([len(each), len(head), data.numel()])
        announced = self._gather_rows(sizes).tolist()
        if any(messages for messages, _, _ in announced):
            yield from self._pass_each(each)
        for who, (_, head_bytes, data_bytes) in enumerate(announced):
            if head_bytes:
                own = who == self.rank.number
                own_head, own_data = (_tensor(head), data) if own else (None, None)
                heard = _asked(self._host.broadcast, who, own_head, head_bytes)
                came = _asked(self._transport.broadcast, who, own_data, data_bytes)
                if not own:
                    yield heard.numpy().tobytes(), came

    def _pass_each(self, each: Mapping[int, RankMessage]) -> Iterator[RankMessage]:
        """Send each rank its message and receive those for this one, at growing distance: at most
        two are being received at a time, however many ranks send to this one."""
        me = self.rank.number
        out = [each.get(rank, (b"", _NOTHING)) for rank in range(self.size)]
        sent = torch.tensor([[len(head), data.numel()] for head, data in out])
        come = torch.empty_like(sent)
        _asked(dist.all_to_all_single, come, sent, group=self._group)
        sizes = come.tolist()
        coming: tuple[Transit, Transit] | None = None
        for apart in range(1, self.size):
            to, source = (me + apart) % self.size, (me - apart) % self.size
            (head, data), (head_bytes, data_bytes) = out[to], sizes[source]
            if not head and not head_bytes:
                continue
            before = coming
            coming = (
                _asked(self._host.swap, to, _tensor(head), source, head_bytes, 0),
                _asked(self._transport.swap, to, data, source, data_bytes, 1),
            )
            yield from _arrived(before)
        yield from _arrived(coming)


def _arrived(coming: tuple[Transit, Transit] | None) -> Iterator[RankMessage]:
    if coming is None:
        return
    head, data = (_asked(transit.wait) for transit in coming)
    if head.numel():
        yield head.numpy().tobytes(), data


def _asked(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    try:
        return call(*arguments, **named)
    except RuntimeError as error:
        raise errors.StorageError(
            "the ranks of this job could not restore collectively",
            found=_first_line(error),
            remedy=(
                "a rank has exited, hangs, or did not call restore(); check the logs of the "
                "other ranks. If torchrun has restarted them: set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            ),
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _complete(note: bytes, send: Callable[[bytes, int], list[bytes]]) -> list[bytes]:
    """Return what ranks hear when each sends its bytes. Most are short and fit beside their length
    into a first part of fixed size, so that one round suffices."""
    room = _NOTE_BYTES - _LENGTH_BYTES
    heads = send(len(note).to_bytes(_LENGTH_BYTES, "little") + note[:room], _NOTE_BYTES)
    sizes = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    rows = [head[_LENGTH_BYTES:] for head in heads]
    if max(sizes) > room:
        rows = send(note, max(sizes))
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _tensor(data: bytes, width: int = 0) -> torch.Tensor:
    data = data.ljust(width, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING


_CONSEQUENCES = {errors.CorruptError.__name__: 1, errors.NotFoundError.__name__: 2}
"""Errors that a rank may raise because another rank failed, likeliest first. They do not count as
the cause if there is another error: `CorruptError` makes a restore skip the checkpoint, so nothing
else may look like it."""


def collective(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on any, raise an error of the same kind on all."""
    if ranks.size == 1:
        return work()
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
        if ranks.all_max(error is not None):
            raise _cause(ranks, error)
    finally:
        # An error and the frames it came through would hold each other, and what is restored.
        del error
    return result  # type: ignore[return-value]


class _Foreign(LaststepError):
    """Stands for an error that is not ours, such as a provider's, until all ranks know of it."""


def _weight(kind: str, fields: Mapping[str, str | None]) -> int:
    """Return the weight of an error; of several, the lightest is the cause. A missing file weighs
    more than a wrong one: the rank may only not have seen it."""
    return 2 * _CONSEQUENCES.get(kind, 0) + ("missing" in fields)


def _cause(ranks: Ranks, error: LaststepError | None) -> BaseException:
    """Return the error that caused all others, or this rank's own if it is of the same kind."""
    notes = ranks.all_gather(b"" if error is None else _encode(error))
    sent = [(rank, *msgspec.msgpack.decode(note)) for rank, note in enumerate(notes) if note]
    rank, kind, fields = min(sent, key=lambda report: _weight(*report[1:]))
    own = error is not None and _weight(*error.to_wire()) == _weight(kind, fields)
    if error is not None and (rank == ranks.rank.number or (own and type(error).__name__ == kind)):
        if isinstance(error, _Foreign) and error.__cause__ is not None:
            return error.__cause__
        return error
    fields["what"] = f"rank {rank}: {fields['what']}"
    cause = errors.from_wire(kind, fields)
    cause.__cause__ = error
    return cause


def _encode(error: LaststepError) -> bytes:
    kind, fields = error.to_wire()
    lines = error.problems.lines() if isinstance(error, errors.MismatchError) else ()
    if lines:  # the rank itself raises all of them
        fields["what"] = f"{fields['what']} (first: {lines[0]})"
        fields["remedy"] = "; ".join(filter(None, ("see its log", fields.get("remedy"))))
    return msgspec.msgpack.encode((kind, fields))
