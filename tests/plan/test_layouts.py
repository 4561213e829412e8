"""What the ranks of a job agree on: classes, contradictions, and who writes what."""

from __future__ import annotations

import msgspec
import pytest

from expect import raises
from laststep.errors import MismatchError
from laststep.plan.layouts import (
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    agree,
    decode_local_layout,
    digest_of,
    encode_local_layout,
)
from laststep.state.boxes import Box, covers_once
from laststep.state.layouts import Flat, Layout, Mesh, Replicate, Shard, Sharded


def local_layout(*tensors: LocalTensor, per_rank: bool = False) -> LocalLayout:
    return (LocalItem("model", "module", per_rank, tensors),)


def agreed(*local_layouts: LocalLayout) -> dict[tuple[str, str], list[tuple[int, Box]]]:
    """Who writes which boxes of each tensor."""
    data = [encode_local_layout(one) for one in local_layouts]
    known = {digest_of(one): decode_local_layout(one) for one in data}
    global_layout = agree([digest_of(one) for one in data], known)
    found: dict[tuple[str, str], list[tuple[int, Box]]] = {key: [] for key in global_layout.keys}
    for rank in range(len(local_layouts)):
        for key, share in global_layout.assignments(rank):
            found[key].append((rank, share.box))
    return found


LAYOUTS: list[Layout] = [
    Sharded((6, 4), Mesh.of(("dp", "tp"), (2, 2), range(4)), (Shard(0, 2), Shard(0))),
    Sharded((6, 4), Mesh.of(("dp",), (4,), range(4)), (Replicate(),)),
    Flat((6, 4), Mesh.of(("dp",), (4,), [3, 1, 0, 2]), ("dp",), 5, 32),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_survives_being_encoded(layout: Layout) -> None:
    one = local_layout(
        LocalTensor("w", "float32", (6, 4), layout),
        LocalTensor("b", "bfloat16", (), None),
        LocalTensor("c", "bfloat16", (), None, Replicas.UNPROVEN),
        LocalTensor("d", "float32", (6, 4), layout, Replicas.CHANGING),
    )
    assert decode_local_layout(encode_local_layout(one)) == one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once(layout: Layout) -> None:
    one = local_layout(
        LocalTensor("w", "float32", (6, 4), layout),
        LocalTensor("plain", "float32", (5,), None),
        LocalTensor("scalar", "float32", (), None),
        LocalTensor("empty", "float32", (3, 0), None),
    )
    found = agreed(one, one, one, one)
    assert len(found["model", "scalar"]) == len(found["model", "empty"]) == 1
    assert covers_once((6, 4), [box for _, box in found["model", "w"]])
    assert covers_once((5,), [box for _, box in found["model", "plain"]])


def test_what_only_some_ranks_hold_is_written_by_those() -> None:
    stages = [local_layout(LocalTensor(f"layer{n}", "float32", (8,), None)) for n in (0, 0, 1, 1)]
    found = agreed(*stages)
    assert {rank for rank, _ in found["model", "layer0"]} <= {0, 1}
    assert {rank for rank, _ in found["model", "layer1"]} <= {2, 3}


def test_a_large_tensor_that_all_hold_is_written_by_all() -> None:
    big = local_layout(LocalTensor("w", "float32", (8 << 20, 1), None))
    (found,) = agreed(big, big, big, big).values()
    assert [rank for rank, _ in found] == [0, 1, 2, 3]
    assert {box.volume for _, box in found} == {2 << 20}


def test_a_table_of_before_replicas_were_told_apart_means_what_it_did() -> None:
    """As it lies in checkpoints: ranks that held a plain tensor had shared the writing of it."""
    rows = [("w", "float32", (8 << 20, 1), None)]
    data = msgspec.msgpack.encode(([("model", "module", False, rows, ())], []))
    big = local_layout(LocalTensor("w", "float32", (8 << 20, 1), None))
    assert decode_local_layout(data) == big
    assert encode_local_layout(big) == data


def test_a_plain_tensor_that_is_not_known_to_be_equal_is_the_lowest_holders() -> None:
    stages = [
        local_layout(
            LocalTensor(f"layer{n}", "float32", (8 << 20, 1), None, Replicas.UNPROVEN),
            LocalTensor("norm", "float32", (8,), None, Replicas.CHANGING),
        )
        for n in (1, 0, 0, 1)
    ]
    found = agreed(*stages)
    assert [rank for rank, _ in found["model", "layer1"]] == [0]
    assert [rank for rank, _ in found["model", "layer0"]] == [1]
    assert [rank for rank, _ in found["model", "norm"]] == [0]


def test_a_layout_is_written_rather_than_a_plain_copy_beside_it() -> None:
    layout = Sharded((8,), Mesh.of(("dp",), (2,), (1, 2)), (Shard(0),))
    plain = local_layout(LocalTensor("w", "float32", (8,), None, Replicas.UNPROVEN))
    laid = local_layout(LocalTensor("w", "float32", (8,), layout))
    assert [rank for rank, _ in agreed(plain, laid, laid)["model", "w"]] == [1, 2]


def test_ranks_that_contradict_each_other_are_named() -> None:
    with raises(MismatchError, "model/w", "float32[5]", "rank 2", "float32[4]", "rank 0"):
        agreed(
            local_layout(LocalTensor("w", "float32", (4,), None)),
            local_layout(LocalTensor("w", "float32", (4,), None)),
            local_layout(LocalTensor("w", "float32", (5,), None)),
        )


def test_an_item_that_is_another_elsewhere_is_named() -> None:
    with raises(MismatchError, "model", "module", "rank 0", "value", "rank 1"):
        agreed(
            (LocalItem("model", "module", False, ()),), (LocalItem("model", "value", False, ()),)
        )


def test_a_rank_of_a_mesh_that_lacks_a_tensor_is_named() -> None:
    layout = Sharded((4,), Mesh.of(("dp",), (2,), range(2)), (Shard(0),))
    with raises(MismatchError, "model/w", "dp", "rank 1"):
        agreed(local_layout(LocalTensor("w", "float32", (4,), layout)), local_layout())


def test_what_is_per_rank_is_not_shared() -> None:
    assert agreed(local_layout(LocalTensor("state", "uint8", (9,), None), per_rank=True)) == {}


@pytest.mark.parametrize("dim", [0, 1])
def test_thousands_of_cuts_along_any_dimension_are_checked_at_once(dim: int) -> None:
    def cut(number: int) -> Box:
        start, stop = [0, 0], [1, 1]
        start[dim], stop[dim] = number, number + 1
        return Box(tuple(start), tuple(stop))

    shape = (20_000, 1) if dim == 0 else (1, 20_000)
    boxes = [cut(number) for number in range(20_000)]
    assert covers_once(shape, boxes)  # by pairs, this would take many minutes
    assert not covers_once(shape, [*boxes[1:], boxes[1]])
