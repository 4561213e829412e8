"""Which tensors ranks compare, and with whom."""

from __future__ import annotations

from laststep.plan.layouts import (
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    agree,
    digest_of,
    encode_local_layout,
)
from laststep.plan.receipts import ReplicatedTensors, held_alike
from laststep.state.layouts import Mesh, Replicate, Sharded

EVERYWHERE = Sharded((4,), Mesh.of(("dp",), (3,), range(3)), (Replicate(),))


def plain(name: str, replicas: Replicas = Replicas.UNPROVEN) -> LocalTensor:
    return LocalTensor(name, "float32", (4,), None, replicas)


def found(*local_layouts: LocalLayout) -> tuple[ReplicatedTensors, ...]:
    known = {
        digest_of(encode_local_layout(local_layout)): local_layout for local_layout in local_layouts
    }
    return held_alike(
        agree(
            [digest_of(encode_local_layout(local_layout)) for local_layout in local_layouts], known
        )
    )


def test_plain_tensors_are_compared_and_nothing_else() -> None:
    local_layout = (
        LocalItem(
            "model",
            "module",
            False,
            (
                plain("w"),
                plain("mean", Replicas.CHANGING),
                plain("b"),
                plain("old", Replicas.EQUAL),
                LocalTensor("laid", "float32", (4,), EVERYWHERE),
            ),
        ),
        LocalItem("mine", "value", True, ()),
    )
    assert found(local_layout, local_layout, local_layout) == (
        ReplicatedTensors((0,), (("model", "w"), ("model", "b"))),
    )


def test_ranks_that_hold_other_things_as_well_are_compared_in_what_they_share() -> None:
    def stage(*names: str) -> LocalLayout:
        return (LocalItem("model", "module", False, tuple(plain(name) for name in names)),)

    held = found(stage("first"), stage("tied", "b"), stage("tied", "c"), stage("tied", "c"))
    assert held == (
        ReplicatedTensors((1, 2), (("model", "tied"),)),
        ReplicatedTensors((2,), (("model", "c"),)),
    )
