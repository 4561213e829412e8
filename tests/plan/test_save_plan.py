"""Where tensors of a save lie: packed, aligned, the same every time, headers within their bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.format.header import Header, encode_header
from laststep.plan import files as planning
from laststep.plan.files import ItemSpec, plan_save
from laststep.state.pieces import Piece
from laststep.terms import ALIGN_BYTES, DTYPES


def piece(name: str, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Piece:
    size = math.prod(shape) * DTYPES[dtype].size_bytes
    return Piece(name, dtype, shape, size, device, True, False)


@st.composite
def items(draw: st.DrawFn) -> tuple[ItemSpec, ...]:
    shapes = st.lists(st.integers(0, 90), max_size=3).map(tuple)
    pieces = st.tuples(st.sampled_from(sorted(DTYPES)), shapes, st.sampled_from(["cpu", "cuda:0"]))
    made = []
    for number in range(draw(st.integers(1, 4))):
        drawn = draw(st.lists(pieces, max_size=8))
        made.append(
            ItemSpec(
                name=f"item{number}",
                kind="value",
                standalone=draw(st.booleans()),
                pieces=tuple(piece(f"t{n}", *one) for n, one in enumerate(drawn)),
            )
        )
    return tuple(made)


@given(items())
def test_every_piece_lies_in_one_place_packed_without_holes_and_aligned(
    described: tuple[ItemSpec, ...],
) -> None:
    plan = plan_save(described)
    every = [spec for item in described for spec in item.pieces]
    assert plan.pieces == tuple(every)
    assert sorted(n for file in plan.files for n in file.pieces) == list(range(len(every)))
    for file in plan.files:
        offset = 0
        for number, entry in zip(file.pieces, file.entries, strict=True):
            spec = every[number]
            assert entry.start == offset
            assert entry.stop - entry.start == spec.size_bytes
            assert entry.start % DTYPES[spec.dtype].size_bytes == 0
            assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape)
            offset = entry.stop
        assert file.tensor_bytes == offset
        assert file.region_bytes % ALIGN_BYTES == 0


@given(items())
def test_the_same_description_gives_the_same_plan(described: tuple[ItemSpec, ...]) -> None:
    again = tuple(
        ItemSpec(name=i.name, kind=i.kind, standalone=i.standalone, pieces=tuple(i.pieces))
        for i in described
    )
    assert plan_save(described) == plan_save(again)


@given(items())
def test_the_header_of_every_file_fits_its_region(described: tuple[ItemSpec, ...]) -> None:
    for file in plan_save(described).files:
        header = Header(
            item=file.item,
            tensors=file.entries,
            objects=(),
            tensor_bytes=file.tensor_bytes,
            blocks=bytes(-(-file.tensor_bytes // (1 << 20)) * 16),
        )
        assert len(encode_header(header, region_bytes=file.region_bytes)) == file.region_bytes


def test_small_items_share_a_file_large_and_standalone_ones_get_their_own() -> None:
    described = (
        ItemSpec(name="big", kind="v", standalone=False, pieces=(piece("x", "uint8", (1 << 20,)),)),
        ItemSpec(name="small", kind="v", standalone=False, pieces=(piece("x", "uint8", (9,)),)),
        ItemSpec(name="alone", kind="v", standalone=True, pieces=(piece("x", "uint8", (9,)),)),
        ItemSpec(name="empty", kind="v", standalone=True, pieces=()),
    )  # fmt: skip
    plan = plan_save(described)
    assert {file.name for file in plan.files} == {
        "big.safetensors", "alone.safetensors", "shared.safetensors",
    }  # fmt: skip
    assert plan.file_of["small"] == plan.file_of["empty"] == "shared.safetensors"
    shared = next(file for file in plan.files if file.item is None)
    assert [entry.name for entry in shared.entries] == ["small/x"]
    assert len(shared.object_names) == 4


@pytest.mark.parametrize("own", [True, False])
def test_a_file_is_split_where_its_header_would_pass_the_bound(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MAX_HEADER_BYTES", 8192)
    pieces = tuple(piece(f"layer.{n}.weight", "float32", (8,)) for n in range(100))
    item = ItemSpec(name="model", kind="v", standalone=own, pieces=pieces)
    plan = plan_save((item,))
    with_tensors = [file for file in plan.files if file.pieces]
    assert len(with_tensors) > 3
    assert len({file.name for file in plan.files}) == len(plan.files)
    names = [entry.name for file in with_tensors for entry in file.entries]
    assert len(names) == 100
    for file in with_tensors:
        header = Header(
            item=file.item, tensors=file.entries, objects=(), tensor_bytes=file.tensor_bytes,
            blocks=bytes(-(-file.tensor_bytes // (1 << 20)) * 16),
        )  # fmt: skip
        text = encode_header(header, region_bytes=file.region_bytes).rstrip(b" ")
        assert len(text) <= 8192


@pytest.mark.parametrize(("rank", "folder"), [
    (None, ""), ((3, 256), ""), ((3, 257), "r00000/"), ((1000, 1024), "r00896/"),
    ((131071, 131072), "r130944/"),
])  # fmt: skip
def test_in_large_jobs_files_lie_in_folders(rank: tuple[int, int] | None, folder: str) -> None:
    described = (
        ItemSpec(name="big", kind="v", standalone=True, pieces=(piece("x", "uint8", (9,)),)),
        ItemSpec(name="small", kind="v", standalone=False, pieces=(piece("x", "uint8", (9,)),)),
    )  # fmt: skip
    plan = plan_save(described, rank=rank)
    mine = "" if rank is None else f"-r{rank[0]:05d}"
    names = [f"{folder}big{mine}.safetensors", f"{folder}shared{mine}.safetensors"]
    assert [file.name for file in plan.files] == names
    assert list(plan.file_of.values()) == names
