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
    from laststep.plan.files import FilePlan, SavePlan


class Way(Enum):
    """How one piece is captured."""

    STAGED = "staged"
    """Gathered at `save()` into one buffer on its own device, moved to the pool afterwards."""
    DIRECT = "direct"
    """Copied straight into the pool: the host's by the training thread, others in background."""


class ElementRange(NamedTuple):
    """Elements [first, last) of a piece."""

    piece: int
    first: int
    last: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingGroup:
    """Neighbouring spans of one dtype that fill bytes [start, stop) of a buffer."""

    dtype: str
    device: str
    start: int
    stop: int
    spans: tuple[ElementRange, ...]


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
    direct: tuple[StagingGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All copies of a save. Pieces are numbered through all items in order."""

    ways: tuple[Way, ...]
    staging_bytes: dict[str, int]
    gathers: dict[str, tuple[StagingGroup, ...]]
    """Per device: how its staging buffer is filled."""
    chunks: tuple[ChunkLayout, ...]
    direct: dict[str, tuple[int, ...]]
    """Per device: the pieces that are copied straight from it, each once."""


class _FileRange(NamedTuple):
    """A piece's bytes [start, stop) of a file."""

    piece: int
    dtype: str
    device: str
    start: int
    stop: int
    staged_at: int


class _StagedRun(NamedTuple):
    """Staged pieces that are neighbours both in the file and in their staging buffer."""

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
    gathers: dict[str, list[_FileRange]] = defaultdict(list)
    chunks: list[ChunkLayout] = []
    for index, file in enumerate(plan.files):
        parts = _stage(plan, file, numbers, ways, staging, gathers)
        chunks.extend(_chunks(index, file, parts))
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
    gathers: dict[str, list[_FileRange]],
) -> list[_FileRange | _StagedRun]:
    """The bytes of a file in order: pieces that are copied straight, and stretches of staged ones.
    Gives each staged piece its place in the device's buffer and enters it into `gathers`."""
    parts: list[_FileRange | _StagedRun] = []
    stretch: _StagedRun | None = None  # the last part, which the next piece may lengthen
    for item, piece, start, stop in file.placed:
        if start == stop:
            continue
        spec = plan.items[item].pieces[piece]
        number, device = numbers[item] + piece, spec.device
        if ways[number] is not Way.STAGED:
            parts.append(_FileRange(number, spec.dtype, device, start, stop, -1))
            stretch = None
            continue
        if stretch is None or stretch.device != device or stretch.stop != start:
            # A new stretch: aligned, so that copies are wide whatever the file's offsets.
            at = align_up(staging[device], 16)
            stretch = _StagedRun(device, start, stop, at)
            parts.append(stretch)
        else:
            at = staging[device]
            stretch = parts[-1] = _StagedRun(device, stretch.start, stop, stretch.staged_at)
        staging[device] = at + stop - start
        gathers[device].append(_FileRange(number, spec.dtype, device, start, stop, at))
    return parts


def _gather_groups(ones: list[_FileRange]) -> tuple[StagingGroup, ...]:
    groups: list[StagingGroup] = []
    run: list[_FileRange] = []

    def flush() -> None:
        if run:
            dtype, device, at = run[0].dtype, run[0].device, run[0].staged_at
            size = DTYPES[dtype].size_bytes
            # Positional: one for each of perhaps 100,000 tensors.
            spans = tuple(
                [ElementRange(one.piece, 0, (one.stop - one.start) // size, True) for one in run]  # noqa: FBT003
            )
            groups.append(StagingGroup(dtype=dtype, device=device, start=at, stop=end, spans=spans))
            run.clear()

    end = 0
    for one in ones:
        if run and (one.dtype != run[-1].dtype or one.staged_at != end):
            flush()
        run.append(one)
        end = one.staged_at + one.stop - one.start
    flush()
    return tuple(groups)


def _chunks(index: int, file: FilePlan, parts: list[_FileRange | _StagedRun]) -> list[ChunkLayout]:
    """Cut a file at chunk boundaries; elements never straddle one, since sizes divide it."""
    chunks: list[ChunkLayout] = []
    builder: _Builder | None = None
    for one in parts:
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
        self._direct: list[StagingGroup] = []
        self._spans: list[ElementRange] = []
        self._run: tuple[str, str, int, int] | None = None
        """Of the spans in hand: dtype, device, first and last byte in the file."""

    def add(self, one: _FileRange | _StagedRun, low: int, high: int) -> None:
        """Bytes [low, high) of the file are those of this piece or stretch."""
        if isinstance(one, _StagedRun):
            start = one.staged_at + low - one.start
            self._staged.append(Staged(one.device, start, low - self._base, high - low))
            return
        run = self._run
        if run is None or run[0] != one.dtype or run[1] != one.device or run[3] != low:
            self._close_run()
            run = (one.dtype, one.device, low, low)
        self._run = (run[0], run[1], run[2], high)
        size = DTYPES[one.dtype].size_bytes
        whole = low == one.start and high == one.stop
        first, last = (low - one.start) // size, (high - one.start) // size
        self._spans.append(ElementRange(one.piece, first, last, whole))

    def chunk(self, index: int, file: FilePlan) -> ChunkLayout:
        self._close_run()
        size = min(CHUNK_BYTES, file.tensor_bytes - self._base)
        return ChunkLayout(file=index, start=self._base, size_bytes=size,
                           staged=tuple(self._staged), direct=tuple(self._direct))  # fmt: skip

    def _close_run(self) -> None:
        if self._run is not None:
            dtype, device, low, high = self._run
            self._direct.append(
                StagingGroup(
                    dtype=dtype, device=device, start=low - self._base, stop=high - self._base,
                    spans=tuple(self._spans),
                )
            )  # fmt: skip
            self._spans, self._run = [], None
