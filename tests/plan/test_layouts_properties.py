"""Whatever the layouts of a job of up to 512 ranks: every byte is written once, by one who holds
it, and where tensors are large all write alike."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import second_arithmetic

from laststep.errors import UsageError
from laststep.plan import who_writes
from laststep.plan.layouts import (
    GlobalLayout,
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    agree,
    decode_local_layout,
    digest_of,
    encode_local_layout,
)
from laststep.state.boxes import Box, whole
from laststep.state.layouts import Flat, Layout, Mesh, Placement, Replicate, Shard, Sharded

DTYPES = {"float64": "f8", "float32": "f4", "float16": "f2", "uint8": "u1"}
MAX_RANKS = 512

Described = list[tuple[str, tuple[int, ...], list[Layout | tuple[int, ...]]]]
"""Tensors: dtype, shape, and how they lie; a tuple of ranks: each of these holds all of it."""


@st.composite
def sizes(draw: st.DrawFn, ranks: int) -> tuple[int, ...]:
    """A shape for a mesh of so many ranks at most."""
    found: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        found.append(draw(st.integers(1, max(1, min(8, ranks // math.prod(found))))))
    found[draw(st.integers(0, len(found) - 1))] *= draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 16, 64) if n * math.prod(found) <= ranks])
    )
    return tuple(found)


@st.composite
def meshes(draw: st.DrawFn, ranks: int) -> Mesh:
    """Of some of these ranks: in order, with gaps, or in disorder."""
    shape = draw(sizes(ranks))
    count = math.prod(shape)
    step = draw(st.integers(1, ranks // count))
    first = draw(st.integers(0, ranks - 1 - (count - 1) * step))
    members = [first + step * n for n in range(count)]
    if draw(st.integers(0, 3)) == 0:
        members = draw(st.permutations(members))
    return Mesh.of(tuple("abc"[: len(shape)]), shape, members)


@st.composite
def flat_layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Flat:
    """Of whole tensors, or of what other dimensions of the mesh leave of them."""
    axes = tuple(draw(st.sets(st.sampled_from(mesh.names))))
    parts = math.prod(s for n, s in zip(mesh.names, mesh.sizes, strict=True) if n in axes)
    offset = draw(st.integers(0, 50))
    total = -(-(offset + math.prod(shape) + draw(st.integers(0, 50))) // parts) * parts
    if draw(st.booleans()):
        return Flat(shape, mesh, axes, offset, total)
    places = [
        Replicate()
        if n in axes or (dim := draw(st.integers(-1, len(shape) - 1))) < 0
        else Shard(dim)
        for n in mesh.names
    ]
    blocks = 2 if shape and shape[0] % 2 == 0 and draw(st.booleans()) else 1
    return Flat(shape, mesh, axes, offset, total, tuple(places), blocks)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    if draw(st.integers(0, 3)) == 0:
        return draw(flat_layouts(mesh, shape))
    dims = [draw(st.integers(-1, len(shape) - 1)) for _ in mesh.sizes]
    order = draw(st.permutations(range(len(dims))))
    placements: list[Placement] = []
    for axis, dim in enumerate(dims):
        earlier = order[: order.index(axis)]
        after = math.prod(mesh.sizes[n] for n in earlier if n > axis and dims[n] == dim)
        placements.append(Replicate() if dim < 0 else Shard(dim, after))
    try:
        return Sharded(shape, mesh, tuple(placements))
    except UsageError:  # an order that no strided shard can say
        assume(False)
        raise


@st.composite
def described(draw: st.DrawFn, ranks: int, most: int = 4) -> Described:
    found: Described = []
    for _ in range(draw(st.integers(1, most))):
        shape = tuple(draw(st.lists(st.integers(0, 24), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        if draw(st.integers(0, 3)) == 0:
            holders = list(draw(meshes(ranks)).ranks())
            found.append((dtype, shape, [tuple(sorted(holders))]))
            continue
        mesh = draw(meshes(ranks))
        ways: list[Layout | tuple[int, ...]] = [draw(layouts(mesh, shape))]
        free = sorted(set(range(ranks)) - set(mesh.ranks()))
        if free and draw(st.booleans()):  # other ranks hold it too, in a way of their own
            ways.append(tuple(free[: draw(st.integers(1, len(free)))]))
        found.append((dtype, shape, ways))
    return found


def local_layouts(
    ranks: int, tensors: Described, replicas: Replicas = Replicas.EQUAL
) -> list[LocalLayout]:
    """What each rank says of itself."""
    mine: list[list[LocalTensor]] = [[] for _ in range(ranks)]
    for number, (dtype, shape, ways) in enumerate(tensors):
        for way in ways:
            plain = isinstance(way, tuple)
            for rank in way if plain else way.mesh.ranks():
                layout = None if plain else way
                mine[rank].append(LocalTensor(f"w{number}", dtype, shape, layout, replicas))
    return [(LocalItem("model", "module", False, tuple(one)),) for one in mine]


def global_layout_of(all_tables: list[LocalLayout]) -> GlobalLayout:
    encoded = [encode_local_layout(local_layout) for local_layout in all_tables]
    known = {digest_of(data): decode_local_layout(data) for data in set(encoded)}
    return agree([digest_of(data) for data in encoded], known)


def held_by(rank: int, shape: tuple[int, ...], ways: list[Layout | tuple[int, ...]]) -> list[Box]:
    for way in ways:
        if isinstance(way, tuple):
            if rank in way:
                return [whole(shape)]
        elif way.mesh.coordinate(rank) is not None:
            return list(way.held(rank))
    return []


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    # The dots make it a view of what has no dimensions, too.
    return array[(*(slice(a, b) for a, b in zip(box.start, box.stop, strict=True)), ...)]


@given(st.integers(1, MAX_RANKS), st.sampled_from((1, 64, 512, 8 << 20)), st.data())
def test_every_byte_is_written_once_by_one_who_holds_it(
    ranks: int, least: int, data: st.DataObject
) -> None:
    tensors = data.draw(described(ranks))
    replicas = data.draw(st.sampled_from(Replicas))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(who_writes, "MIN_ASSIGNMENT_BYTES", least)
        global_layout = global_layout_of(local_layouts(ranks, tensors, replicas))
        times = [np.zeros(shape, dtype=np.int64) for _, shape, _ in tensors]
        entries = [0] * len(tensors)
        for rank in range(ranks):
            for (_, name), share in global_layout.assignments(rank):
                number = int(name[1:])
                _, shape, ways = tensors[number]
                held = held_by(rank, shape, ways)
                assert share.held in held or math.prod(shape) == 0
                assert share.box.meet(share.held) == share.box or share.box.volume <= 1
                cut(times[number], share.box)[...] += 1
                entries[number] += 1
    for number, (_, shape, _) in enumerate(tensors):
        assert (times[number] == 1).all()
        assert entries[number] >= 1  # one without elements is somebody's as well
        if math.prod(shape) == 0:
            assert entries[number] == 1


@given(st.integers(1, MAX_RANKS), st.data())
def test_what_is_not_known_to_be_equal_is_written_by_one_replica(
    ranks: int, data: st.DataObject
) -> None:
    """The one with the lowest rank; whoever else holds a part of it writes none."""
    tensors = data.draw(described(ranks))
    replicas = data.draw(st.sampled_from((Replicas.UNPROVEN, Replicas.CHANGING)))
    global_layout = global_layout_of(local_layouts(ranks, tensors, replicas))
    writers: dict[int, set[int]] = {number: set() for number in range(len(tensors))}
    for rank in range(ranks):
        for (_, name), share in global_layout.assignments(rank):
            if share.box.volume:
                assert share.box == share.held
                writers[int(name[1:])].add(rank)
    for number, (_, shape, ways) in enumerate(tensors):
        way = ways[0]
        if isinstance(way, tuple):
            assert writers[number] <= {min(way)}
        elif math.prod(shape):
            axes = [axis for axis in range(len(way.mesh.sizes)) if axis not in way.cutting]
            places = {way.mesh.coordinate(rank) for rank in writers[number]}
            lowest = way.mesh.coordinate(min(way.mesh.ranks()))
            assert {tuple(at[a] for a in axes) for at in places} == {tuple(lowest[a] for a in axes)}


@given(st.data())
def test_large_tensors_are_written_by_all_alike(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=3).map(tuple))
    ranks = math.prod(shape)
    mesh = Mesh.of(tuple("abc"[: len(shape)]), shape, range(ranks))
    tensors: Described = []
    for _ in range(data.draw(st.integers(1, 6))):
        dims = [data.draw(st.integers(-1, 1)) for _ in shape]
        placements = tuple(Replicate() if dim < 0 else Shard(dim) for dim in dims)
        layout = Sharded((1 << 16, 1 << 16), mesh, placements)
        tensors += [("float16", layout.shape, [layout])] * 2
    if data.draw(st.booleans()):
        tensors.append(("float32", (1 << 16, 1 << 16), [tuple(range(ranks))]))
    global_layout = global_layout_of(local_layouts(ranks, tensors))
    itemsizes = [np.dtype(DTYPES[dtype]).itemsize for dtype, _, _ in tensors]
    loads = [
        sum(share.box.volume * itemsizes[int(name[1:])] for (_, name), share in one)
        for one in map(global_layout.assignments, range(ranks))
    ]
    whole_bytes = sum(
        math.prod(shape) * size for (_, shape, _), size in zip(tensors, itemsizes, strict=True)
    )
    assert sum(loads) == whole_bytes
    mean = whole_bytes / ranks
    assert max(loads) <= 1.05 * mean
    assert min(loads) >= 0.95 * mean


@given(st.integers(1, 64), st.data())
def test_all_see_the_same_agreement_in_whatever_order_tensors_are_told(
    ranks: int, data: st.DataObject
) -> None:
    """Stages list what they hold in orders of their own."""
    tensors = data.draw(described(ranks))
    told = local_layouts(ranks, tensors)
    global_layout = global_layout_of(told)
    written = [
        sorted((n, s.box) for (_, n), s in global_layout.assignments(r)) for r in range(ranks)
    ]
    boxes = sorted(itertools.chain(*written))
    turned = [
        (item._replace(tensors=tuple(reversed(item.tensors))),) if rank % 2 else (item,)
        for rank, (item,) in enumerate(told)
    ]
    again = global_layout_of(turned)
    count = sum(len(again.assignments(r)) for r in range(ranks))
    times = {
        name: np.zeros(t[1], dtype=int)
        for name, t in zip((f"w{n}" for n in range(len(tensors))), tensors, strict=True)
    }
    for rank in range(ranks):
        for (_, name), share in again.assignments(rank):
            cut(times[name], share.box)[...] += 1
    assert all((one == 1).all() for one in times.values())
    assert count >= len({name for name, _ in boxes})


def test_a_tie_that_a_rank_without_a_part_cannot_see_is_a_tie() -> None:
    mesh = Mesh.of(("dp",), (4,), range(4))
    layout = Sharded((5, 3), mesh, (Shard(0),))  # the last rank holds nothing
    tensor = LocalTensor("embed", "float32", (5, 3), layout)
    tied = (LocalItem("model", "module", False, (tensor,), (("head", "embed"),)),)
    blind = (LocalItem("model", "module", False, (tensor, tensor._replace(name="head"))),)
    global_layout = global_layout_of([tied, tied, tied, blind])
    assert global_layout.keys == (("model", "embed"),)
    written = [share.box for rank in range(4) for _, share in global_layout.assignments(rank)]
    assert sum(box.volume for box in written) == 15


@given(
    st.integers(1, 32), st.sampled_from((1, 64, 512, 8 << 20)), st.sampled_from(Replicas), st.data()
)
def test_who_writes_what_follows_from_what_the_format_says_of_it(
    ranks: int, least: int, replicas: Replicas, data: st.DataObject
) -> None:
    """A second arithmetic, written from docs/layouts.md, gives the same."""
    all_tables = local_layouts(ranks, data.draw(described(ranks)), replicas)
    told: dict[bytes, list[int]] = {}
    for rank, one in enumerate(all_tables):
        told.setdefault(encode_local_layout(one), []).append(rank)
    global_layout = global_layout_of(all_tables)
    wanted: dict[tuple[str, str], list[object]] = {key: [] for key in global_layout.keys}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(who_writes, "MIN_ASSIGNMENT_BYTES", least)
        for rank in range(ranks):
            for key, share in global_layout.assignments(rank):
                wanted[key].append((rank, tuple(zip(*share.box, strict=True))))
    found = second_arithmetic.written(list(told.items()), least)
    assert {key: sorted(boxes) for key, boxes in found.items()} == {
        key: sorted(boxes) for key, boxes in wanted.items()
    }
