"""Put boxes of tensors where they belong: into this rank's memory, or into parcels for others.

`deliver` is called on reading threads, several at once: no two boxes overlap, and every box has its
place in the parcels before anything is read. The chunk is another's when it returns. Parcels lie on
the host, or on this rank's device where they are carried from device to device.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from laststep.capture.device import CopyStreams
from laststep.capture.exact import copy_each
from laststep.restoring.placer import MANY, tensor_over
from laststep.state.boxes import Box
from laststep.state.tensors import TORCH_DTYPES, LocalBox, box_of
from laststep.terms import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from laststep.plan.chunk_readers import Chunk
    from laststep.plan.load import Read
    from laststep.plan.wishes import Wants
    from laststep.ranks.rank import Rank

_ALIGN_BYTES = 16
"""A box in a parcel begins at a multiple of the largest element."""
_ALL = -1
"""In the place of a rank: what every one of them wants."""


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
    size_bytes: int


class Parcel(NamedTuple):
    """Boxes for somebody: which, and their bytes one after the other."""

    head: bytes
    data: torch.Tensor


@dataclass(slots=True)
class Parcels:
    """What a rank passes on of some chunks: to each other rank, and to all of them alike."""

    each: dict[int, Parcel]
    all: Parcel | None


class _ParcelPlace(NamedTuple):
    """Where in a parcel a box goes."""

    move: _Move
    parcel: torch.Tensor | None
    """None: into this rank's own memory only."""
    at: int


class _Copy(NamedTuple):
    """A box that lies somewhere in a slot or a parcel, and where a part of it goes."""

    into: torch.Tensor
    tensor: int
    at: int
    box: Box
    taken: Box


class BoxPlacer:
    """Delivers what this rank reads, and what others pass on to it."""

    def __init__(
        self,
        rank: Rank,
        targets: Mapping[int, Sequence[LocalBox]],
        dtypes: Sequence[str],
        wants: Wants,
    ) -> None:
        self._rank = rank
        self._targets = targets
        self._dtypes = [TORCH_DTYPES[dtype] for dtype in dtypes]
        self._wants = wants
        self._places: dict[tuple[int, int], list[_ParcelPlace]] = {}
        self._placed: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._streams = CopyStreams(box.memory.device for held in targets.values() for box in held)

    def device(self) -> torch.device:
        """Where all that this rank wants is to lie; the host, if not all on one device."""
        devices = {box.memory.device for held in self._targets.values() for box in held}
        if not devices and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def passed_on_bytes(self, chunk: Chunk) -> int:
        """How much of a chunk goes to others; what goes to all of them counts once."""
        mine = self._rank.number
        return sum(move.size_bytes for move in self._moves(chunk) if move.who != mine)

    def expect(self, chunks: Sequence[Chunk], device: torch.device) -> Parcels:
        """These are read next; what others want of them gets its place in the parcels, which lie on
        that device and are filled when all are delivered."""
        moves = [(chunk, list(self._moves(chunk))) for chunk in chunks]
        heads: dict[int, list[Sent]] = {}
        sizes: Counter[int] = Counter()
        for _, wanted in moves:
            for move in wanted:
                if move.who != self._rank.number:
                    sizes[move.who] += align_up(move.size_bytes, _ALIGN_BYTES)
                    sent = Sent(move.tensor, move.common.start, move.common.stop)
                    heads.setdefault(move.who, []).append(sent)
        parcels = {
            who: Parcel(
                msgspec.msgpack.encode(heads[who]),
                torch.empty(size, dtype=torch.uint8, device=device),
            )
            for who, size in sizes.items()
        }
        self._streams.follow()  # this memory may have been another's, which is still being copied
        at: Counter[int] = Counter()
        self._places = {}
        for chunk, wanted in moves:
            places = self._places[chunk.file, chunk.start] = []
            for move in wanted:
                parcel = parcels.get(move.who)
                places.append(
                    _ParcelPlace(move, None if parcel is None else parcel.data, at[move.who])
                )
                at[move.who] += align_up(move.size_bytes, _ALIGN_BYTES)
        to_all = parcels.pop(_ALL, None)
        return Parcels(parcels, to_all)

    def deliver(self, read: Read, data: memoryview) -> None:
        """Take what a chunk holds to where it is wanted."""
        copies: list[_Copy] = []
        for move, parcel, at in self._places[read.file, read.start]:
            tensor, common = move.tensor, move.common
            if move.who in (self._rank.number, _ALL):
                copies += self._placed_in(tensor, common, move.at, move.box)
            if parcel is not None:
                place = self._view(parcel, at, tensor, common)
                copies.append(_Copy(place, tensor, move.at, move.box, common.within(move.box)))
        self._copy(tensor_over(data)[: read.stop - read.start], copies)

    def unpack(self, parcel: Parcel) -> None:
        """Place what another rank has passed on."""
        at = 0
        copies: list[_Copy] = []
        for sent in msgspec.msgpack.decode(parcel.head, type=list[Sent]):
            box = Box(sent.start, sent.stop)
            copies += self._placed_in(sent.tensor, box, at, box)
            at += align_up(box.volume * self._dtypes[sent.tensor].itemsize, _ALIGN_BYTES)
        self._copy(parcel.data, copies)

    def finish(self) -> None:
        """Make training wait for all copies."""
        self._streams.lead()

    def lacking(self) -> int | None:
        """A tensor of which not everything that this rank wants has come."""
        for tensor, held in self._targets.items():
            if self._placed[tensor] != sum(target.box.volume for target in held):
                return tensor
        return None

    def _moves(self, chunk: Chunk) -> Iterator[_Move]:
        for stored, box, at in chunk.boxes():
            tensor, size = stored.tensor, stored.itemsize
            if self._wants.by_all(tensor) and self._wants.size > 1:
                yield _Move(tensor, at, box, box, _ALL, box.volume * size)
                continue
            for who in self._wants.ranks(self._wants.of_box(tensor, box)):
                for common in filter(None, map(box.meet, self._wants.boxes(who, tensor))):
                    yield _Move(tensor, at, box, common, who, common.volume * size)

    def _view(self, memory: torch.Tensor, at: int, tensor: int, box: Box) -> torch.Tensor:
        dtype = self._dtypes[tensor]
        return memory[at : at + box.volume * dtype.itemsize].view(dtype).view(box.shape)

    def _placed_in(self, tensor: int, common: Box, at: int, box: Box) -> Iterator[_Copy]:
        """Where in this rank's memory a part of a box goes that lies at `at`; counts it."""
        placed = 0
        for held in self._targets.get(tensor, ()):
            here = held.box.meet(common)
            if here is not None:
                into = box_of(held.memory, here.within(held.box))
                yield _Copy(into, tensor, at, box, here.within(box))
                placed += here.volume
        with self._lock:
            self._placed[tensor] += placed

    def _copy(self, memory: torch.Tensor, copies: Sequence[_Copy]) -> None:
        by_device: dict[torch.device, list[_Copy]] = {}
        for copy in copies:
            by_device.setdefault(copy.into.device, []).append(copy)
        for device, onto in by_device.items():
            if memory.is_cuda:  # a parcel that came on the stream that copies it, too
                self._scatter(memory, onto)
                continue
            with self._streams.copying(device):
                source = memory
                if device.type == "cuda" and len(onto) > MANY:
                    source = memory.to(device, non_blocking=True)
                self._scatter(source, onto)

    def _scatter(self, memory: torch.Tensor, copies: Sequence[_Copy]) -> None:
        source = [box_of(self._view(memory, c.at, c.tensor, c.box), c.taken) for c in copies]
        copy_each([copy.into for copy in copies], source, non_blocking=True)
