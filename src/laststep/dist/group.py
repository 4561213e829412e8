"""What the ranks of a job do together while they restore: tell each other, and pass bytes on.

A gloo group of our own, on the host, so that a failure in it leaves the groups that train alone.
Collective: every rank makes the same calls in the same order. Called on the training thread, in
`restore()` only.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from laststep.errors import LaststepError, Mismatch, StorageFailed, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from laststep.dist.ranks import Rank

T = TypeVar("T")
Parcel = tuple[bytes, torch.Tensor]
"""What one rank passes on to another: a head, and bytes."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its new name, where torch has it: the old one warns there."""


_NOTE_BYTES, _LENGTH_BYTES = 512, 8


class Ranks(Protocol):
    """Who restores."""

    rank: Rank
    size: int
    """How many do so together."""

    def gather(self, note: bytes) -> list[bytes]:
        """The notes of all ranks, on all ranks."""

    def tell(self, who: int, note: bytes) -> bytes:
        """The note of that rank, on all ranks."""

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""

    def exchange(self, each: Mapping[int, Parcel], to_all: Parcel | None) -> Iterator[Parcel]:
        """Send parcels, some to one rank each, one to all others; get theirs, which are to be used
        one after the other."""


class Alone:
    """One rank by itself, whether there are others in its job or not."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.size = 1

    def gather(self, note: bytes) -> list[bytes]:
        return [note]

    def tell(self, who: int, note: bytes) -> bytes:
        return note

    def largest(self, number: int) -> int:
        return number

    def exchange(self, each: Mapping[int, Parcel], to_all: Parcel | None) -> Iterator[Parcel]:
        return iter(())


class Group:
    """The ranks of a job of several; made by all of them at once."""

    def __init__(self, rank: Rank, *, deadline_s: float) -> None:
        self.rank = rank
        self.size = rank.ranks
        self._group = _asked(
            lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        )

    def gather(self, note: bytes) -> list[bytes]:
        # Mostly there is little to tell: that fits beside its length, and one round is enough.
        head = len(note).to_bytes(_LENGTH_BYTES, "little") + note[: _NOTE_BYTES - _LENGTH_BYTES]
        rows = self._gather(head, _NOTE_BYTES)
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
        found = torch.empty(self.size * width, dtype=torch.uint8)
        _asked(lambda: _ALL_GATHER(found, mine, group=self._group))
        return [row.tobytes() for row in found.view(self.size, width).numpy()]

    def largest(self, number: int) -> int:
        value = torch.tensor([number], dtype=torch.int64)
        _asked(lambda: dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group))
        return int(value)

    def tell(self, who: int, note: bytes) -> bytes:
        size = torch.tensor([len(note)])
        _asked(lambda: dist.broadcast(size, group_src=who, group=self._group))
        mine = note if who == self.rank.number else bytes(int(size))
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        _asked(lambda: dist.broadcast(data, group_src=who, group=self._group))
        return data.numpy().tobytes()

    def exchange(self, each: Mapping[int, Parcel], to_all: Parcel | None) -> Iterator[Parcel]:
        head, data = to_all or (b"", _NOTHING)
        sums = [len(each), len(head), data.numel()]
        found = torch.empty(self.size * len(sums), dtype=torch.int64)
        mine = torch.tensor(sums)
        _asked(lambda: _ALL_GATHER(found, mine, group=self._group))
        told = found.view(self.size, len(sums)).tolist()
        if any(parcels for parcels, _, _ in told):
            yield from self._pass_each(each)
        for who, (_, head_bytes, data_bytes) in enumerate(told):
            if head_bytes:
                yield from self._pass_to_all(who, head, data, head_bytes, data_bytes)

    def _pass_each(self, each: Mapping[int, Parcel]) -> Iterator[Parcel]:
        """To every rank what is for it alone, and from every rank what is for this one."""
        out = [each.get(rank, (b"", _NOTHING)) for rank in range(self.size)]
        told = torch.tensor([[len(head), data.numel()] for head, data in out])
        come = torch.empty_like(told)
        _asked(lambda: dist.all_to_all_single(come, told, group=self._group))
        lengths, volumes = come[:, 0].tolist(), come[:, 1].tolist()
        joined = torch.frombuffer(bytearray(b"".join(h for h, _ in out) or b"0"), dtype=torch.uint8)
        heads = self._scatter(joined[: int(told[:, 0].sum())], told[:, 0].tolist(), lengths)
        parts = torch.cat([data for _, data in out])
        for head, data in zip(
            heads, self._scatter(parts, told[:, 1].tolist(), volumes), strict=True
        ):
            if len(head):
                yield head.numpy().tobytes(), data

    def _pass_to_all(
        self, who: int, head: bytes, data: torch.Tensor, head_bytes: int, data_bytes: int
    ) -> Iterator[Parcel]:
        """What one rank has for all others; one after the other, so that it fits into memory."""
        if who == self.rank.number:
            told = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        else:
            told = torch.empty(head_bytes, dtype=torch.uint8)
            data = torch.empty(data_bytes, dtype=torch.uint8)
        for some in (told, data):
            _asked(functools.partial(dist.broadcast, some, group_src=who, group=self._group))
        if who != self.rank.number:
            yield told.numpy().tobytes(), data

    def _scatter(self, data: torch.Tensor, out: list[int], come: list[int]) -> list[torch.Tensor]:
        got = torch.empty(sum(come), dtype=torch.uint8)
        _asked(lambda: dist.all_to_all_single(got, data, come, out, group=self._group))
        return list(got.split(come))

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def _asked(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:
        raise StorageFailed(
            "the ranks of this job could not restore together",
            found=str(error).partition("\n")[0],
            remedy="a rank has ended, hangs, or did not call restore(); see the logs of the others",
        ) from error


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do something on every rank. Where it fails on any, it fails on all, with the error of the
    first rank on which it did: all go on alike."""
    error: BaseException | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as raised:  # noqa: BLE001 (raised again below, when the others know)
        error = raised
    told = error if isinstance(error, LaststepError) else LaststepError(repr(error))
    note = b"" if error is None else _encode(told)
    for rank, heard in enumerate(ranks.gather(note)):
        if not heard:
            continue
        if error is not None and (ranks.size == 1 or rank == ranks.rank.number):
            raise error
        kind, fields = msgspec.msgpack.decode(heard)
        fields["what"] = f"rank {rank}: {fields['what']}"
        raise from_wire(kind, fields) from error
    return result  # type: ignore[return-value]


def _encode(error: LaststepError) -> bytes:
    kind, fields = error.to_wire()
    lines = error.problems.lines() if isinstance(error, Mismatch) else ()
    if lines:
        fields["found"] = "; ".join(lines[:20])
    return msgspec.msgpack.encode((kind, fields))
