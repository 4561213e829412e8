"""The tables that ranks leave in a checkpoint: read back, or `CorruptError`."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.errors import CorruptError
from laststep.format.manifest import ClassRecord
from laststep.format.spans import spans_of
from laststep.plan.tables import Table, TableItem, TableTensor, digest_of, encode_table
from laststep.read.content import agreement_of
from laststep.state.layouts import Mesh, Shard, Sharded

MESH = Mesh.of(("dp",), (2,), range(2))


def table(*tensors: TableTensor) -> Table:
    return (TableItem("model", "module", per_rank=False, tensors=tensors),)


def agreed(tables: list[bytes], ranks: list[list[int]]) -> object:
    classes = [
        ClassRecord(table=digest_of(data).hex(), spans=spans_of(some))
        for data, some in zip(tables, ranks, strict=True)
    ]
    return agreement_of(tables, classes, sum(map(len, ranks)), "here")


def test_what_was_agreed_on_is_found_again() -> None:
    cut = Sharded((4, 3), MESH, (Shard(0),))
    both = TableTensor("w", "float32", (4, 3), cut)
    found = agreed([encode_table(table(both))], [[0, 1]])
    assert found.keys == (("model", "w"),)
    assert found.spreads[0].layouts == (cut,)
    assert [share.box.start for rank in (0, 1) for _, share in found.shares(rank)] == [
        (0, 0),
        (2, 0),
    ]


HOSTILE = {
    "nothing": b"",
    "no table": msgspec.msgpack.encode([1, 2]),
    "a number": msgspec.msgpack.encode(5),
    "no tensors": msgspec.msgpack.encode(([("model", "module", False, 7, ())], [])),
    "an unknown dtype": encode_table(table(TableTensor("w", "float99", (1,), None))),
    "a negative shape": encode_table(table(TableTensor("w", "float32", (-1,), None))),
    "a shape of text": encode_table(table(TableTensor("w", "float32", ("1",), None))),  # type: ignore[arg-type]
    "a layout that is not there": msgspec.msgpack.encode(
        ([("model", "module", False, [("w", "float32", [1], 3)], ())], [])
    ),
    "a layout of another shape": encode_table(
        table(TableTensor("w", "float32", (5, 3), Sharded((4, 3), MESH, (Shard(0),))))
    ),
    "a mesh of ranks that are not there": encode_table(
        table(
            TableTensor(
                "w", "float32", (4,), Sharded((4,), Mesh.of(("d",), (3,), (0, 1, 2)), (Shard(0),))
            )
        )
    ),
    "a mesh without end": encode_table(
        table(
            TableTensor(
                "w", "float32", (4,), Sharded((4,), Mesh(("d",), (1 << 60,), (1,)), (Shard(0),))
            )
        )
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_table_that_makes_no_sense_is_damage(how: str) -> None:
    with pytest.raises(CorruptError, match=r"make no sense.* at here"):
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
