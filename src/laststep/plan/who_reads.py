"""Decide whose files a rank reads when a job loads: found by arithmetic, before a file is opened.

Pure. The checkpoint says how its ranks held the state, the job how its ranks want it. From the one
follows who wrote what (`plan.who_writes`), from the other who wants it (`plan.wishes`). The files
of one writer are read by ranks that want something of the most that it wrote: by all of these where
they are few, else by as many as there are chunks, or as give everyone about two files, in turns.
Everybody comes to the same answer, and a rank looks only at the lines that hold something for
itself.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, NamedTuple

from laststep.plan.who_writes import Line, Spread, lines_of, size_of, writing_layouts
from laststep.plan.wishes import RanksWanting, Wants, union
from laststep.terms import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from laststep.plan.chunk_readers import FileBox
    from laststep.state.layouts import Mesh

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
