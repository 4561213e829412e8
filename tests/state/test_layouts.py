"""Layouts against brute force: every element's index, cut as torch cuts it."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laststep.errors import UsageError
from laststep.state.boxes import Box, boxes_of_range, covers_once, whole
from laststep.state.layouts import (
    Flat,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Sharded,
    copies_of,
    from_plain,
    to_plain,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """The row-major numbers of the elements of a box, in its own row-major order."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[tuple(map(slice, box.start, box.stop))].ravel().tolist()


@given(SHAPES, st.data())
def test_a_range_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, math.prod(shape)))
    last = data.draw(st.integers(first, math.prod(shape)))
    boxes = boxes_of_range(shape, first, last)
    assert [n for box in boxes for n in elements(shape, box)] == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_boxes_meet_where_their_elements_do(shape: tuple[int, ...], data: st.DataObject) -> None:
    def draw() -> Box:
        ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    one, other = draw(), draw()
    met = one.meet(other)
    both = set(elements(shape, one)) & set(elements(shape, other))
    assert (set() if met is None else set(elements(shape, met))) == both
    if met is not None:
        inside = met.within(one)
        local = np.array(elements(shape, one)).reshape(one.shape)
        there = local[tuple(map(slice, inside.start, inside.stop))].ravel().tolist()
        assert there == elements(shape, met)


def holders(layout: Sharded | Flat, held: tuple[Box, ...]) -> list[int]:
    copies = copies_of(layout, held)
    return [] if copies is None else list(copies.ranks())


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = math.prod(sizes)
    ranks = draw(
        st.one_of(
            st.integers(0, 5).map(lambda base: [base + n for n in range(count)]),
            st.integers(1, 3).map(lambda step: [step * n for n in range(count)]),
            st.permutations(range(count)),
        )
    )
    return Mesh.of(tuple("abc"[: len(sizes)]), sizes, ranks)


@given(meshes(), st.data())
def test_ranks_and_coordinates_follow_from_each_other(mesh: Mesh, data: st.DataObject) -> None:
    ranks = list(mesh.ranks())
    places = list(itertools.product(*map(range, mesh.sizes)))
    assert [mesh.coordinate(rank) for rank in ranks] == places
    assert [mesh.rank(at) for at in places] == ranks
    for stranger in {-1, max(ranks) + 1, *range(max(ranks))} - set(ranks):
        assert mesh.coordinate(stranger) is None
    axes = tuple(data.draw(st.sets(st.sampled_from(range(len(mesh.sizes))))))
    drawn = data.draw(st.sampled_from(places))
    copies = mesh.along(drawn, axes)
    alike = [r for r, p in zip(ranks, places, strict=True) if all(p[i] == drawn[i] for i in axes)]
    assert list(copies.ranks()) == alike
    assert copies.size == len(alike)
    assert [copies.place(rank) for rank in alike] == list(range(len(alike)))
    assert all(copies.place(rank) is None for rank in set(ranks) - set(alike))


def test_a_regular_grid_of_many_ranks_is_not_listed() -> None:
    mesh = Mesh.of(("pp", "dp", "tp"), (16, 1024, 8), range(131_072))
    assert mesh.listed == ()
    assert mesh.coordinate(100_000) == (12, 212, 0)
    stage = Mesh.of(("dp", "tp"), (4, 2), [8, 9, 12, 13, 16, 17, 20, 21])
    assert (stage.listed, stage.strides, stage.base) == ((), (4, 1), 8)


@st.composite
def sharded(draw: st.DrawFn) -> Sharded:
    mesh, shape = draw(meshes()), tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    places = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    placements = tuple(draw(places) for _ in mesh.sizes)
    first = placements[0]
    if isinstance(first, Shard) and draw(st.booleans()):
        behind = zip(placements[1:], mesh.sizes[1:], strict=True)
        after = math.prod(size for place, size in behind if place == first)
        placements = (Shard(first.dim, after), *placements[1:])
    return Sharded(shape, mesh, placements)


def cut(layout: Sharded, at: tuple[int, ...]) -> list[int]:
    """What torch.chunk leaves to a rank, cut by cut."""
    local = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    cuts = [(p.after, i, p.dim) for i, p in enumerate(layout.placements) if isinstance(p, Shard)]
    for _, axis, dim in sorted(cuts):
        chunks = local.chunk(layout.mesh.sizes[axis], dim)
        empty = local.narrow(dim, 0, 0)
        local = chunks[at[axis]] if at[axis] < len(chunks) else empty
    return local.flatten().tolist()


@given(sharded())
def test_shards_are_what_torch_cuts_and_cover_the_tensor_once(layout: Sharded) -> None:
    found: dict[Box, set[int]] = {}
    for rank in layout.mesh.ranks():
        boxes = layout.held(rank)
        wanted = cut(layout, layout.mesh.coordinate(rank))
        assert [n for box in boxes for n in elements(layout.shape, box)] == wanted
        for box in boxes:
            found.setdefault(box, set()).add(rank)
    assert covers_once(layout.shape, list(found))
    for box, ranks in found.items():
        assert holders(layout, (box,)) == [r for r in layout.mesh.ranks() if r in ranks]
    assert layout.held(10_000) == ()
    assert copies_of(layout, ()) is None


@given(sharded(), st.data())
def test_nobody_holds_a_box_that_no_cut_gives(layout: Sharded, data: st.DataObject) -> None:
    ends = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in layout.shape
    ]
    box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    holding = [rank for rank in layout.mesh.ranks() if layout.held(rank) == (box,)]
    assert holders(layout, (box,)) == holding


@given(meshes(), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.data())
def test_flat_ranges_cover_the_tensor_once_whatever_the_padding(
    mesh: Mesh, shape: tuple[int, ...], data: st.DataObject
) -> None:
    axes = tuple(data.draw(st.sets(st.sampled_from(mesh.names))))
    parts = math.prod(s for n, s in zip(mesh.names, mesh.sizes, strict=True) if n in axes)
    offset = data.draw(st.integers(0, 9))
    total = -(-(offset + math.prod(shape) + data.draw(st.integers(0, 9))) // parts) * parts
    layout = Flat(shape, mesh, axes, offset, total)
    found: dict[tuple[int, int], set[int]] = {}
    for rank in mesh.ranks():
        span = layout.range_of(rank)
        held = [n for box in layout.held(rank) for n in elements(shape, box)]
        assert held == ([] if span is None else list(range(*span)))
        if span is not None:
            found.setdefault(span, set()).add(rank)
    assert sorted(n for span in found for n in range(*span)) == list(range(math.prod(shape)))
    for span, ranks in found.items():
        boxes = boxes_of_range(shape, *span)
        assert holders(layout, boxes) == [rank for rank in mesh.ranks() if rank in ranks]


@st.composite
def flat_of_parts(draw: st.DrawFn) -> Flat:
    """Some dimensions of a mesh cut a tensor, or each of its blocks; others share the parts."""
    mesh, blocks = draw(meshes()), draw(st.sampled_from((1, 1, 2, 3)))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    shape = (shape[0] * blocks, *shape[1:])
    axes = tuple(draw(st.sets(st.sampled_from(mesh.names))))
    parts, placements = 1, []
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        parts *= size if name in axes else 1
        dim = -1 if name in axes else draw(st.integers(-1, len(shape) - 1))
        placements.append(Replicate() if dim < 0 else Shard(dim))
    largest = len(part_of(shape, mesh.sizes, placements, blocks, (0,) * len(mesh.sizes)))
    offset = draw(st.integers(0, 9))
    total = -(-(offset + largest + draw(st.integers(0, 9))) // parts) * parts
    return Flat(shape, mesh, axes, offset, total, tuple(placements), blocks)


def part_of(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    placements: list[Placement],
    blocks: int,
    at: tuple[int, ...],
) -> list[int]:
    """The elements that torch.chunk leaves to a rank, of each block in turn."""
    rows = shape[0] // blocks
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    for block in range(blocks):
        local = tensor.narrow(0, block * rows, rows)
        for size, place, one in zip(sizes, placements, at, strict=True):
            if isinstance(place, Shard):
                chunks = local.chunk(size, place.dim)
                local = chunks[one] if one < len(chunks) else local.narrow(place.dim, 0, 0)
        found += local.flatten().tolist()
    return found


def held_of_parts(layout: Flat, rank: int) -> list[int]:
    """The elements that a rank has of the part that it flattens with others."""
    at, number = layout.mesh.coordinate(rank), 0
    part = part_of(layout.shape, layout.mesh.sizes, layout.placements, layout.blocks, at)
    ranks = 1
    for name, size, one in zip(layout.mesh.names, layout.mesh.sizes, at, strict=True):
        if name in layout.axes:
            number, ranks = number * size + one, ranks * size
    buffer = [-1] * layout.total
    buffer[layout.offset : layout.offset + len(part)] = part
    each = layout.total // ranks
    return [n for n in buffer[number * each : (number + 1) * each] if n >= 0]


@given(flat_of_parts())
def test_ranges_of_parts_are_what_torch_cuts_flattened(layout: Flat) -> None:
    found: dict[tuple[Box, ...], list[int]] = {}
    for rank in layout.mesh.ranks():
        boxes = layout.held(rank)
        wanted = held_of_parts(layout, rank)
        assert [n for box in boxes for n in elements(layout.shape, box)] == wanted
        first, last = layout.range_of(rank) or (0, 0)
        assert last - first == len(wanted)
        if boxes:
            found.setdefault(boxes, []).append(rank)
    assert covers_once(layout.shape, [box for boxes in found for box in boxes])
    for boxes, ranks in found.items():
        copies = copies_of(layout, boxes)
        assert list(copies.ranks()) == ranks
        for rank in ranks:
            assert copies.rank(copies.place(rank)) == rank
    assert layout.held(10_000) == ()
    assert copies_of(layout, ()) is None


@given(flat_of_parts(), st.data())
def test_who_holds_something_of_a_box_is_told_exactly(layout: Flat, data: st.DataObject) -> None:
    ends = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in layout.shape
    ]
    box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    wanted = set(elements(layout.shape, box))
    found = [rank for span in layout.holders(box) for rank in span.ranks()]
    assert len(found) == len(set(found))
    holding = [r for r in layout.mesh.ranks() if wanted & set(held_of_parts(layout, r))]
    assert set(found) == set(holding)
    if box.volume:
        exactly = [rank for rank in layout.mesh.ranks() if layout.held(rank) == (box,)]
        assert holders(layout, (box,)) == exactly


@given(st.one_of(sharded(), flat_of_parts()))
def test_a_layout_comes_back_from_its_plain_form(layout: Sharded | Flat) -> None:
    again = from_plain(msgspec.msgpack.decode(data := msgspec.msgpack.encode(to_plain(layout))))
    assert again == layout
    assert [again.held(rank) for rank in again.mesh.ranks()] == [
        layout.held(rank) for rank in layout.mesh.ranks()
    ]
    assert again.cuts() == layout.cuts()
    assert msgspec.msgpack.encode(to_plain(again)) == data


def test_a_tensor_that_nothing_cuts_before_it_is_flattened_has_the_plain_form_of_old() -> None:
    mesh = Mesh.of(("dp",), (2,), [0, 1])
    layout = Flat((3, 2), mesh, ("dp",), 1, 8)
    old = ("flat", (3, 2), (("dp",), (2,), (1,), 0, ()), ("dp",), 1, 8)
    assert to_plain(layout) == old
    assert from_plain(old) == layout


@given(SHAPES, st.data())
def test_covering_once_is_told_from_gaps_and_overlaps(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, math.prod(shape)), max_size=4)))
    ends = [0, *cuts, math.prod(shape)]
    boxes = [b for a, z in itertools.pairwise(ends) for b in boxes_of_range(shape, a, z)]
    assert covers_once(shape, data.draw(st.permutations(boxes)))
    real = [box for box in boxes if box.volume]
    if real and shape:
        assert not covers_once(shape, real[1:])
        assert not covers_once(shape, [*real, real[0]])
        assert not covers_once(shape, [real[0]] * len(real)) or len(real) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mesh(("a",), (2, 2), (2, 1)),
        lambda: Mesh(("a", "b"), (2, 2), (1, 1)),
        lambda: Mesh.of(("a",), (3,), [0, 1]),
        lambda: Mesh.of(("a",), (2,), [1, 1]),
        lambda: Sharded((4,), Mesh.of(("a",), (2,), [0, 1]), ()),
        lambda: Sharded((4,), Mesh.of(("a",), (2,), [0, 1]), (Shard(1),)),
        lambda: Sharded((4,), Mesh.of(("a",), (2,), [0, 1]), (Shard(0, after=2),)),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), ("a",), 0, 5),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), ("a",), 1, 4),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), ("b",), 0, 4),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), ("a",), 0, 4, (Shard(0),)),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), (), 0, 4, (Shard(1),)),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), (), 0, 1, (Shard(0),)),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), (), 0, 4, (Shard(0), Replicate())),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), (), 0, 4, (Shard(0),), 3),
        lambda: Flat((4,), Mesh.of(("a",), (2,), [0, 1]), (), 0, 4, (Shard(0),), 0),
        lambda: Flat((), Mesh.of(("a",), (2,), [0, 1]), (), 0, 4, (), 2),
    ],
)
def test_what_does_not_fit_together_is_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make()


def test_a_tensor_without_dimensions_is_one_element() -> None:
    assert whole(()).volume == 1
    assert boxes_of_range((), 0, 1) == (Box((), ()),)
    assert covers_once((), [Box((), ())])
