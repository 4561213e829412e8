"""Who wrote what, from stored tables: written from docs/layouts.md, sharing no code with laststep.

It is slow and lists everything, rank by rank. The numbers in comments are those of the page.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec

SIZES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""
Layout = list[Any]
Held = tuple[Box, ...]


def places(mesh: list[Any]) -> dict[int, tuple[int, ...]]:
    """Where each rank stands, in row-major order (2)."""
    _, sizes, strides, base, ranks = mesh
    found = {}
    for at in itertools.product(*map(range, sizes)):
        number = base + sum(a * b for a, b in zip(at, strides, strict=True))
        found[ranks[number] if ranks else number] = at
    return found


def part(shape: list[int], sizes: list[int], cuts: list[Any], at: tuple[int, ...]) -> Box:
    """What is left of a tensor where a rank stands (3)."""
    box = []
    for dim, side in enumerate(shape):
        start, stop = 0, side
        for _, axis in sorted((c[1], axis) for axis, c in enumerate(cuts) if c and c[0] == dim):
            each = -(-(stop - start) // sizes[axis])
            start, stop = (
                min(start + at[axis] * each, stop),
                min(start + (at[axis] + 1) * each, stop),
            )
        box.append((start, stop))
    return tuple(box)


def boxes_of(shape: list[int], first: int, last: int) -> list[Box]:
    """A range of elements as the fewest boxes, in order (3)."""
    if first >= last:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    if first % row == 0 and last % row == 0:
        return [((first // row, last // row), *((0, side) for side in shape[1:]))]
    low = first // row
    if (last - 1) // row == low:
        inner = boxes_of(shape[1:], first - low * row, last - low * row)
        return [((low, low + 1), *box) for box in inner]
    middle = (low + 1) * row if first % row else last // row * row
    return boxes_of(shape, first, middle) + boxes_of(shape, middle, last)


def flat_held(layout: Layout, at: tuple[int, ...]) -> list[Box]:
    _, shape, (names, sizes, *_), axes, offset, total, *more = layout
    cuts, blocks = more or ([[]] * len(sizes), 1)
    cuts = cuts or [[]] * len(sizes)
    if blocks > 1:
        shape = [blocks, shape[0] // blocks, *shape[1:]]
        cuts = [[c[0] + 1, c[1]] if c else c for c in cuts]
    mine = part(shape, sizes, cuts, at)
    sides = [stop - start for start, stop in mine]
    number, ranks = 0, 1
    for name, size, one in zip(names, sizes, at, strict=True):
        if name in axes:
            number, ranks = number * size + one, ranks * size
    each = total // ranks
    first, last = (
        max(number * each - offset, 0),
        min((number + 1) * each - offset, math.prod(sides)),
    )
    found = []
    for inner in boxes_of(sides, first, last):
        box = tuple((a + p[0], b + p[0]) for (a, b), p in zip(inner, mine, strict=True))
        if blocks == 1:
            found.append(box)
            continue
        for block in range(*box[0]):
            start = block * shape[1]
            found.append(((start + box[1][0], start + box[1][1]), *box[2:]))
    return found


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def held(layout: Layout, at: tuple[int, ...]) -> Held:
    if layout[0] == "flat":
        return tuple(flat_held(layout, at))
    box = part(layout[1], layout[2][1], layout[3], at)
    return (box,) if volume(box) else ()


def cutting(layout: Layout) -> list[int]:
    """The dimensions of the mesh that cut."""
    cuts = layout[3] if layout[0] == "sharded" else (layout[6:] or [[]])[0]
    found = {axis for axis, cut in enumerate(cuts) if cut}
    if layout[0] == "flat":
        found |= {axis for axis, name in enumerate(layout[2][0]) if name in layout[3]}
    return sorted(found)


def manner(layout: Layout) -> Any:
    """Equal for layouts that cut alike (4)."""
    kind, shape, (names, sizes, *_), *more = layout
    cuts, blocks = (more[3:] or ([], 1)) if kind == "flat" else (more[0], 1)
    orders = [
        [
            sizes[axis]
            for _, axis in sorted((c[1], n) for n, c in enumerate(cuts) if c and c[0] == d)
        ]
        for d in range(len(shape))
    ]
    alike = [kind, shape, [[size for size in order if size > 1] for order in orders], blocks]
    if kind == "flat":
        axes, offset, total = more[:3]
        ranks = math.prod(n for name, n in zip(names, sizes, strict=True) if name in axes)
        alike += [offset, total // ranks]
    return alike


def written(layout_groups: list[tuple[bytes, list[int]]], least: int = 8 << 20) -> dict[Any, Any]:
    """(item, tensor) → the (rank, box) of everything that was written of it, from the tables and
    the ranks of all classes, in the order of their lowest ranks."""
    told: dict[Any, list[Any]] = {}
    ties = set()
    for local_layout, ranks in layout_groups:
        items, layouts = msgspec.msgpack.decode(local_layout)
        for item, _, per_rank, tensors, tied in items:
            ties |= {(item, name) for name, _ in tied}
            for name, dtype, shape, number, *replicas in () if per_rank else tensors:
                layout = None if number is None else layouts[number]
                told.setdefault((item, name), []).append(
                    (dtype, shape, layout, sum(replicas), ranks)
                )
    for key in ties & told.keys():  # (1)
        if not any(
            layout is None or any(held(layout, places(layout[2])[rank]) for rank in ranks)
            for _, _, layout, _, ranks in told[key]
        ):
            del told[key]
    found: dict[Any, Any] = {key: [] for key in told}
    lines: dict[Any, list[Any]] = {}
    for number, (key, tellings) in enumerate(told.items()):
        dtype, shape = tellings[0][:2]
        if 0 in shape:  # (6)
            found[key].append((tellings[0][4][0], tuple((0, side) for side in shape)))
            continue
        for line, boxes in ranges_of(tellings, shape):
            lines.setdefault(line, []).extend(
                (number, key, box, volume(box) * SIZES[dtype]) for box in boxes
            )
    for line, entries in lines.items():  # (5)
        ranks = [rank for _, some in line for rank in some]
        write(ranks, entries, found, least)
    return found


def ranges_of(tellings: list[Any], shape: list[int]) -> list[tuple[Any, Held]]:
    """Who holds which boxes of a tensor and takes part in writing it (4): each line as the meshes
    and ranks that it is made of."""
    layouts: list[tuple[Layout, Any]] = []
    laid = [t for t in tellings if t[2] is not None]
    plain = [t for t in tellings if t[2] is None]
    for _, _, layout, _, _ in laid:
        if all(layout != other for other, _ in layouts):
            layouts.append((layout, places(layout[2])))
    if any(t[3] for t in laid):
        layout, standing = layouts[0]
        lowest = standing[min(standing)]
        cut = cutting(layout)
        alone = {
            rank: at
            for rank, at in standing.items()
            if all(axis in cut or at[axis] == lowest[axis] for axis in range(len(at)))
        }
        layouts = [(layout, alone)]
    elif plain and not (any(t[3] for t in plain) and layouts):
        ranks = sorted(rank for t in plain for rank in t[4])
        ranks = ranks[:1] if any(t[3] for t in plain) else ranks
        whole = ["sharded", shape, [["rank"], [len(ranks)], [1], 0, ranks], [[]]]
        layouts.append((whole, {rank: (place,) for place, rank in enumerate(ranks)}))
    same = manner(layouts[0][0])
    lines: dict[Held, list[Any]] = {}
    for layout, standing in layouts:
        if manner(layout) != same:
            continue
        cut, by_boxes = cutting(layout), {}
        for rank, at in standing.items():
            boxes = held(layout, at)
            if boxes:
                by_boxes.setdefault(boxes, []).append(rank)
        mesh = msgspec.json.encode([layout[2], cut])
        for boxes, ranks in by_boxes.items():
            lines.setdefault(boxes, []).append((mesh, tuple(ranks)))
    return [(tuple(holders), boxes) for boxes, holders in lines.items()]


def write(ranks: list[int], entries: list[Any], found: dict[Any, Any], least: int) -> None:
    """Cut a line into pieces, and give each to a rank (5)."""
    total, first = sum(entry[3] for entry in entries), entries[0][0]
    count = min(len(ranks), max(1, total // least))
    starts = itertools.accumulate((entry[3] for entry in entries), initial=0)
    for (_, key, box, size), start in zip(entries, starts, strict=False):
        dim = next((dim for dim, (a, b) in enumerate(box) if b - a > 1), None)
        rows = 1 if dim is None else box[dim][1] - box[dim][0]
        for piece in range(count):
            low, high = piece * total // count, (piece + 1) * total // count
            mine = [row for row in range(rows) if low <= start + row * (size // rows) < high]
            if mine:
                cut = list(box)
                if dim is not None:
                    cut[dim] = (box[dim][0] + mine[0], box[dim][0] + mine[-1] + 1)
                found[key].append((ranks[(piece + first) % len(ranks)], tuple(cut)))
