"""Put boxes of tensors where they belong: into this rank's memory, or into parcels for others.

`deliver` is called on reading threads, several at once: no two boxes overlap, and every box has its
place in the parcels before anything is read. The slot is free again when it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from laststep.state.layouts import Box
from laststep.state.tensors import TORCH_DTYPES, Held, put_box
from laststep.terms import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.dist.ranks import Rank
    from laststep.engine.pool import Pool
    from laststep.plan.gather import Chunk, Wanted
    from laststep.plan.load import Read

_ALIGN_BYTES = 16
"""A box in a parcel begins at a multiple of the largest element."""


class Sent(NamedTuple):
    """A box in a parcel."""

    tensor: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


class _Move(NamedTuple):
    """A box of a chunk, and what of it is wanted by somebody."""

    tensor: int
    at: int
    box: Box
    common: Box
    who: int
    parcel_at: int


class Parcels(NamedTuple):
    """What one rank sends to all: the boxes for each, and their bytes one after the other."""

    heads: list[bytes]
    sizes: list[int]
    data: torch.Tensor


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
        self._rank = rank
        self._targets = targets
        self._dtypes = [TORCH_DTYPES[dtype] for dtype in dtypes]
        self._wanted = wanted
        self._moves: dict[tuple[int, int], list[_Move]] = {}
        self._starts: list[int] = []
        self._parcels = Parcels([], [], torch.empty(0, dtype=torch.uint8))

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """These are read next; what others want of them gets its place in the parcels."""
        heads: list[list[Sent]] = [[] for _ in range(self._rank.ranks)]
        sizes = [0] * self._rank.ranks
        self._moves = {}
        for chunk in chunks:
            moves = self._moves[chunk.file, chunk.start] = []
            for stored, box, at in chunk.boxes():
                for who, boxes in self._wanted(stored.tensor):
                    for common in filter(None, map(box.meet, boxes)):
                        moves.append(_Move(stored.tensor, at, box, common, who, sizes[who]))
                        if who != self._rank.number:
                            size = common.volume * stored.itemsize
                            heads[who].append(Sent(stored.tensor, common.start, common.stop))
                            sizes[who] += align_up(size, _ALIGN_BYTES)
        self._starts = [sum(sizes[:who]) for who in range(len(sizes))]
        self._parcels = Parcels(
            heads=[msgspec.msgpack.encode(some) for some in heads],
            sizes=sizes,
            data=torch.empty(sum(sizes), dtype=torch.uint8),
        )

    def deliver(self, read: Read, slot: int) -> None:
        """Take what a chunk holds to where it is wanted."""
        memory = self._pool.tensor(slot)
        for move in self._moves[read.file, read.start]:
            data = self._view(memory, move.at, move.tensor, move.box)
            if move.who == self._rank.number:
                self._place(move.tensor, move.common, data, move.box)
                continue
            at = self._starts[move.who] + move.parcel_at
            place = self._view(self._parcels.data, at, move.tensor, move.common)
            put_box(place, move.common.within(move.common), data, move.common.within(move.box))

    def parcels(self) -> Parcels:
        """What goes to each rank now that everything expected has been read."""
        return self._parcels

    def unpack(self, head: bytes, data: torch.Tensor) -> None:
        """Place what another rank has passed on."""
        at = 0
        for sent in msgspec.msgpack.decode(head, type=list[Sent]):
            box = Box(sent.start, sent.stop)
            self._place(sent.tensor, box, self._view(data, at, sent.tensor, box), box)
            size = box.volume * self._dtypes[sent.tensor].itemsize
            at += align_up(size, _ALIGN_BYTES)

    def finish(self) -> None:
        """Wait for copies to devices."""
        devices = {h.memory.device for some in self._targets.values() for h in some}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _view(self, memory: torch.Tensor, at: int, tensor: int, box: Box) -> torch.Tensor:
        dtype = self._dtypes[tensor]
        return memory[at : at + box.volume * dtype.itemsize].view(dtype).view(box.shape)

    def _place(self, tensor: int, common: Box, data: torch.Tensor, box: Box) -> None:
        for held in self._targets.get(tensor, ()):
            here = held.box.meet(common)
            if here is not None:
                put_box(held.memory, here.within(held.box), data, here.within(box))
