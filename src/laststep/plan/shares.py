"""Decide which of the ranks that hold the same bytes writes which of them.

Pure, and computed by every rank for itself, from descriptions alone: nobody collects plans. The
copies that a set of ranks holds in common are thought of as one line of bytes, in the order of the
tensors, and cut into as many equal pieces as there are ranks, or fewer where they would be small;
each rank writes one piece. Cuts are moved to whole rows, so what is written is boxes. Every byte of
a tensor is written by exactly one rank, whatever the layouts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from laststep.state.layouts import Box, Copies, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_SHARE_BYTES = 8 << 20
"""Ranks write no less than this of what they hold in common, unless there is no more."""


class Spread(NamedTuple):
    """A tensor of the job, and how the ranks hold it: a layout for each class of ranks that does,
    in the same order everywhere."""

    itemsize: int
    layouts: tuple[Layout, ...]


class Share(NamedTuple):
    """Bytes that a rank writes: a box of a tensor, within the box of it that the rank holds."""

    tensor: int
    box: Box
    held: Box


class _Entry(NamedTuple):
    tensor: int
    held: Box
    size_bytes: int


def shares_of(rank: int, tensors: Sequence[Spread]) -> list[Share]:
    """All that a rank writes, in the order of the tensors."""
    lines: dict[tuple[Copies, ...], list[_Entry]] = {}
    for number, tensor in enumerate(tensors):
        writing = _writing(tensor.layouts)
        held = next((held for layout in writing if (held := layout.held(rank))), ())
        if not held:
            continue
        found = tuple(c for layout in writing if (c := layout.copies(held)) is not None)
        line = lines.setdefault(found, [])
        line += [_Entry(number, box, box.volume * tensor.itemsize) for box in held]
    shares: list[Share] = []
    for copies, line in lines.items():
        shares += _piece(rank, copies, line)
    return sorted(shares, key=lambda share: share.tensor)


def _writing(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts whose ranks take part in writing: all that cut the tensor as the first does. One
    that cuts it otherwise holds the same bytes in other boxes, and leaves them to the others."""
    if len(layouts) == 1:
        return layouts
    cuts = layouts[0].cuts()
    return tuple(layout for layout in layouts if layout.cuts() == cuts)


def _piece(rank: int, copies: tuple[Copies, ...], line: list[_Entry]) -> list[Share]:
    """What of a line this rank writes."""
    place, count = _place(rank, copies)
    total = sum(entry.size_bytes for entry in line)
    pieces = min(count, max(1, total // MIN_SHARE_BYTES))
    # Other lines begin with other tensors: where few write, these are not always the same ranks.
    piece = (place - line[0].tensor) % count
    if piece >= pieces:
        return []
    low, high = piece * total // pieces, (piece + 1) * total // pieces
    shares: list[Share] = []
    start = 0
    for entry in line:
        stop = start + entry.size_bytes
        if start < high and low < stop:
            box = _rows(entry, low - start, high - start)
            if box is not None:
                shares.append(Share(entry.tensor, box, entry.held))
        start = stop
    return shares


def _place(rank: int, copies: tuple[Copies, ...]) -> tuple[int, int]:
    """Which of all holders a rank is, and how many there are."""
    place, count = 0, 0
    for some in copies:
        mine = some.place(rank)
        if mine is not None:
            place = count + mine
        count += some.size
    return place, count


def _rows(entry: _Entry, low: int, high: int) -> Box | None:
    """The whole rows that begin at bytes [low, high) of a held box, along its first dimension that
    has more than one index."""
    shape = entry.held.shape
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if dim is None:
        return entry.held if low <= 0 < high else None
    row_bytes = entry.size_bytes // shape[dim]
    first = min(max(-(-low // row_bytes), 0), shape[dim])
    last = min(max(-(-high // row_bytes), 0), shape[dim])
    if first >= last:
        return None
    start, stop = list(entry.held.start), list(entry.held.stop)
    start[dim], stop[dim] = start[dim] + first, start[dim] + last
    return Box(tuple(start), tuple(stop))


def size_of(share: Share, tensors: Sequence[Spread]) -> int:
    """Bytes of a share."""
    return math.prod(share.box.shape) * tensors[share.tensor].itemsize
