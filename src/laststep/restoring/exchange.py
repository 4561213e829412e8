"""Read a checkpoint into parts of tensors, together with the other ranks of the job.

The ranks tell each other what they want, once for all that want the same; then each reads its share
of the chunks, keeps what is its own and passes the rest on, a few slots' worth at a time. A job of
one rank does the same alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.digests import digest
from laststep.errors import Corrupt
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.plan.chunk_readers import Chunk, FileBox, chunks_of
from laststep.plan.load import Read
from laststep.plan.who_reads import Ledger, able_of, known_sources
from laststep.plan.wishes import Wants, Wish, decode_wish, encode_wish
from laststep.ranks.group import together
from laststep.read.reader import read_all
from laststep.restoring.parcels import BoxPlacer, Parcel
from laststep.state.boxes import whole
from laststep.state.tensors import Laid, LocalBox, held_by
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.plan.who_reads import WriterSource
    from laststep.ranks.group import Ranks
    from laststep.read.content import Content, Key
    from laststep.read.files import DataFile
    from laststep.restoring.match import Match
    from laststep.restoring.placer import TensorRoom
    from laststep.state.stored_items import TensorSpec
    from laststep.tiers.nodes import Readers

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
            raise Corrupt(
                "the parts of a tensor do not make it up", where=self._content.folder,
                expected=f"every element of {name} once", remedy=DAMAGE_REMEDY,
            )  # fmt: skip


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
        stored = {writer: stored_by(writer) for writer in range(content.commit.ranks)}
        sources = [source for source in known_sources(stored, wants) if rank in source.readers]
    else:
        sources = list(Ledger(agreement.spreads, wants).sources(rank))
    if readers is not None:
        able = [able_of(source, readers[source.writer]) for source in sources]
        if not all(source.readers for source in able):
            raise Corrupt("what is wanted lies in the shared memory of another node",
                          where=content.folder)  # fmt: skip
        sources = [source for source in able if rank in source.readers]
    if agreement is not None:
        stored = {source.writer: stored_by(source.writer) for source in sources}
    sizes = {number: file.layout.tensor_bytes for number, file in enumerate(content.files)}
    return [
        chunk
        for source in sources
        for chunk in chunks_of(rank, source, stored[source.writer], wants, sizes)
    ]


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
