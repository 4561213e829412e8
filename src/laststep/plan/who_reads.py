"""Decide which ranks read which writer's files when a job loads, before a file is opened.

Pure. Who wrote what follows from the layouts in the checkpoint (`plan.who_writes`), who needs it
from the requests; ranks that want the same say so once. A writer's files are read by ranks that
need some of the largest range that it wrote: by all of them if they are few, else by as many as
there are chunks, or as give every rank about two files, in turn. Every rank computes the same
answer and looks only at the ranges that hold something for itself.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.constants import CHUNK_BYTES
from laststep.plan.who_writes import ReplicatedRange, Spread, ranges_of, size_of, writing_layouts
from laststep.state.boxes import Box, whole
from laststep.state.layouts import Layout, Mesh, MeshRange, from_plain, held_whole, to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.plan.reads import FileBox


RankRequest = dict[int, Layout | None]
"""The tensors that a rank needs, by number; without a layout, all of the tensor."""


def encode_request(rank_request: RankRequest) -> bytes:
    """Encode a request; equal ones give equal bytes. The few distinct layouts are listed once."""
    distinct: dict[Layout, int] = {}
    table = {
        tensor: -1 if layout is None else distinct.setdefault(layout, len(distinct))
        for tensor, layout in rank_request.items()
    }
    return msgspec.msgpack.encode((table, [to_plain(layout) for layout in distinct]))


def decode_request(data: bytes) -> RankRequest:
    table, plain = msgspec.msgpack.decode(data, strict=False)
    layouts = [from_plain(layout) for layout in plain]
    return {int(t): None if number < 0 else layouts[number] for t, number in table.items()}


class RanksWanting(NamedTuple):
    """Ranks that need some of a box: a range of a mesh, maybe restricted to some groups."""

    span: MeshRange
    groups: tuple[int, ...] | None


class _WantedLayout(NamedTuple):
    """A requested layout, and the groups that request it; None: its whole mesh."""

    layout: Layout
    groups: tuple[int, ...] | None


class ReadRequests:
    """The requests of all ranks."""

    def __init__(
        self,
        rank_requests: Sequence[RankRequest],
        group_of: Mapping[int, int],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        """`group_of` maps each rank to its request."""
        self.size = len(group_of)
        self._rank_requests = rank_requests
        self._group_of = group_of
        self._shapes = shapes
        self._ranks: dict[frozenset[RanksWanting], tuple[int, ...]] = {}
        self._layouts = functools.cache(self._layouts_of)
        self._whole_on = functools.cache(self._held_whole_on)
        self._is_complete = functools.cache(self._covers)
        # By the identity of layouts, which many tensors share, and which live as long as this.
        self._spans: dict[tuple[int, Box], tuple[MeshRange, ...]] = {}
        self._held: dict[tuple[int, int], tuple[Box, ...]] = {}

    def tensors(self, rank: int) -> list[int]:
        return list(self._rank_requests[self._group_of[rank]])

    def boxes(self, rank: int, tensor: int) -> tuple[Box, ...]:
        rank_request = self._rank_requests[self._group_of[rank]]
        if tensor not in rank_request:
            return ()
        layout = rank_request[tensor]
        return (whole(self._shapes[tensor]),) if layout is None else self._held_by(layout, rank)

    def by_all(self, tensor: int) -> bool:
        wanted = self._layouts(tensor)
        return (
            len(wanted) == 1
            and wanted[0].groups is None
            and not wanted[0].layout.cutting
            and math.prod(wanted[0].layout.mesh.sizes) == self.size
        )

    def whole(self, tensor: int) -> bool:
        return not any(wanted.layout.cutting for wanted in self._layouts(tensor))

    def of_box(self, tensor: int, box: Box) -> frozenset[RanksWanting]:
        return frozenset(
            RanksWanting(span, wanted.groups)
            for wanted in self._layouts(tensor)
            for span in self._holders(wanted.layout, box)
        )

    def ranks(self, wanting: frozenset[RanksWanting]) -> tuple[int, ...]:
        if wanting not in self._ranks:
            every: set[int] = set()
            for span, groups in wanting:
                ranks = span.ranks()
                if groups is not None:
                    ranks = filter(lambda rank: self._group_of.get(rank) in groups, ranks)
                every.update(ranks)
            self._ranks[wanting] = tuple(sorted(every))
        return self._ranks[wanting]

    def alike(
        self, tensor: int, ranks: tuple[int, ...]
    ) -> list[tuple[tuple[Box, ...], tuple[int, ...]]]:
        """Return the boxes of a tensor that these ranks need, grouped by equal needs."""
        by_boxes: dict[tuple[Box, ...], list[int]] = {}
        for layout, groups in self._layouts(tensor):
            for group in _standing_alike(layout.mesh, layout.cutting, ranks):
                members = group
                if groups is not None:
                    members = tuple(rank for rank in group if self._group_of[rank] in groups)
                if members and (boxes := self._held_by(layout, members[0])):
                    by_boxes.setdefault(boxes, []).extend(members)
        return [(boxes, tuple(members)) for boxes, members in by_boxes.items()]

    def _held_by(self, layout: Layout, rank: int) -> tuple[Box, ...]:
        case = (id(layout), rank)
        if case not in self._held:
            self._held[case] = layout.held(rank)
        return self._held[case]

    def _holders(self, layout: Layout, box: Box) -> tuple[MeshRange, ...]:
        case = (id(layout), box)
        if case not in self._spans:
            self._spans[case] = layout.holders(box)
        return self._spans[case]

    def _layouts_of(self, tensor: int) -> tuple[_WantedLayout, ...]:
        wishing: dict[Layout | None, list[int]] = {}
        for number, rank_request in enumerate(self._rank_requests):
            if tensor in rank_request:
                wishing.setdefault(rank_request[tensor], []).append(number)
        wanted = []
        for layout, numbers in wishing.items():
            groups = tuple(numbers)
            if layout is None:
                wanted.append(_WantedLayout(self._whole_on(groups, self._shapes[tensor]), None))
            else:
                complete = self._is_complete(layout.mesh, groups)
                wanted.append(_WantedLayout(layout, None if complete else groups))
        return tuple(wanted)

    def _held_whole_on(self, groups: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
        ranks = sorted(rank for rank, number in self._group_of.items() if number in groups)
        return held_whole(shape, ranks)

    def _covers(self, mesh: Mesh, groups: tuple[int, ...]) -> bool:
        return all(self._group_of.get(rank) in groups for rank in mesh.ranks())


@functools.lru_cache(maxsize=1024)
def _standing_alike(
    mesh: Mesh, cutting: tuple[int, ...], ranks: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Group ranks by their coordinates along these mesh dimensions."""
    standing: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        at = mesh.coordinate(rank)
        if at is not None:
            standing.setdefault(tuple(at[axis] for axis in cutting), []).append(rank)
    return [tuple(alike) for alike in standing.values()]


def union(parts: Iterable[frozenset[RanksWanting]]) -> frozenset[RanksWanting]:
    return frozenset(itertools.chain.from_iterable(parts))


FEW_READERS = 16
"""Up to this many ranks read the same files; of more, only as many as there is work for."""


class WriterSource(NamedTuple):
    """A rank that wrote, and the ranks that now read its files."""

    writer: int
    readers: tuple[int, ...]


def readers_of(
    ranks: tuple[int, ...], number: int, size_bytes: int, pieces: int = 1
) -> tuple[int, ...]:
    """Choose readers among the ranks that need some of `size_bytes`; they take turns by `number` if
    they need all of `pieces` such pieces."""
    count = _turns(len(ranks), size_bytes, pieces)
    if count == len(ranks):
        return ranks
    first = number * count
    return tuple(sorted(ranks[(first + n) % len(ranks)] for n in range(count)))


def _turns(ranks: int, size_bytes: int, pieces: int) -> int:
    if ranks <= FEW_READERS:
        return ranks
    chunks = size_bytes // CHUNK_BYTES + 2  # where a file begins and ends does not matter
    # Of many pieces it is enough that each rank reads about two: they come to the same for all.
    return min(ranks, chunks, max(2, -(-2 * ranks // pieces)))


def known_sources(
    stored: Mapping[int, Sequence[FileBox]], requests: ReadRequests
) -> Iterator[WriterSource]:
    """Yield all sources if the content of every writer's files is known."""
    for writer, boxes in stored.items():
        ranks = requests.ranks(union([requests.of_box(box.tensor, box.box) for box in boxes]))
        if ranks:
            size_bytes = sum(box.stop - box.start for box in boxes)
            yield WriterSource(writer, readers_of(ranks, writer, size_bytes))


class Ledger:
    """Computes who wrote what of a checkpoint."""

    def __init__(self, spreads: Sequence[Spread], requests: ReadRequests) -> None:
        self._spreads = spreads
        self._requests = requests
        self._cuts: dict[tuple[Mesh, tuple[int, ...]], None] = {}
        for spread in spreads:
            for layout in writing_layouts(spread.layouts):
                self._cuts[layout.mesh, layout.cutting] = None
        self._standing: dict[int, _RangesOfPlace] = {}
        self._alike: dict[tuple[object, ...], _RangesOfPlace] = {}
        self._known: dict[tuple[object, ...], ReplicatedRange] = {}
        self._common: dict[int, frozenset[RanksWanting] | None] = {}

    def sources(self, rank: int) -> Iterator[WriterSource]:
        for shared_range, pieces in self._pieces_for(rank):
            for piece, readers in self._turns_of(rank, shared_range, pieces):
                writer = shared_range.writer(piece)
                if self._leading(writer) is shared_range:
                    yield WriterSource(writer, readers)

    def _pieces_for(self, rank: int) -> Iterator[tuple[ReplicatedRange, list[range]]]:
        """Yield the ranges that hold something for a rank, and in which of their pieces."""
        by_range: dict[int, tuple[ReplicatedRange, set[range]]] = {}
        for tensor in self._requests.tensors(rank):
            for shared_range, piece in self._pieces_with(rank, tensor):
                by_range.setdefault(id(shared_range), (shared_range, set()))[1].add(piece)
        for shared_range, pieces in by_range.values():
            yield shared_range, _merged(pieces)

    def _pieces_with(self, rank: int, tensor: int) -> Iterator[tuple[ReplicatedRange, range]]:
        layouts = self._spreads[tensor].layouts
        if not layouts:
            return
        layout = layouts[0]
        for wanted in self._requests.boxes(rank, tensor):
            for span in layout.holders(wanted):
                for holder in span.ranks(layout.cutting):
                    for shared_range, number in self._of(holder).by_tensor.get(tensor, ()):
                        common = shared_range.entries[number].held.meet(wanted)
                        if common is not None:
                            yield shared_range, shared_range.pieces_with(number, common)

    def _turns_of(
        self, rank: int, shared_range: ReplicatedRange, pieces: Iterable[range]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the pieces that a rank reads, each with all its readers."""
        common = self._wanted_alike(shared_range)
        size = shared_range.size_bytes // shared_range.pieces
        alike = 1 if common is None else shared_range.pieces
        for consecutive in pieces:
            turns: Iterable[int] = consecutive
            if common is not None:
                turns = _own_turns(rank, self._requests.ranks(common), size, consecutive, alike)
            for piece in turns:
                readers = readers_of(self._ranks(shared_range, piece), piece, size, alike)
                if rank in readers:
                    yield piece, readers

    def _ranks(self, shared_range: ReplicatedRange, piece: int) -> tuple[int, ...]:
        """Return the ranks that need some of a piece."""
        common = self._wanted_alike(shared_range)
        if common is None:
            boxes = [(part.tensor, part.box) for part in shared_range.assignments(piece)]
            common = union(itertools.starmap(self._requests.of_box, boxes))
        return self._requests.ranks(common)

    def _wanted_alike(self, shared_range: ReplicatedRange) -> frozenset[RanksWanting] | None:
        """Return the ranks that need some of every piece, if those are the same for all."""
        if id(shared_range) not in self._common:
            entries = shared_range.entries
            wanting = {self._requests.of_box(entry.tensor, entry.held) for entry in entries}
            # Of a tensor that they have cut, a rank may want what lies in one of the pieces only.
            alike = len(wanting) == 1 and all(self._requests.whole(e.tensor) for e in entries)
            common = union(wanting) if alike or shared_range.pieces == 1 else None
            self._common[id(shared_range)] = common
        return self._common[id(shared_range)]

    def _leading(self, writer: int) -> ReplicatedRange | None:
        """Return the range of which a rank wrote the largest requested piece."""
        best, best_bytes = None, 0
        for shared_range in self._of(writer).shared_ranges:
            piece = shared_range.piece_of(writer)
            if piece is None:
                continue
            size = sum(size_of(part, self._spreads) for part in shared_range.assignments(piece))
            if size > best_bytes and self._ranks(shared_range, piece):
                best, best_bytes = shared_range, size
        return best

    def _of(self, rank: int) -> _RangesOfPlace:
        """Return what a rank holds, cached for all ranks at the same coordinates."""
        held = self._standing.get(rank)
        if held is None:
            where = tuple(
                at and tuple(at[axis] for axis in cutting)
                for mesh, cutting in self._cuts
                for at in (mesh.coordinate(rank),)
            )
            held = self._alike.get(where)
            if held is None:
                # Others hold some of these too, and not all: one object each, whoever asks.
                ranges = ranges_of(rank, self._spreads)
                held = _RangesOfPlace([self._known.setdefault(r.copies, r) for r in ranges])
                self._alike[where] = held
            self._standing[rank] = held
        return held


class _RangesOfPlace:
    """The ranges held by ranks at the same coordinates."""

    def __init__(self, shared_ranges: list[ReplicatedRange]) -> None:
        self.shared_ranges = shared_ranges

    @functools.cached_property
    def by_tensor(self) -> dict[int, list[tuple[ReplicatedRange, int]]]:
        """The ranges that hold some of each tensor, and the entry of each."""
        index: dict[int, list[tuple[ReplicatedRange, int]]] = {}
        for shared_range in self.shared_ranges:
            for number, entry in enumerate(shared_range.entries):
                index.setdefault(entry.tensor, []).append((shared_range, number))
        return index


def _own_turns(
    rank: int, ranks: tuple[int, ...], size_bytes: int, pieces: range, alike: int
) -> Iterator[int]:
    """Return one rank's pieces of those that all `ranks` need, without a loop over the ranks."""
    number, count = bisect.bisect_left(ranks, rank), _turns(len(ranks), size_bytes, alike)
    if count == len(ranks):
        return iter(pieces)
    return (piece for piece in pieces if (number - piece * count) % len(ranks) < count)


def _merged(ranges: Iterable[range]) -> list[range]:
    """Merge overlapping ranges, in order."""
    merged: list[range] = []
    for following in sorted(ranges, key=lambda numbers: (numbers.start, numbers.stop)):
        if merged and following.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, following.stop))
        else:
            merged.append(following)
    return merged
