"""What passes through a ring lands bit by bit, and is proven by what landed.

On memory of the host: the streams are CUDA's and are tested there."""

from __future__ import annotations

import pytest
import torch

from cases import long
from laststep.capture.gather import LiveTensor, bytes_of, hold_all
from laststep.capture.kernels import mixed
from laststep.capture.layout import Layout, Way, lower
from laststep.capture.ring import RING_CHUNKS, Route, chunks_through, ring_chunks
from laststep.constants import CHUNK_BYTES
from laststep.plan.files import ItemSpec, plan_save
from laststep.state.tree import Piece

DEVICE = "cpu"


def state() -> list[torch.Tensor]:
    """Tensors of all widths, some odd, of which one spans several chunks."""
    torch.manual_seed(0)
    return [
        torch.randn(9 << 20),
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(7).bfloat16(),
        torch.randn(9 << 20).bfloat16(),
        torch.randint(0, 255, (1001,), dtype=torch.uint8),
        torch.tensor(3.0),
    ]


def planned(tensors: list[torch.Tensor]) -> tuple[Layout, dict[int, LiveTensor]]:
    names = {
        torch.float32: "float32",
        torch.float64: "float64",
        torch.bfloat16: "bfloat16",
        torch.uint8: "uint8",
    }
    pieces = tuple(
        Piece(f"t{n}", names[t.dtype], tuple(t.shape), t.nbytes, DEVICE, True, False)
        for n, t in enumerate(tensors)
    )
    item = ItemSpec(name="state", kind="tree", standalone=True, pieces=pieces, per_rank=False)
    layout = lower(plan_save((item,)), (Way.DIRECT,) * len(pieces))
    return layout, dict(enumerate(hold_all(tensors, pieces) or ()))


def passed(
    route: Route,
    ring: torch.Tensor,
    sources: dict[int, LiveTensor],
    chunks: int,
    change: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that land when all chunks pass, one after the other, and their fingerprints."""
    landed = torch.zeros(chunks * CHUNK_BYTES, dtype=torch.uint8)
    sums = torch.zeros_like(route.fingerprint(sources))
    for number in range(chunks):
        if change is not None:
            change(number)  # type: ignore[operator]
        where, some = route.fill(ring, number, number + 1, sources)
        sums[where] = some
        place = route.place(number)
        for start, stop in route.windows(number):
            at = number * CHUNK_BYTES
            landed[at + start : at + stop] = ring[place + start : place + stop]
    return landed, sums


@pytest.mark.parametrize("places", [1, 3, *long(2, 8)])
def test_all_chunks_land_bit_by_bit_through_a_ring_of_any_size(places: int) -> None:
    tensors = state()
    layout, sources = planned(tensors)
    ring = torch.empty(places * CHUNK_BYTES, dtype=torch.uint8)
    route = Route(layout, DEVICE, sources, ring, None)
    chunks = len(chunks_through(layout, DEVICE))
    assert chunks > 3
    before = route.fingerprint(sources)
    landed, sums = passed(route, ring, sources, chunks)
    assert torch.equal(before, sums)
    assert route.changed((before == sums).all(dim=1).tolist()) == []
    # In the file: the widest first, and in order.
    order = [1, 0, 5, 2, 3, 4]
    wanted = torch.cat([bytes_of(tensors[number]) for number in order])
    assert torch.equal(landed[: wanted.numel()], wanted)


def test_weights_that_are_swapped_while_a_chunk_passes_and_put_back_are_noticed() -> None:
    tensors = state()
    layout, sources = planned(tensors)
    ring = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8)
    route = Route(layout, DEVICE, sources, ring, None)
    before, kept = route.fingerprint(sources), tensors[0].clone()

    def average(number: int) -> None:
        tensors[0].copy_(kept * 0.5 if number == 1 else kept)

    _, sums = passed(route, ring, sources, len(chunks_through(layout, DEVICE)), average)
    assert torch.equal(route.fingerprint(sources), before)  # all is as it was, and yet
    assert route.changed((before == sums).all(dim=1).tolist()) == [0]


def test_a_stretch_that_never_passed_does_not_look_proven() -> None:
    layout, sources = planned(state())
    ring = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8)
    route = Route(layout, DEVICE, sources, ring, None)
    before = route.fingerprint(sources)
    _, sums = passed(route, ring, sources, len(chunks_through(layout, DEVICE)) - 1)
    assert route.changed((before == sums).all(dim=1).tolist()) != []


def test_a_route_is_kept_while_nothing_moves() -> None:
    tensors = state()
    layout, sources = planned(tensors)
    ring = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8)
    route = Route(layout, DEVICE, sources, ring, None)
    assert route.fits(layout, sources, ring)
    assert not route.fits(layout, sources, torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8))
    assert not route.fits(layout, sources, ring[:CHUNK_BYTES])
    assert not route.fits(planned(tensors)[0], sources, ring)
    tensors[2] = tensors[2].clone()
    assert not route.fits(layout, planned(tensors)[1], ring)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 4099])
@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_fingerprint_depends_on_the_bytes_alone_and_not_on_where_they_lie(
    size: int, at: int
) -> None:
    raw = torch.randint(0, 255, (size,), dtype=torch.uint8)
    room = torch.zeros(size + 16, dtype=torch.uint8)
    room[at : at + size] = raw
    moved = room[at : at + size]
    assert torch.equal(mixed(moved), mixed(raw))
    if size:
        moved[-1] ^= 1
        assert not torch.equal(mixed(moved), mixed(raw))


def test_a_ring_takes_what_there_is_and_no_more() -> None:
    assert ring_chunks(100, 1 << 40) == RING_CHUNKS
    assert ring_chunks(3, 1 << 40) == 3
    assert ring_chunks(100, RING_CHUNKS * CHUNK_BYTES - 1) == 2
    assert ring_chunks(1, CHUNK_BYTES) == 1
    assert ring_chunks(100, 2 * CHUNK_BYTES - 1) == 0
