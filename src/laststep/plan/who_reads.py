"""Decide whose files a rank reads when a job loads: found by arithmetic, before a file is opened.

Pure. The checkpoint says how its ranks held the state, the job how its ranks want it. From the one
follows who wrote what (`plan.who_writes`), from the other who wants it (`plan.wishes`). The files
of one writer are read by ranks that want something of the most that it wrote: by all of these where
they are few, else by as many as there are chunks, or as give everyone about two files, in turns.
Everybody comes to the same answer, and a rank looks only at the lines that hold something for
itself.

Ranks that want the same tensors in the same layouts say so once; who wants what of a box follows by
arithmetic.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.plan.who_writes import Line, Spread, lines_of, size_of, writing_layouts
from laststep.state.boxes import Box, whole
from laststep.state.layouts import Layout, Mesh, MeshRange, from_plain, held_whole, to_plain
from laststep.terms import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.plan.reads import FileBox
    from laststep.state.layouts import Mesh


Wish = dict[int, Layout | None]
"""The tensors that a rank wants, by number; without a layout, it wants all of it."""


def encode_wish(wish: Wish) -> bytes:
    """A wish as bytes; equal wishes give equal bytes. Layouts, of which there are few, are listed
    once."""
    distinct: dict[Layout, int] = {}
    table = {
        tensor: -1 if layout is None else distinct.setdefault(layout, len(distinct))
        for tensor, layout in wish.items()
    }
    return msgspec.msgpack.encode((table, [to_plain(layout) for layout in distinct]))


def decode_wish(data: bytes) -> Wish:
    """The wish again."""
    table, plain = msgspec.msgpack.decode(data, strict=False)
    layouts = [from_plain(layout) for layout in plain]
    return {int(t): None if number < 0 else layouts[number] for t, number in table.items()}


class RanksWanting(NamedTuple):
    """Ranks that want something of a box: those of a span, or of them only some classes."""

    span: MeshRange
    classes: tuple[int, ...] | None


class _WantedLayout(NamedTuple):
    """A layout in which a tensor is wanted, and by which classes, unless by its whole mesh."""

    layout: Layout
    classes: tuple[int, ...] | None


class Wants:
    """What all ranks want."""

    def __init__(
        self, wishes: Sequence[Wish], class_of: Mapping[int, int], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """`class_of` says whose wish each rank has."""
        self.size = len(class_of)
        self._wishes = wishes
        self._class_of = class_of
        self._shapes = shapes
        self._wholes: dict[tuple[tuple[int, ...], tuple[int, ...]], Layout] = {}
        self._complete: dict[tuple[Mesh, tuple[int, ...]], bool] = {}
        self._ranks: dict[frozenset[RanksWanting], tuple[int, ...]] = {}
        self._layouts = functools.cache(self._layouts_of)
        # By the identity of layouts, which many tensors share, and which live as long as this.
        self._spans: dict[tuple[int, Box], tuple[MeshRange, ...]] = {}
        self._held: dict[tuple[int, int], tuple[Box, ...]] = {}

    def tensors(self, rank: int) -> list[int]:
        """The tensors of which a rank wants something."""
        return list(self._wishes[self._class_of[rank]])

    def boxes(self, rank: int, tensor: int) -> tuple[Box, ...]:
        """What a rank wants of a tensor."""
        wish = self._wishes[self._class_of[rank]]
        if tensor not in wish:
            return ()
        layout = wish[tensor]
        return (whole(self._shapes[tensor]),) if layout is None else self._held_by(layout, rank)

    def by_all(self, tensor: int) -> bool:
        """Whether every rank wants all of a tensor."""
        wanted = self._layouts(tensor)
        return (
            len(wanted) == 1
            and wanted[0].classes is None
            and not wanted[0].layout.cutting
            and math.prod(wanted[0].layout.mesh.sizes) == self.size
        )

    def whole(self, tensor: int) -> bool:
        """Whether all who want something of a tensor want all of it."""
        return not any(wanted.layout.cutting for wanted in self._layouts(tensor))

    def of_box(self, tensor: int, box: Box) -> frozenset[RanksWanting]:
        """Who wants something of a box."""
        return frozenset(
            RanksWanting(span, wanted.classes)
            for wanted in self._layouts(tensor)
            for span in self._holders(wanted.layout, box)
        )

    def ranks(self, wanting: frozenset[RanksWanting]) -> tuple[int, ...]:
        """All ranks of these, in order."""
        if wanting not in self._ranks:
            every: set[int] = set()
            for span, classes in wanting:
                ranks = span.ranks()
                if classes is not None:
                    ranks = filter(lambda rank: self._class_of.get(rank) in classes, ranks)
                every.update(ranks)
            self._ranks[wanting] = tuple(sorted(every))
        return self._ranks[wanting]

    def alike(
        self, tensor: int, ranks: tuple[int, ...]
    ) -> list[tuple[tuple[Box, ...], tuple[int, ...]]]:
        """What these ranks want of a tensor; those who want the same, together."""
        by_boxes: dict[tuple[Box, ...], list[int]] = {}
        for layout, classes in self._layouts(tensor):
            for group in _standing_alike(layout.mesh, layout.cutting, ranks):
                members = group
                if classes is not None:
                    members = tuple(rank for rank in group if self._class_of[rank] in classes)
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
        for number, wish in enumerate(self._wishes):
            if tensor in wish:
                wishing.setdefault(wish[tensor], []).append(number)
        wanted = []
        for layout, numbers in wishing.items():
            classes = tuple(numbers)
            if layout is None:
                wanted.append(_WantedLayout(self._whole_on(classes, self._shapes[tensor]), None))
            else:
                complete = self._is_complete(layout.mesh, classes)
                wanted.append(_WantedLayout(layout, None if complete else classes))
        return tuple(wanted)

    def _whole_on(self, classes: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
        """A tensor that all ranks of some classes hold."""
        case = (classes, shape)
        if case not in self._wholes:
            ranks = sorted(rank for rank, number in self._class_of.items() if number in classes)
            self._wholes[case] = held_whole(shape, ranks)
        return self._wholes[case]

    def _is_complete(self, mesh: Mesh, classes: tuple[int, ...]) -> bool:
        case = (mesh, classes)
        if case not in self._complete:
            self._complete[case] = all(self._class_of.get(r) in classes for r in mesh.ranks())
        return self._complete[case]


@functools.lru_cache(maxsize=1024)
def _standing_alike(
    mesh: Mesh, cutting: tuple[int, ...], ranks: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The ranks, by where they stand along these dimensions of a mesh."""
    standing: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        at = mesh.coordinate(rank)
        if at is not None:
            standing.setdefault(tuple(at[axis] for axis in cutting), []).append(rank)
    return [tuple(alike) for alike in standing.values()]


def union(parts: Iterable[frozenset[RanksWanting]]) -> frozenset[RanksWanting]:
    """Whoever wants something of any."""
    return frozenset(itertools.chain.from_iterable(parts))


FEW_READERS = 16
"""Up to so many ranks look at the same files; of more, only as many as there is to read for."""


class WriterSource(NamedTuple):
    """A rank that wrote, and the ranks that read its files now."""

    writer: int
    readers: tuple[int, ...]


def able_of(source: WriterSource, able: frozenset[int]) -> WriterSource:
    """The same source, read only by those who can."""
    return WriterSource(source.writer, tuple(rank for rank in source.readers if rank in able))


def readers_of(
    ranks: tuple[int, ...], number: int, size_bytes: int, pieces: int = 1
) -> tuple[int, ...]:
    """Which of the ranks that want something of `size_bytes` read; they take turns by `number`,
    where they want all of so many such pieces."""
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


def known_sources(stored: Mapping[int, Sequence[FileBox]], wants: Wants) -> Iterator[WriterSource]:
    """All sources, where everything is known of what lies in the files of each writer."""
    for writer, boxes in stored.items():
        ranks = wants.ranks(union([wants.of_box(box.tensor, box.box) for box in boxes]))
        if ranks:
            size_bytes = sum(box.stop - box.start for box in boxes)
            yield WriterSource(writer, readers_of(ranks, writer, size_bytes))


class Ledger:
    """Who wrote what of a checkpoint."""

    def __init__(self, spreads: Sequence[Spread], wants: Wants) -> None:
        self._spreads = spreads
        self._wants = wants
        self._cuts: dict[tuple[Mesh, tuple[int, ...]], None] = {}
        for spread in spreads:
            for layout in writing_layouts(spread.layouts):
                self._cuts[layout.mesh, layout.cutting] = None
        self._standing: dict[int, _LinesOfPlace] = {}
        self._alike: dict[tuple[object, ...], _LinesOfPlace] = {}
        self._known: dict[tuple[object, ...], Line] = {}
        self._common: dict[int, frozenset[RanksWanting] | None] = {}

    def sources(self, rank: int) -> Iterator[WriterSource]:
        """The sources that a rank is a reader of."""
        for line, pieces in self._pieces_for(rank):
            for piece, readers in self._turns_of(rank, line, pieces):
                writer = line.writer(piece)
                if self._leading(writer) is line:
                    yield WriterSource(writer, readers)

    def _pieces_for(self, rank: int) -> Iterator[tuple[Line, list[range]]]:
        """The lines that hold something for a rank, and in which of their pieces."""
        by_line: dict[int, tuple[Line, set[range]]] = {}
        for tensor in self._wants.tensors(rank):
            for line, piece in self._pieces_with(rank, tensor):
                by_line.setdefault(id(line), (line, set()))[1].add(piece)
        for line, pieces in by_line.values():
            yield line, _merged(pieces)

    def _pieces_with(self, rank: int, tensor: int) -> Iterator[tuple[Line, range]]:
        layouts = self._spreads[tensor].layouts
        if not layouts:
            return
        layout = layouts[0]
        for wanted in self._wants.boxes(rank, tensor):
            for span in layout.holders(wanted):
                for holder in span.ranks(layout.cutting):
                    for line, number in self._of(holder).with_tensor(tensor):
                        common = line.entries[number].held.meet(wanted)
                        if common is not None:
                            yield line, line.pieces_with(number, common)

    def _turns_of(
        self, rank: int, line: Line, pieces: Iterable[range]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The pieces for which a rank reads, each with all who do."""
        common, size = self._wanted_alike(line), line.size_bytes // line.pieces
        alike = 1 if common is None else line.pieces
        for consecutive in pieces:
            turns: Iterable[int] = consecutive
            if common is not None:
                turns = _own_turns(self._place(rank, common), size, consecutive, alike)
            for piece in turns:
                readers = readers_of(self._ranks(line, piece), piece, size, alike)
                if rank in readers:
                    yield piece, readers

    def _place(self, rank: int, wanting: frozenset[RanksWanting]) -> tuple[int, int]:
        """Which of these a rank is, and how many they are."""
        ranks = self._wants.ranks(wanting)
        return bisect.bisect_left(ranks, rank), len(ranks)

    def _ranks(self, line: Line, piece: int) -> tuple[int, ...]:
        """Who wants something of a piece."""
        common = self._wanted_alike(line)
        if common is None:
            shares = line.shares(piece)
            common = union([self._wants.of_box(share.tensor, share.box) for share in shares])
        return self._wants.ranks(common)

    def _wanted_alike(self, line: Line) -> frozenset[RanksWanting] | None:
        """Who wants something of each piece of a line, if those are always the same."""
        if id(line) not in self._common:
            wanting = {self._wants.of_box(entry.tensor, entry.held) for entry in line.entries}
            # Of a tensor that they have cut, a rank may want what lies in one of the pieces only.
            alike = len(wanting) == 1 and all(self._wants.whole(e.tensor) for e in line.entries)
            self._common[id(line)] = union(wanting) if alike or line.pieces == 1 else None
        return self._common[id(line)]

    def _leading(self, writer: int) -> Line | None:
        """Of the lines of which a rank wrote a piece that is wanted, the one with the largest."""
        best: tuple[int, Line] | None = None
        for line in self._of(writer).lines:
            piece = line.piece_of(writer)
            if piece is None:
                continue
            size = sum(size_of(share, self._spreads) for share in line.shares(piece))
            if size > (0 if best is None else best[0]) and self._ranks(line, piece):
                best = size, line
        return None if best is None else best[1]

    def _of(self, rank: int) -> _LinesOfPlace:
        """What a rank holds; who stands alike in every way in which tensors are cut holds that
        too."""
        held = self._standing.get(rank)
        if held is None:
            where = tuple(
                at and tuple(at[axis] for axis in cutting)
                for mesh, cutting in self._cuts
                for at in (mesh.coordinate(rank),)
            )
            held = self._alike.get(where)
            if held is None:
                lines = lines_of(rank, self._spreads)
                # Others hold some of these too, and not all: one object each, whoever asks.
                held = _LinesOfPlace([self._known.setdefault(line.copies, line) for line in lines])
                self._alike[where] = held
            self._standing[rank] = held
        return held


class _LinesOfPlace:
    """The lines that ranks hold which stand alike."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self._index: dict[int, list[tuple[Line, int]]] | None = None

    def with_tensor(self, tensor: int) -> list[tuple[Line, int]]:
        """The lines that hold something of a tensor, and which of their entries."""
        if self._index is None:
            self._index = {}
            for line in self.lines:
                for number, entry in enumerate(line.entries):
                    self._index.setdefault(entry.tensor, []).append((line, number))
        return self._index.get(tensor, [])


def _own_turns(place: tuple[int, int], size_bytes: int, pieces: range, alike: int) -> Iterator[int]:
    """Of pieces that the same ranks want, those which one of these reads, without a look at the
    others: of a state that all hold, there are as many as ranks."""
    number, ranks = place
    count = _turns(ranks, size_bytes, alike)
    if count == ranks:
        return iter(pieces)
    return (piece for piece in pieces if (number - piece * count) % ranks < count)


def _merged(ranges: Iterable[range]) -> list[range]:
    """Ranges that do not overlap, in order."""
    merged: list[range] = []
    for following in sorted(ranges, key=lambda numbers: (numbers.start, numbers.stop)):
        if merged and following.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, following.stop))
        else:
            merged.append(following)
    return merged
