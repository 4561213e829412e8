"""Read tensors of an open checkpoint into place, alone or together with the other ranks of the job.

Stored boxes of tensors are read in chunks, verified, and copied into this rank's memory by the
reading threads, several at a time: parts of different chunks never overlap. A tensor that is stored
in one place and needed in one place is a box of bytes.

A rank reads its per-rank items alone, as does a job of one rank everything. For all else, the ranks
exchange their read requests, once per distinct request. Each rank then reads its share of the
chunks, keeps the boxes that it needs itself and sends the others on in messages, a few slots' worth
at a time.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from laststep.capture.device import CopyStreams
from laststep.capture.gather import bytes_of, copy_each
from laststep.codecs.digests import digest
from laststep.constants import align_up
from laststep.errors import CorruptError
from laststep.plan import who_reads
from laststep.plan.reads import FileBox, chunks_of, plan_chunks, requested_ranges
from laststep.process.threads import ready
from laststep.ranks.group import Rank, RankGroup, Ranks, collective
from laststep.read.reader import read_all
from laststep.restoring.match import load_item
from laststep.state.boxes import Box, whole
from laststep.state.tensors import TORCH_DTYPES, LocalBox, LocalShard, box_of, copy_tensors, held_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.plan.layouts import Key
    from laststep.plan.reads import Chunk, Wanted
    from laststep.ranks.group import RankMessage
    from laststep.read.content import Content
    from laststep.read.reader import Room
    from laststep.restoring.match import Match
    from laststep.state.layouts import Layout
    from laststep.tiers.snapshots import Readers


_DEVICE = operator.attrgetter("device")
_INTO = operator.attrgetter("into")
_TENSOR_BYTES = operator.attrgetter("layout.tensor_bytes")
MANY = 16
"""With more small parts than this, a chunk is copied to the device whole and scattered there."""


def tensor_over(chunk: memoryview) -> torch.Tensor:
    """Return a tensor that shares the chunk's memory. If the chunk is read-only, the caller must
    not write to the tensor: torch has no read-only tensors, and would warn."""
    if not chunk.readonly:
        return torch.frombuffer(chunk, dtype=torch.uint8)
    array = np.frombuffer(chunk, np.uint8)
    alias = (ctypes.c_uint8 * chunk.nbytes).from_address(array.ctypes.data)
    alias.source = array  # type: ignore[attr-defined] # keeps the bytes alive
    return torch.frombuffer(alias, dtype=torch.uint8)


class _Copy(NamedTuple):
    """A copy of `part` of a box, which begins at byte `at` of the memory, into a tensor."""

    into: torch.Tensor
    at: int
    box: Box
    part: Box

    def source(self, memory: torch.Tensor) -> torch.Tensor:
        stored = memory[self.at : self.at + self.box.volume * self.into.itemsize]
        shape = self.box.shape
        if self.into.dtype != torch.uint8 or len(shape) != 1:
            stored = stored.view(self.into.dtype).view(shape)
        return stored if self.part == self.box else box_of(stored, self.part.within(self.box))


def _copy_all(streams: CopyStreams, memory: torch.Tensor, copies: Sequence[_Copy]) -> None:
    """Carry out copies; `memory` of the host may be reused afterwards."""
    by_device: dict[torch.device, list[_Copy]] = {}
    for copy in copies:
        by_device.setdefault(copy.into.device, []).append(copy)
    for device, onto in by_device.items():
        into = list(map(_INTO, onto))
        # The host has no streams, and a message is received on the stream that copies it.
        if device.type != "cuda" or memory.is_cuda:
            copy_each(into, [copy.source(memory) for copy in onto], non_blocking=True)
            continue
        with streams.copying(device):
            source = memory.to(device, non_blocking=True) if len(onto) > MANY else memory
            copy_each(into, [copy.source(source) for copy in onto], non_blocking=True)


_ALIGN_BYTES = 16
"""Boxes in a message are aligned to the size of the largest element."""
_ALL = -1
"""Used in place of a rank number for boxes that every rank needs."""
_Sent = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A box in a message: its tensor, start and stop."""


class _Move(NamedTuple):
    """A box at this offset of a chunk, and the part of it that rank `who` needs."""

    tensor: int
    at: int
    box: Box
    common: Box
    who: int
    size_bytes: int


_Read = Callable[..., int]
"""`read_all` with the files, memory and threads of a restore."""
_PARCEL_BYTES = 64 << 20
"""Bytes that a rank sends per turn, unless one chunk exceeds it: bounds memory for messages."""


class Transfer:
    """Reads the tensors of all matches into place; each block is read once, by one rank."""

    def __init__(
        self,
        content: Content,
        matches: Sequence[Match],
        ranks: Ranks,
        readers: Readers | None = None,
    ) -> None:
        """Assign reads and open files; live state is not touched. `readers`: who can read which."""
        self._content = content
        self._matches = matches
        self._ranks = ranks
        self._rank = ranks.rank.number
        self._keys: list[Key] = []
        """Tensors by number. Shared ones come first, with the same numbers on all ranks."""
        self._targets: dict[int, list[LocalBox]] = {}
        """This rank's memory for each tensor."""
        self._own: list[Wanted] = []
        """The boxes that this rank reads for itself."""
        self._moves: dict[tuple[int, int], list[tuple[_Move, torch.Tensor | None, int]]] = {}
        """The boxes of each expected chunk, each with its place in a message, if it has one."""
        self._placed: Counter[int] = Counter()
        """Number of elements that each tensor has received."""
        self._lock = threading.Lock()
        if ranks.size == 1:
            self._request()
            return
        self._keys = content.keys()
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        specs = [content.items[item].tensors[name] for item, name in self._keys]
        self._dtypes = [TORCH_DTYPES[spec.dtype] for spec in specs]
        own_request = collective(ranks, self._request)
        self._requests = self._requests_of_all(own_request, [spec.shape for spec in specs])
        self._chunks = collective(ranks, lambda: self._chunks_to_read(readers))

    def _request(self) -> who_reads.RankRequest:
        """Return the layout of each shared tensor that this rank needs, and record its memory. Plan
        the reads of all other tensors, and open their files."""
        request: who_reads.RankRequest = {}
        for match in self._matches:
            item, is_own = match.item.name, self._ranks.size == 1
            is_own = is_own or item in self._content.per_rank
            for source, tensor in match.reads.items():
                layout = match.layouts.get(source)
                if is_own:
                    self._read_alone((item, source), tensor, layout)
                else:
                    number = self._numbers[item, source]
                    request[number] = layout
                    self._targets[number] = self._held((item, source), tensor, layout)
        self._content.open_files({box.file for _, _, box in self._own})
        return request

    def _held(self, key: Key, tensor: torch.Tensor, layout: Layout | None) -> list[LocalBox]:
        if layout is None:
            return [LocalBox(whole(tuple(tensor.shape)), tensor.detach())]
        return held_by(self._rank, LocalShard(tensor.detach(), layout), "/".join(key))

    def _read_alone(self, key: Key, tensor: torch.Tensor, layout: Layout | None) -> None:
        number = len(self._keys)
        self._keys.append(key)
        places = self._content.places(*key)
        if len(places) == 1 and layout is None:
            # As bytes: 20,000 tensors of 1 KiB took 1.5 times the CPU time as boxes.
            (file, start, stop, _), data = places[0], bytes_of(tensor)
            box = whole((stop - start,))
            self._targets[number] = [LocalBox(box, data)]
            self._own.append((start, stop, FileBox(number, 1, file, start, stop, box)))
            return
        held = self._targets[number] = self._held(key, tensor, layout)
        for place in places:
            stored = FileBox(number, tensor.itemsize, *place)
            for first, last in requested_ranges(stored, tuple(local.box for local in held)):
                self._own.append((first, last, stored))

    def _requests_of_all(
        self, own_request: who_reads.RankRequest, shapes: Sequence[tuple[int, ...]]
    ) -> who_reads.ReadRequests:
        """Collect the read requests of all ranks; equal ones are broadcast once."""
        ranks, note = self._ranks, who_reads.encode_request(own_request)
        digests = ranks.all_gather(digest(note))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(digests))}
        notes = [ranks.broadcast(digests.index(name), note) for name in numbers]
        of_rank = {rank: numbers[name] for rank, name in enumerate(digests)}
        return who_reads.ReadRequests(list(map(who_reads.decode_request, notes)), of_rank, shapes)

    def _chunks_to_read(self, readers: Readers | None) -> list[Chunk]:
        """Return this rank's chunks, files open. Raise `CorruptError` if none can read a block."""
        content, requests, rank = self._content, self._requests, self._rank
        layouts = content.global_layout
        if layouts is None:
            writers = range(content.commit.index_count)
            stored = {writer: self._stored_by(writer) for writer in writers}
            sources = list(who_reads.known_sources(stored, requests))
        else:
            sources = list(who_reads.Ledger(layouts.spreads, requests).sources(rank))
        if readers is not None:
            sources = [
                source._replace(
                    readers=tuple(r for r in source.readers if r in readers[source.writer])
                )
                for source in sources
            ]
            if not all(source.readers for source in sources):
                raise CorruptError(
                    "the block is in the shared memory of another node", where=content.folder
                )
        sources = [source for source in sources if rank in source.readers]
        if layouts is not None:
            stored = {source.writer: self._stored_by(source.writer) for source in sources}
        chunks: list[Chunk] = []
        sizes = dict(enumerate(map(_TENSOR_BYTES, content.files)))
        for source in sources:
            chunks += chunks_of(rank, source, stored[source.writer], requests, sizes)
        # Not earlier: other ranks may read everything that this rank needs from a file.
        content.open_files({chunk.file for chunk in chunks})
        return chunks

    def _stored_by(self, writer: int) -> list[FileBox]:
        return [
            FileBox(number, self._dtypes[number].itemsize, *place)
            for key, place in self._content.places_of_rank(writer)
            if (number := self._numbers.get(key)) is not None
        ]

    def run(self, room: Room, threads: int) -> int:
        """Read, send and receive, then make the matches' copies; return the bytes read."""
        read = functools.partial(read_all, self._content.files, room=room, threads=threads)
        read_bytes = collective(self._ranks, functools.partial(self._read_own, read, room))
        if isinstance(self._ranks, RankGroup):
            read_bytes += self._exchange(self._ranks, read, room)
        else:
            self._streams.lead()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for match in self._matches:
            pairs += match.copies
        collective(self._ranks, functools.partial(copy_tensors, pairs))
        return read_bytes

    def _read_own(self, read: _Read, room: Room) -> int:
        memories = [box.memory for held in self._targets.values() for box in held]
        self._streams = CopyStreams(map(_DEVICE, memories))
        sizes = dict(enumerate(map(_TENSOR_BYTES, self._content.files)))
        own = plan_chunks(self._own, sizes, room.slot_bytes)
        return read(own, deliver=self._deliver_own)

    def _exchange(self, ranks: RankGroup, read: _Read, room: Room) -> int:
        """Read this rank's share of the shared tensors, and send and receive the rest."""
        read_bytes = 0
        turns, passed_on_bytes = collective(ranks, lambda: self._prepare(room))
        error: Exception | None = None
        with ranks.carrying(self._device(), passed_on_bytes) as device:
            for turn in range(ranks.all_max(len(turns))):
                chunks = turns[turn] if turn < len(turns) and error is None else []
                try:
                    messages = self.expect(chunks, device)
                    read_bytes += read(chunks, deliver=self._deliver)
                except Exception as raised:  # noqa: BLE001 (raised after the last turn)
                    error = raised
                    messages = self.expect([], device)
                for message in ranks.exchange(*messages):
                    try:
                        self._unpack(message)
                    except Exception as raised:  # noqa: BLE001 (as above: other ranks wait)
                        error = error or raised

        def finish() -> None:
            self._streams.lead()  # make the streams that training uses wait for all copies
            if error is not None:
                raise error

        collective(ranks, finish)
        # After the errors: a rank's failed read leaves gaps on other ranks, which are no damage.
        collective(ranks, self._check_whole)
        return read_bytes

    def _prepare(self, room: Room) -> tuple[list[list[Chunk]], int]:
        """Return this rank's chunks by turn (messages follow each), and the bytes that it sends."""
        turns: list[list[Chunk]] = [[]]
        in_turn = passed_on = 0
        cut = [part for chunk in self._chunks for part in chunk.cut(room.slot_bytes)]
        for chunk in cut:
            # A box for all ranks counts once.
            need = sum(move.size_bytes for move in self._moves_of(chunk) if move.who != self._rank)
            if in_turn + need > _PARCEL_BYTES and turns[-1]:
                turns.append([])
                in_turn = 0
            turns[-1].append(chunk)
            in_turn, passed_on = in_turn + need, passed_on + need
        return turns, passed_on

    def _device(self) -> torch.device:
        """Return the device of all shared tensors of this rank; the CPU if they are on several.
        Without any, return the current CUDA device if there is one."""
        shared = map(self._targets.__getitem__, self._requests.tensors(self._rank))
        devices = {box.memory.device for held in shared for box in held}
        if not devices and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return next(iter(devices)) if len(devices) == 1 else torch.device("cpu")

    def expect(
        self, chunks: Sequence[Chunk], device: torch.device
    ) -> tuple[dict[int, RankMessage], RankMessage | None]:
        """Allocate messages on `device` with a place for every box that other ranks need, one per
        rank and one for all ranks. They are complete once all these chunks are delivered."""
        heads: dict[int, list[_Sent]] = {}
        sizes: Counter[int] = Counter()
        wanted: list[tuple[Chunk, list[tuple[_Move, int]]]] = []
        for chunk in chunks:
            placed = []
            for move in self._moves_of(chunk):
                placed.append((move, sizes[move.who]))
                if move.who != self._rank:
                    sizes[move.who] += align_up(move.size_bytes, _ALIGN_BYTES)
                    sent = (move.tensor, move.common.start, move.common.stop)
                    heads.setdefault(move.who, []).append(sent)
            wanted.append((chunk, placed))
        data = {who: torch.empty(sizes[who], dtype=torch.uint8, device=device) for who in heads}
        self._streams.follow()  # an earlier user of this memory may still be copying it
        self._moves = {
            (chunk.file, chunk.start): [(move, data.get(move.who), at) for move, at in placed]
            for chunk, placed in wanted
        }
        messages = {who: (msgspec.msgpack.encode(heads[who]), data[who]) for who in heads}
        to_all = messages.pop(_ALL, None)
        return messages, to_all

    def _deliver_own(self, chunk: Chunk, data: memoryview) -> None:
        """Copy the boxes of a chunk into this rank's tensors; `data` may be reused afterwards."""
        copies: list[_Copy] = []
        for stored, box, at in chunk.boxes():
            copies += self._into_targets(stored.tensor, box, at, box)
        _copy_all(self._streams, tensor_over(data)[: chunk.stop - chunk.start], copies)

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        """Copy the boxes of a chunk into this rank's tensors and into messages."""
        copies: list[_Copy] = []
        for move, message, at in self._moves[chunk.file, chunk.start]:
            if move.who in (self._rank, _ALL):
                copies += self._into_targets(move.tensor, move.common, move.at, move.box)
            if message is not None:
                dtype = self._dtypes[move.tensor]
                into = message[at : at + move.size_bytes].view(dtype).view(move.common.shape)
                copies.append(_Copy(into, move.at, move.box, move.common))
        _copy_all(self._streams, tensor_over(data)[: chunk.stop - chunk.start], copies)

    def _unpack(self, message: RankMessage) -> None:
        """Copy the boxes of a received message into this rank's tensors."""
        head, data = message
        at = 0
        copies: list[_Copy] = []
        for tensor, start, stop in msgspec.msgpack.decode(head, type=ready(list[_Sent])):
            box = Box(start, stop)
            copies += self._into_targets(tensor, box, at, box)
            at += align_up(box.volume * self._dtypes[tensor].itemsize, _ALIGN_BYTES)
        _copy_all(self._streams, data, copies)

    def _check_whole(self) -> None:
        """Raise `CorruptError` if elements of a shared tensor have not arrived."""
        for tensor in self._requests.tensors(self._rank):
            held = self._targets[tensor]
            if self._placed[tensor] != sum(target.box.volume for target in held):
                name = "/".join(self._keys[tensor])
                raise CorruptError(
                    "the shards of a tensor do not cover it",
                    where=self._content.folder,
                    expected=f"every element of {name} once",
                )

    def _moves_of(self, chunk: Chunk) -> Iterator[_Move]:
        for stored, box, at in chunk.boxes():
            tensor, size = stored.tensor, stored.itemsize
            if self._requests.by_all(tensor):
                yield _Move(tensor, at, box, box, _ALL, box.volume * size)
                continue
            for who in self._requests.ranks(self._requests.of_box(tensor, box)):
                for common in filter(None, map(box.meet, self._requests.boxes(who, tensor))):
                    yield _Move(tensor, at, box, common, who, common.volume * size)

    def _into_targets(self, tensor: int, common: Box, at: int, box: Box) -> Iterator[_Copy]:
        """Yield and count the copies of a part of a box into this rank's tensors."""
        placed = 0
        for held in self._targets.get(tensor, ()):
            here, into = common, held.memory
            if common != held.box:
                common_here = common.meet(held.box)
                if common_here is None:
                    continue
                here, into = common_here, box_of(into, common_here.within(held.box))
            yield _Copy(into, at, box, here)
            placed += here.volume
        with self._lock:
            self._placed[tensor] += placed


def state_of_rank(content: Content, item: str, room: Room, *, allow_pickle: bool) -> object:
    """Load an item's state into new CPU memory, from `content` as seen by one rank."""
    match = load_item(content.item(item), "cpu")
    Transfer(content, [match], Ranks(Rank(0, 1))).run(room, threads=1)
    return match.tree(allow_pickle=allow_pickle)
