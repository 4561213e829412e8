"""Decide how a save is copied: choose each piece's capture mode, and lower the plan to copies.

Pure: it looks only at specs and at the memory that is spare. A layout says which bytes are gathered
together, and what each chunk takes from where. It is reused while the state keeps its shape.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from itertools import compress, groupby, repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from laststep.constants import CHUNK_BYTES, DTYPES, align_up
from laststep.errors import UsageError
from laststep.settings import Capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from laststep.plan.files import FilePlan, SavePlan
    from laststep.state.tree import Piece

_DTYPE: Final = operator.attrgetter("dtype")
_START: Final = operator.attrgetter("start")
_PIECE: Final = operator.attrgetter("piece")
HOST_STAGING_BYTES = 64 << 20
"""Up to this much host state is copied aside at `save()` instead of into slots."""


class Way(Enum):
    STAGED = "staged"
    """Gathered at `save()` into one buffer on its own device, moved to the pool afterwards."""
    DIRECT = "direct"
    """Copied straight into the pool: host state at `save()`, the rest in the background."""


def choose(
    pieces: Sequence[Piece], mode: Capture, rooms: Mapping[str, int]
) -> tuple[tuple[Way, ...], dict[str, int]]:
    """Return the capture mode of each piece, and the memory that this needs on each device.

    Stage device pieces while there is room, and host pieces if they are small. State that forward
    changes, and device state that needs gathering, cannot be lazy.
    """
    host_bytes = sum([piece.size_bytes for piece in pieces if piece.device == "cpu"])
    small = host_bytes <= HOST_STAGING_BYTES
    needs = dict.fromkeys(rooms, 0)
    ways: list[Way] = []
    device_first = mode in (Capture.AUTO, Capture.DEVICE)
    for _name, _dtype, _shape, size, device, contiguous, volatile, *_ in pieces:
        if device == "cpu":
            staged = volatile or not contiguous if mode is Capture.LAZY else small
        else:
            fits = needs[device] + size <= rooms[device]
            if mode is Capture.DEVICE and not fits:
                needed = sum(piece.size_bytes for piece in pieces if piece.device == device)
                raise UsageError(
                    "device memory is short for capture='device'",
                    where=device,
                    expected=f"{needed} spare bytes",
                    found=str(rooms[device]),
                    remedy="use capture='auto', which captures lazily what does not fit",
                )
            staged = volatile or not contiguous or (fits and device_first)
            needs[device] += size if staged else 0
        ways.append(Way.STAGED if staged else Way.DIRECT)
    return tuple(ways), needs


class ElementRange(NamedTuple):
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
    """All copies of a save, by device. Pieces are numbered through all items in order."""

    ways: tuple[Way, ...]
    staging_bytes: dict[str, int]
    gathers: dict[str, tuple[StagingGroup, ...]]
    """How the staging buffer is filled."""
    chunks: tuple[ChunkLayout, ...]
    direct: dict[str, tuple[int, ...]]
    """The pieces that are copied straight from a device, each once."""


class _StagedRange(NamedTuple):
    """Staged pieces that are neighbours in bytes [start, stop) of a file and in their buffer."""

    device: str
    start: int
    stop: int
    staged_at: int


class _CopyRun(NamedTuple):
    """Neighbouring pieces that fill bytes [start, stop) of a file and are copied alike."""

    way: Way
    device: str
    dtype: str
    start: int
    stop: int
    bounds: list[int]
    """The byte of the file at which each piece starts, and the one at which the last stops."""
    spans: list[ElementRange]

    def within(self, low: int, high: int) -> tuple[ElementRange, ...]:
        """Return what lies in bytes [low, high) of the file, with the first and last span cut."""
        first, last = bisect_right(self.bounds, low) - 1, bisect_left(self.bounds, high)
        spans = self.spans[first:last]
        size = DTYPES[self.dtype].size_bytes
        if self.bounds[last] > high:
            stop = (high - self.bounds[last - 1]) // size
            spans[-1] = ElementRange(spans[-1].piece, 0, stop, whole=False)
        if self.bounds[first] < low:
            start = (low - self.bounds[first]) // size
            spans[0] = ElementRange(spans[0].piece, start, spans[0].last, whole=False)
        return tuple(spans)


def lower(plan: SavePlan, ways: tuple[Way, ...]) -> Layout:
    """Return the copies that carry out `plan` with these capture modes."""
    gathers: dict[str, list[StagingGroup]] = defaultdict(list)
    direct: dict[str, list[int]] = defaultdict(list)
    chunks: list[ChunkLayout] = []
    for index, file in enumerate(plan.files):
        parts: list[_StagedRange | _CopyRun] = []
        for run in _runs(plan, file, ways):
            if run.way is Way.STAGED:
                _stage(run, parts, gathers[run.device])
            else:
                parts.append(run)
                direct[run.device] += map(_PIECE, run.spans)
        chunks += _chunks(index, file, parts)
    return Layout(
        ways=ways,
        staging_bytes={device: groups[-1].stop for device, groups in gathers.items()},
        gathers={device: tuple(groups) for device, groups in gathers.items()},
        chunks=tuple(chunks),
        direct={device: tuple(pieces) for device, pieces in direct.items()},
    )


def _runs(plan: SavePlan, file: FilePlan, ways: tuple[Way, ...]) -> Iterator[_CopyRun]:
    """Yield the pieces of a file as long runs: it is sorted by device and dtype. There may be
    100,000 pieces, so none gets a Python call of its own."""
    full = [start != stop for _, _, _, start, stop in file.layout.tensors]
    numbers, placed = list(compress(file.pieces, full)), list(compress(file.layout.tensors, full))
    chosen = [ways[number] for number in numbers]
    devices = [plan.pieces[number].device for number in numbers]
    alike = list(zip(chosen, devices, map(_DTYPE, placed), strict=True))
    for (way, device, dtype), members in groupby(range(len(placed)), alike.__getitem__):
        at = list(members)
        run, size = placed[at[0] : at[-1] + 1], DTYPES[dtype].size_bytes
        elements = [(stop - start) // size for _, _, _, start, stop in run]
        numbered = zip(numbers[at[0] :], repeat(0), elements, repeat(True), strict=False)  # noqa: FBT003
        bounds = [*map(_START, run), run[-1].stop]
        spans = list(map(ElementRange._make, numbered))
        yield _CopyRun(way, device, dtype, bounds[0], bounds[-1], bounds, spans)


def _stage(run: _CopyRun, parts: list[_StagedRange | _CopyRun], groups: list[StagingGroup]) -> None:
    """Append a run to the staging buffer of its device, `groups`, and to the parts of its file."""
    end = groups[-1].stop if groups else 0
    before = parts[-1] if parts else None
    if isinstance(before, _StagedRange) and before.device == run.device:
        at = end
        parts[-1] = before._replace(stop=run.stop)
    else:
        # A new stretch: aligned, so that copies are wide whatever the file's offsets.
        at = align_up(end, 16)
        parts.append(_StagedRange(run.device, run.start, run.stop, at))
    stop, spans = at + run.stop - run.start, tuple(run.spans)
    if groups and groups[-1].dtype == run.dtype and end == at:
        groups[-1] = replace(groups[-1], stop=stop, spans=groups[-1].spans + spans)
    else:
        groups.append(
            StagingGroup(dtype=run.dtype, device=run.device, start=at, stop=stop, spans=spans)
        )


def _chunks(
    index: int, file: FilePlan, parts: list[_StagedRange | _CopyRun]
) -> Iterator[ChunkLayout]:
    """Cut a file at chunk boundaries; elements never straddle one, since sizes divide it."""
    chunks: dict[int, tuple[list[Staged], list[StagingGroup]]] = {}
    for part in parts:
        for base in range(part.start // CHUNK_BYTES * CHUNK_BYTES, part.stop, CHUNK_BYTES):
            staged, direct = chunks.setdefault(base, ([], []))
            low, high = max(part.start, base), min(part.stop, base + CHUNK_BYTES)
            if isinstance(part, _StagedRange):
                start = part.staged_at + low - part.start
                staged.append(Staged(part.device, start, low - base, high - low))
            else:
                direct.append(
                    StagingGroup(
                        dtype=part.dtype,
                        device=part.device,
                        start=low - base,
                        stop=high - base,
                        spans=part.within(low, high),
                    )
                )
    for base, (staged, direct) in chunks.items():
        size = min(CHUNK_BYTES, file.layout.tensor_bytes - base)
        yield ChunkLayout(
            file=index, start=base, size_bytes=size, staged=tuple(staged), direct=tuple(direct)
        )
