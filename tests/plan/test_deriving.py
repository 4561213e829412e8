"""Which tensors may be derived from which others, by names and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from laststep.constants import DTYPES
from laststep.plan.deriving import with_derived
from laststep.plan.files import ItemSpec, plan_save
from laststep.state.tree import BoxPart, Piece

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.plan.files import SavePlan


def piece(name: str, dtype: str, *shape: int, part: BoxPart | None = None) -> Piece:
    size = DTYPES[dtype].size_bytes
    for side in shape:
        size *= side
    return Piece(name, dtype, shape, size, "cpu", contiguous=True, volatile=False, part=part)


def item(name: str, *pieces: Piece) -> ItemSpec:
    return ItemSpec(name=name, kind="value", standalone=True, pieces=pieces)


def pairs(plan: SavePlan) -> list[tuple[str, str]]:
    """Each tensor that may be derived, and its candidate, by their full names."""

    def name_of(file: int, entry: int) -> str:
        layout = plan.files[file].layout
        return f"{layout.item}/{layout.tensors[entry].name}"

    return [
        (name_of(pair.file, pair.entry), name_of(pair.master_file, pair.master_entry))
        for pair in plan.derived
    ]


def planned(*items: ItemSpec, asked: bool | Mapping[str, str] = True) -> SavePlan:
    return with_derived(plan_save(items), asked)


MODEL = item("model", piece("a.weight", "bfloat16", 4, 3), piece("a.bias", "float16", 4))


def optimizer(*keys: str) -> ItemSpec:
    shapes = {"a.weight": (4, 3), "a.bias": (4,)}
    return item(
        "optimizer",
        *(piece(f"state/{n}/{k}", "float32", *s) for n, s in shapes.items() for k in keys),
    )


def test_what_an_optimizer_keeps_for_a_parameter_is_tried_masters_first() -> None:
    found = pairs(planned(MODEL, optimizer("exp_avg", "exp_avg_sq", "master_param")))
    assert found[:3] == [
        ("model/a.weight", "optimizer/state/a.weight/master_param"),
        ("model/a.weight", "optimizer/state/a.weight/exp_avg"),
        ("model/a.weight", "optimizer/state/a.weight/exp_avg_sq"),
    ]
    assert {low for low, _ in found} == {"model/a.weight", "model/a.bias"}


def test_no_more_than_four_are_tried() -> None:
    found = pairs(planned(MODEL, optimizer("b", "c", "d", "e", "f", "fp32")))
    weight = [master for low, master in found if low == "model/a.weight"]
    assert len(weight) == 4
    assert weight[0].endswith("fp32")


def test_two_items_of_the_same_names_are_paired() -> None:
    masters = item("masters", piece("a.weight", "float32", 4, 3), piece("a.bias", "float32", 4))
    assert pairs(planned(MODEL, masters)) == [
        ("model/a.weight", "masters/a.weight"),
        ("model/a.bias", "masters/a.bias"),
    ]


def test_copies_in_lists_go_by_their_order() -> None:
    model = item("model", *(piece(f"l{n}", "bfloat16", 5) for n in range(3)))
    lists = item("optimizer", *(piece(f"fp32_groups/#0/#{n}", "float32", 5) for n in range(3)))
    assert pairs(planned(model, lists)) == [
        (f"model/l{n}", f"optimizer/fp32_groups/#0/#{n}") for n in range(3)
    ]


def test_lists_of_another_length_are_no_copies() -> None:
    model = item("model", *(piece(f"l{n}", "bfloat16", 5) for n in range(3)))
    lists = item("optimizer", *(piece(f"groups/#{n}", "float32", 5) for n in range(2)))
    assert pairs(planned(model, lists)) == []


@pytest.mark.parametrize(
    "other", [piece("a.weight", "float32", 3, 4), piece("a.weight", "float64", 4, 3)]
)
def test_other_shapes_and_dtypes_are_no_masters(other: Piece) -> None:
    assert pairs(planned(MODEL, item("masters", other))) == []


def test_patterns_name_masters() -> None:
    plan = planned(
        MODEL, optimizer("exp_avg", "master"), asked={"model/*": "optimizer/state/*/master"}
    )
    assert pairs(plan) == [
        ("model/a.weight", "optimizer/state/a.weight/master"),
        ("model/a.bias", "optimizer/state/a.bias/master"),
    ]


def test_one_name_stands_for_one_tensor() -> None:
    asked = {"model/a.bias": "optimizer/state/a.bias/exp_avg"}
    assert pairs(planned(MODEL, optimizer("exp_avg"), asked=asked)) == list(asked.items())


def test_dots_and_brackets_in_patterns_stand_for_themselves() -> None:
    model = item("model", piece("a.b", "bfloat16", 4), piece("axb", "bfloat16", 4))
    masters = item("masters", piece("a.b", "float32", 4), piece("axb", "float32", 4))
    found = pairs(planned(model, masters, asked={"model/a.b": "masters/a.b"}))
    assert found == [("model/a.b", "masters/a.b")]


def test_files_with_derived_tensors_come_behind_those_of_their_masters() -> None:
    whole = plan_save((MODEL, optimizer("master")))
    plan = planned(MODEL, optimizer("master"))
    assert [file.layout.item for file in whole.files] == ["model", "optimizer"]
    assert [file.layout.item for file in plan.files] == ["optimizer", "model"]
    assert plan.files == whole.files[::-1]


@pytest.mark.parametrize(("asked", "is_declared"), [(True, False), ({"model/*": "x/*"}, True)])
def test_a_plan_says_whether_masters_were_declared(
    asked: bool | Mapping[str, str], is_declared: bool
) -> None:
    assert planned(MODEL, optimizer("master"), asked=asked).is_declared == is_declared


def test_nothing_in_an_excerpt_is_derived_from_what_is_left_out() -> None:
    plan = plan_save((MODEL, optimizer("master")))
    assert pairs(with_derived(plan, True, partial_tiers=[["model"]])) == []
    assert len(pairs(with_derived(plan, True, partial_tiers=[["model", "optimizer"]]))) == 2


def test_only_the_same_part_of_a_tensor_is_its_master() -> None:
    def part(name: str, dtype: str, start: int) -> Piece:
        box = BoxPart(name, (8, 3), (start, 0))
        return piece(f"{name}~6at{start},0", dtype, 4, 3, part=box)

    model = item("model", part("w", "bfloat16", 0), part("w", "bfloat16", 4))
    masters = item("masters", part("w", "float32", 4))
    assert pairs(planned(model, masters)) == [("model/w~6at4,0", "masters/w~6at4,0")]
