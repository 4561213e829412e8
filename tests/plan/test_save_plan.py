"""Where tensors of a save lie: packed, aligned, the same every time, with headers in bounds."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.constants import ALIGN_BYTES, DTYPES
from laststep.format.index import index_name, pack_name
from laststep.format.layout import Part
from laststep.plan import files as planning
from laststep.plan.files import ItemSpec, plan_save
from laststep.state.tree import BoxPart, Piece


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
        for number, entry in zip(file.pieces, file.layout.tensors, strict=True):
            spec = every[number]
            assert entry.start == offset
            assert entry.stop - entry.start == spec.size_bytes
            assert entry.start % DTYPES[spec.dtype].size_bytes == 0
            assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape)
            offset = entry.stop
        assert file.layout.tensor_bytes == offset
        assert file.layout.problem() is None
    assert plan.tensor_bytes == sum(spec.size_bytes for spec in every)


@given(items())
def test_the_same_description_gives_the_same_plan(described: tuple[ItemSpec, ...]) -> None:
    again = tuple(
        ItemSpec(name=i.name, kind=i.kind, standalone=i.standalone, pieces=tuple(i.pieces))
        for i in described
    )
    assert plan_save(described) == plan_save(again)


@given(items())
def test_the_header_of_every_file_is_complete_and_aligned(described: tuple[ItemSpec, ...]) -> None:
    for file in plan_save(described).files:
        layout = file.layout
        header = layout.header()
        assert len(header) == layout.header_bytes
        assert layout.header_bytes % ALIGN_BYTES == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert list(json.loads(header[8:])) == ["__metadata__", *(t.name for t in layout.tensors)]


def test_small_items_share_a_file_large_and_standalone_ones_get_their_own() -> None:
    described = (
        ItemSpec(name="big", kind="v", standalone=False, pieces=(piece("x", "uint8", (1 << 20,)),)),
        ItemSpec(name="small", kind="v", standalone=False, pieces=(piece("x", "uint8", (9,)),)),
        ItemSpec(name="alone", kind="v", standalone=True, pieces=(piece("x", "uint8", (9,)),)),
        ItemSpec(name="empty", kind="v", standalone=True, pieces=()),
    )
    plan = plan_save(described)
    assert [(file.layout.name, file.layout.item) for file in plan.files] == [
        ("big.safetensors", "big"),
        ("alone.safetensors", "alone"),
        ("shared.safetensors", None),
    ]
    assert [entry.name for entry in plan.files[-1].layout.tensors] == ["small/x"]


def test_items_without_tensors_need_no_file() -> None:
    described = tuple(
        ItemSpec(name=name, kind="v", standalone=alone, pieces=())
        for name, alone in (("a", True), ("b", False))
    )
    plan = plan_save(described)
    assert plan.files == ()
    assert plan.values == ("a", "b")


def test_the_values_of_a_plan_are_the_trees_of_all_items_unless_told() -> None:
    described = (ItemSpec(name="a", kind="v", standalone=True, pieces=()),)
    assert plan_save(described).values == ("a",)
    assert plan_save(described, rank=(1, 2), values=("~layout",)).values == ("~layout",)


def test_a_part_of_a_tensor_says_which() -> None:
    part = piece("w~6at4", "float32", (4,))._replace(part=BoxPart("w", (8,), (4,)))
    plan = plan_save((ItemSpec(name="m", kind="v", standalone=True, pieces=(part,)),))
    assert plan.files[0].layout.parts == {"w~6at4": Part("w", (8,), (4,))}
    assert plan.files[0].layout.problem() is None


@pytest.mark.parametrize("own", [True, False])
def test_a_file_is_split_where_its_header_would_pass_the_bound(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MAX_HEADER_BYTES", 8192)
    pieces = tuple(piece(f"layer.{n}.weight", "float32", (8,)) for n in range(100))
    item = ItemSpec(name="model", kind="v", standalone=own, pieces=pieces)
    plan = plan_save((item,))
    assert len(plan.files) > 3
    assert len({file.layout.name for file in plan.files}) == len(plan.files)
    names = [entry.name for file in plan.files for entry in file.layout.tensors]
    assert len(set(names)) == 100
    assert all(len(file.layout.header().rstrip(b" ")) <= 8192 for file in plan.files)


@pytest.mark.parametrize(
    ("rank", "folder"),
    [
        (None, ""),
        ((3, 256), ""),
        ((3, 257), "r00000/"),
        ((1000, 1024), "r00896/"),
        ((131071, 131072), "r130944/"),
    ],
)
def test_in_large_jobs_files_lie_in_folders(rank: tuple[int, int] | None, folder: str) -> None:
    described = (
        ItemSpec(name="big", kind="v", standalone=True, pieces=(piece("x", "uint8", (9,)),)),
        ItemSpec(name="small", kind="v", standalone=False, pieces=(piece("x", "uint8", (9,)),)),
    )
    plan = plan_save(described, rank=rank)
    mine = "" if rank is None else f"-r{rank[0]:05d}"
    names = [f"{folder}big{mine}.safetensors", f"{folder}shared{mine}.safetensors"]
    assert [file.layout.name for file in plan.files] == names
    number, ranks = rank or (0, 1)
    assert index_name(number, ranks) == f"{folder}index-r{number:05d}"
    assert pack_name(number, ranks) == f"{folder}blocks-r{number:05d}.pack"
