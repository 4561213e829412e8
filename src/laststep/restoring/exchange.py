"""Read a checkpoint into parts of tensors, together with the other ranks of the job.

The ranks tell each other what they want, once for all that want the same; then each reads its share
of the chunks, keeps what is its own and passes the rest on, a few slots' worth at a time. A job of
one rank does the same alone.

Verified bytes are put into tensors by `Placer`, on several reading threads at once: parts of
different reads never overlap. What other ranks want goes to them in parcels.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from laststep.capture.device import CopyStreams
from laststep.capture.exact import copy_each
from laststep.capture.gather import bytes_of
from laststep.codecs.digests import digest
from laststep.errors import CorruptError
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.plan.reads import Chunk, FileBox, Read, chunks_of
from laststep.plan.who_reads import (
    Ledger,
    Wants,
    Wish,
    able_of,
    decode_wish,
    encode_wish,
    known_sources,
)
from laststep.ranks.group import together
from laststep.read.reader import Room, read_all
from laststep.state.boxes import Box, whole
from laststep.state.tensors import TORCH_DTYPES, Laid, LocalBox, box_of, held_by
from laststep.terms import DTYPES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from laststep.plan.reads import Chunk, ReadPart
    from laststep.plan.who_reads import WriterSource
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.read.content import Content, Key
    from laststep.read.files import DataFile
    from laststep.restoring.match import Match
    from laststep.state.tree import TensorSpec
    from laststep.tiers.nodes import Readers


MANY = 16
"""From so many small parts on, a chunk is moved to the device whole and scattered there."""


class TensorRoom(Room, Protocol):
    """Where reads land that go into tensors."""

    slot_bytes: int


def tensor_over(chunk: memoryview) -> torch.Tensor:
    """Bytes as a tensor, not copied. Nobody may write into it where the bytes are read-only: torch
    has no such tensors, and would warn."""
    if not chunk.readonly:
        return torch.frombuffer(chunk, dtype=torch.uint8)
    there = np.frombuffer(chunk, np.uint8)
    alias = (ctypes.c_uint8 * chunk.nbytes).from_address(there.ctypes.data)
    alias.source = there  # type: ignore[attr-defined] # which keeps the bytes
    return torch.frombuffer(alias, dtype=torch.uint8)


class Placer:
    """Delivers reads into targets; targets MUST be contiguous."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._bytes = [bytes_of(target) for target in targets]
        self._devices = [target.device for target in targets]
        self._streams = CopyStreams(self._devices)

    def deliver(self, read: Read, data: memoryview) -> None:
        """Copy a read's parts to where they belong; its memory is free afterwards."""
        by_device: dict[torch.device, list[ReadPart]] = {}
        for part in read.parts:
            by_device.setdefault(self._devices[part.target], []).append(part)
        chunk = tensor_over(data)
        for device, parts in by_device.items():
            with self._streams.copying(device):
                source = chunk
                if device.type == "cuda" and len(parts) > MANY:
                    source = chunk[: read.stop - read.start].to(device, non_blocking=True)
                self._scatter(source, parts)

    def finish(self) -> None:
        """Make the streams that training uses wait for all copies."""
        self._streams.lead()

    def _scatter(self, chunk: torch.Tensor, parts: list[ReadPart]) -> None:
        into = [self._bytes[p.target][p.target_at : p.target_at + p.size_bytes] for p in parts]
        source = [chunk[p.at : p.at + p.size_bytes] for p in parts]
        copy_each(into, source, non_blocking=True)


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


_PARCEL_BYTES = 64 << 20
"""So much is passed on at a time by a rank, or what is wanted of one chunk: what bounds the
memory."""


class BoxTransfer:
    """What all ranks want of a checkpoint, each block read once by one of them."""

    def __init__(
        self,
        content: Content,
        matches: Sequence[Match],
        ranks: Ranks,
        readers: Readers | None = None,
    ) -> None:
        """Work out who reads what, and open the files; nothing is touched yet."""
        self._content = content
        self._ranks = ranks
        number = ranks.rank.number
        self._keys = content.keys()
        index = {key: at for at, key in enumerate(self._keys)}
        specs = [content.items[item].tensors[name] for item, name in self._keys]
        self._dtypes = [spec.dtype for spec in specs]
        self._targets, wish = together(ranks, lambda: _targets(matches, index, number))
        self._wants = _wants_of_all(wish, [spec.shape for spec in specs], ranks)
        self._chunks = together(
            ranks, lambda: _chunks(content, index, specs, self._wants, number, readers)
        )

    def run(self, room: TensorRoom, threads: int) -> int:
        """Read and pass on; returns the bytes that this rank read."""
        ranks = self._ranks
        plan = together(ranks, lambda: self._prepare(room, threads))
        placer, turns = plan.placer, plan.turns
        read_bytes = 0
        error: Exception | None = None
        with ranks.carrying(placer.device(), plan.passed_on_bytes) as device:
            for turn in range(ranks.largest(len(turns))):
                mine = turns[turn] if turn < len(turns) and error is None else []
                try:
                    parcels = placer.expect(mine, device)
                    read_bytes += plan.read(mine)
                except Exception as raised:  # noqa: BLE001 (told when all have had their turns)
                    error = raised
                    parcels = placer.expect([], device)
                for head, data in ranks.exchange(parcels.each, parcels.all):
                    try:
                        placer.unpack(Parcel(head, data))
                    except Exception as raised:  # noqa: BLE001 (as above: the others wait)
                        error = error or raised
        together(ranks, lambda: _finish(placer, error))
        # Only now: what a rank could not read is lacking on others, and no fault of the checkpoint.
        together(ranks, lambda: self._check_whole(placer))
        return read_bytes

    def _prepare(self, room: TensorRoom, threads: int) -> _Plan:
        placer = BoxPlacer(self._ranks.rank, self._targets, self._dtypes, self._wants)
        read = functools.partial(
            _read, files=self._content.files, room=room, placer=placer, threads=threads
        )
        chunks = [part for chunk in self._chunks for part in chunk.cut(room.slot_bytes)]
        passed_on = [placer.passed_on_bytes(chunk) for chunk in chunks]
        return _Plan(placer, _turns(chunks, passed_on), sum(passed_on), read)

    def _check_whole(self, placer: BoxPlacer) -> None:
        lacking = placer.lacking()
        if lacking is not None:
            name = "/".join(self._keys[lacking])
            raise CorruptError(
                "the parts of a tensor do not make it up",
                where=self._content.folder,
                expected=f"every element of {name} once",
                remedy=DAMAGE_REMEDY,
            )


class _Plan(NamedTuple):
    """What a rank reads, and in how many turns."""

    placer: BoxPlacer
    turns: list[list[Chunk]]
    passed_on_bytes: int
    read: Callable[[Sequence[Chunk]], int]


def _finish(placer: BoxPlacer, error: Exception | None) -> None:
    placer.finish()
    if error is not None:
        raise error


def _targets(
    matches: Sequence[Match], index: dict[Key, int], rank: int
) -> tuple[dict[int, list[LocalBox]], Wish]:
    """The memory that each tensor's boxes go to on this rank, and how it lies over all."""
    targets: dict[int, list[LocalBox]] = {}
    wish: Wish = {}
    for match in matches:
        for source, tensor in match.reads.items():
            at = index[match.item.name, source]
            layout = wish[at] = match.layouts.get(source)
            if layout is None:
                targets[at] = [LocalBox(whole(tuple(tensor.shape)), tensor.detach())]
            else:
                where = f"{match.item.name}/{source}"
                targets[at] = held_by(rank, Laid(tensor.detach(), layout), where)
    return targets, wish


def _wants_of_all(mine: Wish, shapes: Sequence[tuple[int, ...]], ranks: Ranks) -> Wants:
    """What all ranks want. Those who want the same say it once."""
    if ranks.size == 1:
        return Wants([mine], {ranks.rank.number: 0}, shapes)
    note = encode_wish(mine)
    digests = ranks.gather(digest(note))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(digests))}
    wishes = [decode_wish(ranks.tell(digests.index(name), note)) for name in numbers]
    return Wants(wishes, {rank: numbers[name] for rank, name in enumerate(digests)}, shapes)


def _chunks(
    content: Content,
    index: dict[Key, int],
    specs: Sequence[TensorSpec],
    wants: Wants,
    rank: int,
    readers: Readers | None,
) -> list[Chunk]:
    """All that a rank reads."""

    def stored_by(writer: int) -> list[FileBox]:
        return [
            FileBox(at, DTYPES[specs[at].dtype].size_bytes, *place)
            for key, place in content.places_of_rank(writer)
            if (at := index.get(key)) is not None
        ]

    agreement = content.agreement
    sources: list[WriterSource]
    if agreement is None:
        stored = {writer: stored_by(writer) for writer in range(content.commit.index_count)}
        sources = [source for source in known_sources(stored, wants) if rank in source.readers]
    else:
        sources = list(Ledger(agreement.spreads, wants).sources(rank))
    if readers is not None:
        able = [able_of(source, readers[source.writer]) for source in sources]
        if not all(source.readers for source in able):
            raise CorruptError(
                "what is wanted lies in the shared memory of another node", where=content.folder
            )
        sources = [source for source in able if rank in source.readers]
    if agreement is not None:
        stored = {source.writer: stored_by(source.writer) for source in sources}
    sizes = {number: file.layout.tensor_bytes for number, file in enumerate(content.files)}
    chunks = [
        chunk
        for source in sources
        for chunk in chunks_of(rank, source, stored[source.writer], wants, sizes)
    ]
    # Only now: others may read all of a file that this rank wants something of.
    content.open_files({chunk.file for chunk in chunks})
    return chunks


def _turns(chunks: Sequence[Chunk], passed_on: Sequence[int]) -> list[list[Chunk]]:
    """What is read before something is passed on: as much as gives parcels that fit into memory."""
    turns: list[list[Chunk]] = [[]]
    room = _PARCEL_BYTES
    for chunk, need in zip(chunks, passed_on, strict=True):
        if need > room and turns[-1]:
            turns.append([])
            room = _PARCEL_BYTES
        turns[-1].append(chunk)
        room -= need
    return turns


def _read(
    chunks: Sequence[Chunk],
    files: Sequence[DataFile],
    room: TensorRoom,
    placer: BoxPlacer,
    threads: int,
) -> int:
    if not chunks:
        return 0
    reads = [Read(file=c.file, start=c.start, stop=c.stop, parts=()) for c in chunks]
    return read_all(files, reads, room, placer.deliver, threads=min(threads, len(reads)))
