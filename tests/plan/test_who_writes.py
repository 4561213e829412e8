"""Every byte is written once, by somebody who holds it, and the ranks share the work."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.plan import who_writes
from laststep.plan.who_writes import Assignment, Spread, assignments_of, size_of
from laststep.state.boxes import covers_once, whole
from laststep.state.layouts import Flat, Layout, Mesh, Replicate, Shard, Sharded


@st.composite
def layouts_on(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    if draw(st.integers(0, 4)) == 0:
        axes = tuple(draw(st.sets(st.sampled_from(mesh.names))))
        parts = math.prod(s for n, s in zip(mesh.names, mesh.sizes, strict=True) if n in axes)
        offset = draw(st.integers(0, 40))
        total = -(-(offset + math.prod(shape) + draw(st.integers(0, 40))) // parts) * parts
        return Flat(shape, mesh, axes, offset, total)
    dims = st.sampled_from(range(len(shape))) if shape else st.nothing()
    place = st.one_of(st.just(Replicate()), dims.map(Shard)) if shape else st.just(Replicate())
    return Sharded(shape, mesh, tuple(draw(place) for _ in mesh.sizes))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[Spread]]:
    """A pipeline of one to three stages, each a mesh of its own; tensors of one stage or of two."""
    stages = draw(st.integers(1, 3))
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    each = math.prod(sizes)
    names = tuple("abc"[: len(sizes)])
    meshes = [Mesh.of(names, sizes, range(n * each, (n + 1) * each)) for n in range(stages)]
    tensors = []
    for _ in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 60), max_size=3)))
        stage = draw(st.integers(0, stages - 1))
        found = [draw(layouts_on(meshes[stage], shape))]
        if draw(st.booleans()):  # tied to another stage, cut the same way or otherwise
            other = draw(st.integers(0, stages - 1))
            if other != stage:
                found.append(draw(layouts_on(meshes[other], shape)))
        tensors.append(Spread(draw(st.sampled_from((1, 2, 4))), tuple(found)))
    return stages * each, tensors


@settings(max_examples=50)
@given(jobs(), st.sampled_from((1, 64, 1024)))
def test_every_byte_is_written_once_by_a_rank_that_holds_it(
    job: tuple[int, list[Spread]], least: int
) -> None:
    ranks, tensors = job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(who_writes, "MIN_ASSIGNMENT_BYTES", least)
        written: dict[int, list[Assignment]] = defaultdict(list)
        for rank in range(ranks):
            for share in assignments_of(rank, tensors):
                layouts = tensors[share.tensor].layouts
                assert any(share.held in layout.held(rank) for layout in layouts)
                assert share.held.meet(share.box) == share.box or share.box.volume == 1
                written[share.tensor].append(share)
    for number, tensor in enumerate(tensors):
        boxes = [share.box for share in written[number]]
        assert covers_once(tensor.layouts[0].shape, boxes)


def loads(ranks: int, tensors: list[Spread]) -> list[int]:
    return [
        sum(size_of(s, tensors) for s in assignments_of(rank, tensors)) for rank in range(ranks)
    ]


def big(layout: Layout) -> Spread:
    return Spread(2, (layout,))


def test_replicas_share_the_work_within_five_percent() -> None:
    mesh = Mesh.of(("dp", "tp"), (8, 4), range(32))
    tensors = []
    for _ in range(24):
        tensors += [
            big(Sharded((4096, 16384), mesh, (Replicate(), Shard(0)))),
            big(Sharded((16384, 4096), mesh, (Replicate(), Shard(1)))),
            big(Sharded((4096,), mesh, (Replicate(), Replicate()))),
        ]
    found = loads(32, tensors)
    mean = sum(found) / 32
    assert max(found) <= 1.05 * mean
    assert min(found) >= 0.95 * mean


def test_two_stages_share_what_is_tied() -> None:
    first = Mesh.of(("dp",), (4,), range(4))
    last = Mesh.of(("dp",), (4,), range(4, 8))
    shape = (50_000, 4096)
    both = (Sharded(shape, first, (Replicate(),)), Sharded(shape, last, (Replicate(),)))
    found = loads(8, [Spread(2, both)])
    assert max(found) - min(found) <= 2 * 4096


def test_few_bytes_are_written_by_few_and_not_always_the_same() -> None:
    mesh = Mesh.of(("dp",), (16,), range(16))
    one = Mesh.of(("dp",), (16,), range(16))
    small = Sharded((64,), mesh, (Replicate(),))
    assert sum(load > 0 for load in loads(16, [big(small)] * 3)) == 1
    shapes = [(4096, 1024 + n) for n in range(4)]
    lines = [big(Sharded(shape, one, (Replicate(),))) for shape in shapes]
    assert sum(load > 0 for load in loads(16, lines)) == 4


def test_a_rank_of_many_plans_alone_and_fast() -> None:
    """131,072 ranks: what one of them computes does not grow with them."""
    mesh = Mesh.of(("pp", "dp", "tp"), (16, 1024, 8), range(131_072))
    stage = Mesh(("dp", "tp"), (1024, 8), (8, 1), base=5 * 8192)
    sharded = Sharded((8192, 8192), stage, (Shard(0, after=8), Shard(0)))
    everywhere = Sharded((4096, 4096), mesh, (Replicate(),) * 3)
    tensors = [big(sharded), big(everywhere)] * 200
    mine = assignments_of(5 * 8192 + 77, tensors)
    assert sum(share.tensor % 2 == 0 for share in mine) == 200
    assert all(share.box == share.held for share in mine if share.tensor % 2 == 0)
    assert sum(size_of(share, tensors) for share in mine) < 200 * 8192 * 2 + (64 << 20)


def test_the_whole_of_a_lone_element_is_written_once() -> None:
    mesh = Mesh.of(("dp",), (3,), range(3))
    scalar = Spread(8, (Sharded((), mesh, (Replicate(),)),))
    written = [share for rank in range(3) for share in assignments_of(rank, [scalar])]
    assert [share.box for share in written] == [whole(())]
