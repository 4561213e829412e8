"""Lower a save plan to copies: which bytes are gathered at once, which chunk takes what from where.

Pure but for the vocabulary: it moves nothing and looks at no tensor, only at specs and at the way
that was chosen for each piece. A layout depends on plan and ways alone, so it is made once and
reused while the state keeps its shape.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from laststep.terms import CHUNK_BYTES, DTYPES, align_up

if TYPE_CHECKING:
    from laststep.plan.save import FilePlan, SavePlan


class Way(Enum):
    """How one piece is captured."""

    STAGED = "staged"
    """Gathered at `save()` into one buffer on its own device, moved to the pool afterwards."""
    DIRECT = "direct"
    """Copied straight into the pool: the host's by the training thread, others in background."""


class Span(NamedTuple):
    """Elements [first, last) of a piece."""

    piece: int
    first: int
    last: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring spans of one dtype that fill bytes [start, stop) of a buffer."""

    dtype: str
    device: str
    start: int
    stop: int
    spans: tuple[Span, ...]


class Staged(NamedTuple):
    """Bytes of a staging buffer and their place in a chunk."""

    device: str
    start: int
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """One slot's worth of a file: what comes from staging buffers, what straight from pieces."""

    file: int
    start: int
    size_bytes: int
    staged: tuple[Staged, ...]
    direct: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All copies of a save. Pieces are numbered through all items in order."""

    ways: tuple[Way, ...]
    staging_bytes: dict[str, int]
    gathers: dict[str, tuple[Group, ...]]
    """Per device: how its staging buffer is filled."""
    chunks: tuple[ChunkLayout, ...]
    direct: dict[str, tuple[int, ...]]
    """Per device: the pieces that are copied straight from it, each once."""


class _Placed(NamedTuple):
    piece: int
    dtype: str
    device: str
    start: int
    stop: int
    staged_at: int


def lower(plan: SavePlan, ways: tuple[Way, ...]) -> Layout:
    """The copies that carry out `plan` when every piece goes its way."""
    numbers: list[int] = []
    total = 0
    for item in plan.items:
        numbers.append(total)
        total += len(item.pieces)
    staging: dict[str, int] = defaultdict(int)
    gathers: dict[str, list[_Placed]] = defaultdict(list)
    chunks: list[ChunkLayout] = []
    for index, file in enumerate(plan.files):
        placed = _stage(plan, file, numbers, ways, staging)
        for one in placed:
            if one.staged_at >= 0:
                gathers[one.device].append(one)
        chunks.extend(_chunks(index, file, placed))
    return Layout(
        ways=ways,
        staging_bytes=dict(staging),
        gathers={device: _gather_groups(ones) for device, ones in gathers.items()},
        chunks=tuple(chunks),
        direct=_direct_pieces(chunks),
    )


def _direct_pieces(chunks: list[ChunkLayout]) -> dict[str, tuple[int, ...]]:
    found: dict[str, dict[int, None]] = defaultdict(dict)
    for chunk in chunks:
        for group in chunk.direct:
            found[group.device].update((span.piece, None) for span in group.spans)
    return {device: tuple(pieces) for device, pieces in found.items()}


def _stage(
    plan: SavePlan,
    file: FilePlan,
    numbers: list[int],
    ways: tuple[Way, ...],
    staging: dict[str, int],
) -> list[_Placed]:
    """The non-empty pieces of a file, and where each staged one lies in its device's buffer."""
    placed: list[_Placed] = []
    last_stop: dict[str, int] = {}
    for one in file.placed:
        if one.start == one.stop:
            continue
        spec = plan.items[one.item].pieces[one.piece]
        number = numbers[one.item] + one.piece
        at = -1
        if ways[number] is Way.STAGED:
            if last_stop.get(spec.device) != one.start:
                # A new stretch: aligned, so that copies are wide whatever the file's offsets.
                staging[spec.device] = align_up(staging[spec.device], 16)
            at = staging[spec.device]
            staging[spec.device] += one.stop - one.start
            last_stop[spec.device] = one.stop
        placed.append(_Placed(number, spec.dtype, spec.device, one.start, one.stop, at))
    return placed


def _gather_groups(ones: list[_Placed]) -> tuple[Group, ...]:
    groups: list[Group] = []
    run: list[_Placed] = []

    def flush() -> None:
        if run:
            start = run[0].staged_at
            stop = run[-1].staged_at + run[-1].stop - run[-1].start
            spans = tuple(Span(one.piece, 0, _elements(one), whole=True) for one in run)
            groups.append(
                Group(dtype=run[0].dtype, device=run[0].device, start=start, stop=stop, spans=spans)
            )
            run.clear()

    for one in ones:
        if run:
            end = run[-1].staged_at + run[-1].stop - run[-1].start
            if one.dtype != run[-1].dtype or one.staged_at != end:
                flush()
        run.append(one)
    flush()
    return tuple(groups)


def _elements(one: _Placed) -> int:
    return (one.stop - one.start) // DTYPES[one.dtype].size_bytes


def _chunks(index: int, file: FilePlan, placed: list[_Placed]) -> list[ChunkLayout]:
    """Cut a file at chunk boundaries; elements never straddle one, since sizes divide it."""
    chunks: list[ChunkLayout] = []
    builder: _Builder | None = None
    for one in placed:
        low = one.start
        while low < one.stop:
            number = low // CHUNK_BYTES
            if builder is None or builder.number != number:
                if builder is not None:
                    chunks.append(builder.chunk(index, file))
                builder = _Builder(number)
            high = min(one.stop, (number + 1) * CHUNK_BYTES)
            builder.add(one, low, high)
            low = high
    if builder is not None:
        chunks.append(builder.chunk(index, file))
    return chunks


class _Builder:
    """One chunk in the making; parts come in the order of the file."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._base = number * CHUNK_BYTES
        self._staged: list[Staged] = []
        self._direct: list[Group] = []
        self._spans: list[Span] = []
        self._run: tuple[str, str, int, int] | None = None
        """Of the spans in hand: dtype, device, first and last byte in the file."""

    def add(self, one: _Placed, low: int, high: int) -> None:
        """Bytes [low, high) of the file are those of this piece."""
        if one.staged_at >= 0:
            self._add_staged(one, low, high)
            return
        run = self._run
        if run is None or run[0] != one.dtype or run[1] != one.device or run[3] != low:
            self._close_run()
            run = (one.dtype, one.device, low, low)
        self._run = (run[0], run[1], run[2], high)
        size = DTYPES[one.dtype].size_bytes
        whole = low == one.start and high == one.stop
        first, last = (low - one.start) // size, (high - one.start) // size
        self._spans.append(Span(one.piece, first, last, whole))

    def chunk(self, index: int, file: FilePlan) -> ChunkLayout:
        self._close_run()
        size = min(CHUNK_BYTES, file.tensor_bytes - self._base)
        return ChunkLayout(file=index, start=self._base, size_bytes=size,
                           staged=tuple(self._staged), direct=tuple(self._direct))  # fmt: skip

    def _add_staged(self, one: _Placed, low: int, high: int) -> None:
        """Neighbours in the file that are neighbours in their staging buffer become one copy."""
        start, at, size = one.staged_at + low - one.start, low - self._base, high - low
        if self._staged:
            last = self._staged[-1]
            touching = last.start + last.size_bytes == start and last.at + last.size_bytes == at
            if last.device == one.device and touching:
                self._staged[-1] = last._replace(size_bytes=last.size_bytes + size)
                return
        self._staged.append(Staged(one.device, start, at, size))

    def _close_run(self) -> None:
        if self._run is not None:
            dtype, device, low, high = self._run
            self._direct.append(
                Group(dtype=dtype, device=device, start=low - self._base, stop=high - self._base,
                      spans=tuple(self._spans))
            )  # fmt: skip
            self._spans, self._run = [], None
