"""A plan lowered to copies fills every byte of every file exactly once, whatever the ways."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laststep.capture import layout as lowering
from laststep.capture.gather import gather
from laststep.capture.layout import Layout, Way, lower
from laststep.constants import DTYPES
from laststep.plan.files import ItemSpec, SavePlan, plan_save
from laststep.state.tensors import TORCH_DTYPES
from laststep.state.tree import Piece

SMALL_CHUNK = 4096


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "CHUNK_BYTES", SMALL_CHUNK)


@st.composite
def planned(draw: st.DrawFn, devices: tuple[str, ...]) -> tuple[SavePlan, tuple[Way, ...]]:
    shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
    drawn = st.tuples(st.sampled_from(sorted(DTYPES)), shapes, st.sampled_from(devices))
    items, ways = [], []
    for number in range(draw(st.integers(1, 3))):
        pieces = []
        for n, (dtype, shape, device) in enumerate(draw(st.lists(drawn, max_size=8))):
            size = math.prod(shape) * DTYPES[dtype].size_bytes
            pieces.append(Piece(f"t{n}", dtype, shape, size, device, True, False))
            ways.append(draw(st.sampled_from(Way)))
        items.append(
            ItemSpec(
                name=f"item{number}", kind="v", standalone=draw(st.booleans()), pieces=tuple(pieces)
            )
        )
    return plan_save(tuple(items)), tuple(ways)


@given(planned(("cpu", "cuda:0", "cuda:1")))
def test_every_byte_of_every_file_is_filled_exactly_once(
    drawn: tuple[SavePlan, tuple[Way, ...]],
) -> None:
    plan, ways = drawn
    made = lower(plan, ways)
    pieces = [piece for item in plan.items for piece in item.pieces]
    filled = [bytearray(file.layout.tensor_bytes) for file in plan.files]
    for chunk in made.chunks:
        assert chunk.start % SMALL_CHUNK == 0
        assert 0 < chunk.size_bytes <= SMALL_CHUNK
        for part in chunk.staged:
            assert 0 <= part.at <= part.at + part.size_bytes <= chunk.size_bytes
            mark(filled[chunk.file], chunk.start + part.at, part.size_bytes)
        for group in chunk.direct:
            assert group.stop <= chunk.size_bytes
            sizes = [(s.last - s.first) * DTYPES[group.dtype].size_bytes for s in group.spans]
            assert sum(sizes) == group.stop - group.start
            assert all(pieces[s.piece].device == group.device for s in group.spans)
            mark(filled[chunk.file], chunk.start + group.start, group.stop - group.start)
    assert all(count == 1 for file in filled for count in file)
    for device, size in made.staging_bytes.items():
        staged = bytearray(size)
        for group in made.gathers[device]:
            assert group.start % DTYPES[group.dtype].size_bytes == 0
            mark(staged, group.start, group.stop - group.start)
        assert max(staged, default=0) <= 1
        wanted = sum(
            p.size_bytes
            for p, way in zip(pieces, ways, strict=True)
            if p.device == device and way is Way.STAGED
        )
        assert sum(staged) == wanted
    for device, numbers in made.direct.items():
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) == {
            n
            for n, (p, way) in enumerate(zip(pieces, ways, strict=True))
            if p.device == device and way is Way.DIRECT and p.size_bytes
        }


def mark(area: bytearray, start: int, size: int) -> None:
    for at in range(start, start + size):
        area[at] += 1


@given(planned(("cpu",)), st.integers(0, 1 << 32))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_carried_out_the_copies_give_the_bytes_of_the_file(
    drawn: tuple[SavePlan, tuple[Way, ...]], seed: int
) -> None:
    plan, ways = drawn
    chance = random.Random(seed)
    made = lower(plan, ways)
    pieces = [piece for item in plan.items for piece in item.pieces]
    raws = [random_bytes(chance, piece) for piece in pieces]
    sources = [tensor_of(raw, piece) for raw, piece in zip(raws, pieces, strict=True)]
    expected = [b"".join(raws[piece] for piece in file.pieces) for file in plan.files]
    assert carry_out(plan, made, sources) == expected


def random_bytes(chance: random.Random, piece: Piece) -> bytes:
    bits = 1 if piece.dtype == "bool" else 8
    return bytes(chance.getrandbits(bits) for _ in range(piece.size_bytes))


def tensor_of(raw: bytes, piece: Piece) -> torch.Tensor:
    dtype = TORCH_DTYPES[piece.dtype]
    if not raw:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(piece.shape)


def carry_out(plan: SavePlan, made: Layout, sources: list[torch.Tensor]) -> list[bytes]:
    staging = {}
    for device, size in made.staging_bytes.items():
        staging[device] = torch.empty(size, dtype=torch.uint8)
        gather(staging[device], made.gathers[device], sources)
    files = [bytearray(file.layout.tensor_bytes) for file in plan.files]
    for chunk in made.chunks:
        slot = torch.full((SMALL_CHUNK,), 0xEE, dtype=torch.uint8)
        for part in chunk.staged:
            slot[part.at : part.at + part.size_bytes] = staging[part.device][
                part.start : part.start + part.size_bytes
            ]
        gather(slot, chunk.direct, sources)
        piece = bytes(slot[: chunk.size_bytes].tolist())
        files[chunk.file][chunk.start : chunk.start + chunk.size_bytes] = piece
    return [bytes(file) for file in files]
