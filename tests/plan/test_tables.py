"""What the ranks of a job agree on: classes, contradictions, and who writes what."""

from __future__ import annotations

import msgspec
import pytest

from laststep.errors import MismatchError
from laststep.plan.tables import (
    Replicas,
    Table,
    TableItem,
    TableTensor,
    agree,
    decode_table,
    digest_of,
    encode_table,
)
from laststep.state.boxes import Box, covers_once
from laststep.state.layouts import Flat, Layout, Mesh, Replicate, Shard, Sharded


def table(*tensors: TableTensor, per_rank: bool = False) -> Table:
    return (TableItem("model", "module", per_rank, tensors),)


def agreed(*tables: Table) -> dict[tuple[str, str], list[tuple[int, Box]]]:
    """Who writes which boxes of each tensor."""
    data = [encode_table(one) for one in tables]
    known = {digest_of(one): decode_table(one) for one in data}
    agreement = agree([digest_of(one) for one in data], known)
    found: dict[tuple[str, str], list[tuple[int, Box]]] = {key: [] for key in agreement.keys}
    for rank in range(len(tables)):
        for key, share in agreement.shares(rank):
            found[key].append((rank, share.box))
    return found


LAYOUTS: list[Layout] = [
    Sharded((6, 4), Mesh.of(("dp", "tp"), (2, 2), range(4)), (Shard(0, 2), Shard(0))),
    Sharded((6, 4), Mesh.of(("dp",), (4,), range(4)), (Replicate(),)),
    Flat((6, 4), Mesh.of(("dp",), (4,), [3, 1, 0, 2]), ("dp",), 5, 32),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_survives_being_encoded(layout: Layout) -> None:
    one = table(
        TableTensor("w", "float32", (6, 4), layout),
        TableTensor("b", "bfloat16", (), None),
        TableTensor("c", "bfloat16", (), None, Replicas.UNPROVEN),
        TableTensor("d", "float32", (6, 4), layout, Replicas.CHANGING),
    )
    assert decode_table(encode_table(one)) == one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once(layout: Layout) -> None:
    one = table(
        TableTensor("w", "float32", (6, 4), layout),
        TableTensor("plain", "float32", (5,), None),
        TableTensor("scalar", "float32", (), None),
        TableTensor("empty", "float32", (3, 0), None),
    )
    found = agreed(one, one, one, one)
    assert len(found["model", "scalar"]) == len(found["model", "empty"]) == 1
    assert covers_once((6, 4), [box for _, box in found["model", "w"]])
    assert covers_once((5,), [box for _, box in found["model", "plain"]])


def test_what_only_some_ranks_hold_is_written_by_those() -> None:
    stages = [table(TableTensor(f"layer{n}", "float32", (8,), None)) for n in (0, 0, 1, 1)]
    found = agreed(*stages)
    assert {rank for rank, _ in found["model", "layer0"]} <= {0, 1}
    assert {rank for rank, _ in found["model", "layer1"]} <= {2, 3}


def test_a_large_tensor_that_all_hold_is_written_by_all() -> None:
    big = table(TableTensor("w", "float32", (8 << 20, 1), None))
    (found,) = agreed(big, big, big, big).values()
    assert [rank for rank, _ in found] == [0, 1, 2, 3]
    assert {box.volume for _, box in found} == {2 << 20}


def test_a_table_of_before_replicas_were_told_apart_means_what_it_did() -> None:
    """As it lies in checkpoints: ranks that held a plain tensor had shared the writing of it."""
    rows = [("w", "float32", (8 << 20, 1), None)]
    data = msgspec.msgpack.encode(([("model", "module", False, rows, ())], []))
    big = table(TableTensor("w", "float32", (8 << 20, 1), None))
    assert decode_table(data) == big
    assert encode_table(big) == data


def test_a_plain_tensor_that_is_not_known_to_be_equal_is_the_lowest_holders() -> None:
    stages = [
        table(
            TableTensor(f"layer{n}", "float32", (8 << 20, 1), None, Replicas.UNPROVEN),
            TableTensor("norm", "float32", (8,), None, Replicas.CHANGING),
        )
        for n in (1, 0, 0, 1)
    ]
    found = agreed(*stages)
    assert [rank for rank, _ in found["model", "layer1"]] == [0]
    assert [rank for rank, _ in found["model", "layer0"]] == [1]
    assert [rank for rank, _ in found["model", "norm"]] == [0]


def test_a_layout_is_written_rather_than_a_plain_copy_beside_it() -> None:
    layout = Sharded((8,), Mesh.of(("dp",), (2,), (1, 2)), (Shard(0),))
    plain = table(TableTensor("w", "float32", (8,), None, Replicas.UNPROVEN))
    laid = table(TableTensor("w", "float32", (8,), layout))
    assert [rank for rank, _ in agreed(plain, laid, laid)["model", "w"]] == [1, 2]


def test_ranks_that_contradict_each_other_are_named() -> None:
    with pytest.raises(
        MismatchError, match=r"model/w: float32\[5\] on rank 2, float32\[4\] on ranks 0, 1"
    ):
        agreed(
            table(TableTensor("w", "float32", (4,), None)),
            table(TableTensor("w", "float32", (4,), None)),
            table(TableTensor("w", "float32", (5,), None)),
        )


def test_an_item_that_is_another_elsewhere_is_named() -> None:
    with pytest.raises(MismatchError, match="model: a module on rank 0, a value on rank 1"):
        agreed(
            (TableItem("model", "module", False, ()),), (TableItem("model", "value", False, ()),)
        )


def test_a_rank_of_a_mesh_that_lacks_a_tensor_is_named() -> None:
    layout = Sharded((4,), Mesh.of(("dp",), (2,), range(2)), (Shard(0),))
    with pytest.raises(MismatchError, match=r"model/w: .* with rank 1, which does not hold it so"):
        agreed(table(TableTensor("w", "float32", (4,), layout)), table())


def test_what_is_per_rank_is_not_shared() -> None:
    assert agreed(table(TableTensor("state", "uint8", (9,), None), per_rank=True)) == {}
