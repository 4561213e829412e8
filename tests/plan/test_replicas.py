"""Which tensors ranks compare, and with whom."""

from __future__ import annotations

from laststep.plan.job import Item, Replicas, Table, Tensor, agree, digest_of, encode_table
from laststep.plan.replicas import Held, held_alike
from laststep.state.layouts import Mesh, Replicate, Sharded

EVERYWHERE = Sharded((4,), Mesh.of(("dp",), (3,), range(3)), (Replicate(),))


def plain(name: str, replicas: Replicas = Replicas.UNPROVEN) -> Tensor:
    return Tensor(name, "float32", (4,), None, replicas)


def found(*tables: Table) -> tuple[Held, ...]:
    known = {digest_of(encode_table(table)): table for table in tables}
    return held_alike(agree([digest_of(encode_table(table)) for table in tables], known))


def test_plain_tensors_are_compared_and_nothing_else() -> None:
    table = (
        Item("model", "module", False, (
            plain("w"), plain("mean", Replicas.CHANGING), plain("b"), plain("old", Replicas.EQUAL),
            Tensor("laid", "float32", (4,), EVERYWHERE),
        )),
        Item("mine", "value", True, ()),
    )  # fmt: skip
    assert found(table, table, table) == (Held((0,), (("model", "w"), ("model", "b")), 0),)


def test_ranks_that_hold_other_things_as_well_are_compared_in_what_they_share() -> None:
    def stage(*names: str) -> Table:
        return (Item("model", "module", False, tuple(plain(name) for name in names)),)

    held = found(stage("first"), stage("tied", "b"), stage("tied", "c"), stage("tied", "c"))
    assert held == (Held((1, 2), (("model", "tied"),), 1), Held((2,), (("model", "c"),), 2))
