"""The tables that ranks leave in a checkpoint: read back, or `CorruptError`."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import raises
from laststep.errors import CorruptError
from laststep.format.manifest import LayoutGroupRecord, spans_of
from laststep.plan.layouts import (
    LocalItem,
    LocalLayout,
    LocalTensor,
    digest_of,
    encode_local_layout,
    global_layout_of,
)
from laststep.state.layouts import Mesh, Shard, Sharded

MESH = Mesh.of(("dp",), (2,), range(2))


def local_layout(*tensors: LocalTensor) -> LocalLayout:
    return (LocalItem("model", "module", per_rank=False, tensors=tensors),)


def agreed(local_layouts: list[bytes], ranks: list[list[int]]) -> object:
    layout_groups = [
        LayoutGroupRecord(local_layout=digest_of(data).hex(), spans=spans_of(some))
        for data, some in zip(local_layouts, ranks, strict=True)
    ]
    return global_layout_of(local_layouts, layout_groups, sum(map(len, ranks)), "here")


def test_what_was_agreed_on_is_found_again() -> None:
    cut = Sharded((4, 3), MESH, (Shard(0),))
    both = LocalTensor("w", "float32", (4, 3), cut)
    found = agreed([encode_local_layout(local_layout(both))], [[0, 1]])
    assert found.keys == (("model", "w"),)
    assert found.spreads[0].layouts == (cut,)
    assert [share.box.start for rank in (0, 1) for _, share in found.assignments(rank)] == [
        (0, 0),
        (2, 0),
    ]


HOSTILE = {
    "nothing": b"",
    "no table": msgspec.msgpack.encode([1, 2]),
    "a number": msgspec.msgpack.encode(5),
    "no tensors": msgspec.msgpack.encode(([("model", "module", False, 7, ())], [])),
    "an unknown dtype": encode_local_layout(local_layout(LocalTensor("w", "float99", (1,), None))),
    "a negative shape": encode_local_layout(local_layout(LocalTensor("w", "float32", (-1,), None))),
    "a shape of text": encode_local_layout(local_layout(LocalTensor("w", "float32", ("1",), None))),  # type: ignore[arg-type]
    "a layout that is not there": msgspec.msgpack.encode(
        ([("model", "module", False, [("w", "float32", [1], 3)], ())], [])
    ),
    "a layout of another shape": encode_local_layout(
        local_layout(LocalTensor("w", "float32", (5, 3), Sharded((4, 3), MESH, (Shard(0),))))
    ),
    "a mesh of ranks that are not there": encode_local_layout(
        local_layout(
            LocalTensor(
                "w", "float32", (4,), Sharded((4,), Mesh.of(("d",), (3,), (0, 1, 2)), (Shard(0),))
            )
        )
    ),
    "a mesh without end": encode_local_layout(
        local_layout(
            LocalTensor(
                "w", "float32", (4,), Sharded((4,), Mesh(("d",), (1 << 60,), (1,)), (Shard(0),))
            )
        )
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_table_that_makes_no_sense_is_damage(how: str) -> None:
    with raises(CorruptError, where="here", found=True):
        agreed([HOSTILE[how]], [[0, 1]])


def _packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return b""


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.integers(-3, 1 << 70) | st.text(max_size=3) | st.none() | st.booleans(),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=20,
    ).map(_packed)
)
def test_whatever_lies_there_is_read_or_damage(data: bytes) -> None:
    with contextlib.suppress(CorruptError):
        agreed([data], [[0, 1]])
