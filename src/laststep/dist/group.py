"""What the ranks of a job do together while they restore: tell each other, and pass bytes on.

A gloo group of our own, on the host, so that a failure in it leaves the groups that train alone.
Collective: every rank makes the same calls in the same order. Called on the training thread, in
`restore()` only.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from laststep.errors import LaststepError, Mismatch, StorageFailed, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.dist.ranks import Rank

T = TypeVar("T")


class Ranks(Protocol):
    """Who restores."""

    rank: Rank
    size: int
    """How many do so together."""

    def gather(self, note: bytes) -> list[bytes]:
        """The notes of all ranks, on all ranks."""

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""

    def exchange(self, parcels: Sequence[bytes | bytearray]) -> list[memoryview]:
        """Send a parcel to each rank, oneself included, and get one from each."""


class Alone:
    """One rank by itself, whether there are others in its job or not."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.size = 1

    def gather(self, note: bytes) -> list[bytes]:
        return [note]

    def largest(self, number: int) -> int:
        return number

    def exchange(self, parcels: Sequence[bytes | bytearray]) -> list[memoryview]:
        return [memoryview(parcel) for parcel in parcels]


class Group:
    """The ranks of a job of several; made by all of them at once."""

    def __init__(self, rank: Rank, *, deadline_s: float) -> None:
        self.rank = rank
        self.size = rank.ranks
        self._group = _asked(
            lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        )

    def gather(self, note: bytes) -> list[bytes]:
        sizes = torch.zeros(self.rank.ranks, dtype=torch.int64)
        mine = torch.tensor([len(note)], dtype=torch.int64)
        _asked(lambda: dist.all_gather_into_tensor(sizes, mine, group=self._group))
        width = max(int(sizes.max()), 1)
        padded = torch.zeros(width, dtype=torch.uint8)
        if note:
            padded[: len(note)] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        found = torch.empty(self.rank.ranks * width, dtype=torch.uint8)
        _asked(lambda: dist.all_gather_into_tensor(found, padded, group=self._group))
        rows = found.view(self.rank.ranks, width).numpy()
        return [bytes(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def largest(self, number: int) -> int:
        value = torch.tensor([number], dtype=torch.int64)
        _asked(lambda: dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group))
        return int(value)

    def exchange(self, parcels: Sequence[bytes | bytearray]) -> list[memoryview]:
        out = torch.tensor([len(parcel) for parcel in parcels], dtype=torch.int64)
        come = torch.empty_like(out)
        _asked(lambda: dist.all_to_all_single(come, out, group=self._group))
        joined = bytearray(b"".join(parcels)) or bytearray(1)
        sent = torch.frombuffer(joined, dtype=torch.uint8)[: int(out.sum())]
        sizes = come.tolist()
        got = torch.empty(sum(sizes), dtype=torch.uint8)
        _asked(lambda: dist.all_to_all_single(got, sent, sizes, out.tolist(), group=self._group))
        view = memoryview(got.numpy())  # type: ignore[arg-type]
        at, found = 0, []
        for size in sizes:
            found.append(view[at : at + size])
            at += size
        return found

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
    told = LaststepError(repr(error)) if error else None
    note = b"" if error is None else _encode((error if isinstance(error, LaststepError) else told))
    for rank, heard in enumerate(ranks.gather(note)):
        if not heard:
            continue
        if error is not None and (ranks.size == 1 or rank == ranks.rank.number):
            raise error
        kind, fields = msgspec.msgpack.decode(heard)
        fields["what"] = f"rank {rank}: {fields['what']}"
        raise from_wire(kind, fields) from error
    return result  # type: ignore[return-value]


def _encode(error: LaststepError | None) -> bytes:
    assert error is not None  # noqa: S101 (only asked where there is one)
    kind, fields = error.to_wire()
    lines = error.problems.lines() if isinstance(error, Mismatch) else ()
    if lines:
        fields["found"] = "; ".join(lines[:20])
    return msgspec.msgpack.encode((kind, fields))
