"""Read a checkpoint into parts of tensors, together with the other ranks of the job.

Every rank tells the others what it wants; then each reads its share of the chunks, keeps what is
its own and passes the rest on, a few slots' worth at a time. A job of one rank does the same alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from laststep.dist.group import together
from laststep.engine.copy.boxes import BoxPlacer
from laststep.engine.read import ReadFile, read_all
from laststep.plan.gather import Chunk, Stored, Wanted, chunks_of
from laststep.plan.load import Read
from laststep.state.layouts import Box, Layout, from_plain, to_plain, whole
from laststep.state.tensors import Held, Laid, held_by
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.content import Content
    from laststep.dist.group import Ranks
    from laststep.engine.pool import Pool
    from laststep.state.matching import Match

_ROUND_CHUNKS = 4
"""So many chunks are read before what others want of them is passed on: what bounds the memory."""


def transfer_boxes(
    content: Content,
    matches: Sequence[Match],
    pool: Pool,
    files: list[ReadFile],
    threads: int,
    ranks: Ranks,
) -> int:
    """Read what all ranks want, each block once; returns the bytes that this rank read."""
    number = ranks.rank.number
    keys = sorted(key for key in content.places if key[0] not in content.per_rank)
    index = {key: at for at, key in enumerate(keys)}
    targets, layouts = together(ranks, lambda: _targets(matches, index, number))
    specs = [content.items[item].tensors[name] for item, name in keys]
    wanted = _wanted_by_all(layouts, [spec.shape for spec in specs], ranks)
    stored = [
        Stored(at, DTYPES[specs[at].dtype].size_bytes, *place)
        for at, key in enumerate(keys)
        for place in content.places[key]
    ]
    sizes = [file.header.tensor_bytes for file in content.files]
    chunks = chunks_of(number, stored, wanted, sizes)
    placer = BoxPlacer(pool, ranks.rank, targets, [spec.dtype for spec in specs], wanted)
    own = [chunk for chunk in chunks if chunk.alone]
    shared = [chunk for chunk in chunks if not chunk.alone]
    rounds = [shared[at : at + _ROUND_CHUNKS] for at in range(0, len(shared), _ROUND_CHUNKS)]
    read = functools.partial(_read, files=files, pool=pool, placer=placer, threads=threads)
    read_bytes = together(ranks, lambda: read(own))
    error: Exception | None = None
    for turn in range(ranks.largest(len(rounds))):
        mine = rounds[turn] if turn < len(rounds) and error is None else []
        try:
            read_bytes += read(mine)
        except Exception as raised:  # noqa: BLE001 (told when all have had their turns)
            error = raised
            placer.expect([])
        parcels = ranks.exchange(*placer.parcels())
        try:
            for head, data in parcels:
                placer.unpack(head, data)
        except Exception as raised:  # noqa: BLE001 (as above: the others wait for this rank)
            error = raised
    placer.finish()
    together(ranks, lambda: _raise(error))
    return read_bytes


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _targets(
    matches: Sequence[Match], index: dict[tuple[str, str], int], rank: int
) -> tuple[dict[int, list[Held]], dict[int, Layout | None]]:
    """The memory that each tensor's boxes go to on this rank, and how it lies over all."""
    targets: dict[int, list[Held]] = {}
    layouts: dict[int, Layout | None] = {}
    for match in matches:
        for source, tensor in match.reads.items():
            at = index[match.item.name, source]
            layout = layouts[at] = match.layouts.get(source)
            if layout is None:
                targets[at] = [Held(whole(tuple(tensor.shape)), tensor.detach())]
            else:
                where = f"{match.item.name}/{source}"
                targets[at] = held_by(rank, Laid(tensor.detach(), layout), where)
    return targets, layouts


def _read(
    chunks: Sequence[Chunk], files: list[ReadFile], pool: Pool, placer: BoxPlacer, threads: int
) -> int:
    placer.expect(chunks)
    if not chunks:
        return 0
    reads = [Read(file=c.file, start=c.start, stop=c.stop, parts=()) for c in chunks]
    return read_all(files, reads, pool, placer.deliver, threads=min(threads, len(reads)))


def _wanted_by_all(
    mine: dict[int, Layout | None], shapes: Sequence[tuple[int, ...]], ranks: Ranks
) -> functools._lru_cache_wrapper[Wanted]:
    """Who wants what, from what every rank says of itself. Ranks that say the same are many."""
    distinct: dict[Layout, int] = {}
    table = {
        at: -1 if layout is None else distinct.setdefault(layout, len(distinct))
        for at, layout in mine.items()
    }
    note = msgspec.msgpack.encode((table, [to_plain(layout) for layout in distinct]))
    decoded: dict[bytes, tuple[dict[int, int], list[Layout]]] = {}
    for one in (notes := ranks.gather(note)):
        if one not in decoded:
            theirs, plain = msgspec.msgpack.decode(one, strict=False)
            decoded[one] = theirs, [from_plain(layout) for layout in plain]

    said = list(enumerate(notes)) if ranks.size > 1 else [(ranks.rank.number, notes[0])]

    @functools.cache
    def wanted(tensor: int) -> Wanted:
        found: Wanted = []
        for rank, one in said:
            table, layouts = decoded[one]
            if tensor in table:
                boxes: tuple[Box, ...] = (whole(shapes[tensor]),)
                if table[tensor] >= 0:
                    boxes = layouts[table[tensor]].held(rank)
                if boxes:
                    found.append((rank, boxes))
        return found

    return wanted
