"""Which tensors ranks compare, and with whom."""

from __future__ import annotations

from laststep.plan.receipts import ReplicatedTensors, held_alike
from laststep.plan.tables import (
    Replicas,
    Table,
    TableItem,
    TableTensor,
    agree,
    digest_of,
    encode_table,
)
from laststep.state.layouts import Mesh, Replicate, Sharded

EVERYWHERE = Sharded((4,), Mesh.of(("dp",), (3,), range(3)), (Replicate(),))


def plain(name: str, replicas: Replicas = Replicas.UNPROVEN) -> TableTensor:
    return TableTensor(name, "float32", (4,), None, replicas)


def found(*tables: Table) -> tuple[ReplicatedTensors, ...]:
    known = {digest_of(encode_table(table)): table for table in tables}
    return held_alike(agree([digest_of(encode_table(table)) for table in tables], known))


def test_plain_tensors_are_compared_and_nothing_else() -> None:
    table = (
        TableItem(
            "model",
            "module",
            False,
            (
                plain("w"),
                plain("mean", Replicas.CHANGING),
                plain("b"),
                plain("old", Replicas.EQUAL),
                TableTensor("laid", "float32", (4,), EVERYWHERE),
            ),
        ),
        TableItem("mine", "value", True, ()),
    )
    assert found(table, table, table) == (
        ReplicatedTensors((0,), (("model", "w"), ("model", "b")), 0),
    )


def test_ranks_that_hold_other_things_as_well_are_compared_in_what_they_share() -> None:
    def stage(*names: str) -> Table:
        return (TableItem("model", "module", False, tuple(plain(name) for name in names)),)

    held = found(stage("first"), stage("tied", "b"), stage("tied", "c"), stage("tied", "c"))
    assert held == (
        ReplicatedTensors((1, 2), (("model", "tied"),), 1),
        ReplicatedTensors((2,), (("model", "c"),), 2),
    )
