"""Put boxes of tensors where they belong: into this rank's memory, or into parcels for others.

Called on reading threads, several at once: no two boxes overlap. What other ranks want is copied
out of the slot, which is free again when `deliver` returns.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from laststep.state.layouts import Box
from laststep.state.tensors import TORCH_DTYPES, Held, put_box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.dist.ranks import Rank
    from laststep.engine.pool import Pool
    from laststep.plan.gather import Chunk, Wanted
    from laststep.plan.load import Read

_HEAD_BYTES = 8


class _Sent(NamedTuple):
    """A box in a parcel; its bytes follow in order."""

    tensor: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


class BoxPlacer:
    """Delivers what this rank reads, and what others pass on to it."""

    def __init__(
        self,
        pool: Pool,
        rank: Rank,
        targets: Mapping[int, Sequence[Held]],
        dtypes: Sequence[str],
        wanted: Callable[[int], Wanted],
    ) -> None:
        self._pool = pool
        self._rank = rank.number
        self._targets = targets
        self._dtypes = dtypes
        self._wanted = wanted
        self._lock = threading.Lock()
        self._heads: list[list[_Sent]] = [[] for _ in range(rank.ranks)]
        self._bytes: list[list[bytes]] = [[] for _ in range(rank.ranks)]
        self._chunks: dict[tuple[int, int], Chunk] = {}

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """These are read next."""
        self._chunks = {(chunk.file, chunk.start): chunk for chunk in chunks}

    def deliver(self, read: Read, slot: int) -> None:
        """Take what a chunk holds to where it is wanted."""
        memory = self._pool.tensor(slot)
        for stored, box, at in self._chunks[read.file, read.start].boxes():
            size = box.volume * stored.itemsize
            data = memory[at : at + size].view(TORCH_DTYPES[self._dtypes[stored.tensor]])
            data = data.view(box.shape)
            for who, boxes in self._wanted(stored.tensor):
                for one in boxes:
                    common = box.meet(one)
                    if common is not None:
                        self._pass_on(who, stored.tensor, common, data, box)

    def _pass_on(self, who: int, tensor: int, common: Box, data: torch.Tensor, box: Box) -> None:
        if who == self._rank:
            self._place(tensor, common, data, box)
            return
        inner = common.within(box)
        indices = tuple(slice(a, b) for a, b in zip(inner.start, inner.stop, strict=True))
        copied = data[indices].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        with self._lock:
            self._heads[who].append(_Sent(tensor, common.start, common.stop))
            self._bytes[who].append(copied)

    def _place(self, tensor: int, common: Box, data: torch.Tensor, box: Box) -> None:
        for held in self._targets.get(tensor, ()):
            here = held.box.meet(common)
            if here is not None:
                put_box(held.memory, here.within(held.box), data, here.within(box))

    def parcels(self) -> list[bytes]:
        """What is to go to each rank now."""
        found = []
        for heads, parts in zip(self._heads, self._bytes, strict=True):
            head = msgspec.msgpack.encode(heads)
            found.append(len(head).to_bytes(_HEAD_BYTES, "little") + head + b"".join(parts))
            heads.clear()
            parts.clear()
        return found

    def unpack(self, parcel: memoryview) -> None:
        """Place what another rank has passed on."""
        size = int.from_bytes(parcel[:_HEAD_BYTES], "little")
        heads = msgspec.msgpack.decode(parcel[_HEAD_BYTES : _HEAD_BYTES + size], type=list[_Sent])
        at = _HEAD_BYTES + size
        for head in heads:
            box = Box(head.start, head.stop)
            dtype = TORCH_DTYPES[self._dtypes[head.tensor]]
            length = box.volume * dtype.itemsize
            data = torch.frombuffer(bytearray(parcel[at : at + length]), dtype=dtype)
            self._place(head.tensor, box, data.view(box.shape), box)
            at += length

    def finish(self) -> None:
        """Wait for copies to devices."""
        for held in (one for some in self._targets.values() for one in some):
            if held.memory.is_cuda:
                torch.cuda.synchronize(held.memory.device)
